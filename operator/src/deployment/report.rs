//! Writes the status of a deployment, and events about the decision.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use kube::{Api, ResourceExt as _};
use russet_crds::ModelDeployment;
use russet_crds::conditions::{self, Reason, Type, get};

use super::stages::{AppliedDeployment, Resources};
use super::{Error, status};
use crate::context::Context;
use crate::group::missing_files;
use crate::ssa;

/// Attempts to write a status on the newest version of its object.
const MAX_ATTEMPTS: usize = 5;

/// Writes the status if it differs.
pub async fn report(
    context: &Context,
    applied: &Resources<AppliedDeployment>,
    now: Timestamp,
) -> Result<(), Error> {
    let mut deployment = applied.deployment.clone();
    let namespace = deployment.namespace().unwrap_or_default();
    let mut missing = BTreeMap::new();
    for group in &applied.stage.groups {
        missing.extend(missing_files(context, &namespace, &group.spec));
    }
    let name = deployment.name_any();
    let failed = |source| Error::Report { name: name.clone(), source };
    let mut status = status::status(applied, &missing, now);
    let placement = &applied.stage.planned.placement;
    let tried = !placement.create.is_empty() || !placement.waiting.is_empty();
    let placed = get(&status.conditions, Type::Placed);
    if let Some(placed) = placed.filter(|_| tried) {
        context.metrics.placements.with_label_values(&[&placed.reason]).inc();
    }
    let api: Api<ModelDeployment> = ssa::namespaced_api(&context.client, deployment.as_ref());
    for attempt in 1.. {
        if deployment.status.clone().map(status::operator_fields).as_ref() == Some(&status) {
            return Ok(());
        }
        match ssa::apply_status_on(&api, deployment.as_ref(), &status).await {
            Ok(_) => break,
            // What was decided now is known only now, so it is said of the newest version.
            Err(error) if ssa::is_code(&error, 409) && attempt < MAX_ATTEMPTS => {
                let live = api.get_opt(&name).await.map_err(failed)?;
                let Some(live) = live.filter(|live| live.uid() == deployment.uid()) else { return Ok(()) };
                deployment = carried_on(&deployment, live);
                let stage = applied.stage.clone();
                status = status::status(&Resources { deployment: deployment.clone(), stage }, &missing, now);
            }
            Err(error) => return Err(failed(error)),
        }
    }

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

/// The deployment that was planned, with the version and the status that it has now.
fn carried_on(planned: &ModelDeployment, live: ModelDeployment) -> Arc<ModelDeployment> {
    let mut deployment = planned.clone();
    deployment.metadata.resource_version = live.metadata.resource_version;
    deployment.status = live.status;
    Arc::new(deployment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_carries_on_the_newest_and_describes_what_was_planned() {
        let version = |spec: i32, version: &str| {
            let mut deployment = ModelDeployment::new("chat", Default::default());
            deployment.spec.replicas = spec;
            deployment.metadata.generation = Some(i64::from(spec));
            deployment.metadata.resource_version = Some(version.to_owned());
            deployment.status.get_or_insert_default().summary = Some(format!("of version {version}"));
            deployment
        };
        let on = carried_on(&version(1, "10"), version(2, "20"));
        assert_eq!((on.spec.replicas, on.metadata.generation), (1, Some(1)));
        assert_eq!(on.metadata.resource_version.as_deref(), Some("20"));
        assert_eq!(on.status.as_ref().unwrap().summary.as_deref(), Some("of version 20"));
    }
}
