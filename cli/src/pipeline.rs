//! `russet pipeline`: starts runs of Pipelines, shows how far they are and what their steps made, and decides on
//! what their steps are about to do. Not here: the runs themselves; a gateway does them.

mod approval;
mod creation;
mod follow;
mod gateway_client;
mod text;

use anyhow::{Context, Result, bail};
use console::Term;
use jiff::Timestamp;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt as _};
use russet_crds::conditions::{Type, is_true, message};
use russet_crds::{PipelineRun, StepStatus};
use russet_rpc::list_item::ListItem;
use serde_json::json;

use crate::client::Connection;
use crate::pipeline::creation::RunOptions;
use crate::pipeline::gateway_client::{GatewayClient, GatewayOptions};
use crate::stdout::{out, outln};

/// Bytes of an output that the logs show. More would push the table of steps off the screen.
const MAX_SHOWN_BYTES: usize = 4096;
/// Columns of what is shown where standard output is no terminal.
const DEFAULT_WIDTH: usize = 100;
/// Fewer columns than these show nothing readable.
const MIN_WIDTH: usize = 40;

/// Arguments of `russet pipeline`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: PipelineAction,
    #[command(flatten)]
    connection: Connection,
}

#[derive(clap::Subcommand)]
enum PipelineAction {
    /// Start a run of a Pipeline.
    Run(RunOptions),
    /// List the runs of the namespace.
    List,
    /// Show the steps of a run and what they made.
    Logs {
        /// Name of the PipelineRun.
        run: String,
        /// Print each step that changes its state until the run has ended; exit with 1 if it failed.
        #[arg(long, short)]
        follow: bool,
        #[command(flatten)]
        gateway: GatewayOptions,
    },
    /// Show what a step is about to do, and approve it.
    Approve {
        /// Name of the PipelineRun.
        run: String,
        /// Do not ask for confirmation.
        #[arg(long, short)]
        yes: bool,
        #[command(flatten)]
        gateway: GatewayOptions,
    },
    /// Deny what a step is about to do; the run fails.
    Deny {
        /// Name of the PipelineRun.
        run: String,
    },
    /// Go on with a run that failed, at the step that failed.
    Resume {
        /// Name of the PipelineRun.
        run: String,
    },
}

/// Runs the subcommand.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { action, connection } = arguments;
    let client = connection.client().await?;
    let namespace = connection.namespace();
    match action {
        PipelineAction::Run(options) => {
            let (follow, gateway) = (options.follow, options.gateway.clone());
            let name = creation::create(&client, &connection, options).await?;
            match follow {
                true => followed(client, &namespace, &name, &gateway.client(&connection)?).await,
                false => Ok(()),
            }
        }
        PipelineAction::List => list(client, &namespace).await,
        PipelineAction::Logs { run, follow, gateway } => {
            let gateway = gateway.client(&connection)?;
            match follow {
                true => followed(client, &namespace, &run, &gateway).await,
                false => logs(&get(&client, &namespace, &run).await?, &gateway).await,
            }
        }
        PipelineAction::Approve { run, yes, gateway } => {
            approval::approve(client, &namespace, &gateway.client(&connection)?, &run, yes).await
        }
        PipelineAction::Deny { run } => approval::deny(client, &namespace, &run).await,
        PipelineAction::Resume { run } => resume(client, &namespace, &run).await,
    }
}

/// The run of this name.
async fn get(client: &Client, namespace: &str, name: &str) -> Result<PipelineRun> {
    let runs: Api<PipelineRun> = Api::namespaced(client.clone(), namespace);
    let run = runs.get_opt(name).await;
    let run = run.with_context(|| format!("PipelineRun {namespace}/{name} cannot be read"))?;
    run.with_context(|| no_run(namespace, name))
}

fn no_run(namespace: &str, name: &str) -> String {
    format!("there is no PipelineRun {namespace}/{name}; `russet pipeline list -n {namespace}` lists all")
}

async fn list(client: Client, namespace: &str) -> Result<()> {
    let runs: Api<ListItem<PipelineRun>> = Api::namespaced(client, namespace);
    let runs = runs.list(&ListParams::default()).await.context("the PipelineRuns could not be listed")?;
    let runs: Vec<PipelineRun> = runs.items.into_iter().filter_map(|run| run.0.ok()).collect();
    match runs.is_empty() {
        true => outln!("There is no PipelineRun in namespace {namespace}.")?,
        false => out!("{}", text::run_table(&runs, Timestamp::now()))?,
    }
    Ok(())
}

/// Prints the table of steps and what they made.
async fn logs(run: &PipelineRun, gateway: &GatewayClient) -> Result<()> {
    let status = run.status.clone().unwrap_or_default();
    if status.steps.is_empty() {
        let why = message(&status.conditions, Type::Ready).map(text::one_line);
        outln!("No step has begun. {}", why.unwrap_or_else(|| "The run waits for a gateway.".to_owned()))?;
        return Ok(());
    }
    out!("{}", text::step_table(&status.steps, Timestamp::now()))?;
    for step in &status.steps {
        let Some(digest) = &step.output else { continue };
        output(step, digest, gateway).await?;
    }
    Ok(())
}

