//! Follows a run: a line for each step that changes its state, until the run has ended. It watches the run and does
//! not ask for it again and again.

use std::collections::BTreeMap;
use std::pin::pin;

use anyhow::{Result, bail};
use futures::StreamExt as _;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, watch_object};
use kube::{Api, Client, ResourceExt as _};
use russet_crds::{PipelineRun, StepState, StepStatus};
use russet_telemetry::say;

use super::text::{one_line, step_time};
use super::{has_ended, no_run};
use crate::api_error;
use crate::stdout::outln;

/// Prints the changes of a run until it has ended, and returns it.
pub async fn until_end(client: Client, namespace: &str, name: &str) -> Result<PipelineRun> {
    let runs: Api<PipelineRun> = Api::namespaced(client, namespace);
    let mut changes = pin!(watch_object(runs, name).default_backoff());
    let mut progress = RunProgress::default();
    let (mut was_there, mut last_error) = (false, String::new());
    while let Some(change) = changes.next().await {
        let run = match change {
            Ok(Some(run)) => run,
            Ok(None) if was_there => {
                bail!("PipelineRun {namespace}/{name} was deleted before it ended")
            }
            Ok(None) => bail!(no_run(namespace, name)),
            Err(watcher::Error::InitialListFailed(error @ kube::Error::Api(_))) if !was_there => {
                return Err(anyhow::Error::new(error)
                    .context(format!("PipelineRun {namespace}/{name} cannot be watched")));
            }
            // A control plane that restarts is waited for.
            Err(error) => {
                let error = api_error::text(&anyhow::Error::new(error));
                if error != last_error {
                    say!("the watch of PipelineRun {namespace}/{name} broke and is resumed: {error}");
                    last_error = error;
                }
                continue;
            }
        };
        if !was_there && run.status.is_none() {
            say!("PipelineRun {namespace}/{name} waits for a gateway.");
        }
        was_there = true;
        for line in progress.changes(&run, namespace) {
            outln!("{line}")?;
        }
        if has_ended(&run) {
            return Ok(run);
        }
    }
    bail!(
        "the watch of PipelineRun {namespace}/{name} ended; `russet pipeline logs {name} --follow -n {namespace}` \
         goes on"
    )
}

/// What was printed of each step: its state, and the Approval where it waits for one.
#[derive(Debug, Default)]
struct RunProgress {
    printed: BTreeMap<String, (StepState, Option<String>)>,
}

impl RunProgress {
    /// A line for each step that is in another state than before.
    fn changes(&mut self, run: &PipelineRun, namespace: &str) -> Vec<String> {
        let mut lines = Vec::new();
        let Some(status) = &run.status else { return lines };
        // Until a gateway resumes the run, its status is that of an earlier attempt.
        if status.attempt != Some(run.spec.attempt) {
            return lines;
        }
        for step in &status.steps {
            let awaited = match step.state {
                StepState::AwaitingApproval => step.approval.clone(),
                _ => None,
            };
            let (state, approval) = self.printed.get(&step.name).cloned().unwrap_or_default();
            // With forEach one step may wait for several Approvals, one after the other. That the first one gets
            // its name is no change.
            let is_other_approval = approval.is_some() && awaited.is_some() && approval != awaited;
            if state != step.state || is_other_approval {
                lines.push(line(step, &run.name_any(), namespace));
            }
            self.printed.insert(step.name.clone(), (step.state, awaited));
        }
        lines
    }
}

/// A step in its state.
fn line(step: &StepStatus, run: &str, namespace: &str) -> String {
    let mut line = format!("{}: {:?}", one_line(&step.name), step.state);
    match step.state {
        StepState::AwaitingApproval => {
            line += &format!("; see it and decide: russet pipeline approve {run} -n {namespace}");
        }
        StepState::Done | StepState::Failed => {
            if let (Some(time), Some(_)) = (step_time(step, jiff::Timestamp::UNIX_EPOCH), &step.finished_at) {
                line += &format!(" after {time}");
            }
        }
        StepState::Pending
        | StepState::Running
        | StepState::Skipped
        | StepState::Compensated
        | StepState::Unknown => {}
    }
    if let Some(message) = step.message.as_deref().filter(|message| !message.trim().is_empty()) {
        line += &format!(": {}", one_line(message));
    }
    line
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use russet_crds::{PipelineRunSpec, PipelineRunStatus};

    use super::*;

    fn step(name: &str, state: StepState) -> StepStatus {
        StepStatus { name: name.to_owned(), state, ..StepStatus::default() }
    }

    fn run(attempt: u32, steps: &[StepStatus]) -> PipelineRun {
        let spec = PipelineRunSpec { attempt: 2, ..PipelineRunSpec::default() };
        let mut run = PipelineRun::new("digest-1", spec);
        let status = PipelineRunStatus {
            attempt: Some(attempt),
            steps: steps.to_vec(),
            ..PipelineRunStatus::default()
        };
        run.status = Some(status);
        run
    }

    #[test]
    fn a_step_has_a_line_for_each_state_and_approval() {
        let mut progress = RunProgress::default();
        let time = |seconds| Some(Time(Timestamp::from_second(seconds).unwrap()));
        let done =
            StepStatus { started_at: time(100), finished_at: time(190), ..step("draft", StepState::Done) };
        let waits = |approval: Option<&str>| StepStatus {
            approval: approval.map(str::to_owned),
            ..step("send", StepState::AwaitingApproval)
        };
        let failed = StepStatus {
            message: Some("the address\nanswers 500\u{1b}[2J".to_owned()),
            ..step("send", StepState::Failed)
        };
        let draft = |state| step("draft", state);
        let pending = || step("send", StepState::Pending);
        let approve = "send: AwaitingApproval; see it and decide: russet pipeline approve digest-1 -n team";
        for (attempt, steps, expected) in [
            // Of an earlier attempt.
            (1, vec![draft(StepState::Failed), pending()], vec![]),
            (2, vec![draft(StepState::Pending), pending()], vec![]),
            (2, vec![draft(StepState::Running), pending()], vec!["draft: Running"]),
            (2, vec![draft(StepState::Running), pending()], vec![]),
            (2, vec![done.clone(), waits(None)], vec!["draft: Done after 90s", approve]),
            (2, vec![done.clone(), waits(Some("a"))], vec![]),
            (2, vec![done.clone(), waits(Some("a"))], vec![]),
            (2, vec![done.clone(), waits(Some("b"))], vec![approve]),
            (
                2,
                vec![step("draft", StepState::Compensated), failed],
                vec!["draft: Compensated", "send: Failed: the address answers 500\\u{1b}[2J"],
            ),
        ] {
            assert_eq!(progress.changes(&run(attempt, &steps), "team"), expected, "{steps:?}");
        }
        let mut bare = run(2, &[]);
        bare.status = None;
        assert_eq!(progress.changes(&bare, "team"), Vec::<String>::new());
    }
}
