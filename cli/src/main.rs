//! `russet`: one binary for the control plane, the node agent, the gateway and the people who use
//! them. Each verb is one file; a new verb is one file, one variant and one line in `main`.

mod agent;
mod apply;
mod approve;
mod leader_identity;
mod catalog;
mod gateway_certificate;
mod client;
mod cordon;
mod credentials;
mod delete;
mod describe;
mod fd_limit;
mod doctor;
mod manifests;
mod drain;
mod etcd;
mod explain;
mod fabric;
mod gateway;
mod get;
mod helper;
mod identities;
mod join;
mod key;
mod data_dir;
mod leave;
mod log_rotation;
mod logs;
mod operator;
mod plan;
mod mqtt;
mod resources;
mod run;
mod serve;
mod service;
mod signals;
mod token;
mod up;
mod wait;

use clap::{Parser, Subcommand};
use russet_crds::ApprovalDecision;

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
    /// Have systemd or launchd run a verb from the machine's start on.
    Service(service::Arguments),
    /// Make tokens with which machines join.
    Token(token::Arguments),
    /// Make, list and revoke the keys that open the gateway.
    Key(key::Arguments),
    /// Say which Secrets open closed sources of models.
    Credentials(credentials::Arguments),
    /// List objects as the server's own tables.
    Get(get::Arguments),
    /// Create or change objects from YAML files, by server-side apply.
    Apply(apply::Arguments),
    /// Show a list of models and what they need, search the hub, and add a model to the cluster.
    Catalog(catalog::Arguments),
    /// Add a model, deploy it and chat with it.
    Run(run::Arguments),
    /// Show what the planner would do with YAML files, on a server's cluster or a described one.
    Plan(plan::Arguments),
    /// Show why a deployment runs where it does, or what keeps it from running.
    Explain(explain::Arguments),
    /// Say yes to something the operator asks; without a name, list what it asks.
    Approve(approve::Arguments),
    /// Say no to something the operator asks.
    Deny(approve::Arguments),
    /// Delete one object.
    Delete(delete::Arguments),
    /// Show one object with its conditions and events.
    Describe(describe::Arguments),
    /// Let a node keep what it runs and take nothing new.
    Cordon(cordon::Arguments),
    /// Let a node take new work again.
    Uncordon(cordon::Arguments),
    /// Move everything off a node and wait until it is empty.
    Drain(drain::Arguments),
    /// Show the machines' ports and cables, what keeps RDMA from each, and which changes would let it; make them.
    Fabric(fabric::Arguments),
    /// Change this machine's network for its agent, as root, within bounds, and take it back (a service: `russet service install helper`).
    #[command(hide = true)]
    Helper(helper::Arguments),
    /// Say what is wrong with the cluster and what to do, and prove its machines by having them answer.
    Doctor(doctor::Arguments),
    /// Wait until objects have a condition.
    Wait(wait::Arguments),
    /// Show the logs of this machine's processes and engines.
    Logs(logs::Arguments),
    /// Run the API server and the operator (started by `up`).
    #[command(hide = true)]
    Serve(serve::Arguments),
    /// Run the operator alone, against an API server that is there already.
    Operator(operator::Arguments),
    /// Run the gateway (started by `up`).
    #[command(hide = true)]
    Gateway(gateway::Arguments),
    /// Run the node agent (started by `up`).
    #[command(hide = true)]
    Agent(agent::Arguments),
}

/// The operator and the API server make and drop many small things on all threads; the C library's allocator keeps
/// the room of them for long: five times as much at 1,000 machines (`cargo xtask bench operator`).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    // Ring is the one provider; the call only fails when it has been made before.
    let _ = rustls::crypto::ring::default_provider().install_default();
    fd_limit::raise();
    log_rotation::start();
    let arguments = Arguments::parse();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: cannot start the runtime: {error}");
            return std::process::ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(async {
        let done = match arguments.verb {
            // Its exit says whether everything has a place.
            Verb::Plan(arguments) => return plan::run(arguments).await,
            Verb::Up(arguments) => up::run(arguments).await,
            Verb::Join(arguments) => join::run(arguments).await,
            Verb::Leave(arguments) => leave::run(arguments).await,
            Verb::Service(arguments) => service::run(arguments),
            Verb::Token(arguments) => token::run(arguments).await,
            Verb::Key(arguments) => key::run(arguments).await,
            Verb::Credentials(arguments) => credentials::run(arguments).await,
            Verb::Get(arguments) => get::run(arguments).await,
            Verb::Apply(arguments) => apply::run(arguments).await,
            Verb::Catalog(arguments) => catalog::run(arguments).await,
            Verb::Run(arguments) => run::run(arguments).await,
            Verb::Explain(arguments) => explain::run(arguments).await,
            Verb::Approve(arguments) => approve::run(arguments, ApprovalDecision::Approved).await,
            Verb::Deny(arguments) => approve::run(arguments, ApprovalDecision::Denied).await,
            Verb::Delete(arguments) => delete::run(arguments).await,
            Verb::Describe(arguments) => describe::run(arguments).await,
            Verb::Cordon(arguments) => cordon::run(arguments).await,
            Verb::Uncordon(arguments) => cordon::undo(arguments).await,
            Verb::Drain(arguments) => drain::run(arguments).await,
            Verb::Fabric(arguments) => fabric::run(arguments).await,
            Verb::Helper(arguments) => helper::run(arguments).await,
            Verb::Doctor(arguments) => doctor::run(arguments).await,
            Verb::Wait(arguments) => wait::run(arguments).await,
            Verb::Logs(arguments) => logs::run(arguments),
            Verb::Serve(arguments) => serve::run(arguments).await,
            Verb::Operator(arguments) => operator::run(arguments).await,
            Verb::Gateway(arguments) => gateway::run(arguments).await,
            Verb::Agent(arguments) => agent::run(arguments).await,
        };
        done.map(|()| std::process::ExitCode::SUCCESS)
    });
    // Tasks that still wait on a peer must not keep a process that has said its last word.
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}
