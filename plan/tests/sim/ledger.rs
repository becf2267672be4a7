//! Invariants across deployments regardless of the planner: sums over the server's objects and the engines'
//! real memory, without the planner's view of either.

use std::collections::{BTreeMap, BTreeSet};

use russet_crds::{GroupMember, Preemption, Residency, Scheduling, ShardGroup};
use russet_plan::placement::{NewGroup, Placement};
use russet_plan::quantity::show;
use russet_plan::snapshot::Availability;

use super::disk;
use super::world::{World, answers};

/// All ranks on a node: of existing groups, and of engines without a group.
fn ranks<'w>(world: &'w World, node: &'w str) -> impl Iterator<Item = (String, &'w GroupMember)> {
    let groups = || world.cluster.groups.iter();
    let members = groups().flat_map(move |group| {
        let own = group.spec.plan.members.iter().filter(move |member| member.node_name == node);
        own.map(move |member| (world.label(group), member))
    });
    let exists = move |uid: &str| groups().any(|group| group.metadata.uid.as_deref() == Some(uid));
    let held = world.engine_ranks.get(node).into_iter().flatten();
    let unreleased = held.filter(move |((uid, _), _)| !exists(uid));
    members.chain(unreleased.map(|(_, member)| ("an engine that was not released".to_owned(), member)))
}

/// Resources that a new group would reserve twice: bytes of a node or its disk, or a port.
pub fn doubled(world: &World, model: &str, new: &NewGroup) -> Vec<String> {
    let mut wrong = Vec::new();
    for member in &new.plan.members {
        let node = &member.node_name;
        let Some(machine) = world.machines.get(node) else {
            wrong.push(format!("a group is put on node {node}, which has left"));
            continue;
        };
        let there: u64 = ranks(world, node).map(|(_, member)| member.reserved_bytes()).sum();
        let promised = there + member.reserved_bytes();
        if promised > machine.limit {
            let (promised, limit) = (show(promised), show(machine.limit));
            wrong.push(format!("node {node} is promised twice: {promised} of {limit}"));
        }
        if disk::never_fits(world, model, node) {
            wrong.push(format!("a group is put on node {node}, whose disk never has room for {model}"));
        }
        for (owner, other) in ranks(world, node) {
            let shared = member
                .rdma_devices
                .iter()
                .flatten()
                .find(|device| other.rdma_devices.iter().flatten().any(|taken| taken == *device));
            if let Some(device) = shared {
                wrong.push(format!("port {device} of node {node} is given away and in use by {owner}"));
            }
        }
    }
    wrong
}

/// Replicas that would move or be deleted without a request for it.
pub fn unrequested(world: &World, deployment: &str, placement: &Placement, resting: bool) -> Vec<String> {
    let of = |replica: i32| {
        let groups = world.living().into_iter();
        groups.filter(move |group| {
            group.spec.deployment_ref.name == deployment && group.spec.replica == replica
        })
    };
    let mut wrong = Vec::new();
    for new in &placement.create {
        for group in of(new.replica).filter(|group| !was_requested(world, group)) {
            let label = world.label(group);
            wrong.push(format!(
                "replica {} of {deployment} is placed again beside {label} unasked",
                new.replica
            ));
        }
    }
    let goes = |group: &ShardGroup| {
        placement.delete.iter().any(|old| group.metadata.name.as_deref() == Some(&old.name))
    };
    for group in
        world.living().into_iter().filter(|group| goes(group) && !resting && !was_requested(world, group))
    {
        // Of two that do the same, one may be deleted.
        let twin = of(group.spec.replica).any(|other| !goes(other) && (answers(other) || !answers(group)));
        if group.spec.deployment_ref.name != deployment || !twin {
            wrong.push(format!("{} of {deployment} goes unasked", world.label(group)));
        }
    }
    let named =
        |name: &str| world.living().into_iter().find(|group| group.metadata.name.as_deref() == Some(name));
    for group in placement.preempt.iter().filter_map(|(_, name)| named(name)) {
        wrong.extend(undue(world, deployment, group));
    }
    wrong
}

