//! `russet join`: makes this machine a node and runs its agent.

use anyhow::Result;

use crate::agent::{self, NodeArguments};
use crate::layout::Layout;

/// Arguments of `russet join`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The control plane, such as https://studio.local:6443.
    url: String,
    /// What `russet token create` printed.
    #[arg(long, env = "RUSSET_TOKEN", hide_env_values = true)]
    token: String,
    #[command(flatten)]
    node: NodeArguments,
}

/// Joins once, then runs the agent until a signal.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { url, token, node } = arguments;
    russet_telemetry::logs::init("agent", node.json_logs);
    let layout = Layout::open(node.data_dir.clone())?;
    russet_agent::join(russet_agent::JoinConfig {
        url: url.clone(),
        token,
        data_dir: layout.root().to_owned(),
        node_name: node.name(),
    })
    .await?;
    eprintln!("{} joined {url}; its agent runs here until Ctrl-C.", node.name());
    agent::run_node(node).await
}
