//! Tiers: the nodes of a Dedicated tier's workload groups, and the tier's status. Not here: placement
//! (`deployment`).

mod decide;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::runtime::controller::Action;
use kube::{Api, ResourceExt as _};
use russet_crds::{Model, ModelDeployment, Tier, TierStatus};
use russet_plan::ClusterObjects;
use thiserror::Error;

use crate::context::Context;
use crate::reconcile::requeue_after;
use crate::snapshot;
use crate::ssa;

/// Why a tier could not be reconciled.
#[derive(Debug, Error)]
pub enum Error {
    /// The running groups could not be listed.
    #[error("Tier {name}: the running ShardGroups could not be listed")]
    Observe {
        /// The tier.
        name: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// Its status was not written.
    #[error("Tier {name}: its status could not be written")]
    Report {
        /// The tier.
        name: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
}

/// Reconciles one tier.
pub async fn reconcile(tier: Arc<Tier>, context: Arc<Context>) -> Result<Action, Error> {
    let now = Timestamp::now();
    let name = tier.name_any();
    let again = until_schedule_change(&tier, now);
    let (deployments, models) = members(&context, &name);
    let mut status = decide::status(&tier, &snapshot::cached(&context, models.clone()), &deployments, now);
    let write = async |status: &TierStatus| {
        let api: Api<Tier> = Api::all(context.client.clone());
        ssa::apply_status(&api, &name, status)
            .await
            .map_err(|source| Error::Report { name: name.clone(), source })
    };
    let before = tier.status.clone().unwrap_or_default();
    if nodes(&status) == nodes(&before) {
        if status != before {
            write(&status).await?;
        }
        return Ok(requeue_after([again]));
    }
    // A node is assigned: no other reservation may be made on it meanwhile, and the caches may lag behind one
    // just made.
    let _alone = context.placement_lock.lock().await;
    let cluster: ClusterObjects = snapshot::live(&context, models)
        .await
        .map_err(|source| Error::Observe { name: name.clone(), source })?;
    let newest = cluster.tiers.iter().find(|other| other.name_any() == name).cloned().unwrap_or(tier);
    status = decide::status(&newest, &cluster, &deployments, now);
    write(&status).await?;
    Ok(requeue_after([again]))
}

/// Time until its active hours start or end; no watch event announces that.
fn until_schedule_change(tier: &Tier, now: Timestamp) -> Option<Duration> {
    let until = russet_plan::tier::TierInfo::read(tier, now).active_hours.until?;
    // A little more, so that the caller does not wake just before.
    Some(Duration::try_from(until.duration_since(now)).ok()? + Duration::from_millis(100))
}

/// The deployments of a tier, and their models.
fn members(context: &Context, tier: &str) -> (Vec<Arc<ModelDeployment>>, Vec<Arc<Model>>) {
    let mut deployments = context.stores.deployments.state();
    deployments.retain(|deployment| {
        deployment.spec.tier_ref.as_ref().is_some_and(|reference| reference.name == tier)
            && deployment.metadata.deletion_timestamp.is_none()
    });
    deployments.sort_by_key(|deployment| (deployment.namespace(), deployment.name_any()));
    let models = deployments.iter().flat_map(|deployment| snapshot::models(context, deployment)).collect();
    (deployments, models)
}

fn nodes(status: &TierStatus) -> Vec<(&str, &[String])> {
    status.workload_groups.iter().map(|group| (group.name.as_str(), group.nodes.as_slice())).collect()
}