/// Why a group may not be stopped for a deployment.
fn undue(world: &World, deployment: &str, group: &ShardGroup) -> Option<String> {
    let tier = |name: &str| {
        let reference = world.deployments.get(name)?.spec.tier_ref.as_ref()?;
        let tiers = world.cluster.tiers.iter();
        Some(tiers.clone().find(|tier| tier.metadata.name.as_ref() == Some(&reference.name))?.spec.clone())
    };
    let of = &group.spec.deployment_ref.name;
    let (needs, loses) = (tier(deployment)?, tier(of).unwrap_or_default());
    let since = group.metadata.creation_timestamp.as_ref().map(|since| since.0.as_second());
    let young =
        since.is_some_and(|since| world.now.as_second() < since + i64::from(loses.min_residency_seconds));
    let why = if of == deployment {
        "is its own"
    } else if needs.preemption != Preemption::LowerPriority {
        "may not be stopped by its tier"
    } else if needs.priority <= loses.priority {
        "is as important"
    } else if loses.residency == Residency::Always {
        "is always resident"
    } else if young {
        "has not run for long enough"
    } else {
        return None;
    };
    Some(format!("{} is stopped for {deployment} and {why}", world.label(group)))
}

/// Whether a group was requested to stop or move: its deployment was edited or scaled, or one of its nodes is
/// draining or lost.
fn was_requested(world: &World, group: &ShardGroup) -> bool {
    let name = &group.spec.deployment_ref.name;
    let Some(deployment) = world.deployments.get(name) else { return true };
    let before = group.metadata.uid.as_ref().and_then(|uid| world.asked.get(uid));
    let leaves = |member: &GroupMember| {
        let node = &member.node_name;
        let found = world.cluster.nodes.iter().find(|other| other.metadata.name.as_ref() == Some(node));
        let draining = found.is_none_or(|node| node.spec.scheduling == Scheduling::Draining);
        draining || world.availability(node) == Some(Availability::Lost)
    };
    indices(world, name).len() > usize::try_from(deployment.spec.replicas).unwrap_or(0)
        || before != world.group_inputs(name).as_ref()
        || group.spec.plan.members.iter().any(leaves)
}

/// The replicas of a deployment that exist and are not being deleted.
fn indices(world: &World, deployment: &str) -> BTreeSet<i32> {
    let own = world.living().into_iter().filter(|group| group.spec.deployment_ref.name == deployment);
    own.map(|group| group.spec.replica).collect()
}

/// Errors after everything has settled: surplus, duplicate and missing replicas.
pub fn unsettled(world: &World) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut there: BTreeMap<(&str, i32), Vec<&ShardGroup>> = BTreeMap::new();
    for group in world.living() {
        there.entry((&group.spec.deployment_ref.name, group.spec.replica)).or_default().push(group);
    }
    for ((name, replica), groups) in &there {
        let (expected, there) = (world.desired(name), indices(world, name));
        if there.len() > usize::try_from(expected).unwrap_or(0) {
            wrong.push(format!(
                "{} is one of {}, and {expected} are wanted",
                world.label(groups[0]),
                there.len()
            ));
        }
        if groups.iter().filter(|group| answers(group)).count() > 1 {
            wrong.push(format!("replica {replica} of {name} answers twice"));
        }
    }
    for name in world.deployments.keys() {
        let said = world.said.get(name).cloned().unwrap_or_default();
        let counted = indices(world, name).into_iter().chain(said.waiting.iter().copied());
        let counted = counted.collect::<BTreeSet<i32>>().len();
        let expected = usize::try_from(world.desired(name)).unwrap_or(0);
        if counted < expected && said.refused.is_none() {
            wrong.push(format!("{counted} replicas of {name} are there or said to wait, not {expected}"));
        }
    }
    wrong
}

/// The state of every replica: its number of groups, and of ready ones.
pub fn outcome(world: &World) -> BTreeMap<(String, i32), (usize, usize)> {
    let mut outcome = BTreeMap::new();
    for group in world.living() {
        let key = (group.spec.deployment_ref.name.clone(), group.spec.replica);
        let (all, answering): &mut (usize, usize) = outcome.entry(key).or_default();
        *all += 1;
        *answering += usize::from(answers(group));
    }
    outcome
}
