//! Room that others make: which replicas of lower priority have to stop so that one that fits nowhere else fits.
//! Whole replicas, as few and as unimportant ones as will do; never one whose tier keeps it, and none of the same
//! priority, so that no two can drive each other out in turns.

use std::collections::BTreeSet;

use russet_crds::{Action, Residency};

use super::choose::find;
use super::worth::Way;
use crate::digest::digest;
use crate::fabric;
use crate::fit::Fit;
use crate::note::Note;
use crate::snapshot::{Group, Key, Snapshot};
use crate::validate::ValidDeployment;

/// Ways that are looked at for the least harm, the best ones first.
const WAYS: usize = 64;
/// Digits of a hash that people copy into Git.
const DIGITS: usize = 16;

/// What a person has to say yes to before it is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// What is to be done.
    pub action: Action,
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
    pub groups: Vec<Key>,
    /// Their deployments, as `namespace/name`.
    pub deployments: Vec<String>,
    /// Bytes they hold.
    pub frees: u64,
    /// Where the replica would be then.
    pub nodes: Vec<String>,
}

/// What becomes of a replica that fits nowhere.
pub enum Outcome {
    /// These stop now.
    Take(Victims),
    /// A person is asked first.
    Ask(Ask, Note),
    /// They would make room, and do not yet, or may not.
    Wait(Note),
}

/// Whom a replica may have make room, as if the groups for which `without` is true were gone; `None` when no
/// replica of lower priority helps.
pub fn preempt(
    view: &Snapshot,
    want: &ValidDeployment,
    fit: &Fit<'_>,
    replica: i32,
    without: impl Fn(&Key) -> bool + Copy,
) -> Option<Outcome> {
    let lower = |key: &Key, group: &Group| {
        !without(key)
            && !group.deleting
            && (key.0 != want.namespace || group.deployment != want.name)
            && view.priority(group) < want.priority
            && view.residency(group) != Residency::Always
    };
    // Those that have run long enough first; of the others only how long they have still.
    let ripe = victims(view, want, fit, replica, without, |key, group| {
        lower(key, group) && group.resident_until.is_none()
    });
    let Some(victims) = ripe else {
        let victims = victims(view, want, fit, replica, without, lower)?;
        let until = victims.groups.iter().filter_map(|key| view.groups.get(key)?.resident_until).max();
        let Victims { deployments, frees, .. } = victims;
        let note = match until.filter(|_| want.preempts) {
            Some(until) => Note::Resident { replica, deployments, frees, until },
            None => Note::CouldPreempt { replica, deployments, frees, tier: want.tier.clone() },
        };
        return Some(Outcome::Wait(note));
    };
    let Victims { deployments, frees, .. } = &victims;
    if !want.preempts {
        let (deployments, tier) = (deployments.clone(), want.tier.clone());
        return Some(Outcome::Wait(Note::CouldPreempt { replica, deployments, frees: *frees, tier }));
    }
    let tiers = victims.groups.iter().filter_map(|key| view.groups.get(key)?.tier.as_ref());
    let asks =
        |tier: &String| view.tiers.get(tier).is_some_and(|tier| tier.approvals.contains(&Action::Preempt));
    if !tiers.chain(&want.tier).any(asks) {
        return Some(Outcome::Take(victims));
    }
    let hash = hash(want, Action::Preempt, deployments);
    if want.denied.contains(&hash) {
        return Some(Outcome::Wait(Note::Denied { replica, hash }));
    }
    if want.approved.contains(&hash) {
        return Some(Outcome::Take(victims));
    }
    let note =
        Note::AwaitsApproval { replica, hash: hash.clone(), deployments: deployments.clone(), frees: *frees };
    let (affects, message) = (deployments.clone(), note.to_string());
    Some(Outcome::Ask(Ask { action: Action::Preempt, hash, affects, message }, note))
}

/// What an approval is about: what is to run and who has to stop for it, and not on which nodes, so that it
/// outlives a plan that is made anew.
pub fn hash(want: &ValidDeployment, action: Action, affects: &[String]) -> String {
    let ValidDeployment { namespace, name, model, sharding, replicas, .. } = want;
    let intent = (namespace, name, model, sharding, replicas, action, affects);
    // What was approved before there were draft models stays approved.
    let mut hash = match &want.draft {
        None => digest(&intent),
        Some(draft) => digest(&(intent, &draft.name)),
    };
    hash.truncate(DIGITS);
    hash
}

