//! An independent judge of every placement: what must hold, restated without the planner's own
//! arithmetic. Used by tests over thousands of random clusters, and cheap enough for anyone.

mod group;

use std::collections::BTreeMap;

use russet_crds::Backend;
use thiserror::Error;

use crate::place::{Placement, Removal, place, plan_hash};
use crate::snapshot::Snapshot;
use crate::validate::{Split, ValidDeployment};

/// Something a placement must never be.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Violation {
    /// Layers are missing, doubled or a rank is empty, or members of a stage differ.
    #[error("group {group}: layers {layers:?} do not cut {model} layers into non-empty stages in order")]
    Layers {
        /// The group.
        group: String,
        /// Layers per rank.
        layers: Vec<u32>,
        /// Layers of the model.
        model: u32,
    },
    /// The split is not the one asked for.
    #[error("group {group}: layers {layers:?} are not the split {split:?}")]
    Split {
        /// The group.
        group: String,
        /// Layers per rank.
        layers: Vec<u32>,
        /// What was asked for.
        split: Split,
    },
    /// A layer cannot be cut into so many equal parts.
    #[error("group {group}: no layer can be cut into {size}")]
    Uncuttable {
        /// The group.
        group: String,
        /// Members of a stage.
        size: u32,
    },
    /// A backend that was not asked for, or that the cables do not carry.
    #[error("group {group}: {backend:?} cannot be: {why}")]
    Backend {
        /// The group.
        group: String,
        /// The backend.
        backend: Backend,
        /// Why.
        why: String,
    },
    /// An RDMA port in two groups.
    #[error("port {device} of node {node} is in two groups")]
    PortTwice {
        /// The node.
        node: String,
        /// The device.
        device: String,
    },
    /// A rank's reservation is not what its part of the model takes.
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
    /// Ranks outside the areas asked for, or of several of them, or not joined as one asks.
    #[error("group {group}: no area that was asked for has {nodes:?}, joined as it asks")]
    Area {
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
    /// A node promised more than it has.
    #[error("node {node}: {promised} bytes promised of {limit}")]
    OverCommitted {
        /// The node.
        node: String,
        /// Bytes promised, everything together.
        promised: u64,
        /// Bytes models may take.
        limit: u64,
    },
    /// A name or hash that is not the plan's own, or is taken.
    #[error("group {group}: its name or hash is wrong or taken")]
    Name {
        /// The group.
        group: String,
    },
    /// A group of another deployment was touched, or one that does not exist.
    #[error("group {group}: not a group of this deployment")]
    Stranger {
        /// The group.
        group: String,
    },
    /// A replica that answers is taken away without need.
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
    /// Planning again after applying changes something.
    #[error("planning an applied plan again changes it")]
    Restless,
}

/// Everything that is wrong with `placement`; empty when it may be carried out.
pub fn check(view: &Snapshot, want: &ValidDeployment, placement: &Placement) -> Vec<Violation> {
    let mut wrong = Vec::new();
    for new in &placement.create {
        group::check(view, want, &new.name, &new.plan, &mut wrong);
        let taken = view.groups.contains_key(&(want.namespace.clone(), new.name.clone()));
        if taken
            || new.plan.hash != plan_hash(&want.model, &new.plan)
            || !new.name.contains(&new.plan.hash[..8])
        {
            wrong.push(Violation::Name { group: new.name.clone() });
        }
    }
    check_memory(view, placement, &mut wrong);
    group::check_ports(view, placement, &mut wrong);
    check_removals(view, want, placement, &mut wrong);
    check_replicas(view, want, placement, &mut wrong);
    let after = placement.apply(view, want);
    let (again, _) = place(&after, want);
    // While something waits for memory, the release is an event that allows another step.
    if placement.waiting.is_empty() && !again.is_empty() {
        wrong.push(Violation::Restless);
    }
    wrong
}

fn check_memory(view: &Snapshot, placement: &Placement, wrong: &mut Vec<Violation>) {
    // Everything that exists counts, also what this very placement deletes.
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

fn check_removals(
    view: &Snapshot,
    want: &ValidDeployment,
    placement: &Placement,
    wrong: &mut Vec<Violation>,
) {
    for old in &placement.delete {
        let Some(group) = view.groups.get(&(want.namespace.clone(), old.name.clone())) else {
            wrong.push(Violation::Stranger { group: old.name.clone() });
            continue;
        };
        if group.deployment != want.name || group.deleting {
            wrong.push(Violation::Stranger { group: old.name.clone() });
        }
        let replaced = placement
            .keep
            .iter()
            .any(|key| view.groups.get(key).is_some_and(|kept| kept.replica == group.replica && kept.ready));
        let wanted = (0..want.replicas).contains(&group.replica);
        if group.ready && wanted && !replaced && old.why != Removal::Drained {
            wrong.push(Violation::Outage { group: old.name.clone() });
        }
    }
}

fn check_replicas(
    view: &Snapshot,
    want: &ValidDeployment,
    placement: &Placement,
    wrong: &mut Vec<Violation>,
) {
    for replica in 0..want.replicas {
        let kept = placement
            .keep
            .iter()
            .filter_map(|key| view.groups.get(key))
            .any(|group| group.replica == replica);
        let created = placement.create.iter().filter(|new| new.replica == replica).count();
        let waiting = placement.waiting.contains(&replica);
        if !(kept || created == 1 || waiting) || created > 1 || (waiting && created > 0) {
            wrong.push(Violation::Replica { replica });
        }
    }
    if placement.create.iter().any(|new| !(0..want.replicas).contains(&new.replica)) {
        wrong.push(Violation::Replica { replica: -1 });
    }
}
