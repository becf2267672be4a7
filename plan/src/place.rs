//! From a valid deployment to what must exist: which replicas stay, come and go. Sticky: a replica
//! whose plan still serves the spec stays where it is, so that replanning an applied plan changes
//! nothing. It never deletes anything it could not replace.
//!
//! ```text
//! for each replica:  a current group? ─yes─▶ keep; once it is ready, its predecessors go
//!                         │ no
//!                         ├─ fits beside what runs ──────────────▶ create, predecessor goes when ready
//!                         ├─ fits once deleted groups let go ────▶ wait
//!                         ├─ fits once its predecessor is gone ──▶ delete the predecessor, wait
//!                         ├─ fits once others made room ─────────▶ delete those of lower priority, or ask first
//!                         └─ fits nowhere ───────────────────────▶ keep what runs, say the numbers
//! ```

mod choose;
mod preempt;
mod report;
mod ways;
mod worth;

use std::borrow::Cow;

use russet_crds::{Action, Backend, BackendChoice, GroupPlan, PlacementReport, names};
use russet_wire::partition::Partition;
use sha2::{Digest as _, Sha256};

use crate::fit::Fit;
use crate::forecast::Forecast;
use crate::note::Note;
use crate::quantity::show;
use crate::shard::Candidate;
use crate::snapshot::{Availability, Group, Key, Snapshot};
use crate::solve::Advice;
use crate::validate::{Split, ValidDeployment};
use choose::find;
use preempt::{Outcome, Victims, preempt};

use report::report;

pub use preempt::Ask;
pub use report::{STAYS, refused, shown};
pub use ways::{Ways, ways};
pub use worth::{Scale, Way};

/// Nodes that a refusal names as its remedy.
const SHOWN: usize = 5;

/// What must change for one deployment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Groups that stay.
    pub keep: Vec<Key>,
    /// Groups to create, at epoch 1.
    pub create: Vec<NewGroup>,
    /// Groups to delete.
    pub delete: Vec<OldGroup>,
    /// Replicas of other deployments to delete, so that one of this fits.
    pub preempt: Vec<Key>,
    /// Nodes that should have the files before anything stops for them.
    pub prefetch: Vec<String>,
    /// What a person is asked.
    pub asks: Vec<Ask>,
    /// Replicas that have no current group and get none yet.
    pub waiting: Vec<i32>,
    /// The decision for people; only when something was placed.
    pub report: Option<PlacementReport>,
}

/// A group to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewGroup {
    /// Its name; the namespace is the deployment's.
    pub name: String,
    /// Index of the replica.
    pub replica: i32,
    /// The split.
    pub plan: GroupPlan,
}

/// A group to delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OldGroup {
    /// Its name.
    pub name: String,
    /// Why it goes.
    pub why: Removal,
}

/// Why a group goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// The deployment wants fewer replicas.
    ScaledDown,
    /// It wants none for now: its tier has it rest.
    Rests,
    /// Another group of the same replica serves the spec.
    Replaced,
    /// Its successor needs its memory.
    Drained,
}

impl Placement {
    /// Whether nothing has to be done.
    pub fn is_empty(&self) -> bool {
        self.create.is_empty() && self.delete.is_empty() && self.preempt.is_empty()
    }

    /// The view after everything was carried out and every agent released what it had to.
    pub fn apply(&self, view: &Snapshot, want: &ValidDeployment) -> Snapshot {
        let mut after = view.clone();
        for old in &self.delete {
            after.groups.remove(&(want.namespace.clone(), old.name.clone()));
        }
        for key in &self.preempt {
            after.groups.remove(key);
        }
        for new in &self.create {
            after.groups.insert(
                (want.namespace.clone(), new.name.clone()),
                want.group(new.replica, new.plan.clone()),
            );
        }
        after
    }
}

/// Decides what must exist for `want`, as if nobody else waited.
pub fn place(view: &Snapshot, want: &ValidDeployment) -> (Placement, Vec<Note>) {
    place_as(view, want, &Advice::default())
}

