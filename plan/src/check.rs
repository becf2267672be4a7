//! Independent checker of placements: the invariants, restated without the planner's own arithmetic. Used by
//! tests over thousands of random clusters, and cheap enough for any caller.

mod group;

use std::collections::{BTreeMap, BTreeSet};

use russet_crds::Backend;
use thiserror::Error;

use crate::placement::{Placement, RemovalReason, RemovedGroup, place, plan_hash};
use crate::snapshot::{ObjectKey, Snapshot};
use crate::valid_deployment::{Split, ValidDeployment};

/// A violated invariant of a placement.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Violation {
    /// Layers are missing or duplicated, a rank is empty, or members of a stage differ.
    #[error("group {group}: layers {layers:?} do not cut {model} layers into non-empty stages in order")]
    Layers {
        /// The group.
        group: String,
        /// Layers per rank.
        layers: Vec<u32>,
        /// Layers of the model.
        model: u32,
    },
    /// A layer is on another stage than the one whose keys and values it reads.
    #[error("group {group}: layer {layer} reads the keys and values of layer {owner} on another stage")]
    SharedCache {
        /// The group.
        group: String,
        /// The layer.
        layer: u32,
        /// The layer that keeps them.
        owner: u32,
    },
    /// The split is not the requested one.
    #[error("group {group}: layers {layers:?} are not the split {split:?}")]
    Split {
        /// The group.
        group: String,
        /// Layers per rank.
        layers: Vec<u32>,
        /// The requested split.
        split: Split,
    },
    /// A rank on a node whose engine lacks a requested option.
    #[error("group {group}: the engine of node {node} has no {option}")]
    Option {
        /// The group.
        group: String,
        /// The node.
        node: String,
        /// The option.
        option: &'static str,
    },
    /// The draft model is not the requested one.
    #[error("group {group}: the draft model {draft:?} was not asked for")]
    Draft {
        /// The group.
        group: String,
        /// Its draft model.
        draft: Option<String>,
    },
    /// The adapters are not the requested ones.
    #[error("group {group}: the adapters {adapters:?} were not asked for")]
    Adapters {
        /// The group.
        group: String,
        /// Names of its adapters.
        adapters: Vec<String>,
    },
    /// A layer is not divisible into this many equal parts.
    #[error("group {group}: no layer can be cut into {size}")]
    Indivisible {
        /// The group.
        group: String,
        /// Members of a stage.
        size: u32,
    },
    /// The backend was not requested, or the cables do not support it.
    #[error("group {group}: {backend:?} cannot be: {why}")]
    Backend {
        /// The group.
        group: String,
        /// The backend.
        backend: Backend,
        /// Why.
        why: String,
    },
    /// An RDMA port is used by two groups.
    #[error("port {device} of node {node} is in two groups")]
    PortTwice {
        /// The node.
        node: String,
        /// The device.
        device: String,
    },
    /// A rank's reservation differs from its share of the model.
    #[error(
        "group {group} rank {rank}: reserves {reserved} bytes, its part takes {takes} and the engine more"
    )]
    Reservation {
        /// The group.
        group: String,
        /// The rank.
        rank: u32,
        /// Bytes reserved.
        reserved: u64,
        /// Bytes of weights and KV cache.
        takes: u64,
    },
    /// Two ranks of one group on one node.
    #[error("group {group}: node {node} has two ranks")]
    NodeTwice {
        /// The group.
        group: String,
        /// The node.
        node: String,
    },
    /// A rank on a node that takes no new work.
    #[error("group {group}: node {node} takes no new work")]
    NodeClosed {
        /// The group.
        group: String,
        /// The node.
        node: String,
    },
    /// Ranks are outside the requested pools, spread over several of them, or not linked as a pool requires.
    #[error("group {group}: no area that was asked for has {nodes:?}, joined as it asks")]
    NodeEligibility {
        /// The group.
        group: String,
        /// Its nodes.
        nodes: Vec<String>,
    },
    /// Ranks with different engines.
    #[error("group {group}: its nodes have different engine builds")]
    Builds {
        /// The group.
        group: String,
    },
    /// The reservations on a node exceed its memory.
    #[error("node {node}: {promised} bytes promised of {limit}")]
    OverCommitted {
        /// The node.
        node: String,
        /// Sum of all reservations, bytes.
        promised: u64,
        /// Bytes models may take.
        limit: u64,
    },
    /// A rank on a node whose disk can never hold its model's files.
    #[error("group {group}: node {node} would have to hold {files} bytes of files and may hold {limit}")]
    Disk {
        /// The group.
        group: String,
        /// The node.
        node: String,
        /// Bytes of files that stay there, the group's own included.
        files: u64,
        /// Bytes models may take there.
        limit: u64,
    },
    /// A name or hash differs from the plan's own, or already exists.
    #[error("group {group}: its name or hash is wrong or taken")]
    Name {
        /// The group.
        group: String,
    },
    /// A group of another deployment was touched, or one that does not exist.
    #[error("group {group}: not a group of this deployment")]
    ForeignGroup {
        /// The group.
        group: String,
    },
    /// A ready replica is removed without need.
    #[error("group {group}: answers, and goes although nothing replaces it")]
    Outage {
        /// The group.
        group: String,
    },
    /// Not every replica is accounted for exactly once.
    #[error("replica {replica}: neither kept, created nor waiting, or more than one of them")]
    Replica {
        /// The replica.
        replica: i32,
    },
    /// The number of removed or remaining replicas does not match the surplus.
    #[error("replicas {gone:?} go or are left, and {many} are too many")]
    Surplus {
        /// The removed replicas.
        gone: Vec<i32>,
        /// The surplus.
        many: usize,
    },
    /// A replica is removed although one stays that shares its failure domain with more others.
    #[error("replica {goes} goes, beside which {had} were, and replica {stays} stays beside {has}")]
    Spread {
        /// The removed replica.
        goes: i32,
        /// Replicas that shared its failure domain.
        had: usize,
        /// The replica that stays.
        stays: i32,
        /// Replicas that still share its failure domain.
        has: usize,
    },
    /// Planning again after the placement is applied changes something.
    #[error("planning an applied plan again changes it")]
    Unstable,
}

