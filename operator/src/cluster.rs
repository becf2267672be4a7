//! The cluster as the planner reads it: from the caches, or, before anything is promised to anybody, with what
//! the server itself holds of promises.

use std::sync::Arc;

use kube::api::ListParams;
use kube::core::DeserializeGuard;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Resource, ResourceExt as _};
use russet_crds::{Model, ModelDeployment, Shard, ShardGroup, Tier};
use russet_plan::Cluster;
use serde::de::DeserializeOwned;

use crate::context::Context;

/// From the caches, with these models.
pub fn cached(context: &Context, models: Vec<Arc<Model>>) -> Cluster {
    let stores = &context.stores;
    Cluster {
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

/// The same with groups, ranks and tiers as the server holds them. One that cannot be read keeps its memory
/// all the same: its node has granted it, and no known group accounts for that.
pub async fn live(context: &Context, models: Vec<Arc<Model>>) -> Result<Cluster, kube::Error> {
    let (groups, shards, tiers) =
        tokio::try_join!(all::<ShardGroup>(context), all::<Shard>(context), all::<Tier>(context))?;
    Ok(Cluster { groups, shards, tiers, ..cached(context, models) })
}

/// The Model a deployment names.
pub fn model(context: &Context, deployment: &ModelDeployment) -> Option<Arc<Model>> {
    let namespace = deployment.namespace().unwrap_or_default();
    context.stores.models.get(&ObjectRef::new(&deployment.spec.model_ref.name).within(&namespace))
}

/// Every object of a kind that can be read, as the server holds it.
pub async fn all<K>(context: &Context) -> Result<Vec<Arc<K>>, kube::Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let api = Api::<DeserializeGuard<K>>::all(context.client.clone());
    let listed = api.list(&ListParams::default()).await?;
    Ok(listed.items.into_iter().filter_map(|one| one.0.ok()).map(Arc::new).collect())
}
