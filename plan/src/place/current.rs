//! What runs already: which groups of a deployment are what it asks for, and may go on where they are. Sticky: a
//! better place elsewhere is no reason to move.

use std::collections::BTreeSet;

use russet_crds::{Backend, BackendChoice};
use russet_model::partition::Partition;

use super::spread::counted;
use crate::fabric;
use crate::fit::Fit;
use crate::note::Note;
use crate::snapshot::{Availability, Group, Key, Snapshot};
use crate::validate::{Split, ValidDeployment};

/// The replicas of a deployment that have no current group; `own` are its groups that are not being deleted.
pub fn pending(view: &Snapshot, want: &ValidDeployment, fit: &Fit<'_>, own: &[(&Key, &Group)]) -> Vec<i32> {
    let has = |replica: i32| {
        own.iter().any(|(_, group)| {
            group.replica == replica && serves(want, fit, group) && may_stay(view, want, group)
        })
    };
    let (mut wanted, _) = counted(view, own, want.replicas, &want.topology_key);
    wanted.retain(|replica| !has(*replica));
    wanted.into_iter().collect()
}

/// The same, its groups being looked for.
pub fn waiting(view: &Snapshot, want: &ValidDeployment, fit: &Fit<'_>) -> Vec<i32> {
    let own = view.groups_of(&want.namespace, &want.name);
    let own: Vec<(&Key, &Group)> = own.filter(|(_, group)| !group.deleting).collect();
    pending(view, want, fit, &own)
}

/// Whether a running plan is what the deployment asks for, on nodes it may stay on.
pub fn is_current(view: &Snapshot, want: &ValidDeployment, group: &Group) -> bool {
    serves(want, &want.fit(), group) && may_stay(view, want, group)
}

/// Whether another replica has a successor that does not answer yet, or none because it makes room for one.
pub(super) fn on_its_way(
    view: &Snapshot,
    want: &ValidDeployment,
    fit: &Fit<'_>,
    wanted: &BTreeSet<i32>,
    replica: i32,
) -> bool {
    view.groups_of(&want.namespace, &want.name).any(|(_, group)| {
        let other = group.replica != replica && wanted.contains(&group.replica);
        other && (group.deleting || (!group.ready && serves(want, fit, group)))
    })
}

/// A group and whether it answers.
pub(super) type Named = (Key, bool);

/// The groups of a replica: those that serve the spec, ready ones first, and those that do not; each
/// with whether it is ready.
pub(super) fn split_groups(
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
        && plan.kv_tokens == want.room.kv_tokens
        && plan.engine == want.room.engine
        && plan.draft_model_ref.as_ref().map(|draft| &draft.name)
            == want.draft.as_ref().map(|draft| &draft.name)
}

/// Whether its nodes may go on with it. Pools count when a group is placed: one that was placed in those
/// that are asked for stays when its nodes leave them.
pub(super) fn may_stay(view: &Snapshot, want: &ValidDeployment, group: &Group) -> bool {
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

/// Whether a node of it is lost for good, so that it does not answer, whatever was last heard of it.
pub(super) fn broken(view: &Snapshot, group: &Group) -> bool {
    let lost = |node: &str| view.nodes.get(node).is_none_or(|node| node.availability == Availability::Lost);
    group.nodes().any(lost)
}

/// What is to be said of a group that stays, and does not answer because cables are gone. It is not moved: a cable
/// that is touched is back in a moment.
pub(super) fn severed(view: &Snapshot, key: &Key) -> Option<Note> {
    let group = view.groups.get(key).filter(|group| !group.ready)?;
    let why = fabric::severed(&view.nodes, &group.plan)?;
    Some(Note::Severed { group: key.1.clone(), why })
}

/// What is to be said of a group that stays outside the pools.
pub(super) fn outside(view: &Snapshot, want: &ValidDeployment, key: &Key) -> Option<Note> {
    let group = view.groups.get(key).filter(|group| !want.allows(group.nodes()))?;
    let strangers = group.nodes().filter(|node| !want.allows(std::iter::once(*node)));
    let mut nodes: Vec<String> = strangers.map(str::to_owned).collect();
    if nodes.is_empty() {
        // Each is in some pool, and no pool has them all.
        nodes = group.nodes().map(str::to_owned).collect();
    }
    Some(Note::Outside { group: key.1.clone(), nodes, pools: want.pools() })
}
