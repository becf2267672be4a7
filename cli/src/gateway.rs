//! `russet gateway`: the OpenAI-compatible gateway as a process; `up` starts it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kube::Client;
use russet_agent::process::record::short_path;
use russet_gateway::GatewayConfig;
use russet_gateway::listen::ServerFiles;
use russet_gateway::origins::OriginPolicy;
use russet_rpc::kube_client;
use russet_rpc::tls::{TlsFiles, identity_dir};
use russet_telemetry::tasks::TaskSet;

use crate::catalog;
use crate::client::client_in_pod;
use crate::data_dir::DataDir;
use crate::gateway_certificate;
use crate::mqtt::BrokerArguments;
use crate::port_holder;
use crate::response_store::ResponseStoreArguments;
use crate::signals;

/// Interval between two looks whether the gateway answers yet.
const ANNOUNCE_INTERVAL: Duration = Duration::from_millis(50);

/// Arguments of `russet gateway`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Folder of the control plane, or of this gateway's own certificate.
    #[arg(long)]
    data_dir: Option<PathBuf>,
    /// Kubeconfig of an external control plane; default the one that `russet serve` wrote for the gateway,
    /// else the ServiceAccount of this pod.
    #[arg(long)]
    kubeconfig: Option<PathBuf>,
    /// Addresses to listen on; may repeat. Without TLS on loopback, with TLS and keys elsewhere.
    #[arg(long, default_value = "127.0.0.1:52415")]
    listen: Vec<SocketAddr>,
    #[command(flatten)]
    certificate: CertificateArguments,
    #[command(flatten)]
    origins: OriginArguments,
    /// Let holders of keys with `modelManagement: Allowed` pull, copy and delete models by Ollama's API; the gateway needs
    /// the rights of manifests/gateway-models.yaml for that.
    #[arg(long)]
    model_management: bool,
    /// File to keep responses of OpenAI's Responses API in, with the prompts they answer, files and batches; without it none
    /// is kept.
    #[arg(long, value_name = "FILE")]
    responses_store: Option<PathBuf>,
    #[command(flatten)]
    response_store: ResponseStoreArguments,
    /// Folder to write the audit log to: which request left for which provider, and how far each one went. Without it none
    /// is written.
    #[arg(long, value_name = "FOLDER")]
    audit_log: Option<PathBuf>,
    #[command(flatten)]
    broker: BrokerArguments,
    /// Address that serves metrics without TLS; listeners on loopback always serve them.
    #[arg(long)]
    metrics_listen: Option<SocketAddr>,
    /// File to write the first address to once the gateway answers.
    #[arg(long, hide = true)]
    answers_file: Option<PathBuf>,
    /// Log as JSON.
    #[arg(long)]
    json_logs: bool,
    /// Exit when standard input closes.
    #[arg(long, hide = true)]
    exit_with_parent: bool,
}

/// The certificate for clients on other machines.
#[derive(clap::Args, Clone)]
pub struct CertificateArguments {
    /// Certificate chain for clients on other machines, PEM; reloaded when it changes.
    #[arg(long, requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Its private key, PEM.
    #[arg(long, requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
}

impl CertificateArguments {
    /// The two files, if given.
    pub fn files(&self) -> Option<ServerFiles> {
        Some(ServerFiles { cert: self.tls_cert.clone()?, key: self.tls_key.clone()? })
    }
}

/// Web pages and host names that may use the gateway on loopback without a key.
#[derive(clap::Args, Clone)]
pub struct OriginArguments {
    /// Origin of web pages that may use the gateway on loopback, such as https://chat.example.org or
    /// chrome-extension://*; may repeat.
    #[arg(long)]
    pub allow_origin: Vec<String>,
    /// Host name under which clients may reach the gateway on loopback, such as studio.example.org or *.lan; may
    /// repeat. Its DNS must be yours: whoever can make it resolve to loopback can send pages to the gateway.
    #[arg(long)]
    pub allow_host: Vec<String>,
}