/// Prints what a step made, or why that cannot be shown.
async fn output(step: &StepStatus, digest: &str, gateway: &GatewayClient) -> Result<()> {
    let name = text::one_line(&step.name);
    let artifact = match gateway.artifact(digest, MAX_SHOWN_BYTES).await {
        Ok(artifact) => artifact,
        Err(error) => {
            outln!("\nThe output of {name} cannot be shown: {}", text::one_line(&format!("{error:#}")))?;
            return Ok(());
        }
    };
    outln!("\nOutput of {name}:")?;
    outln!("{}", text::output(&artifact.bytes, artifact.is_whole, width()))?;
    if !artifact.is_whole {
        let bytes = step.output_bytes.map_or("more".to_owned(), |bytes| bytes.to_string());
        outln!("… (the first {MAX_SHOWN_BYTES} of {bytes} bytes; all of it: {})", gateway.command(digest))?;
    }
    Ok(())
}

/// Follows a run, then prints its logs. It is an error where it failed.
async fn followed(client: Client, namespace: &str, name: &str, gateway: &GatewayClient) -> Result<()> {
    let run = follow::until_end(client, namespace, name).await?;
    outln!("")?;
    logs(&run, gateway).await?;
    if has_failed(&run) {
        let conditions = run.status.map(|status| status.conditions).unwrap_or_default();
        let why = message(&conditions, Type::Ready).map(|why| format!(": {}", text::one_line(why)));
        bail!(
            "PipelineRun {namespace}/{name} failed{}; `russet pipeline resume {name} -n {namespace}` goes on at the \
             step that failed",
            why.unwrap_or_default()
        );
    }
    Ok(())
}

/// Whether the last attempt has ended.
fn has_ended(run: &PipelineRun) -> bool {
    let Some(status) = &run.status else { return false };
    status.finished_at.is_some() && status.attempt == Some(run.spec.attempt)
}

/// Whether the last attempt has ended, and not well.
fn has_failed(run: &PipelineRun) -> bool {
    has_ended(run) && !run.status.as_ref().is_some_and(|status| is_true(&status.conditions, Type::Ready))
}

async fn resume(client: Client, namespace: &str, name: &str) -> Result<()> {
    let run = get(&client, namespace, name).await?;
    let attempt = next_attempt(&run, namespace)?;
    let runs: Api<PipelineRun> = Api::namespaced(client, namespace);
    let patch = json!({"metadata": {"uid": run.uid()}, "spec": {"attempt": attempt}});
    runs.patch(name, &PatchParams::default(), &Patch::Merge(patch))
        .await
        .with_context(|| format!("PipelineRun {namespace}/{name} could not be resumed"))?;
    outln!("pipelinerun.russet.dev/{name} resumed, attempt {attempt}")?;
    Ok(())
}

/// The attempt that resumes a run.
fn next_attempt(run: &PipelineRun, namespace: &str) -> Result<u32> {
    let name = run.name_any();
    if !has_ended(run) {
        bail!(
            "PipelineRun {namespace}/{name} has not ended; `russet pipeline logs {name} --follow -n {namespace}` \
             follows it"
        );
    }
    if !has_failed(run) {
        bail!(
            "PipelineRun {namespace}/{name} succeeded, so there is nothing to resume; `russet pipeline run {} \
             -n {namespace}` starts another run",
            run.spec.pipeline_ref.name
        );
    }
    Ok(run.spec.attempt.saturating_add(1))
}

/// Columns for what is shown.
fn width() -> usize {
    let columns = Term::stdout().size_checked().map_or(DEFAULT_WIDTH, |(_, columns)| usize::from(columns));
    columns.max(MIN_WIDTH)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use russet_crds::conditions::{Reason, set};
    use russet_crds::{LocalReference, PipelineRunSpec, PipelineRunStatus};

    use super::*;

    fn run(spec_attempt: u32, attempt: u32, finished: bool, ready: bool) -> PipelineRun {
        let pipeline_ref = LocalReference { name: "digest".to_owned() };
        let spec = PipelineRunSpec { pipeline_ref, attempt: spec_attempt, ..PipelineRunSpec::default() };
        let mut run = PipelineRun::new("digest-1", spec);
        let finished_at = finished.then_some(Time(Timestamp::UNIX_EPOCH));
        let mut status =
            PipelineRunStatus { attempt: Some(attempt), finished_at, ..PipelineRunStatus::default() };
        let reason = if ready { Reason::Finished } else { Reason::Failed };
        set(&mut status.conditions, Type::Ready, ready, reason, "", None, Timestamp::UNIX_EPOCH);
        run.status = Some(status);
        run
    }

    #[test]
    fn only_a_run_that_ended_and_failed_is_resumed() {
        for (run, expected) in [
            (run(1, 1, true, false), Ok(2)),
            (run(7, 7, true, false), Ok(8)),
            (run(1, 1, false, false), Err("logs digest-1 --follow -n team")),
            // The status is that of an earlier attempt.
            (run(2, 1, true, false), Err("has not ended")),
            (run(1, 1, true, true), Err("`russet pipeline run digest -n team`")),
            (PipelineRun::new("digest-1", PipelineRunSpec::default()), Err("has not ended")),
        ] {
            match (next_attempt(&run, "team"), expected) {
                (Ok(attempt), Ok(expected)) => assert_eq!(attempt, expected),
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
                (found, _) => panic!("{expected:?}: {found:?}"),
            }
        }
    }
}
