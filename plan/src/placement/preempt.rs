//! Room that others make: which replicas of lower priority have to stop so that one that fits nowhere else fits.
//! Whole replicas, as few and as unimportant ones as will do; never one whose tier keeps it, and none of the same
//! priority, so that no two can drive each other out in turns.

use std::collections::BTreeSet;

use russet_crds::{ApprovalAction, Residency};

use super::selection::find_candidates;
use super::score::ScoredCandidate;
use crate::digest::digest;
use crate::fabric;
use crate::memory_model::MemoryModel;
use crate::note::Note;
use crate::snapshot::{GroupInfo, ObjectKey, Snapshot};
use crate::validate::ValidDeployment;

/// Ways that are looked at for the least harm, the best ones first.
const MAX_CANDIDATES: usize = 64;
/// Digits of a hash that people copy into Git.
const HASH_DIGITS: usize = 16;

/// What a person has to say yes to before it is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApprovalRequest {
    /// What is to be done.
    pub action: ApprovalAction,
    /// Digest of what is to run and of who has to stop for it.
    pub hash: String,
    /// Deployments that would lose replicas, as `namespace/name`.
    pub affects: Vec<String>,
    /// The question.
    pub message: String,
}

/// Replicas of others that have to stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Victims {
    /// The groups.
    pub groups: Vec<ObjectKey>,
    /// Their deployments, as `namespace/name`.
    pub deployments: Vec<String>,
    /// Bytes they hold.
    pub freed_bytes: u64,
    /// Where the replica would be then.
    pub nodes: Vec<String>,
}

/// What becomes of a replica that fits nowhere.
pub enum PreemptOutcome {
    /// These stop now.
    Preempt(Victims),
    /// A person is asked first.
    RequestApproval(ApprovalRequest, Note),
    /// They would make room, and do not yet, or may not.
    Wait(Note),
}

/// Whom a replica may have make room, as if the groups for which `without` is true were gone; `None` when no
/// replica of lower priority helps.
pub fn preempt(
    view: &Snapshot,
    desired: &ValidDeployment,
    fit: &MemoryModel<'_>,
    replica: i32,
    without: impl Fn(&ObjectKey) -> bool + Copy,
) -> Option<PreemptOutcome> {
    let lower = |key: &ObjectKey, group: &GroupInfo| {
        !without(key)
            && !group.deleting
            && (key.0 != desired.namespace || group.deployment != desired.name)
            && view.priority(group) < desired.priority
            && view.residency(group) != Residency::Always
    };
    // Those that have run long enough first; of the others only how long they have still.
    let ripe = victims(view, desired, fit, replica, without, |key, group| {
        lower(key, group) && group.resident_until.is_none()
    });
    let Some(victims) = ripe else {
        let victims = victims(view, desired, fit, replica, without, lower)?;
        let until = victims.groups.iter().filter_map(|key| view.groups.get(key)?.resident_until).max();
        let Victims { deployments, freed_bytes: frees, .. } = victims;
        let note = match until.filter(|_| desired.preempts) {
            Some(until) => Note::Resident { replica, deployments, frees, until },
            None => Note::CouldPreempt { replica, deployments, frees, tier: desired.tier.clone() },
        };
        return Some(PreemptOutcome::Wait(note));
    };
    let Victims { deployments, freed_bytes: frees, .. } = &victims;
    if !desired.preempts {
        let (deployments, tier) = (deployments.clone(), desired.tier.clone());
        return Some(PreemptOutcome::Wait(Note::CouldPreempt { replica, deployments, frees: *frees, tier }));
    }
    let tiers = victims.groups.iter().filter_map(|key| view.groups.get(key)?.tier.as_ref());
    let asks =
        |tier: &String| view.tiers.get(tier).is_some_and(|tier| tier.approvals.contains(&ApprovalAction::Preempt));
    if !tiers.chain(&desired.tier).any(asks) {
        return Some(PreemptOutcome::Preempt(victims));
    }
    let hash = approval_hash(desired, ApprovalAction::Preempt, deployments);
    if desired.denied.contains(&hash) {
        return Some(PreemptOutcome::Wait(Note::Denied { replica, hash }));
    }
    if desired.approved.contains(&hash) {
        return Some(PreemptOutcome::Preempt(victims));
    }
    let note =
        Note::AwaitsApproval { replica, hash: hash.clone(), deployments: deployments.clone(), frees: *frees };
    let (affects, message) = (deployments.clone(), note.to_string());
    Some(PreemptOutcome::RequestApproval(ApprovalRequest { action: ApprovalAction::Preempt, hash, affects, message }, note))
}

