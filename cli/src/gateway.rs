//! `russet gateway`: the OpenAI-compatible front as a process; `up` starts it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Result;

use crate::layout::Layout;
use crate::signals;

/// Arguments of `russet gateway`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Folder of the control plane.
    #[arg(long)]
    data_dir: Option<PathBuf>,
    /// Where clients connect.
    #[arg(long, default_value = "127.0.0.1:52415")]
    listen: SocketAddr,
    /// Log as JSON.
    #[arg(long)]
    json_logs: bool,
    /// End when standard input closes.
    #[arg(long, hide = true)]
    exit_with_parent: bool,
}

/// Serves until a signal.
pub async fn run(arguments: Arguments) -> Result<()> {
    russet_telemetry::logs::init("gateway", arguments.json_logs);
    let layout = Layout::at(arguments.data_dir)?;
    let config = russet_gateway::GatewayConfig::new(
        layout.gateway().join("kubeconfig"),
        russet_rpc::tls::Files::in_dir(&layout.gateway()),
        arguments.listen,
    );
    let shutdown = async move {
        signals::ending(arguments.exit_with_parent).await;
    };
    russet_gateway::run(config, prometheus::Registry::new(), Arc::new(AtomicBool::new(false)), shutdown)
        .await?;
    Ok(())
}