/// Decides what must exist for `want`, its new replicas where `advice` has them.
pub fn place_as(view: &Snapshot, want: &ValidDeployment, advice: &Advice) -> (Placement, Vec<Note>) {
    let forecast = Forecast::new(view, &want.shape, want.room);
    // Of a large cluster nothing is copied while nothing changes.
    let mut view = Cow::Borrowed(view);
    let mut placement = Placement::default();
    let mut notes = Vec::new();
    let mut found = Vec::new();
    let fit = Fit::new(&want.shape, want.room);

    let own: Vec<(Key, i32)> = view
        .groups_of(&want.namespace, &want.name)
        .filter(|(_, group)| !group.deleting)
        .map(|(key, group)| (key.clone(), group.replica))
        .collect();
    let unwanted = if want.rest.is_some() { Removal::Rests } else { Removal::ScaledDown };
    for (key, replica) in own {
        if replica < 0 || replica >= want.replicas {
            remove(view.to_mut(), &mut placement, &key, unwanted);
        }
    }
    for replica in 0..want.replicas {
        let (current, outdated) = split_groups(&view, want, &fit, replica);
        if let Some(((kept, ready), surplus)) = current.split_first() {
            if let Some(note) = outside(&view, want, kept) {
                notes.push(note);
            }
            placement.keep.push(kept.clone());
            for (key, _) in surplus {
                remove(view.to_mut(), &mut placement, key, Removal::Replaced);
            }
            for (key, old_ready) in outdated {
                if *ready || !old_ready {
                    remove(view.to_mut(), &mut placement, &key, Removal::Replaced);
                } else {
                    placement.keep.push(key);
                }
            }
            continue;
        }
        if let Some(note) = unapproved(&view, want, replica, &outdated, &mut placement.asks) {
            notes.push(note);
            placement.waiting.push(replica);
            placement.keep.extend(outdated.into_iter().map(|(key, _)| key));
            continue;
        }
        let advised = advice.splits.get(&(want.key(), replica));
        let nothing_less = |_: &Key| false;
        let goes_first = want.drains && outdated.iter().any(|(_, ready)| *ready);
        let beside = match goes_first {
            true => Err(Vec::new()),
            false => find(&view, want, &fit, replica, true, nothing_less),
        };
        match beside {
            Ok(_) if advised == Some(&None) => {
                notes.push(Note::Outweighed { replica, by: advice.preferred() });
                placement.waiting.push(replica);
                placement.keep.extend(outdated.into_iter().map(|(key, _)| key));
            }
            Ok(choices) => {
                let Some(choice) = choices.choose(&view, advised.and_then(Option::as_ref)) else { continue };
                let new = new_group(want, &fit, replica, &choice.candidate);
                if view.groups.contains_key(&(want.namespace.clone(), new.name.clone())) {
                    // The same plan, being deleted: its name is free once its agents let go.
                    notes.push(Note::WaitingForRelease {
                        replica,
                        holders: vec![format!("ShardGroup {}", new.name)],
                    });
                    placement.waiting.push(replica);
                    continue;
                }
                notes.push(Note::Placed { replica, decision: choice.candidate.show() });
                for (key, old_ready) in outdated {
                    if old_ready {
                        placement.keep.push(key);
                    } else {
                        remove(view.to_mut(), &mut placement, &key, Removal::Replaced);
                    }
                }
                view.to_mut().groups.insert(
                    (want.namespace.clone(), new.name.clone()),
                    want.group(new.replica, new.plan.clone()),
                );
                placement.create.push(new);
                found.push((replica, choice));
            }
            Err(refusal) => {
                placement.waiting.push(replica);
                let gone = |key: &Key| view.groups.get(key).is_some_and(|group| group.deleting);
                if !goes_first && find(&view, want, &fit, replica, false, gone).is_ok() {
                    notes.push(Note::WaitingForRelease { replica, holders: holders(&view) });
                    placement.keep.extend(outdated.into_iter().map(|(key, _)| key));
                    continue;
                }
                let drained = |key: &Key| gone(key) || outdated.iter().any(|(old, _)| old == key);
                // Memory that agents have not released may stay so: nothing is taken down for it.
                let after =
                    find(&view, want, &fit, replica, true, drained).ok().filter(|_| !outdated.is_empty());
                if let Some(after) = after {
                    if !placement.create.is_empty() || on_its_way(&view, want, &fit, replica) {
                        notes.push(Note::InTurn { replica });
                        placement.keep.extend(outdated.into_iter().map(|(key, _)| key));
                        continue;
                    }
                    let nodes = after.ways().next().map(Way::nodes).unwrap_or_default();
                    let lacking = lacking(&view, want, nodes);
                    if !lacking.is_empty() && outdated.iter().any(|(_, ready)| *ready) {
                        notes.push(Note::FetchFirst { replica, nodes: lacking.clone() });
                        placement.prefetch.extend(lacking);
                        placement.keep.extend(outdated.into_iter().map(|(key, _)| key));
                        continue;
                    }
                    for (key, _) in &outdated {
                        notes.push(Note::DrainFirst { group: key.1.clone() });
                        remove(view.to_mut(), &mut placement, key, Removal::Drained);
                    }
                    continue;
                }
                notes.extend(refusal);
                let remedy = match preempt(&view, want, &fit, replica, drained) {
                    Some(Outcome::Take(Victims { groups, deployments, frees, nodes })) => {
                        let lacking = lacking(&view, want, nodes);
                        if !lacking.is_empty() {
                            notes.push(Note::FetchFirst { replica, nodes: lacking.clone() });
                            placement.prefetch.extend(lacking);
                            placement.keep.extend(outdated.into_iter().map(|(key, _)| key));
                            continue;
                        }
                        let seen = &mut view.to_mut().groups;
                        for key in &groups {
                            seen.entry(key.clone()).and_modify(|group| group.deleting = true);
                        }
                        notes.push(Note::Preempts { replica, deployments, frees });
                        placement.preempt.extend(groups);
                        placement.keep.extend(outdated.into_iter().map(|(key, _)| key));
                        continue;
                    }
                    Some(Outcome::Ask(ask, note)) => {
                        placement.asks.push(ask);
                        Some(note)
                    }
                    Some(Outcome::Wait(note)) => Some(note),
                    None => None,
                };
                let needed = fit.whole();
                let closed = closed(&view, want, needed.total());
                notes.push(Note::NothingFits { replica, needed, closed });
                // Last, because it is what will help.
                notes.extend(remedy);
                for (key, _) in outdated {
                    notes.push(Note::KeptOutdated { group: key.1.clone() });
                    placement.keep.push(key);
                }
            }
        }
    }
    placement.report = report(&placement, &found, &forecast);
    (placement, notes)
}

