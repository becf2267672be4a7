//! Running groups: which groups of a deployment match its spec, and may stay where they are. Sticky: a better
//! candidate is no reason to move.

use std::collections::BTreeSet;

use russet_crds::{Backend, BackendChoice};
use russet_model::partition::Partition;

use super::failure_domains::desired_and_surplus;
use crate::fabric;
use crate::memory_model::MemoryModel;
use crate::note::Note;
use crate::snapshot::{Availability, GroupInfo, ObjectKey, Snapshot};
use crate::valid_deployment::{Split, ValidDeployment};

/// The replicas of a deployment without a current group; `own` are its groups that are not being deleted.
pub fn pending_among(
    view: &Snapshot,
    desired: &ValidDeployment,
    fit: &MemoryModel<'_>,
    own: &[(&ObjectKey, &GroupInfo)],
) -> Vec<i32> {
    let has = |replica: i32| {
        own.iter().any(|(_, group)| {
            group.replica == replica
                && matches_spec(desired, fit, group)
                && may_keep_nodes(view, desired, group)
        })
    };
    let (mut pending, _) = desired_and_surplus(view, own, desired.replicas, &desired.topology_key);
    pending.retain(|replica| !has(*replica));
    pending.into_iter().collect()
}

/// The same, with the groups looked up in the view.
pub fn pending_replicas(view: &Snapshot, desired: &ValidDeployment, fit: &MemoryModel<'_>) -> Vec<i32> {
    let own = view.groups_of(&desired.namespace, &desired.name);
    let own: Vec<(&ObjectKey, &GroupInfo)> = own.filter(|(_, group)| !group.deleting).collect();
    pending_among(view, desired, fit, &own)
}

/// Whether a running plan matches the deployment's spec, on nodes where it may stay.
pub fn is_current(view: &Snapshot, desired: &ValidDeployment, group: &GroupInfo) -> bool {
    matches_spec(desired, &desired.memory_model(), group) && may_keep_nodes(view, desired, group)
}

/// Whether another replica's replacement is not ready yet, or is still to be created in freed memory.
pub(super) fn rollout_in_progress(
    view: &Snapshot,
    desired: &ValidDeployment,
    fit: &MemoryModel<'_>,
    desired_replicas: &BTreeSet<i32>,
    replica: i32,
) -> bool {
    view.groups_of(&desired.namespace, &desired.name).any(|(_, group)| {
        let other = group.replica != replica && desired_replicas.contains(&group.replica);
        other && (group.deleting || (!group.ready && matches_spec(desired, fit, group)))
    })
}

/// A group and whether it is ready.
pub(super) type GroupReadiness = (ObjectKey, bool);

/// The groups of a replica: those that match the spec, ready ones first, and the others; each with whether it
/// is ready.
pub(super) fn current_and_outdated(
    view: &Snapshot,
    desired: &ValidDeployment,
    fit: &MemoryModel<'_>,
    replica: i32,
) -> (Vec<GroupReadiness>, Vec<GroupReadiness>) {
    let (mut current, mut outdated) = (Vec::new(), Vec::new());
    for (key, group) in view.groups_of(&desired.namespace, &desired.name) {
        if group.replica != replica || group.deleting {
            continue;
        }
        let list = if matches_spec(desired, fit, group) && may_keep_nodes(view, desired, group) {
            &mut current
        } else {
            &mut outdated
        };
        list.push((key.clone(), group.ready));
    }
    current.sort_by_key(|(key, ready)| (!ready, key.clone()));
    (current, outdated)
}