/// All violations of `placement`; empty if it may be applied.
pub fn check(view: &Snapshot, desired: &ValidDeployment, placement: &Placement) -> Vec<Violation> {
    let mut wrong = Vec::new();
    for new in &placement.create {
        group::check(view, desired, &new.name, &new.plan, &mut wrong);
        let taken = view.groups.contains_key(&(desired.namespace.clone(), new.name.clone()));
        if taken
            || new.plan.hash != plan_hash(&desired.model, &new.plan)
            || !new.name.contains(&new.plan.hash[..8])
        {
            wrong.push(Violation::Name { group: new.name.clone() });
        }
    }
    check_memory(view, placement, &mut wrong);
    check_disks(view, desired, placement, &mut wrong);
    group::check_ports(view, placement, &mut wrong);
    check_removals(view, desired, placement, &mut wrong);
    check_replicas(view, desired, placement, &mut wrong);
    let after = placement.apply(view, desired);
    let (again, _) = place(&after, desired);
    // While a replica waits for memory, its release is an event that allows another step.
    if placement.waiting.is_empty() && !again.is_empty() {
        wrong.push(Violation::Unstable);
    }
    wrong
}

fn check_memory(view: &Snapshot, placement: &Placement, wrong: &mut Vec<Violation>) {
    // Every existing group counts, including those that this placement deletes.
    let mut promised: BTreeMap<&str, u128> = BTreeMap::new();
    let existing = view.groups.values().map(|group| &group.plan);
    for plan in existing.chain(placement.create.iter().map(|new| &new.plan)) {
        for member in &plan.members {
            *promised.entry(&member.node_name).or_default() += u128::from(member.reserved_bytes());
        }
    }
    for new in &placement.create {
        for member in &new.plan.members {
            let Some(node) = view.nodes.get(&member.node_name) else { continue };
            let promised = promised[member.node_name.as_str()] + u128::from(node.unreleased);
            if promised > u128::from(node.serving_limit) {
                wrong.push(Violation::OverCommitted {
                    node: member.node_name.clone(),
                    promised: u64::try_from(promised).unwrap_or(u64::MAX),
                    limit: node.serving_limit,
                });
            }
        }
    }
}

fn check_disks(
    view: &Snapshot,
    desired: &ValidDeployment,
    placement: &Placement,
    wrong: &mut Vec<Violation>,
) {
    let Some(disks) = &view.disks else { return };
    let goes = |key: &ObjectKey| {
        let own = key.0 == desired.namespace && placement.delete.iter().any(|old| old.name == key.1);
        own || placement.preempt.contains(key)
    };
    for new in &placement.create {
        for (model, node) in new.plan.files(&desired.model) {
            if disks.holds(&desired.namespace, model, node) {
                continue;
            }
            let remaining = view.groups.iter().filter(|(key, group)| !group.deleting && !goes(key));
            let read = remaining.flat_map(|(key, group)| group.files().map(|files| (key.0.as_str(), files)));
            let own = new.plan.files(&desired.model).map(|files| (desired.namespace.as_str(), files));
            let here = read.chain(own).filter(|(_, (_, other))| *other == node);
            let read = here.map(|(namespace, (model, _))| (namespace, model));
            if let Some((limit, files)) =
                disks.limit_and_pinned(node, read).filter(|(limit, files)| files > limit)
            {
                let (group, node) = (new.name.clone(), node.to_owned());
                wrong.push(Violation::Disk { group, node, files, limit });
            }
        }
    }
}