/// Of these nodes those that lack the model's files. Nothing stops for a model that is not there yet.
fn lacking(view: &Snapshot, want: &ValidDeployment, mut nodes: Vec<String>) -> Vec<String> {
    let Some(files) = &view.files else { return Vec::new() };
    let held = files.get(&(want.namespace.clone(), want.model.clone()));
    nodes.retain(|node| !held.is_some_and(|held| held.contains(node)));
    nodes
}

/// What keeps a replica that answers from being replaced: its tier wants that approved. One that cannot stay
/// where it is needs nobody's word.
fn unapproved(
    view: &Snapshot,
    want: &ValidDeployment,
    replica: i32,
    outdated: &[Named],
    asks: &mut Vec<Ask>,
) -> Option<Note> {
    let tier = view.tiers.get(want.tier.as_ref()?)?;
    let answers = |(key, ready): &Named| {
        *ready && view.groups.get(key).is_some_and(|group| may_stay(view, want, group))
    };
    if !tier.approvals.contains(&Action::Rollout) || !outdated.iter().any(answers) {
        return None;
    }
    let hash = preempt::hash(want, Action::Rollout, &[]);
    if want.approved.contains(&hash) {
        return None;
    }
    if want.denied.contains(&hash) {
        return Some(Note::Denied { replica, hash });
    }
    let note = Note::AwaitsApproval { replica, hash: hash.clone(), deployments: Vec::new(), frees: 0 };
    asks.push(Ask { action: Action::Rollout, hash, affects: Vec::new(), message: note.to_string() });
    Some(note)
}

