//! Autoscaling controller: writes replicas by demand through `/scale`, as a HorizontalPodAutoscaler would,
//! the reason in the condition ScalingActive, and with `predictive` what the hours of the week needed. Not here: the number of replicas (`plan`), and their
//! placement (`deployment`).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::controller::Action;
use kube::{Api, ResourceExt as _};
use parking_lot::Mutex;
use russet_crds::conditions::{self, Reason, Type, get};
use russet_crds::names::{AUTOSCALER_MANAGER, DEMAND_HISTORY_MANAGER};
use russet_crds::{Autoscaling, DemandHistory, ModelDeployment};
use russet_plan::autoscaling::{ScalingDecision, ScalingHistory, ScalingInput, scale};
use russet_plan::demand::{last_times, summarize, until_stale};
use russet_plan::demand_history::{self, ExpectedDemand, HistoryMemory, NeededNow};
use russet_plan::joint_placement::JointPlan;
use russet_plan::placement::place_with;
use russet_plan::validate::{read, read_at};
use serde_json::json;
use thiserror::Error;

use crate::context::Context;
use crate::reconcile::requeue_after;
use crate::snapshot;
use crate::ssa;

/// Retry delay after a write conflict.
const CONFLICT_RETRY_DELAY: Duration = Duration::from_secs(1);

/// What is remembered of deployments, by UID; an operator that restarts only scales down later.
pub type ScalingMemories = Mutex<HashMap<String, ScalingMemory>>;

/// What is remembered of a deployment.
#[derive(Clone, Debug, Default)]
pub struct ScalingMemory {
    scaling: ScalingHistory,
    demand: HistoryMemory,
}

