//! The cluster as the planner wants it, from the caches or, before anything is changed, from the
//! server itself.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::api::ListParams;
use kube::core::DeserializeGuard;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt as _};
use russet_crds::{Model, ModelDeployment, Shard, ShardGroup};
use russet_plan::Snapshot;
use russet_plan::cluster::{Cluster, until_lost};

use super::apply::Applied;
use super::{Error, Resources};
use crate::context::Context;

/// A deployment and everything its plan depends on.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The Model it names, when there is one.
    pub model: Option<Arc<Model>>,
    /// The cluster.
    pub view: Snapshot,
    /// The other deployments, each with its Model; only where something is about to be placed.
    pub rivals: Vec<Rival>,
    /// The deployment's own groups, those being deleted included.
    pub groups: Vec<Arc<ShardGroup>>,
}

/// From the caches.
pub fn cached(context: &Context, deployment: &Arc<ModelDeployment>, now: Timestamp) -> Resources<Observed> {
    let (groups, shards) = (context.stores.groups.state(), context.stores.shards.state());
    observed(context, deployment, Vec::new(), groups, shards, now)
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
    let shards = shards.items.into_iter().filter_map(|shard| shard.0.ok()).map(Arc::new).collect();
    Ok(observed(context, deployment, rivals(context, deployment), groups, shards, now))
}

type Rival = (Arc<ModelDeployment>, Option<Arc<Model>>);

/// The other deployments.
fn rivals(context: &Context, deployment: &ModelDeployment) -> Vec<Rival> {
    let mut others = context.stores.deployments.state();
    others.retain(|other| {
        other.metadata.uid != deployment.metadata.uid && other.metadata.deletion_timestamp.is_none()
    });
    others.into_iter().map(|other| (other.clone(), model(context, &other))).collect()
}

fn model(context: &Context, deployment: &ModelDeployment) -> Option<Arc<Model>> {
    let namespace = deployment.namespace().unwrap_or_default();
    context.stores.models.get(&ObjectRef::new(&deployment.spec.model_ref.name).within(&namespace))
}

fn observed(
    context: &Context,
    deployment: &Arc<ModelDeployment>,
    rivals: Vec<Rival>,
    groups: Vec<Arc<ShardGroup>>,
    shards: Vec<Arc<Shard>>,
    now: Timestamp,
) -> Resources<Observed> {
    let namespace = deployment.namespace().unwrap_or_default();
    let model = model(context, deployment);
    let cluster = Cluster {
        nodes: context.stores.nodes.state(),
        models: model.iter().chain(rivals.iter().filter_map(|(_, model)| model.as_ref())).cloned().collect(),
        strategies: context.stores.strategies.state(),
        pools: context.stores.pools.state(),
        groups,
        shards,
    };
    let view = cluster.snapshot(now);
    let mut groups = cluster.groups;
    groups.retain(|group| {
        group.namespace().as_deref() == Some(&namespace)
            && group.spec.deployment_ref.name == deployment.name_any()
    });
    groups.sort_by_key(|group| (group.spec.replica, group.name_any()));
    Resources { deployment: deployment.clone(), stage: Observed { model, view, rivals, groups } }
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
