//! `russet gateway`: the OpenAI-compatible front as a process; `up` starts it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use kube::Client;
use russet_gateway::GatewayConfig;
use russet_gateway::listen::ServerFiles;
use russet_rpc::kube_client;
use russet_rpc::tls::{TlsFiles, identity_dir};

use crate::gateway_certificate;
use crate::client::client_in_pod;
use crate::data_dir::DataDir;
use crate::signals;

/// Arguments of `russet gateway`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Folder of the control plane, or of this gateway's own certificate.
    #[arg(long)]
    data_dir: Option<PathBuf>,
    /// Kubeconfig of a control plane that somebody else runs; default the one that `russet serve` wrote for
    /// the gateway, else the ServiceAccount of the pod this runs in.
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
    let layout = DataDir::resolve(arguments.data_dir)?;
    let (client, asked) = connect(&layout, arguments.kubeconfig).await?;
    let identity = TlsFiles::in_dir(&layout.gateway());
    // Better than none where the cluster signed it: it names `gateway.russet.dev`.
    let signed = asked.then(|| ServerFiles { cert: identity.cert.clone(), key: identity.key.clone() });
    let config = GatewayConfig {
        listen: arguments.listen,
        certificate: arguments.certificate.files().or(signed),
        metrics: arguments.metrics_listen,
        ..GatewayConfig::new(client, identity, ([127, 0, 0, 1], 0).into())
    };
    let shutdown = async move {
        signals::stop_signal(arguments.exit_with_parent).await;
    };
    russet_gateway::run(config, prometheus::Registry::new(), Arc::new(AtomicBool::new(false)), shutdown)
        .await?;
    Ok(())
}

/// A client as the gateway. On a control plane of `russet serve` its identity lies in its folder;
/// elsewhere a kubeconfig or the pod's ServiceAccount says who it is, and the certificate that engines
/// know it by is asked for and renewed here; the second value says whether it is.
async fn connect(layout: &DataDir, kubeconfig: Option<PathBuf>) -> Result<(Client, bool)> {
    let kept = layout.gateway().join(identity_dir::KUBECONFIG);
    let client = match kubeconfig {
        Some(path) => kube_client::client(&path, |_| {}).await?,
        None if kept.exists() || std::env::var_os("KUBERNETES_SERVICE_HOST").is_none() => {
            let client = kube_client::client(&kept, |_| {}).await.context(
                "no control plane is known here; start one with `russet up`, or name a kubeconfig with --kubeconfig",
            )?;
            return Ok((client, false));
        }
        None => client_in_pod()?,
    };
    gateway_certificate::ensure(&client, &layout.gateway()).await?;
    tokio::spawn(gateway_certificate::run(client.clone(), layout.gateway()));
    Ok((client, true))
}
