//! An independent judge of every placement: what must hold, restated without the planner's own
//! arithmetic. Used by tests over thousands of random clusters, and cheap enough for anyone.

use std::collections::{BTreeMap, BTreeSet};

use russet_crds::GroupPlan;
use thiserror::Error;

use crate::place::{Placement, Removal, place, plan_hash};
use crate::snapshot::{Availability, Snapshot};
use crate::validate::{Split, ValidDeployment};

/// Something a placement must never be.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Violation {
    /// Layers are missing, doubled or a rank is empty.
    #[error("group {group}: layers {layers:?} do not cut {model} layers into non-empty ranks in order")]
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
        check_plan(view, want, &new.name, &new.plan, &mut wrong);
        let taken = view.groups.contains_key(&(want.namespace.clone(), new.name.clone()));
        if taken
            || new.plan.hash != plan_hash(&want.model, &new.plan)
            || !new.name.contains(&new.plan.hash[..8])
        {
            wrong.push(Violation::Name { group: new.name.clone() });
        }
    }
    check_memory(view, placement, &mut wrong);
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

fn check_plan(
    view: &Snapshot,
    want: &ValidDeployment,
    name: &str,
    plan: &GroupPlan,
    wrong: &mut Vec<Violation>,
) {
    let group = || name.to_owned();
    let layers: Vec<u32> = plan.members.iter().map(|member| member.layers).collect();
    let total: u64 = layers.iter().map(|&count| u64::from(count)).sum();
    let ordered = plan.members.iter().enumerate().all(|(index, member)| member.rank == index as u32);
    if layers.is_empty() || layers.contains(&0) || total != u64::from(want.shape.layers) || !ordered {
        wrong.push(Violation::Layers { group: group(), layers, model: want.shape.layers });
        return;
    }
    let asked = match &want.split {
        Split::Auto => true,
        Split::Single => layers.len() == 1,
        Split::Pipeline => layers.len() >= 2,
        Split::Ranks(ranks) => layers.len() == *ranks as usize,
        Split::Layers(wanted) => layers == *wanted,
    };
    if !asked {
        wrong.push(Violation::Split { group: group(), layers: layers.clone(), split: want.split.clone() });
    }
    // Walk the layers from the end, as rank 0 holds the last ones.
    let mut rest: &[u64] = &want.shape.layer_bytes;
    for member in &plan.members {
        let (before, own) = rest.split_at(rest.len() - member.layers as usize);
        rest = before;
        let (first, last) = (member.rank == 0, before.is_empty());
        let mut takes: u128 = own.iter().map(|&bytes| u128::from(bytes)).sum();
        if first {
            takes += u128::from(want.shape.head_bytes);
        }
        if last || (first && want.shape.tied) {
            takes += u128::from(want.shape.embedding_bytes);
        }
        takes += u128::from(want.shape.kv_bytes_per_token_per_layer)
            * u128::from(member.layers)
            * u128::from(want.room.context_tokens)
            * u128::from(want.room.max_sequences);
        let headroom = takes * u128::from(want.room.headroom_percent) / 100;
        let reserved = member.reserved_bytes();
        if u128::from(reserved) < takes + headroom || u128::from(member.overhead_bytes) < 64 << 20 {
            let takes = u64::try_from(takes).unwrap_or(u64::MAX);
            wrong.push(Violation::Reservation { group: group(), rank: member.rank, reserved, takes });
        }
    }
    let mut seen = BTreeSet::new();
    let mut builds = BTreeSet::new();
    for member in &plan.members {
        if !seen.insert(&member.node_name) {
            wrong.push(Violation::NodeTwice { group: group(), node: member.node_name.clone() });
        }
        match view.nodes.get(&member.node_name) {
            Some(node) if node.availability == Availability::Open => {
                builds.insert(&node.engine_build);
            }
            _ => wrong.push(Violation::NodeClosed { group: group(), node: member.node_name.clone() }),
        }
    }
    if builds.len() > 1 {
        wrong.push(Violation::Builds { group: group() });
    }
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
