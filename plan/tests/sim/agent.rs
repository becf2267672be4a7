//! Agents and the API server's garbage collector: agents claim, serve and release, and the server collects
//! orphans. One step of each at a time, so that a script sees every state in between.

use std::collections::BTreeSet;
use std::sync::Arc;

use russet_crds::conditions::{self, Reason, Type, is_true};
use russet_crds::{GroupMember, LocalReference, Shard, ShardGroup, ShardSpec, names};
use russet_plan::snapshot::Availability;

use super::disk;
use super::world::{OWNER, World, answers};

/// Every component does its next step; returns whether any did.
pub fn step(world: &mut World) -> bool {
    // The last stage of each first, so that one step is one stage.
    let served = serve(world, None);
    let released = release(world);
    let collected = collect(world);
    let claimed = claim(world);
    let fetched = disk::fetch(world);
    fetched | served | released | collected | claimed
}

/// Releases everything that was deleted, as far as agents are reachable and not set to refuse.
pub fn release_deleted(world: &mut World) {
    while collect(world) | release(world) {}
}

/// Makes the groups of one deployment ready.
pub fn bring_up(world: &mut World, deployment: &str) {
    while claim(world) | disk::fetch(world) {}
    serve(world, Some(deployment));
}

/// Groups become ready once all their ranks are claimed, and not ready when they lose a node.
fn serve(world: &mut World, only: Option<&str>) -> bool {
    let mut changed = false;
    for at in 0..world.cluster.groups.len() {
        let group = world.cluster.groups[at].clone();
        let deployment = &group.spec.deployment_ref.name;
        if group.metadata.deletion_timestamp.is_some() || only.is_some_and(|only| only != deployment) {
            continue;
        }
        let uid = group.metadata.uid.clone().unwrap_or_default();
        let nodes = || group.spec.plan.members.iter().map(|member| world.availability(&member.node_name));
        let lost = nodes().any(|seen| matches!(seen, None | Some(Availability::Lost)));
        let silent = nodes().any(|seen| seen == Some(Availability::Unreachable));
        let fails = world.failing.get(deployment).is_some_and(|exempt| !exempt.contains(&uid));
        let claimed =
            world.cluster.shards.iter().filter(|shard| shard.spec.group_uid == uid && is_claimed(shard));
        let mut files = group.spec.plan.files(&group.spec.model_ref.name);
        let files = files.all(|(model, node)| disk::holds(world, model, node));
        let formed = files && claimed.count() == group.spec.plan.members.len();
        let before = answers(&group);
        // While a node is only unreachable, the end of its engine is unknown.
        let after = formed && !lost && !fails && (before || !silent);
        if before != after {
            set_ready(Arc::make_mut(&mut world.cluster.groups[at]), after, world.now);
            changed = true;
        }
    }
    changed
}

/// Sets whether a group is ready.
pub fn set_ready(group: &mut ShardGroup, ready: bool, now: jiff::Timestamp) {
    let reason = if ready { Reason::Serving } else { Reason::Loading };
    let conditions = &mut group.status.get_or_insert_default().conditions;
    conditions::set(conditions, Type::Ready, ready, reason, "", None, now);
}

fn is_claimed(shard: &Shard) -> bool {
    shard.status.as_ref().is_some_and(|status| is_true(&status.conditions, Type::Claimed))
}

/// Engines without a Shard exit, if the agent is reachable and not set to refuse, and it reports the rest.
fn release(world: &mut World) -> bool {
    let mut changed = false;
    let shards: BTreeSet<(String, u32)> =
        world.cluster.shards.iter().map(|shard| (shard.spec.group_uid.clone(), shard.spec.rank)).collect();
    for node in world.machines.keys().cloned().collect::<Vec<_>>() {
        if !world.is_reachable(&node) || world.refusing.contains(&node) {
            continue;
        }
        let held = world.engine_ranks.entry(node.clone()).or_default();
        let before = held.len();
        held.retain(|rank, _| shards.contains(rank));
        if held.len() != before {
            changed = true;
            report(world, &node);
        }
    }
    changed
}

