//! Tiers: the nodes of a Dedicated tier's workload groups, and the tier's status. Not here: placement
//! (`deployment`).

mod decide;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::runtime::controller::Action;
use kube::{Api, ResourceExt as _};
use russet_crds::{Model, ModelDeployment, Tier, TierStatus};
use russet_plan::ClusterObjects;
use thiserror::Error;

use crate::context::Context;
use crate::planner::{PlanError, PlanKey};
use crate::reconcile::requeue_after;
use crate::snapshot;
use crate::ssa;

/// Why a tier could not be reconciled.
#[derive(Debug, Error)]
pub enum Error {
    /// It was not planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
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
    let (deployments, models) = members(&context, &tier);
    let key = PlanKey { kind: "Tier", namespace: String::new(), name: name.clone() };
    let plan = {
        let (context, tier) = (context.clone(), tier.clone());
        let (deployments, models) = (deployments.clone(), models.clone());
        move || decide::status(&tier, &snapshot::cached(&context, models), &deployments, now)
    };
    let status = context.planner.plan(key.clone(), plan).await?;
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
    let observe = || async {
        let live = snapshot::live(&context, models.clone()).await;
        live.map_err(|source| Error::Observe { name: name.clone(), source })
    };
    let decide = move |cluster: ClusterObjects| {
        let newest = cluster.tiers.iter().find(|other| other.name_any() == tier.name_any());
        decide::status(newest.unwrap_or(&tier), &cluster, &deployments, now)
    };
    let assigned = |status: &TierStatus| {
        status.workload_groups.iter().flat_map(|group| group.nodes.iter().cloned()).collect::<BTreeSet<_>>()
    };
    let (status, mut turn) = context.planner.plan_in_turn(key, observe, decide, assigned).await?;
    turn.note_write(None);
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
fn members(context: &Context, tier: &Tier) -> (Vec<Arc<ModelDeployment>>, Vec<Arc<Model>>) {
    let name = tier.name_any();
    let mut deployments = context.stores.deployments.state();
    deployments.retain(|deployment| {
        deployment.spec.tier_ref.as_ref().is_some_and(|reference| reference.name == name)
            && tier.spec.allows(deployment.metadata.namespace.as_deref().unwrap_or_default())
            && deployment.metadata.deletion_timestamp.is_none()
    });
    deployments.sort_by_key(|deployment| (deployment.namespace(), deployment.name_any()));
    let models = deployments.iter().flat_map(|deployment| snapshot::models(context, deployment)).collect();
    (deployments, models)
}

fn nodes(status: &TierStatus) -> Vec<(&str, &[String])> {
    status.workload_groups.iter().map(|group| (group.name.as_str(), group.nodes.as_slice())).collect()
}
