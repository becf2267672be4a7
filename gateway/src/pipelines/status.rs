//! Builds the status of a PipelineRun from its record. Pure.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{PipelineRun, PipelineRunStatus, PipelineStep, StepState, StepStatus, StepUsage};

use super::record::{ArtifactRef, RunRecord, StepRecord, UsageRecord};

/// Longest text about one step.
const MAX_MESSAGE_CHARS: usize = 1000;

/// Whether a run is ready (kstatus).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum RunCondition {
    Ready,
    Reconciling,
    Stalled,
}

/// The status of a run that cannot begin yet, or never can.
pub(super) fn waiting(
    run: &PipelineRun,
    condition: RunCondition,
    reason: Reason,
    message: &str,
    now: Timestamp,
) -> PipelineRunStatus {
    let finished = condition == RunCondition::Stalled && reason == Reason::Failed;
    let status = PipelineRunStatus {
        attempt: Some(run.spec.attempt),
        finished_at: finished.then_some(Time(now)),
        // What an earlier attempt did is still what was done.
        ..run.status.clone().unwrap_or_default()
    };
    with_conditions(run, status, condition, reason, message, now)
}

/// The status of a run that this gateway runs, or ran.
pub(super) fn of_record(
    run: &PipelineRun,
    record: &RunRecord,
    runner: &str,
    now: Timestamp,
) -> PipelineRunStatus {
    let over = record.steps.iter().filter(|step| step.is_over()).count();
    let current = record.next_step();
    let steps = record.pipeline.steps.iter().zip(&record.steps);
    let usage = record.usage();
    let finished = record.finished;
    let status = PipelineRunStatus {
        observed_generation: None,
        runner: Some(runner.to_owned()),
        renewed_at: finished.is_none().then_some(Time(now)),
        attempt: Some(record.attempt),
        started_at: Some(Time(record.started)),
        finished_at: finished.map(Time),
        progress: Some(format!("{over}/{}", record.steps.len())),
        step: current.and_then(|at| record.spec(at)).map(|step| step.name.clone()),
        steps: steps.map(|(spec, step)| step_status(spec, step)).collect(),
        usage: used(usage),
        conditions: run.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default(),
    };
    let name = status.step.clone().unwrap_or_default();
    let waiting =
        current.and_then(|at| record.steps.get(at)).filter(|step| step.state == StepState::AwaitingApproval);
    let (condition, reason, message) = match (&record.failure, finished, waiting) {
        (Some(failure), Some(_), _) => {
            let message = format!("{failure}; `russet pipeline resume {}` goes on with it", record.name);
            (RunCondition::Stalled, Reason::Failed, message)
        }
        (Some(failure), None, _) => {
            (RunCondition::Reconciling, Reason::Running, format!("{failure}; what was done is being undone"))
        }
        (None, Some(_), _) => {
            (RunCondition::Ready, Reason::Finished, format!("{} steps", record.steps.len()))
        }
        (None, None, Some(step)) => {
            let approval = step.approval.as_ref().map_or("", |approval| approval.name.as_str());
            let message = format!(
                "step {name} waits for Approval {approval}: `russet pipeline approve {run}` shows what it does, and \
                 `russet pipeline deny {run}` ends the run",
                run = record.name
            );
            (RunCondition::Reconciling, Reason::AwaitingApproval, message)
        }
        (None, None, None) => (RunCondition::Reconciling, Reason::Running, format!("step {name}")),
    };
    with_conditions(run, status, condition, reason, &message, now)
}

fn step_status(spec: &PipelineStep, step: &StepRecord) -> StepStatus {
    let digest = |made: &ArtifactRef| format!("sha256:{}", made.digest);
    let items = step.items.as_ref().filter(|_| step.list.is_some()).map(|items| {
        let done = items.iter().filter(|item| item.output.is_some()).count();
        format!("{done}/{}", items.len())
    });
    StepStatus {
        name: spec.name.clone(),
        state: step.state,
        items,
        started_at: step.started.map(Time),
        finished_at: step.finished.map(Time),
        action: step.approval.as_ref().map(|approval| digest(&approval.actions)),
        output: step.output.as_ref().map(digest),
        output_bytes: step.output.as_ref().map(|made| made.bytes),
        approval: step.approval.as_ref().map(|approval| approval.name.clone()),
        decided_by: step.approval.as_ref().and_then(|approval| approval.approved_by.clone()),
        usage: used(step.usage()),
        message: step.message.as_ref().map(|message| message.chars().take(MAX_MESSAGE_CHARS).collect()),
    }
}

fn used(usage: UsageRecord) -> Option<StepUsage> {
    let UsageRecord { prompt_tokens, completion_tokens, cost, millijoules, electricity } = usage;
    (usage != UsageRecord::default()).then_some(StepUsage {
        prompt_tokens,
        completion_tokens,
        cost,
        millijoules,
        electricity,
    })
}

fn with_conditions(
    run: &PipelineRun,
    mut status: PipelineRunStatus,
    condition: RunCondition,
    reason: Reason,
    message: &str,
    now: Timestamp,
) -> PipelineRunStatus {
    let generation = run.metadata.generation;
    let message: String = message.chars().take(2 * MAX_MESSAGE_CHARS).collect();
    status.observed_generation = generation;
    for (kind, value) in [
        (Type::Ready, condition == RunCondition::Ready),
        (Type::Reconciling, condition == RunCondition::Reconciling),
        (Type::Stalled, condition == RunCondition::Stalled),
    ] {
        conditions::set(&mut status.conditions, kind, value, reason, message.as_str(), generation, now);
    }
    status
}
