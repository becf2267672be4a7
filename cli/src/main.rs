//! `russet`: one binary for the control plane, the node agent, the gateway and the client commands. Each verb
//! is one file; a new verb is one file, one variant and one line in `main`.

mod agent;
mod api_error;
mod apply;
mod approve;
mod audit;
mod backup;
mod catalog;
mod client;
mod client_setup;
mod confirmation;
mod cordon;
mod cost;
mod credentials;
mod data_dir;
mod delete;
mod describe;
mod doctor;
mod drain;
mod energy_text;
mod etcd;
mod explain;
mod fabric;
mod fd_limit;
mod gateway;
mod gateway_certificate;
mod get;
mod helper;
mod identities;
mod join;
mod key;
mod leader_identity;
mod leave;
mod log_rotation;
mod logs;
mod manifests;
mod mqtt;
mod operator;
mod pipeline;
mod plan;
mod port_holder;
mod resources;
mod response_store;
mod restore;
mod run;
mod serve;
mod service;
mod signals;
mod stdout;
mod time_span;
mod token;
mod up;
mod wait;
mod why;

use std::io::IsTerminal as _;
use std::panic::AssertUnwindSafe;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use russet_crds::ApprovalDecision;
use russet_telemetry::say;

use crate::stdout::out;

/// A control plane for local LLM clusters.
#[derive(Parser)]
#[command(name = "russet", version, about, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Run the control plane, the gateway and this machine's agent.
    Up(up::Arguments),
    /// Make this machine a node of a control plane.
    Join(join::Arguments),
    /// Take this machine out of the cluster it joined.
    Leave(leave::Arguments),
    /// Run a verb as a systemd or launchd service, from the machine's start on.
    Service(service::Arguments),
    /// Create tokens that let machines join.
    Token(token::Arguments),
    /// Create, list and revoke API keys for the gateway.
    Key(key::Arguments),
    /// Set up a client (Claude Code, Codex, Open WebUI and others) for the gateway, and test it.
    Client(client_setup::Arguments),
    /// Manage the Secrets with credentials of model sources.
    Credentials(credentials::Arguments),
    /// List objects as the server's own tables.
    Get(get::Arguments),
    /// Create or change objects from YAML files, by server-side apply.
    Apply(apply::Arguments),
    /// List known models and what they need, search the hub, and add a model to the cluster.
    Catalog(catalog::Arguments),
    /// Add a model, deploy it and chat with it.
    Run(run::Arguments),
    /// Show what the planner would do with YAML files, on a server's cluster or a described one.
    Plan(plan::Arguments),
    /// Show why a deployment runs where it does, or what keeps it from running.
    Explain(explain::Arguments),
    /// Approve an action of the operator that waits for it; without a name, list open Approvals.
    Approve(approve::Arguments),
    /// Deny an action of the operator that waits for approval.
    Deny(approve::Arguments),
    /// Run Pipelines, follow their runs, and approve what their steps are about to do.
    Pipeline(pipeline::Arguments),
    /// Write all objects of the control plane into a file, while it runs.
    Backup(backup::Arguments),
    /// Make the objects of a backup those of this machine's control plane, while it is stopped.
    Restore(restore::Arguments),
    /// Delete one object.
    Delete(delete::Arguments),
    /// Show one object with its conditions and events.
    Describe(describe::Arguments),
    /// Keep a node's running replicas and place nothing new on it.
    Cordon(cordon::Arguments),
    /// Let a node take new work again.
    Uncordon(cordon::Arguments),
    /// Move all replicas off a node and wait until it is empty.
    Drain(drain::Arguments),
    /// Show the machines' ports and cables, what prevents RDMA on each, and the changes that enable it; apply
    /// them.
    Fabric(fabric::Arguments),
    /// Run the root helper, which changes this machine's network for its agent within bounds (as a service:
    /// `russet service install helper`).
    #[command(hide = true)]
    Helper(helper::Arguments),
    /// Find problems of the cluster and their remedies, and test its machines by running a model on them.
    Doctor(doctor::Arguments),
    /// Show what a gateway did with one of its last requests, and why.
    Why(why::Arguments),
    /// Prove from the gateway's audit log how far from home requests went.
    Audit(audit::Arguments),
    /// Show what requests used by key, model, day and provider, what it cost, and what it would have cost elsewhere.
    Cost(cost::Arguments),
    /// Wait until objects have a condition.
    Wait(wait::Arguments),
    /// Show the logs of this machine's processes and engines.
    Logs(logs::Arguments),
    /// Run the API server and the operator (started by `up`).
    #[command(hide = true)]
    Serve(serve::Arguments),
    /// Run only the operator, against an existing API server.
    Operator(operator::Arguments),
    /// Run the gateway (started by `up`).
    #[command(hide = true)]
    Gateway(gateway::Arguments),
    /// Run the node agent (started by `up`).
    #[command(hide = true)]
    Agent(agent::Arguments),
}