/// Nodes it may have that would hold so much if nothing else ran there, and take no work.
fn closed(view: &Snapshot, want: &ValidDeployment, needed: u64) -> Vec<String> {
    let holds = view.nodes.iter().filter(|(name, node)| {
        let shut = node.availability != Availability::Open && node.serving_limit >= needed;
        shut && want.allows(std::iter::once(name.as_str()))
    });
    holds.take(SHOWN).map(|(name, _)| name.clone()).collect()
}

/// The replicas of a deployment that have no current group; `own` are its groups that are not being deleted.
pub fn pending(view: &Snapshot, want: &ValidDeployment, fit: &Fit<'_>, own: &[&Group]) -> Vec<i32> {
    let has = |replica: i32| {
        own.iter()
            .any(|group| group.replica == replica && serves(want, fit, group) && may_stay(view, want, group))
    };
    (0..want.replicas).filter(|replica| !has(*replica)).collect()
}

/// What a deployment that cannot be planned still allows: replicas nobody wants any more go.
pub fn scale_down(view: &Snapshot, namespace: &str, deployment: &str, replicas: i32) -> Placement {
    let mut placement = Placement::default();
    for (key, group) in view.groups_of(namespace, deployment).filter(|(_, group)| !group.deleting) {
        if (0..replicas).contains(&group.replica) {
            placement.keep.push(key.clone());
        } else {
            placement.delete.push(OldGroup { name: key.1.clone(), why: Removal::ScaledDown });
        }
    }
    placement
}

/// Digest of everything that makes a plan what it is; another digest is another group.
pub fn plan_hash(model: &str, plan: &GroupPlan) -> String {
    let bare = GroupPlan { hash: String::new(), ..plan.clone() };
    // Struct fields serialise in the order of their declaration, so equal plans are equal bytes.
    let canonical = serde_json::to_vec(&(model, bare)).unwrap_or_default();
    hex::encode(Sha256::digest(canonical))
}

/// The hash a deployment shows for all its replicas.
pub fn deployment_hash<'a>(hashes: impl Iterator<Item = &'a str>) -> String {
    let hashes: Vec<&str> = hashes.collect();
    match hashes.as_slice() {
        [] => String::new(),
        [one] => (*one).to_owned(),
        many => hex::encode(Sha256::digest(many.join(","))),
    }
}

/// Whether a running plan is what the deployment asks for, on nodes it may stay on.
pub fn is_current(view: &Snapshot, want: &ValidDeployment, group: &Group) -> bool {
    serves(want, &Fit::new(&want.shape, want.room), group) && may_stay(view, want, group)
}

/// Whether another replica has a successor that does not answer yet, or none because it makes room for one.
fn on_its_way(view: &Snapshot, want: &ValidDeployment, fit: &Fit<'_>, replica: i32) -> bool {
    view.groups_of(&want.namespace, &want.name).any(|(_, group)| {
        let other = group.replica != replica && (0..want.replicas).contains(&group.replica);
        other && (group.deleting || (!group.ready && serves(want, fit, group)))
    })
}

type Named = (Key, bool);

/// The groups of a replica: those that serve the spec, ready ones first, and those that do not; each
/// with whether it is ready.
fn split_groups(
    view: &Snapshot,
    want: &ValidDeployment,
    fit: &Fit<'_>,
    replica: i32,
) -> (Vec<Named>, Vec<Named>) {
    let (mut current, mut outdated) = (Vec::new(), Vec::new());
    for (key, group) in view.groups_of(&want.namespace, &want.name) {
        if group.replica != replica || group.deleting {
            continue;
        }
        let list = if serves(want, fit, group) && may_stay(view, want, group) {
            &mut current
        } else {
            &mut outdated
        };
        list.push((key.clone(), group.ready));
    }
    current.sort_by_key(|(key, ready)| (!ready, key.clone()));
    (current, outdated)
}

