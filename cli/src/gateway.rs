//! `russet gateway`: the OpenAI-compatible front as a process; `up` starts it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Result;
use russet_gateway::GatewayConfig;
use russet_gateway::listen::ServerFiles;

use crate::client::client_from;
use crate::layout::Layout;
use crate::signals;

/// Arguments of `russet gateway`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Folder of the control plane, or of this gateway's own certificate.
    #[arg(long)]
    data_dir: Option<PathBuf>,
    /// Kubeconfig of another control plane; default the one that `russet serve` wrote for the gateway.
    #[arg(long)]
    kubeconfig: Option<PathBuf>,
    /// Where clients connect; may repeat. Without TLS on loopback, with TLS and keys elsewhere.
    #[arg(long, default_value = "127.0.0.1:52415")]
    listen: Vec<SocketAddr>,
    #[command(flatten)]
    certificate: CertificateArguments,
    /// Where metrics are served without TLS; listeners on loopback serve them anyway.
    #[arg(long)]
    metrics_listen: Option<SocketAddr>,
    /// Log as JSON.
    #[arg(long)]
    json_logs: bool,
    /// End when standard input closes.
    #[arg(long, hide = true)]
    exit_with_parent: bool,
}

/// The certificate that clients of other machines see.
#[derive(clap::Args, Clone)]
pub struct CertificateArguments {
    /// Certificate chain for clients of other machines, PEM; read again when it changes.
    #[arg(long, requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Its private key, PEM.
    #[arg(long, requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
}

impl CertificateArguments {
    /// The two files, when they were named.
    pub fn files(&self) -> Option<ServerFiles> {
        Some(ServerFiles { cert: self.tls_cert.clone()?, key: self.tls_key.clone()? })
    }
}

/// Serves until a signal.
pub async fn run(arguments: Arguments) -> Result<()> {
    russet_telemetry::logs::init("gateway", arguments.json_logs);
    let layout = Layout::at(arguments.data_dir)?;
    let kubeconfig = arguments.kubeconfig.unwrap_or_else(|| layout.gateway().join("kubeconfig"));
    let config = GatewayConfig {
        listen: arguments.listen,
        certificate: arguments.certificate.files(),
        metrics: arguments.metrics_listen,
        ..GatewayConfig::new(
            client_from(&kubeconfig).await?,
            russet_rpc::tls::Files::in_dir(&layout.gateway()),
            ([127, 0, 0, 1], 0).into(),
        )
    };
    let shutdown = async move {
        signals::ending(arguments.exit_with_parent).await;
    };
    russet_gateway::run(config, prometheus::Registry::new(), Arc::new(AtomicBool::new(false)), shutdown)
        .await?;
    Ok(())
}