/// An agent reports the memory of its engines.
fn report(world: &mut World, node: &str) {
    let held = world.engine_ranks.get(node).into_iter().flatten();
    let granted = held.map(|(_, member)| member.reserved_bytes()).sum();
    if let Ok(status) = world.status(node) {
        status.memory.get_or_insert_default().granted_bytes = granted;
    }
}

/// The server removes deleted objects and orphans.
fn collect(world: &mut World) -> bool {
    let groups: BTreeSet<&str> =
        world.cluster.groups.iter().filter_map(|group| group.metadata.uid.as_deref()).collect();
    let before = (world.cluster.shards.len(), groups.len());
    let mut shards = world.cluster.shards.clone();
    shards.retain(|shard| groups.contains(shard.spec.group_uid.as_str()));
    world.cluster.shards = shards;
    world.cluster.groups.retain(|group| group.metadata.deletion_timestamp.is_none());
    let owners: BTreeSet<&str> =
        world.deployments.values().filter_map(|owner| owner.metadata.uid.as_deref()).collect();
    let stray = world.cluster.groups.iter().filter(|group| {
        let owner = group.metadata.annotations.as_ref().and_then(|notes| notes.get(OWNER));
        owner.is_none_or(|owner| !owners.contains(owner.as_str()))
    });
    let stray: Vec<String> = stray.filter_map(|group| group.metadata.uid.clone()).collect();
    for uid in &stray {
        world.delete(uid);
    }
    before != (world.cluster.shards.len(), world.cluster.groups.len()) || !stray.is_empty()
}

/// Shards are granted their memory, or created if missing.
fn claim(world: &mut World) -> bool {
    let mut changed = false;
    let groups: Vec<ShardGroup> = world.living().into_iter().cloned().collect();
    for group in &groups {
        let uid = group.metadata.uid.clone().unwrap_or_default();
        for member in &group.spec.plan.members {
            let shards = world.cluster.shards.iter();
            let of = |shard: &Arc<Shard>| shard.spec.group_uid == uid && shard.spec.rank == member.rank;
            match shards.clone().position(of) {
                None => {
                    world.cluster.shards.push(Arc::new(shard(group, member)));
                    changed = true;
                }
                Some(at) if !is_claimed(&world.cluster.shards[at]) => changed |= grant(world, at, member),
                Some(_) => {}
            }
        }
    }
    changed
}

fn shard(group: &ShardGroup, member: &GroupMember) -> Shard {
    let spec = ShardSpec {
        group_ref: LocalReference::new(group.metadata.name.clone().unwrap_or_default()),
        group_uid: group.metadata.uid.clone().unwrap_or_default(),
        node_name: member.node_name.clone(),
        rank: member.rank,
        weight_bytes: member.weight_bytes,
        kv_bytes: member.kv_bytes,
        overhead_bytes: member.overhead_bytes,
        engine: group.spec.plan.engine,
        draft_model_ref: group.spec.plan.draft_model_ref.clone().filter(|_| member.rank == 0),
        adapters: group.spec.plan.adapters.clone(),
        epoch: 1,
        ..ShardSpec::default()
    };
    let name = group.metadata.name.clone().unwrap_or_default();
    Shard::new(&names::shard(&name, member.rank), spec)
}

fn grant(world: &mut World, at: usize, member: &GroupMember) -> bool {
    let node = &member.node_name;
    let held = world.engine_ranks.entry(node.clone()).or_default();
    let taken: u64 = held.values().map(GroupMember::reserved_bytes).sum();
    let limit = world.machines.get(node).map_or(0, |machine| machine.limit);
    if !world.is_reachable(node) || taken + member.reserved_bytes() > limit {
        return false;
    }
    let now = world.now;
    let shard = Arc::make_mut(&mut world.cluster.shards[at]);
    let conditions = &mut shard.status.get_or_insert_default().conditions;
    conditions::set(conditions, Type::Claimed, true, Reason::MemoryGranted, "", None, now);
    let rank = (shard.spec.group_uid.clone(), member.rank);
    world.engine_ranks.entry(node.clone()).or_default().insert(rank, member.clone());
    report(world, node);
    true
}
