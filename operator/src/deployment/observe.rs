//! The cluster snapshot for one deployment, from the caches or, before a change, from the server itself.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::ResourceExt as _;
use kube::runtime::reflector::ObjectRef;
use russet_crds::{Model, ModelDeployment, ShardGroup};
use russet_plan::Snapshot;
use russet_plan::cluster::until_lost;

use super::Error;
use super::stages::{AppliedDeployment, Competitor, ObservedDeployment, Resources};
use crate::context::Context;
use crate::snapshot;

/// From the caches.
pub fn cached(
    context: &Context,
    deployment: &Arc<ModelDeployment>,
    now: Timestamp,
) -> Resources<ObservedDeployment> {
    let models = snapshot::models(context, deployment);
    let view = snapshot::snapshot(context, now);
    observed(deployment, models, Vec::new(), view, context.stores.groups.state(), now)
}

/// From the server.
pub async fn live(
    context: &Context,
    deployment: &Arc<ModelDeployment>,
    now: Timestamp,
) -> Result<Resources<ObservedDeployment>, Error> {
    let competitors = competitors(context, deployment);
    let models = snapshot::models(context, deployment);
    let cluster = snapshot::live(context, context.stores.models.state())
        .await
        .map_err(|source| Error::Observe { name: deployment.name_any(), source })?;
    Ok(observed(deployment, models, competitors, Arc::new(cluster.snapshot(now)), cluster.groups, now))
}

/// The other deployments.
fn competitors(context: &Context, deployment: &ModelDeployment) -> Vec<Competitor> {
    let mut others = context.stores.deployments.state();
    others.retain(|other| {
        other.metadata.uid != deployment.metadata.uid && other.metadata.deletion_timestamp.is_none()
    });
    others.into_iter().map(|other| (other.clone(), snapshot::models(context, &other))).collect()
}

fn observed(
    deployment: &Arc<ModelDeployment>,
    models: Vec<Arc<Model>>,
    competitors: Vec<Competitor>,
    view: Arc<Snapshot>,
    mut groups: Vec<Arc<ShardGroup>>,
    now: Timestamp,
) -> Resources<ObservedDeployment> {
    let namespace = deployment.namespace().unwrap_or_default();
    groups.retain(|group| {
        group.namespace().as_deref() == Some(&namespace)
            && group.spec.deployment_ref.name == deployment.name_any()
    });
    groups.sort_by_key(|group| (group.spec.replica, group.name_any()));
    Resources {
        deployment: deployment.clone(),
        stage: ObservedDeployment { now, models, view, competitors, groups },
    }
}

/// Time until the next node of this deployment counts as lost; no watch event announces that.
pub fn until_next_loss(
    context: &Context,
    applied: &Resources<AppliedDeployment>,
    now: Timestamp,
) -> Option<Duration> {
    let members = applied.stage.groups.iter().flat_map(|group| &group.spec.plan.members);
    members
        .filter_map(|member| {
            until_lost(context.stores.nodes.get(&ObjectRef::new(&member.node_name))?.as_ref(), now)
        })
        .min()
}