/// Why a deployment could not be scaled.
#[derive(Debug, Error)]
pub enum Error {
    /// The replicas were not written.
    #[error("ModelDeployment {name}: its replicas could not be scaled to {replicas}")]
    Scale {
        /// The deployment.
        name: String,
        /// The desired number.
        replicas: i32,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// The status was not written.
    #[error("ModelDeployment {name}: its status could not be written")]
    Report {
        /// The deployment.
        name: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
}

/// Reconciles the replicas of one deployment.
pub async fn reconcile(
    deployment: Arc<ModelDeployment>,
    memories: Arc<ScalingMemories>,
    context: Arc<Context>,
) -> Result<Action, Error> {
    let uid = deployment.uid().unwrap_or_default();
    let name = deployment.name_any();
    let rules = deployment.spec.autoscaling.as_ref();
    let Some(rules) = rules.filter(|_| deployment.metadata.deletion_timestamp.is_none()) else {
        memories.lock().remove(&uid);
        report(&context, &deployment, None, None).await?;
        return Ok(requeue_after([]));
    };
    let now = Timestamp::now();
    let demand = deployment.status.as_ref().map(|status| status.demand.as_slice()).unwrap_or_default();
    let (decision, history) = {
        let mut memories = memories.lock();
        let memory = memories.entry(uid).or_default();
        let rolled = roll(&deployment, rules, &mut memory.demand, now);
        let can_be = || read(&snapshot::snapshot(&context, now), &deployment).is_ok();
        let expected = rules.predictive.as_ref().zip(rolled.as_ref()).and_then(|(predictive, history)| {
            let expected = demand_history::expected(predictive, history, now);
            // What cannot run as it is written is not started, and its status says why.
            expected.filter(|_| deployment.spec.replicas > 0 || can_be())
        });
        let fits = |replicas| fits(&context, &deployment, replicas, now);
        let decision = decide(&deployment, rules, expected, &mut memory.scaling, now, fits);
        let history = count(&deployment, rules, rolled.as_ref(), decision.needed, &mut memory.demand, now);
        (decision, history)
    };
    let replicas = decision.replicas;
    if replicas != deployment.spec.replicas {
        match write(&context, &deployment, replicas).await {
            Ok(()) => {
                let ScalingDecision { reason, message, .. } = &decision;
                tracing::info!(deployment = name, replicas, "{message}");
                context.record(deployment.as_ref(), true, *reason, "Scale", message).await;
            }
            // The deployment has changed since the decision.
            Err(error) if ssa::is_code(&error, 409) => return Ok(Action::requeue(CONFLICT_RETRY_DELAY)),
            Err(error) if ssa::is_code(&error, 404) => return Ok(requeue_after([])),
            Err(source) => return Err(Error::Scale { name, replicas, source }),
        }
    }
    report(&context, &deployment, Some(&decision), history.as_ref()).await?;
    let expectation =
        rules.predictive.as_ref().and_then(|predictive| demand_history::until_change(predictive, now));
    Ok(requeue_after([decision.requeue_after, until_stale(demand, now), expectation]))
}

/// Decides on the deployment's status.
fn decide(
    deployment: &ModelDeployment,
    rules: &Autoscaling,
    expected: Option<ExpectedDemand>,
    memory: &mut ScalingHistory,
    now: Timestamp,
    fits: impl FnOnce(i32) -> i32,
) -> ScalingDecision {
    let status = deployment.status.clone().unwrap_or_default();
    let since = |kind| {
        let condition = get(&status.conditions, kind).filter(|condition| condition.status == "True")?;
        Some(Duration::try_from(now.duration_since(condition.last_transition_time.0)).unwrap_or_default())
    };
    let current = status.observed_generation == deployment.metadata.generation;
    let said = get(&status.conditions, Type::ScalingActive).map(|condition| condition.reason.as_str());
    let seen = ScalingInput {
        replicas: deployment.spec.replicas,
        ready_for: since(Type::Available),
        settled: current && since(Type::Ready).is_some() && since(Type::Progressing).is_none(),
        demand: summarize(&status.demand, now),
        expected,
        by_history: said == Some("ScaledByHistory"),
    };
    let decision = scale(rules, &seen, memory, now, fits);
    match rules.predictive.as_ref().and_then(demand_history::invalid) {
        // Demand goes on to decide.
        Some(why) => {
            let message = format!("spec.autoscaling.predictive: {why}; {}", decision.message);
            ScalingDecision { reason: Reason::InvalidSpec, message, ..decision }
        }
        None => decision,
    }
}

/// The history of its demand at `now`, with all hours that are over; `None` without one, and while the clock or the time zone is
/// in doubt.
fn roll(
    deployment: &ModelDeployment,
    rules: &Autoscaling,
    memory: &mut HistoryMemory,
    now: Timestamp,
) -> Option<DemandHistory> {
    let predictive = rules.predictive.as_ref()?;
    let before = deployment.status.as_ref().and_then(|status| status.demand_history.as_ref());
    if !before.is_none_or(|history| demand_history::is_clock_plausible(history, memory, now)) {
        return None;
    }
    demand_history::record(before, predictive, NeededNow::default(), now)
}

/// The history with what is needed now. One that is in doubt stays as it was.
fn count(
    deployment: &ModelDeployment,
    rules: &Autoscaling,
    rolled: Option<&DemandHistory>,
    replicas: i32,
    memory: &mut HistoryMemory,
    now: Timestamp,
) -> Option<DemandHistory> {
    let predictive = rules.predictive.as_ref()?;
    let status = deployment.status.as_ref();
    let before = status.and_then(|status| status.demand_history.as_ref());
    if rolled.is_none() {
        return before.cloned();
    }
    let (last_request, reported) =
        last_times(status.map(|status| status.demand.as_slice()).unwrap_or_default());
    let needed = NeededNow { replicas, reported, last_request };
    let mut history = demand_history::record(before, predictive, needed, now)?;
    memory.keep_peak(&mut history);
    Some(history)
}

/// How many of this many replicas the planner can place, beside all that runs.
fn fits(context: &Context, deployment: &Arc<ModelDeployment>, replicas: i32, now: Timestamp) -> i32 {
    let view = snapshot::snapshot(context, now);
    let mut more = ModelDeployment::clone(deployment);
    more.spec.replicas = replicas;
    match read_at(&view, &more, now) {
        // Its tier stops it while nobody asks.
        Ok(valid) if valid.replicas < replicas => valid.replicas,
        Ok(valid) => {
            let (placement, _) = place_with(&view, &valid, &JointPlan::default());
            replicas - i32::try_from(placement.waiting.len()).unwrap_or(replicas)
        }
        // The deployment's status says why it is invalid; more replicas would be invalid too.
        Err(_) => deployment.spec.replicas,
    }
}

/// Writes the replicas, provided the deployment is unchanged.
async fn write(context: &Context, deployment: &ModelDeployment, replicas: i32) -> Result<(), kube::Error> {
    let api: Api<ModelDeployment> = ssa::namespaced_api(&context.client, deployment);
    let patch = json!({
        "metadata": {"resourceVersion": deployment.resource_version()},
        "spec": {"replicas": replicas},
    });
    let params = PatchParams { field_manager: Some(AUTOSCALER_MANAGER.to_owned()), ..PatchParams::default() };
    api.patch_scale(&deployment.name_any(), &params, &Patch::Merge(patch)).await.map(drop)
}

/// Writes ScalingActive with the reason for the number of replicas, and the history; only when the decision changes or the
/// history has news, since requests come and go.
async fn report(
    context: &Context,
    deployment: &ModelDeployment,
    decision: Option<&ScalingDecision>,
    history: Option<&DemandHistory>,
) -> Result<(), Error> {
    let (name, status) = (deployment.name_any(), deployment.status.as_ref());
    let api: Api<ModelDeployment> = ssa::namespaced_api(&context.client, deployment);
    let failed = |source| Error::Report { name: name.clone(), source };
    if demand_history::differs(status.and_then(|status| status.demand_history.as_ref()), history) {
        let field = history.map_or_else(|| json!({}), |history| json!({"demandHistory": history}));
        ssa::apply_status_as(DEMAND_HISTORY_MANAGER, &api, &name, &field).await.map_err(failed)?;
    }
    let before = status.and_then(|status| get(&status.conditions, Type::ScalingActive));
    let conditions = match (before, decision) {
        (None, None) => return Ok(()),
        (Some(_), None) => Vec::new(),
        (_, Some(ScalingDecision { replicas, needed: _, reason, message, requeue_after: _ })) => {
            let same = before.is_some_and(|before| {
                let said = *reason != Reason::ScaledByHistory || before.message == *message;
                before.reason == format!("{reason:?}") && said
            });
            if *replicas == deployment.spec.replicas && same {
                return Ok(());
            }
            let mut conditions: Vec<_> = before.cloned().into_iter().collect();
            let active = !matches!(reason, Reason::ScalingDisabled | Reason::InvalidSpec);
            let (kind, generation) = (Type::ScalingActive, deployment.metadata.generation);
            conditions::set(&mut conditions, kind, active, *reason, message, generation, Timestamp::now());
            conditions
        }
    };
    let conditions = json!({"conditions": conditions});
    ssa::apply_status_as(AUTOSCALER_MANAGER, &api, &name, &conditions).await.map_err(failed)
}

#[cfg(test)]
mod tests {
    use russet_crds::ModelDeploymentSpec;
    use serde_json::Value;

    use super::*;

    fn deployment(replicas: i32, status: Value) -> ModelDeployment {
        let autoscaling = Autoscaling {
            min_replicas: 0,
            max_replicas: 3,
            target_queue: 2,
            target_ttft_milliseconds: None,
            idle_seconds: 60,
            max_idle_seconds: None,
            predictive: None,
        };
        let spec = ModelDeploymentSpec { replicas, autoscaling: Some(autoscaling), ..Default::default() };
        let mut deployment = ModelDeployment::new("chat", spec);
        deployment.status = Some(serde_json::from_value(status).unwrap());
        deployment
    }

    #[test]
    fn the_status_of_a_deployment_says_how_many_replicas_it_needs() {
        let condition = |kind: &str, at: i64| {
            json!({"type": kind, "status": "True", "reason": "Serving", "message": "",
                   "lastTransitionTime": Timestamp::from_second(at).unwrap()})
        };
        let demand = |waiting: u32, reported: i64| {
            let at = Timestamp::from_second(reported).unwrap();
            json!([{"gateway": "g", "reportedAt": at, "lastRequestTime": at, "waiting": waiting, "active": 0}])
        };
        let answers = json!([condition("Available", 0), condition("Ready", 0)]);
        for (story, replicas, status, expected) in [
            ("nothing is known yet", 1, json!({}), 1),
            ("it sleeps", 0, json!({"conditions": answers}), 0),
            ("one waits", 0, json!({"demand": demand(1, 1000)}), 1),
            ("many wait", 1, json!({"conditions": answers, "demand": demand(5, 1000)}), 3),
            ("the gateway that held them is gone", 0, json!({"demand": demand(5, 900)}), 0),
            ("asked a moment ago", 1, json!({"conditions": answers, "demand": demand(0, 941)}), 1),
            ("asked long ago", 1, json!({"conditions": answers, "demand": demand(0, 940)}), 0),
            ("it woke a moment ago", 1, json!({"conditions": [condition("Available", 941)]}), 1),
        ] {
            let deployment = deployment(replicas, status);
            let rules = deployment.spec.autoscaling.clone().unwrap();
            let now = Timestamp::from_second(1000).unwrap();
            let decision =
                decide(&deployment, &rules, None, &mut ScalingHistory::default(), now, |replicas| replicas);
            assert_eq!(decision.replicas, expected, "{story}: {}", decision.message);
        }
    }
}