/// What an approval is about: what is to run and who has to stop for it, and not on which nodes, so that it
/// outlives a plan that is made anew.
pub fn approval_hash(desired: &ValidDeployment, action: ApprovalAction, affects: &[String]) -> String {
    let ValidDeployment { namespace, name, model, sharding, replicas, .. } = desired;
    let intent = (namespace, name, model, sharding, replicas, action, affects);
    // What was approved before there were draft models stays approved.
    let mut hash = match &desired.draft {
        None => digest(&intent),
        Some(draft) => digest(&(intent, &draft.name)),
    };
    hash.truncate(HASH_DIGITS);
    hash
}

/// The least harmful set of groups, of those that may be taken, without which the replica fits.
fn victims(
    view: &Snapshot,
    desired: &ValidDeployment,
    fit: &MemoryModel<'_>,
    replica: i32,
    without: impl Fn(&ObjectKey) -> bool + Copy,
    may: impl Fn(&ObjectKey, &GroupInfo) -> bool,
) -> Option<Victims> {
    let takable: BTreeSet<&ObjectKey> =
        view.groups.iter().filter(|(key, group)| may(key, group)).map(|(key, _)| key).collect();
    if takable.is_empty() {
        return None;
    }
    let gone = |key: &ObjectKey| without(key) || takable.contains(key);
    let choices = find_candidates(view, desired, fit, replica, true, gone).ok()?;
    let sets = choices.candidates().take(MAX_CANDIDATES).map(|scored| (needed_victims(view, fit, scored, without, &takable), scored));
    // The first of equals is the better way.
    let (groups, scored) = sets.min_by_key(|(groups, _)| disruption_cost(view, groups))?;
    let of = |key: &&ObjectKey| view.groups.get(*key).map(|group| format!("{}/{}", key.0, group.deployment));
    let deployments: BTreeSet<String> = groups.iter().filter_map(of).collect();
    Some(Victims {
        freed_bytes: groups.iter().filter_map(|key| view.groups.get(*key)).map(GroupInfo::reserved_bytes).sum(),
        nodes: scored.nodes(),
        deployments: deployments.into_iter().collect(),
        groups: groups.into_iter().cloned().collect(),
    })
}

/// Of the groups that may be taken those that this way really needs.
fn needed_victims<'k>(
    view: &Snapshot,
    fit: &MemoryModel<'_>,
    scored: &ScoredCandidate,
    without: impl Fn(&ObjectKey) -> bool + Copy,
    takable: &BTreeSet<&'k ObjectKey>,
) -> BTreeSet<&'k ObjectKey> {
    let on_it =
        |key: &&&ObjectKey| view.groups.get(**key).is_some_and(|group| group.nodes().any(|node| scored.uses(node)));
    let mut taken: BTreeSet<&ObjectKey> = takable.iter().filter(on_it).copied().collect();
    // The most important stays first, if anybody can, and of equals the larger.
    let mut by_harm: Vec<&ObjectKey> = taken.iter().copied().collect();
    by_harm.sort_by_key(|key| std::cmp::Reverse(disruption_cost(view, &BTreeSet::from([*key]))));
    for key in by_harm {
        taken.remove(key);
        if !fits_without(view, fit, scored, |other| without(other) || taken.contains(other)) {
            taken.insert(key);
        }
    }
    taken
}

/// Whether a way has its memory and its ports once these groups are gone.
fn fits_without(view: &Snapshot, fit: &MemoryModel<'_>, scored: &ScoredCandidate, gone: impl Fn(&ObjectKey) -> bool) -> bool {
    let committed = view.committed_bytes(&gone);
    let room = scored.candidate.ranks.iter().all(|rank| {
        let limit = view.nodes.get(&rank.node).map_or(0, |node| node.serving_limit);
        let free = limit.saturating_sub(committed.get(rank.node.as_str()).copied().unwrap_or(0));
        rank.memory.total() <= free
    });
    let plan = scored.candidate.plan(fit);
    let ports: BTreeSet<(&str, &str)> = fabric::ports(&plan).collect();
    let staying = || view.groups.iter().filter(|(key, _)| !gone(key));
    room && (ports.is_empty()
        || !staying().any(|(_, group)| fabric::ports(&group.plan).any(|port| ports.contains(&port))))
}

/// What stopping these does, the least first: by the most important of them, what is not there on demand, how many,
/// and how much they hold.
fn disruption_cost(view: &Snapshot, groups: &BTreeSet<&ObjectKey>) -> (i32, usize, usize, u64) {
    let seen = || groups.iter().filter_map(|key| view.groups.get(*key));
    (
        seen().map(|group| view.priority(group)).max().unwrap_or(i32::MIN),
        seen().filter(|group| view.residency(group) != Residency::OnDemand).count(),
        groups.len(),
        seen().map(GroupInfo::reserved_bytes).fold(0, u64::saturating_add),
    )
}
