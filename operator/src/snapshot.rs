//! The snapshot of the cluster for the planner: from the caches, or, before resources are reserved, with the
//! reservations as the server itself has them.

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use kube::{Resource, ResourceExt as _};
use russet_crds::{Model, ModelDeployment, Shard, ShardGroup, Tier};
use russet_plan::{ClusterObjects, Snapshot};
use russet_rpc::list_item::list_decodable;
use serde::de::DeserializeOwned;

use crate::context::Context;
use crate::memory::CachedSnapshot;

/// The snapshot from the caches, with every Model. One change triggers many reconciliations, which all share
/// it.
pub fn snapshot(context: &Context, now: Timestamp) -> Arc<Snapshot> {
    // A change during the read of the caches belongs to the next generation, so that none of it is missed.
    let generation = context.stores.generation();
    let mut shared = context.memory.snapshot.lock();
    if let Some(current) = shared.as_ref().filter(|last| last.is_current(generation, now)) {
        return current.view.clone();
    }
    let cluster = cached(context, context.stores.models.state());
    let view = Arc::new(cluster.snapshot(now));
    let until = cluster.valid_until(&view, now);
    *shared = Some(CachedSnapshot { generation, at: now, until, view: view.clone() });
    view
}

/// From the caches, with these Models.
pub fn cached(context: &Context, models: Vec<Arc<Model>>) -> ClusterObjects {
    let stores = &context.stores;
    ClusterObjects {
        nodes: stores.nodes.state(),
        models,
        strategies: stores.strategies.state(),
        pools: stores.pools.state(),
        tiers: stores.tiers.state(),
        groups: stores.groups.state(),
        shards: stores.shards.state(),
        copies: Some(stores.copies.state()),
        approvals: stores.approvals.state(),
    }
}

/// The same with groups, ranks and tiers as the server has them. An undecodable Shard keeps its memory: its
/// node has granted it, and no known group accounts for it.
pub async fn live(context: &Context, models: Vec<Arc<Model>>) -> Result<ClusterObjects, kube::Error> {
    let (groups, shards, tiers) = tokio::try_join!(
        list_all::<ShardGroup>(context),
        list_all::<Shard>(context),
        list_all::<Tier>(context)
    )?;
    Ok(ClusterObjects { groups, shards, tiers, ..cached(context, models) })
}

/// The existing Models that a deployment names, and those of its last known good spec.
pub fn models(context: &Context, deployment: &ModelDeployment) -> Vec<Arc<Model>> {
    let namespace = deployment.namespace().unwrap_or_default();
    let rollout = deployment.status.as_ref().and_then(|status| status.rollout.as_ref());
    let last_known_good = rollout.and_then(|rollout| rollout.proven.as_ref());
    let earlier = last_known_good.into_iter().flat_map(|good| {
        let adapters = good.adapters.iter().map(|adapter| &adapter.model_ref);
        [&good.model_ref].into_iter().chain(&good.draft_model_ref).chain(adapters)
    });
    let earlier = earlier.map(|model| model.name.as_str());
    let names: BTreeSet<&str> = deployment.spec.models().chain(earlier).collect();
    let find = |name| context.stores.models.get(&ObjectRef::new(name).within(&namespace));
    names.into_iter().filter_map(find).collect()
}

/// Every decodable object of a kind, as the server has it.
pub async fn list_all<K>(context: &Context) -> Result<Vec<Arc<K>>, kube::Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let listed = list_decodable(&context.client).await?;
    Ok(listed.into_iter().map(Arc::new).collect())
}
