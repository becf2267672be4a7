//! Writes the status of a deployment, and events about the decision.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use kube::{Api, ResourceExt as _};
use russet_crds::conditions::{self, Reason, Type, get};
use russet_crds::{ModelDeployment, PlacementReport};

use super::stages::{AppliedDeployment, Resources};
use super::{Error, status};
use crate::context::Context;
use crate::group::missing_files;
use crate::ssa;

/// Writes the status if it differs.
pub async fn report(
    context: &Context,
    applied: &Resources<AppliedDeployment>,
    now: Timestamp,
) -> Result<(), Error> {
    let deployment = &applied.deployment;
    let namespace = deployment.namespace().unwrap_or_default();
    let mut missing = BTreeMap::new();
    for group in &applied.stage.groups {
        missing.extend(missing_files(context, &namespace, &group.spec));
    }
    let name = deployment.name_any();
    let api: Api<ModelDeployment> = ssa::namespaced_api(&context.client, deployment.as_ref());
    let mut status = status::status(applied, &missing, now);
    if status::is_reason_missing(deployment, &status) {
        // The cache may not have the report that was written when the plan was made.
        let live = api.get_opt(&name).await.map_err(|source| Error::Report { name: name.clone(), source })?;
        if let Some(placement) = live.and_then(|live| live.status).and_then(|status| status.placement) {
            status = status::status(&reported(applied, placement), &missing, now);
        }
    }
    let placement = &applied.stage.planned.placement;
    let tried = !placement.create.is_empty() || !placement.waiting.is_empty();
    let placed = get(&status.conditions, Type::Placed);
    if let Some(placed) = placed.filter(|_| tried) {
        context.metrics.placements.with_label_values(&[&placed.reason]).inc();
    }
    if deployment.status.clone().map(status::operator_fields).as_ref() == Some(&status) {
        return Ok(());
    }
    ssa::apply_status(&api, &name, &status).await.map_err(|source| Error::Report { name, source })?;

    for (kind, action) in [(Type::Placed, "Place"), (Type::Ready, "Serve")] {
        let before = deployment.status.as_ref().and_then(|status| get(&status.conditions, kind));
        let Some(after) = get(&status.conditions, kind) else { continue };
        // Progress changes messages all the time; events are only for changes of status or reason.
        if before.is_some_and(|before| before.status == after.status && before.reason == after.reason) {
            continue;
        }
        let reason = conditions::reason(after);
        let is_event = matches!(
            reason,
            Some(
                Reason::PlanFound
                    | Reason::NothingFits
                    | Reason::NoNodes
                    | Reason::InvalidSpec
                    | Reason::ModelNotFound
                    | Reason::StrategyNotFound
                    | Reason::PoolNotFound
                    | Reason::OutsidePools
                    | Reason::CableLost
                    | Reason::UnsupportedArchitecture
                    | Reason::UnsupportedModel
                    | Reason::ModelRefused
                    | Reason::Serving
                    | Reason::Stopped
                    | Reason::OutsideSchedule
                    | Reason::Idle
                    | Reason::RolledBack
                    | Reason::Preempting
                    | Reason::Resident
                    | Reason::AwaitingApproval
                    | Reason::Denied
            )
        );
        if let Some(reason) = reason.filter(|_| is_event && !(kind == Type::Ready && after.status == "False"))
        {
            context.record(deployment.as_ref(), after.status == "True", reason, action, &after.message).await;
        }
    }
    Ok(())
}

/// The same with this report of an earlier plan.
fn reported(
    applied: &Resources<AppliedDeployment>,
    placement: PlacementReport,
) -> Resources<AppliedDeployment> {
    let mut deployment = ModelDeployment::clone(&applied.deployment);
    deployment.status.get_or_insert_default().placement = Some(placement);
    Resources { deployment: Arc::new(deployment), stage: applied.stage.clone() }
}