/// The operator and the API server allocate and free many small objects on all threads; the C library's
/// allocator retains their memory for long: five times as much at 1,000 machines (`cargo xtask bench
/// operator`).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Exit code of a panic, as the standard library has it.
const PANICKED: u8 = 101;

fn main() -> ExitCode {
    // Ring is the only provider; the call fails only if it was made before.
    let _ = rustls::crypto::ring::default_provider().install_default();
    fd_limit::raise();
    log_rotation::start();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return not_parsed(&error),
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            say!("error: cannot start the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let work = async {
        let done = match arguments.verb {
            // Its exit code says whether everything is placed.
            Verb::Plan(arguments) => return plan::run(arguments).await,
            Verb::Up(arguments) => up::run(arguments).await,
            Verb::Join(arguments) => join::run(arguments).await,
            Verb::Leave(arguments) => leave::run(arguments).await,
            Verb::Service(arguments) => service::run(arguments),
            Verb::Token(arguments) => token::run(arguments).await,
            Verb::Key(arguments) => key::run(arguments).await,
            Verb::Client(arguments) => client_setup::run(arguments).await,
            Verb::Credentials(arguments) => credentials::run(arguments).await,
            Verb::Get(arguments) => get::run(arguments).await,
            Verb::Apply(arguments) => apply::run(arguments).await,
            Verb::Catalog(arguments) => catalog::run(arguments).await,
            Verb::Run(arguments) => run::run(arguments).await,
            Verb::Explain(arguments) => explain::run(arguments).await,
            Verb::Approve(arguments) => approve::run(arguments, ApprovalDecision::Approved).await,
            Verb::Deny(arguments) => approve::run(arguments, ApprovalDecision::Denied).await,
            Verb::Pipeline(arguments) => pipeline::run(arguments).await,
            Verb::Backup(arguments) => backup::run(arguments).await,
            Verb::Restore(arguments) => restore::run(&arguments),
            Verb::Delete(arguments) => delete::run(arguments).await,
            Verb::Describe(arguments) => describe::run(arguments).await,
            Verb::Cordon(arguments) => cordon::run(arguments).await,
            Verb::Uncordon(arguments) => cordon::undo(arguments).await,
            Verb::Drain(arguments) => drain::run(arguments).await,
            Verb::Fabric(arguments) => fabric::run(arguments).await,
            Verb::Helper(arguments) => helper::run(arguments).await,
            Verb::Doctor(arguments) => doctor::run(arguments).await,
            Verb::Why(arguments) => why::run(arguments).await,
            Verb::Audit(arguments) => audit::run(arguments),
            Verb::Cost(arguments) => cost::run(arguments).await,
            Verb::Wait(arguments) => wait::run(arguments).await,
            Verb::Logs(arguments) => logs::run(arguments),
            Verb::Serve(arguments) => serve::run(arguments).await,
            Verb::Operator(arguments) => operator::run(arguments).await,
            Verb::Gateway(arguments) => gateway::run(arguments).await,
            Verb::Agent(arguments) => agent::run(arguments).await,
        };
        done.map(|()| ExitCode::SUCCESS)
    };
    // A panic of this task has been reported; without this the runtime would wait for its blocking threads.
    let result = std::panic::catch_unwind(AssertUnwindSafe(|| runtime.block_on(work)));
    // Tasks that still wait for a peer must not delay the exit of a finished process.
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    match result {
        Ok(Ok(code)) => code,
        Ok(Err(error)) => failed(&error),
        Err(_) => ExitCode::from(PANICKED),
    }
}

/// Reports why a verb failed. A reader of standard output that wants no more is not reported.
fn failed(error: &anyhow::Error) -> ExitCode {
    stdout::closed_pipe(error).unwrap_or_else(|| {
        say!("error: {}", api_error::text(error));
        ExitCode::FAILURE
    })
}

/// Prints help, the version, or what is wrong with the arguments.
fn not_parsed(error: &clap::Error) -> ExitCode {
    if error.use_stderr() {
        // On stderr a line that cannot be written is dropped.
        let _ = error.print();
        return ExitCode::from(error.exit_code().try_into().unwrap_or(2));
    }
    let text = error.render();
    let written = match std::io::stdout().is_terminal() {
        true => out!("{}", text.ansi()),
        false => out!("{text}"),
    };
    written.map_or_else(|error| failed(&error.into()), |()| ExitCode::SUCCESS)
}
