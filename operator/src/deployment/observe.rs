//! The cluster as the planner wants it, from the caches or, before anything is changed, from the
//! server itself.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::api::ListParams;
use kube::core::DeserializeGuard;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt as _};
use russet_crds::conditions::{Type, is_true};
use russet_crds::{InferenceNode, Model, ModelDeployment, Shard, ShardGroup};
use russet_plan::Snapshot;
use russet_plan::snapshot::{Group, Node};

use super::apply::Applied;
use super::{Error, Resources};
use crate::context::Context;
use crate::node::{availability, until_lost};
use crate::pool;

/// A deployment and everything its plan depends on.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The Model it names, when there is one.
    pub model: Option<Arc<Model>>,
    /// The cluster.
    pub view: Snapshot,
    /// The deployment's own groups, those being deleted included.
    pub groups: Vec<Arc<ShardGroup>>,
}

/// From the caches.
pub fn cached(context: &Context, deployment: &Arc<ModelDeployment>, now: Timestamp) -> Resources<Observed> {
    observed(context, deployment, context.stores.groups.state(), &context.stores.shards.state(), now)
}

/// From the server.
pub async fn live(
    context: &Context,
    deployment: &Arc<ModelDeployment>,
    now: Timestamp,
) -> Result<Resources<Observed>, Error> {
    let failed = |source| Error::Observe { name: deployment.name_any(), source };
    let params = ListParams::default();
    let groups = Api::<DeserializeGuard<ShardGroup>>::all(context.client.clone());
    let shards = Api::<DeserializeGuard<Shard>>::all(context.client.clone());
    let (groups, shards) = tokio::try_join!(groups.list(&params), shards.list(&params)).map_err(failed)?;
    // One that cannot be read keeps its memory all the same: its node has granted it, and no known
    // group accounts for that.
    let groups = groups.items.into_iter().filter_map(|group| group.0.ok()).map(Arc::new).collect();
    let shards: Vec<Arc<Shard>> =
        shards.items.into_iter().filter_map(|shard| shard.0.ok()).map(Arc::new).collect();
    Ok(observed(context, deployment, groups, &shards, now))
}

fn observed(
    context: &Context,
    deployment: &Arc<ModelDeployment>,
    mut groups: Vec<Arc<ShardGroup>>,
    shards: &[Arc<Shard>],
    now: Timestamp,
) -> Resources<Observed> {
    let namespace = deployment.namespace().unwrap_or_default();
    let key = ObjectRef::new(&deployment.spec.model_ref.name).within(&namespace);
    let model = context.stores.models.get(&key);
    let nodes = context.stores.nodes.state();
    let mut view = snapshot(&nodes, model.as_deref(), &groups, shards, now);
    if deployment.spec.strategy_ref.is_some() {
        let strategies = context.stores.strategies.state();
        let named = strategies.iter().map(|strategy| (strategy.name_any(), strategy.spec.sharding.clone()));
        view.strategies = named.collect();
    }
    if !deployment.spec.pool_refs.is_empty() {
        view.pools = pool::areas(&context.stores.pools.state(), &nodes);
    }
    groups.retain(|group| {
        group.namespace().as_deref() == Some(&namespace)
            && group.spec.deployment_ref.name == deployment.name_any()
    });
    groups.sort_by_key(|group| (group.spec.replica, group.name_any()));
    Resources { deployment: deployment.clone(), stage: Observed { model, view, groups } }
}