fn matches_spec(desired: &ValidDeployment, fit: &MemoryModel<'_>, group: &GroupInfo) -> bool {
    let plan = &group.plan;
    let layers: Vec<u32> = plan.members.iter().map(|member| member.layers).collect();
    let size = plan.tensor_size.max(1);
    let stages: Vec<u32> = layers.iter().copied().step_by(size as usize).collect();
    let ranks = layers.len() as u32;
    let split = match &desired.split {
        Split::Auto => true,
        Split::Single => ranks == 1,
        Split::Pipeline => ranks > 1 && size == 1,
        Split::Ranks(requested) => ranks == *requested && size == 1,
        Split::Layers(requested) => layers == *requested && size == 1,
        Split::Tensor(requested) => {
            size > 1 && ranks == size && requested.is_none_or(|requested| requested == size)
        }
        Split::Hybrid(requested) => size > 1 && stages.len() > 1 && requested.allows(&stages, size),
    };
    let backend = size == 1
        || match desired.backend {
            BackendChoice::Auto | BackendChoice::Unknown => true,
            BackendChoice::Jaccl => plan.backend == Backend::Jaccl,
            BackendChoice::JacclRing => plan.backend == Backend::JacclRing,
            BackendChoice::Ring => plan.backend == Backend::Ring,
        };
    let Ok(partition) = Partition::with_tensor(layers, size, desired.shape.layers) else { return false };
    if partition.keeps_together(&desired.shape.kept_together()).is_err() {
        return false;
    }
    let sizes = plan.members.iter().all(|member| {
        partition.part(member.rank).is_some_and(|part| {
            let need = fit.rank_estimate(&part);
            // A running plan may have the overhead of an older release's memory model; it stays while the
            // requested headroom is met.
            (member.weight_bytes, member.kv_bytes) == (need.weights, need.kv)
                && member.overhead_bytes >= fit.headroom(&need)
        })
    });
    split
        && backend
        && sizes
        && group.model == desired.model
        && plan.context_tokens == desired.capacity.context_tokens
        && plan.max_sequences == desired.capacity.max_sequences
        && plan.kv_tokens == desired.capacity.kv_tokens
        && plan.engine == desired.capacity.engine
        && plan.draft_model_ref.as_ref().map(|draft| &draft.name)
            == desired.draft.as_ref().map(|draft| &draft.name)
        && plan.adapters.iter().eq(desired.adapters.iter().map(|deployed| &deployed.adapter))
}

/// Whether it may stay on its nodes. Pools count at placement: a group that was placed in the requested pools
/// stays when its nodes leave them.
pub(super) fn may_keep_nodes(view: &Snapshot, desired: &ValidDeployment, group: &GroupInfo) -> bool {
    let inside = group.pools == desired.pools() || desired.allows(group.nodes());
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

/// Whether one of its nodes is lost, so that it cannot be ready, whatever was last reported.
pub(super) fn has_lost_node(view: &Snapshot, group: &GroupInfo) -> bool {
    let lost = |node: &str| view.nodes.get(node).is_none_or(|node| node.availability == Availability::Lost);
    group.nodes().any(lost)
}

/// The note of a group that stays and is not ready because cables are gone. It is not moved: an unplugged
/// cable is usually back in a moment.
pub(super) fn lost_cable_note(view: &Snapshot, key: &ObjectKey) -> Option<Note> {
    let group = view.groups.get(key).filter(|group| !group.ready)?;
    let why = fabric::severed(&view.nodes, &group.plan)?;
    Some(Note::CableLost { group: key.1.clone(), why })
}

/// The note of a group that stays outside the pools.
pub(super) fn outside_pools_note(
    view: &Snapshot,
    desired: &ValidDeployment,
    key: &ObjectKey,
) -> Option<Note> {
    let group = view.groups.get(key).filter(|group| !desired.allows(group.nodes()))?;
    let strangers = group.nodes().filter(|node| !desired.allows(std::iter::once(*node)));
    let mut nodes: Vec<String> = strangers.map(str::to_owned).collect();
    if nodes.is_empty() {
        // Each node is in some pool, and no pool has them all.
        nodes = group.nodes().map(str::to_owned).collect();
    }
    Some(Note::OutsidePools { group: key.1.clone(), nodes, pools: desired.pools() })
}