fn serves(want: &ValidDeployment, fit: &Fit<'_>, group: &Group) -> bool {
    let plan = &group.plan;
    let layers: Vec<u32> = plan.members.iter().map(|member| member.layers).collect();
    let size = plan.tensor_size.max(1);
    let stages: Vec<u32> = layers.iter().copied().step_by(size as usize).collect();
    let ranks = layers.len() as u32;
    let split = match &want.split {
        Split::Auto => true,
        Split::Single => ranks == 1,
        Split::Pipeline => ranks > 1 && size == 1,
        Split::Ranks(wanted) => ranks == *wanted && size == 1,
        Split::Layers(wanted) => layers == *wanted && size == 1,
        Split::Tensor(wanted) => size > 1 && ranks == size && wanted.is_none_or(|wanted| wanted == size),
        Split::Hybrid(wanted) => size > 1 && stages.len() > 1 && wanted.allows(&stages, size),
    };
    let backend = size == 1
        || match want.backend {
            BackendChoice::Auto | BackendChoice::Unknown => true,
            BackendChoice::Jaccl => plan.backend == Backend::Jaccl,
            BackendChoice::JacclRing => plan.backend == Backend::JacclRing,
            BackendChoice::Ring => plan.backend == Backend::Ring,
        };
    let Ok(partition) = Partition::with_tensor(layers, size, want.shape.layers) else { return false };
    let sizes = plan.members.iter().all(|member| {
        partition.part(member.rank).is_some_and(|part| {
            let need = fit.part(&part);
            // What runs was planned with the engine's own share as an older release knew it, and stays while
            // the headroom that is asked for is there.
            (member.weight_bytes, member.kv_bytes) == (need.weights, need.kv)
                && member.overhead_bytes >= fit.headroom(&need)
        })
    });
    split
        && backend
        && sizes
        && group.model == want.model
        && plan.context_tokens == want.room.context_tokens
        && plan.max_sequences == want.room.max_sequences
}

/// Whether its nodes may go on with it. Pools count when a group is placed: one that was placed in those
/// that are asked for stays when its nodes leave them.
fn may_stay(view: &Snapshot, want: &ValidDeployment, group: &Group) -> bool {
    let inside = group.pools == want.pools() || want.allows(group.nodes());
    inside
        && group.plan.members.iter().all(|member| {
            view.nodes.get(&member.node_name).is_some_and(|node| match node.availability {
                Availability::Open
                | Availability::Cordoned
                | Availability::Unreachable
                | Availability::Unmeasured => true,
                Availability::Draining | Availability::Lost => false,
            })
        })
}

/// What is to be said of a group that stays outside the pools.
fn outside(view: &Snapshot, want: &ValidDeployment, key: &Key) -> Option<Note> {
    let group = view.groups.get(key).filter(|group| !want.allows(group.nodes()))?;
    let strangers = group.nodes().filter(|node| !want.allows(std::iter::once(*node)));
    let mut nodes: Vec<String> = strangers.map(str::to_owned).collect();
    if nodes.is_empty() {
        // Each is in some pool, and no pool has them all.
        nodes = group.nodes().map(str::to_owned).collect();
    }
    Some(Note::Outside { group: key.1.clone(), nodes, pools: want.pools() })
}

fn new_group(want: &ValidDeployment, fit: &Fit<'_>, replica: i32, candidate: &Candidate) -> NewGroup {
    let mut plan = candidate.plan(fit);
    plan.hash = plan_hash(&want.model, &plan);
    NewGroup { name: names::shard_group(&want.name, replica, &plan.hash), replica, plan }
}

fn remove(view: &mut Snapshot, placement: &mut Placement, key: &Key, why: Removal) {
    if let Some(group) = view.groups.get_mut(key) {
        // It keeps its memory until its agents say otherwise; only a later view shows that free.
        group.deleting = true;
    }
    placement.delete.push(OldGroup { name: key.1.clone(), why });
}

fn holders(view: &Snapshot) -> Vec<String> {
    let leaving = view.groups.iter().filter(|(_, group)| group.deleting);
    let groups = leaving.map(|(key, group)| format!("ShardGroup {} {}", key.1, show(group.reserved_bytes())));
    let nodes = view
        .nodes
        .iter()
        .filter(|(_, node)| node.unreleased > 0)
        .map(|(name, node)| format!("node {name} {}", show(node.unreleased)));
    groups.chain(nodes).collect()
}

#[cfg(test)]
mod tests;