fn check_removals(
    view: &Snapshot,
    desired: &ValidDeployment,
    placement: &Placement,
    wrong: &mut Vec<Violation>,
) {
    for old in &placement.delete {
        let Some(group) = view.groups.get(&(desired.namespace.clone(), old.name.clone())) else {
            wrong.push(Violation::ForeignGroup { group: old.name.clone() });
            continue;
        };
        if group.deployment != desired.name || group.deleting {
            wrong.push(Violation::ForeignGroup { group: old.name.clone() });
        }
        let replaced = placement.keep.iter().any(|key| {
            view.groups.get(key).is_some_and(|existing| existing.replica == group.replica && existing.ready)
        });
        let surplus = matches!(old.reason, RemovalReason::ScaledDown | RemovalReason::Idle);
        if group.ready && !surplus && !replaced && old.reason != RemovalReason::Drained {
            wrong.push(Violation::Outage { group: old.name.clone() });
        }
    }
}

fn check_replicas(
    view: &Snapshot,
    desired: &ValidDeployment,
    placement: &Placement,
    wrong: &mut Vec<Violation>,
) {
    let there: BTreeSet<i32> = view
        .groups_of(&desired.namespace, &desired.name)
        .filter(|(_, group)| !group.deleting)
        .map(|(_, group)| group.replica)
        .collect();
    let surplus: Vec<&RemovedGroup> = placement
        .delete
        .iter()
        .filter(|old| matches!(old.reason, RemovalReason::ScaledDown | RemovalReason::Idle))
        .collect();
    let of = |name: &String| Some(view.groups.get(&(desired.namespace.clone(), name.clone()))?.replica);
    let gone: BTreeSet<i32> = surplus.iter().filter_map(|old| of(&old.name)).collect();
    let many = there.len().saturating_sub(usize::try_from(desired.replicas).unwrap_or(0));
    if gone.len() != many {
        wrong.push(Violation::Surplus { gone: gone.into_iter().collect(), many });
        return;
    }
    check_spread(view, desired, &there, &gone, wrong);
    let created = placement.create.iter().map(|new| new.replica);
    let counted: BTreeSet<i32> =
        there.difference(&gone).copied().chain(created).chain(placement.waiting.iter().copied()).collect();
    if counted.len() != usize::try_from(desired.replicas).unwrap_or(0) || !counted.is_disjoint(&gone) {
        wrong.push(Violation::Surplus { gone: counted.into_iter().collect(), many });
        return;
    }
    for replica in counted {
        let retained = placement
            .keep
            .iter()
            .filter_map(|key| view.groups.get(key))
            .any(|group| group.replica == replica);
        let created = placement.create.iter().filter(|new| new.replica == replica).count();
        let waiting = placement.waiting.contains(&replica);
        if !(retained || created == 1 || waiting) || created > 1 || (waiting && created > 0) {
            wrong.push(Violation::Replica { replica });
        }
    }
}

/// Of replicas that are all ready, none is removed from a domain with fewer replicas than the domain of one
/// that stays. The same for each pair: the removed one shared its domain with as many replicas as any that
/// stays does now.
fn check_spread(
    view: &Snapshot,
    desired: &ValidDeployment,
    there: &BTreeSet<i32>,
    gone: &BTreeSet<i32>,
    wrong: &mut Vec<Violation>,
) {
    let groups = || view.groups_of(&desired.namespace, &desired.name).filter(|(_, group)| !group.deleting);
    if desired.replicas == 0 || !groups().all(|(_, group)| group.ready) {
        return;
    }
    let label = |node: &str| view.nodes.get(node).and_then(|seen| seen.labels.get(&desired.topology_key));
    let meet = |a: &str, b: &str| a == b || label(a).is_some_and(|value| label(b) == Some(value));
    let of = |replica: i32| {
        groups()
            .filter(move |(_, group)| group.replica == replica)
            .flat_map(|(_, group)| group.nodes())
            .collect::<Vec<_>>()
    };
    let beside = |replica: i32, among: &mut dyn Iterator<Item = i32>| {
        among.filter(|other| of(*other).iter().any(|a| of(replica).iter().any(|b| meet(a, b)))).count()
    };
    for goes in gone {
        for stays in there.difference(gone) {
            let had = beside(*goes, &mut there.iter().copied().filter(|other| other != goes));
            let has = beside(*stays, &mut there.difference(gone).copied().filter(|other| other != stays));
            if had < has {
                wrong.push(Violation::Spread { goes: *goes, had, stays: *stays, has });
            }
        }
    }
}