impl OriginArguments {
    /// The same for the command line of a child process.
    pub fn to_flags(&self) -> Vec<String> {
        let Self { allow_origin, allow_host } = self;
        let flag = |name: &'static str| move |value: &String| [name.to_owned(), value.clone()];
        let origins = allow_origin.iter().flat_map(flag("--allow-origin"));
        origins.chain(allow_host.iter().flat_map(flag("--allow-host"))).collect()
    }
}

/// Serves until a signal.
pub async fn run(arguments: Arguments) -> Result<()> {
    russet_telemetry::logs::init("gateway", arguments.json_logs);
    let layout = DataDir::resolve(arguments.data_dir)?;
    let mut tasks = TaskSet::default();
    let (client, asked) = connect(&layout, arguments.kubeconfig, &mut tasks).await?;
    let identity = TlsFiles::in_dir(&layout.gateway());
    // Better than no certificate where the cluster signed it: it names `gateway.russet.dev`.
    let signed = asked.then(|| ServerFiles { cert: identity.cert.clone(), key: identity.key.clone() });
    let ready = Arc::new(AtomicBool::new(false));
    if let (Some(path), Some(address)) = (arguments.answers_file, arguments.listen.first()) {
        tasks.spawn("announcement", announce(ready.clone(), path, format!("http://{address}\n")));
    }
    let mqtt = arguments.broker.inbox(short_path(&layout.gateway().join("mqtt.sock")))?;
    if mqtt.is_some() && arguments.responses_store.is_none() {
        bail!(
            "requests from the broker of --mqtt are kept in the store of responses: name its file with --responses-store"
        );
    }
    let config = GatewayConfig {
        mqtt,
        listen: arguments.listen,
        certificate: arguments.certificate.files().or(signed),
        metrics: arguments.metrics_listen,
        origins: OriginPolicy {
            origins: arguments.origins.allow_origin,
            hosts: arguments.origins.allow_host,
        },
        responses: arguments.responses_store.map(|path| arguments.response_store.config(&path)),
        audit_log: arguments.audit_log,
        budget_journal: Some(layout.gateway_budgets()),
        model_management: arguments.model_management.then(catalog::pullable_models).transpose()?,
        ..GatewayConfig::new(client, identity, ([127, 0, 0, 1], 0).into())
    };
    let shutdown = async move {
        signals::stop_signal(arguments.exit_with_parent).await;
    };
    let served = tokio::select! {
        served = russet_gateway::run(config, prometheus::Registry::new(), ready, shutdown) => served,
        ended = tasks.ended() => return Err(ended.into()),
    };
    let holder = match &served {
        Err(russet_gateway::Error::PortInUse(address)) => port_holder::describe(*address),
        _ => None,
    };
    served.map_err(|error| port_holder::with_holder(error.into(), holder))
}

/// Writes the address to `path` once the gateway answers with routes and keys.
async fn announce(ready: Arc<AtomicBool>, path: PathBuf, address: String) {
    while !ready.load(Ordering::Acquire) || std::fs::write(&path, &address).is_err() {
        tokio::time::sleep(ANNOUNCE_INTERVAL).await;
    }
    std::future::pending().await
}

/// A client with the gateway's identity. On a control plane of `russet serve` the identity is in its folder.
/// Elsewhere the kubeconfig or the pod's ServiceAccount is the identity, and the certificate for engines is
/// requested and renewed here; the second value says whether it is.
async fn connect(
    layout: &DataDir,
    kubeconfig: Option<PathBuf>,
    tasks: &mut TaskSet,
) -> Result<(Client, bool)> {
    let stored = layout.gateway().join(identity_dir::KUBECONFIG);
    let client = match kubeconfig {
        Some(path) => kube_client::client(&path, |_| {}).await?,
        None if stored.exists() || std::env::var_os("KUBERNETES_SERVICE_HOST").is_none() => {
            let client = kube_client::client(&stored, |_| {}).await.context(
                "no control plane is known here; start one with `russet up`, or name a kubeconfig with --kubeconfig",
            )?;
            return Ok((client, false));
        }
        None => client_in_pod()?,
    };
    gateway_certificate::ensure(&client, &layout.gateway()).await?;
    tasks.spawn("certificate", gateway_certificate::run(client.clone(), layout.gateway()));
    Ok((client, true))
}
