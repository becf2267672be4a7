//! Preemption: which replicas of lower priority have to stop so that one that fits nowhere else fits. Whole
//! replicas, as few and as unimportant as possible; never one that its tier protects, and none of the same
//! priority, so that no two can preempt each other in turn.

use std::collections::BTreeSet;

use russet_crds::{Adapter, ApprovalAction, Residency};

use super::score::ScoredCandidate;
use super::selection::find_candidates;
use crate::digest::digest;
use crate::fabric;
use crate::memory_model::MemoryModel;
use crate::note::Note;
use crate::snapshot::{GroupInfo, ObjectKey, Snapshot};
use crate::valid_deployment::ValidDeployment;

/// Maximum number of candidates that are evaluated for the lowest cost, the best ones first.
const MAX_CANDIDATES: usize = 64;
/// Digits of a hash that people copy into Git.
const HASH_DIGITS: usize = 16;

/// A request for approval.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApprovalRequest {
    /// The action.
    pub action: ApprovalAction,
    /// Digest of the plan to run and of the replicas that have to stop for it.
    pub hash: String,
    /// Deployments that would lose replicas, as `namespace/name`.
    pub affects: Vec<String>,
    /// The request as a sentence.
    pub message: String,
}

/// Replicas of other deployments that have to stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Victims {
    /// The groups.
    pub groups: Vec<ObjectKey>,
    /// Their deployments, as `namespace/name`.
    pub deployments: Vec<String>,
    /// Bytes they hold.
    pub freed_bytes: u64,
    /// The nodes of the replica afterwards.
    pub nodes: Vec<String>,
}

/// What to do for a replica that fits nowhere.
pub enum PreemptOutcome {
    /// Preempt these now.
    Preempt(Victims),
    /// Request approval first.
    RequestApproval(ApprovalRequest, Note),
    /// Preemption is not possible yet, or not allowed.
    Wait(Note),
}

/// The replicas to preempt, as if the groups for which `without` is true were gone; `None` if no replica of
/// lower priority helps.
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
    // Those past their minimum residency first; of the others only the remaining time.
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
    let asks = |tier: &String| {
        view.tiers.get(tier).is_some_and(|tier| tier.approvals.contains(&ApprovalAction::Preempt))
    };
    let own = format!("{}/", desired.namespace);
    let foreign = deployments.iter().any(|deployment| !deployment.starts_with(&own));
    // A tier that everybody may name gives nobody the right to stop replicas of others.
    let asks_for_others = foreign && !desired.preempts_everywhere;
    if !asks_for_others && !tiers.chain(&desired.tier).any(asks) {
        return Some(PreemptOutcome::Preempt(victims));
    }
    let hash = approval_hash(desired, ApprovalAction::Preempt, deployments);
    if desired.denied.contains(&hash) {
        return Some(PreemptOutcome::Wait(Note::Denied { replica, hash }));
    }
    // An Approval speaks for the deployments that it names; the API server asks whether its author may.
    let named = |affects: &BTreeSet<String>| {
        !foreign || deployments.iter().all(|deployment| affects.contains(deployment))
    };
    if desired.approved.get(&hash).is_some_and(named)
        || (!foreign && desired.approved_plan.as_ref() == Some(&hash))
    {
        return Some(PreemptOutcome::Preempt(victims));
    }
    let note = Note::AwaitsApproval {
        replica,
        hash: hash.clone(),
        deployments: deployments.clone(),
        frees: *frees,
        foreign,
    };
    let (affects, message) = (deployments.clone(), note.to_string());
    Some(PreemptOutcome::RequestApproval(
        ApprovalRequest { action: ApprovalAction::Preempt, hash, affects, message },
        note,
    ))
}

/// Identity of an approval: the plan to run and the replicas that have to stop for it. Without the nodes, so
/// that it stays valid when the plan is computed again.
pub fn approval_hash(desired: &ValidDeployment, action: ApprovalAction, affects: &[String]) -> String {
    let ValidDeployment { namespace, name, model, sharding, replicas, .. } = desired;
    let intent = (namespace, name, model, sharding, replicas, action, affects);
    // Approvals from before draft models or adapters existed stay valid.
    let adapters: Vec<&Adapter> = desired.adapters.iter().map(|deployed| &deployed.adapter).collect();
    let mut hash = match &desired.draft {
        draft if !adapters.is_empty() => digest(&(intent, draft.as_ref().map(|draft| &draft.name), adapters)),
        None => digest(&intent),
        Some(draft) => digest(&(intent, &draft.name)),
    };
    hash.truncate(HASH_DIGITS);
    hash
}

/// The set of evictable groups with the lowest cost without which the replica fits.
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
    let sets = choices
        .candidates()
        .take(MAX_CANDIDATES)
        .map(|scored| (needed_victims(view, fit, scored, without, &takable), scored));
    // The first of equals is the better candidate.
    let (groups, scored) = sets.min_by_key(|(groups, _)| disruption_cost(view, groups))?;
    let of = |key: &&ObjectKey| view.groups.get(*key).map(|group| format!("{}/{}", key.0, group.deployment));
    let deployments: BTreeSet<String> = groups.iter().filter_map(of).collect();
    Some(Victims {
        freed_bytes: groups
            .iter()
            .filter_map(|key| view.groups.get(*key))
            .map(GroupInfo::reserved_bytes)
            .sum(),
        nodes: scored.nodes(),
        deployments: deployments.into_iter().collect(),
        groups: groups.into_iter().cloned().collect(),
    })
}

/// The groups that this candidate really needs, of those that may be preempted.
fn needed_victims<'k>(
    view: &Snapshot,
    fit: &MemoryModel<'_>,
    scored: &ScoredCandidate,
    without: impl Fn(&ObjectKey) -> bool + Copy,
    takable: &BTreeSet<&'k ObjectKey>,
) -> BTreeSet<&'k ObjectKey> {
    let on_it = |key: &&&ObjectKey| {
        view.groups.get(**key).is_some_and(|group| group.nodes().any(|node| scored.uses(node)))
    };
    let mut taken: BTreeSet<&ObjectKey> = takable.iter().filter(on_it).copied().collect();
    // Spare the most important first if possible, and of equals the larger.
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

/// Whether a candidate has its memory and its ports once these groups are gone.
fn fits_without(
    view: &Snapshot,
    fit: &MemoryModel<'_>,
    scored: &ScoredCandidate,
    gone: impl Fn(&ObjectKey) -> bool,
) -> bool {
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

/// Cost of stopping these groups, for comparison: by the most important of them, the number that are not on
/// demand, the number of groups, and their bytes.
fn disruption_cost(view: &Snapshot, groups: &BTreeSet<&ObjectKey>) -> (i32, usize, usize, u64) {
    let seen = || groups.iter().filter_map(|key| view.groups.get(*key));
    (
        seen().map(|group| view.priority(group)).max().unwrap_or(i32::MIN),
        seen().filter(|group| view.residency(group) != Residency::OnDemand).count(),
        groups.len(),
        seen().map(GroupInfo::reserved_bytes).fold(0, u64::saturating_add),
    )
}
