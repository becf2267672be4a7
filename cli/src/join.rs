//! `russet join`: makes this machine a node and runs its agent.

use anyhow::Result;
use russet_telemetry::say;

use crate::agent::{self, NodeArguments};
use crate::data_dir::DataDir;

/// Arguments of `russet join`.
#[derive(clap::Args)]
pub struct Arguments {
    /// URL of the control plane, such as https://studio.local:6443; several, if it has several API servers.
    #[arg(required = true)]
    servers: Vec<String>,
    /// The token that `russet token create` printed.
    #[arg(long, env = "RUSSET_TOKEN", hide_env_values = true)]
    token: String,
    /// How the API server authenticates this node; default: detected.
    #[arg(long, hide = true)]
    access: Option<Access>,
    /// Only join; a service runs the agent (`russet service install agent`).
    #[arg(long)]
    no_agent: bool,
    #[command(flatten)]
    node: NodeArguments,
}

/// How an API server authenticates a node.
#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum Access {
    /// By its client certificate.
    Certificate,
    /// By a token of its ServiceAccount.
    Token,
}

/// Joins once, then runs the agent until a signal.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { servers, token, access, no_agent, node } = arguments;
    russet_telemetry::logs::init("agent", node.json_logs);
    let layout = DataDir::open(node.data_dir.clone())?;
    let identity = russet_agent::join(russet_agent::JoinConfig {
        servers,
        token,
        data_dir: layout.root().to_owned(),
        node_name: node.name(),
        access: access.map(|access| match access {
            Access::Certificate => russet_agent::Access::Certificate,
            Access::Token => russet_agent::Access::Token,
        }),
    })
    .await?;
    if no_agent {
        say!("{} joined {}; no agent runs yet.", node.name(), identity.server);
        return Ok(());
    }
    say!("{} joined {}; its agent runs here until Ctrl-C.", node.name(), identity.server);
    agent::run_node(node).await
}