/// The least harmful set of groups, of those that may be taken, without which the replica fits.
fn victims(
    view: &Snapshot,
    want: &ValidDeployment,
    fit: &Fit<'_>,
    replica: i32,
    without: impl Fn(&Key) -> bool + Copy,
    may: impl Fn(&Key, &Group) -> bool,
) -> Option<Victims> {
    let takable: BTreeSet<&Key> =
        view.groups.iter().filter(|(key, group)| may(key, group)).map(|(key, _)| key).collect();
    if takable.is_empty() {
        return None;
    }
    let gone = |key: &Key| without(key) || takable.contains(key);
    let choices = find(view, want, fit, replica, true, gone).ok()?;
    let sets = choices.ways().take(WAYS).map(|way| (needed(view, fit, way, without, &takable), way));
    // The first of equals is the better way.
    let (groups, way) = sets.min_by_key(|(groups, _)| harm(view, groups))?;
    let of = |key: &&Key| view.groups.get(*key).map(|group| format!("{}/{}", key.0, group.deployment));
    let deployments: BTreeSet<String> = groups.iter().filter_map(of).collect();
    Some(Victims {
        frees: groups.iter().filter_map(|key| view.groups.get(*key)).map(Group::reserved_bytes).sum(),
        nodes: way.nodes(),
        deployments: deployments.into_iter().collect(),
        groups: groups.into_iter().cloned().collect(),
    })
}

/// Of the groups that may be taken those that this way really needs.
fn needed<'k>(
    view: &Snapshot,
    fit: &Fit<'_>,
    way: &Way,
    without: impl Fn(&Key) -> bool + Copy,
    takable: &BTreeSet<&'k Key>,
) -> BTreeSet<&'k Key> {
    let on_it =
        |key: &&&Key| view.groups.get(**key).is_some_and(|group| group.nodes().any(|node| way.uses(node)));
    let mut taken: BTreeSet<&Key> = takable.iter().filter(on_it).copied().collect();
    // The most important stays first, if anybody can, and of equals the larger.
    let mut by_harm: Vec<&Key> = taken.iter().copied().collect();
    by_harm.sort_by_key(|key| std::cmp::Reverse(harm(view, &BTreeSet::from([*key]))));
    for key in by_harm {
        taken.remove(key);
        if !holds(view, fit, way, |other| without(other) || taken.contains(other)) {
            taken.insert(key);
        }
    }
    taken
}

/// Whether a way has its memory and its ports once these groups are gone.
fn holds(view: &Snapshot, fit: &Fit<'_>, way: &Way, gone: impl Fn(&Key) -> bool) -> bool {
    let committed = view.committed(&gone);
    let room = way.candidate.ranks.iter().all(|rank| {
        let limit = view.nodes.get(&rank.node).map_or(0, |node| node.serving_limit);
        let free = limit.saturating_sub(committed.get(rank.node.as_str()).copied().unwrap_or(0));
        rank.need.total() <= free
    });
    let plan = way.candidate.plan(fit);
    let ports: BTreeSet<(&str, &str)> = fabric::ports(&plan).collect();
    let staying = || view.groups.iter().filter(|(key, _)| !gone(key));
    room && (ports.is_empty()
        || !staying().any(|(_, group)| fabric::ports(&group.plan).any(|port| ports.contains(&port))))
}

/// What stopping these does, the least first: by the most important of them, what is not there on demand, how many,
/// and how much they hold.
fn harm(view: &Snapshot, groups: &BTreeSet<&Key>) -> (i32, usize, usize, u64) {
    let seen = || groups.iter().filter_map(|key| view.groups.get(*key));
    (
        seen().map(|group| view.priority(group)).max().unwrap_or(i32::MIN),
        seen().filter(|group| view.residency(group) != Residency::OnDemand).count(),
        groups.len(),
        seen().map(Group::reserved_bytes).fold(0, u64::saturating_add),
    )
}