/// The planner's view of these objects.
pub fn snapshot(
    nodes: &[Arc<InferenceNode>],
    model: Option<&Model>,
    groups: &[Arc<ShardGroup>],
    shards: &[Arc<Shard>],
    now: Timestamp,
) -> Snapshot {
    let mut view = Snapshot::default();
    let living: BTreeSet<String> = groups.iter().filter_map(|group| group.uid()).collect();
    // Bytes of claimed Shards whose group lives, and of all Shards whose group is gone, by node.
    let (mut claimed, mut orphaned) = (BTreeMap::<&str, u64>::new(), BTreeMap::<&str, u64>::new());
    for shard in shards {
        let bytes = shard.spec.reserved_bytes();
        let sum = if !living.contains(&shard.spec.group_uid) {
            orphaned.entry(&shard.spec.node_name).or_default()
        } else if shard.status.as_ref().is_some_and(|status| is_true(&status.conditions, Type::Claimed)) {
            claimed.entry(&shard.spec.node_name).or_default()
        } else {
            continue;
        };
        *sum = sum.saturating_add(bytes);
    }
    for node in nodes {
        let name = node.name_any();
        let status = node.status.clone().unwrap_or_default();
        let memory = status.memory.unwrap_or_default();
        let of = |sums: &BTreeMap<&str, u64>| sums.get(name.as_str()).copied().unwrap_or(0);
        let unreleased = memory.granted_bytes.saturating_sub(of(&claimed)).max(of(&orphaned));
        let seen = Node {
            serving_limit: memory.serving_limit_bytes,
            unreleased,
            availability: availability(node, now),
            engine_build: status.engine_build,
            backends: status.backends,
            cuts_layers: status.sharding_modes.iter().any(|mode| mode == "Tensor"),
            links: status.links,
        };
        view.nodes.insert(name, seen);
    }
    if let Some(model) = model
        && let Some(shape) = model.status.as_ref().and_then(|status| status.shape.clone())
    {
        view.models.insert((model.namespace().unwrap_or_default(), model.name_any()), shape);
    }
    for group in groups {
        let ready = group.status.as_ref().is_some_and(|status| is_true(&status.conditions, Type::Ready));
        let seen = Group {
            deployment: group.spec.deployment_ref.name.clone(),
            model: group.spec.model_ref.name.clone(),
            replica: group.spec.replica,
            pools: pools(group),
            plan: group.spec.plan.clone(),
            ready,
            deleting: group.metadata.deletion_timestamp.is_some(),
        };
        view.groups.insert((group.namespace().unwrap_or_default(), group.name_any()), seen);
    }
    view
}

fn pools(group: &ShardGroup) -> Vec<String> {
    group.spec.pool_refs.iter().map(|reference| reference.name.clone()).collect()
}

/// When the next node of this deployment will count as lost; nothing else wakes it then.
pub fn next_loss(context: &Context, applied: &Resources<Applied>, now: Timestamp) -> Option<Duration> {
    let members = applied.stage.groups.iter().flat_map(|group| &group.spec.plan.members);
    members
        .filter_map(|member| {
            until_lost(context.stores.nodes.get(&ObjectRef::new(&member.node_name))?.as_ref(), now)
        })
        .min()
}

#[cfg(test)]
mod tests {
    use russet_crds::conditions::{self, Reason};
    use russet_crds::{
        GroupMember, GroupPlan, InferenceNodeSpec, InferenceNodeStatus, NodeMemory, ShardGroupSpec,
        ShardSpec, ShardStatus,
    };

    use super::*;

    #[test]
    fn memory_is_free_only_when_the_agent_has_released_it() {
        let group = |uid: &str| {
            let member =
                GroupMember { node_name: "a".to_owned(), weight_bytes: 100, ..GroupMember::default() };
            let plan = GroupPlan { members: vec![member], ..GroupPlan::default() };
            let mut group = ShardGroup::new(uid, ShardGroupSpec { plan, ..ShardGroupSpec::default() });
            group.metadata.uid = Some(uid.to_owned());
            Arc::new(group)
        };
        let shard = |uid: &str, claimed: bool| {
            let spec = ShardSpec {
                group_uid: uid.to_owned(),
                node_name: "a".to_owned(),
                weight_bytes: 100,
                ..ShardSpec::default()
            };
            let mut shard = Shard::new(uid, spec);
            let mut status = ShardStatus::default();
            let reason = Reason::MemoryGranted;
            conditions::set(
                &mut status.conditions,
                Type::Claimed,
                claimed,
                reason,
                "",
                None,
                Timestamp::UNIX_EPOCH,
            );
            shard.status = Some(status);
            Arc::new(shard)
        };
        for (story, granted, groups, shards, unreleased) in [
            ("nothing runs", 0, vec![], vec![], 0),
            ("created, not granted yet", 0, vec![group("g")], vec![shard("g", false)], 0),
            ("granted and claimed", 100, vec![group("g")], vec![shard("g", true)], 0),
            ("claimed, the node not reported yet", 0, vec![group("g")], vec![shard("g", true)], 0),
            ("group gone, Shard still there", 100, vec![], vec![shard("g", true)], 100),
            ("group gone, Shard not granted yet but might be", 0, vec![], vec![shard("g", false)], 100),
            ("group and Shard gone, not released", 100, vec![], vec![], 100),
            ("one gone and unreleased, another claimed", 200, vec![group("g")], vec![shard("g", true)], 100),
        ] {
            let mut node = InferenceNode::new("a", InferenceNodeSpec::default());
            let memory = NodeMemory { granted_bytes: granted, ..NodeMemory::default() };
            node.status =
                Some(InferenceNodeStatus { memory: Some(memory), ..InferenceNodeStatus::default() });
            let view = snapshot(&[Arc::new(node)], None, &groups, &shards, Timestamp::UNIX_EPOCH);
            assert_eq!(view.nodes["a"].unreleased, unreleased, "{story}");
        }
    }
}
