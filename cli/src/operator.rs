//! `russet operator`: only the operator, for an external control plane. The kinds and the roles must be
//! installed already; the chart does that, and this process has no permission to.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use kube::Client;
use prometheus::Registry;
use russet_operator::LeaderCaches;
use russet_rpc::kubeconfig::KubeconfigSource;
use russet_telemetry::admin::{Page, Pages, Readiness};
use russet_telemetry::tasks::TaskSet;
use tokio::net::TcpListener;

use crate::client::{client_in_pod, client_of};
use crate::leader_identity::LeaderIdentity;
use crate::signals;

/// Arguments of `russet operator`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Kubeconfig file, or files as in KUBECONFIG; without it, the ServiceAccount of this pod.
    #[arg(long, env = "KUBECONFIG")]
    kubeconfig: Option<PathBuf>,
    /// Address that serves `/metrics`, `/targets`, `/healthz` and `/readyz`, without TLS.
    #[arg(long, default_value = "127.0.0.1:8080")]
    metrics_listen: SocketAddr,
    /// Identity of this operator in leader election; the pod's name if there is one. It must stay the same
    /// across restarts, and no two operators may share it at a time. Default: generated.
    #[arg(long, env = "POD_NAME")]
    identity: Option<String>,
    /// Log as JSON.
    #[arg(long)]
    json_logs: bool,
    /// Exit when standard input closes.
    #[arg(long, hide = true)]
    exit_with_parent: bool,
}

/// Runs until a signal.
pub async fn run(arguments: Arguments) -> Result<()> {
    russet_telemetry::logs::init("operator", arguments.json_logs);
    let client = connect(arguments.kubeconfig).await?;
    let registry = Registry::new();
    let ready = Arc::new(AtomicBool::new(false));
    let leader_caches = LeaderCaches::default();
    let listen = arguments.metrics_listen;
    let metrics = TcpListener::bind(listen)
        .await
        .with_context(|| format!("cannot serve metrics on {listen}; choose another --metrics-listen"))?;
    let mut tasks = TaskSet::default();
    serve_metrics(&mut tasks, metrics, registry.clone(), readiness(&ready, &leader_caches), &leader_caches);
    tracing::info!(metrics = %listen, "the operator starts");
    let identity = arguments.identity.filter(|name| !name.is_empty());
    let identity = identity.unwrap_or_else(|| LeaderIdentity::ephemeral().identity);
    let credential = russet_operator::node_accounts::Credential::Account;
    let operator =
        russet_operator::run(client, &identity, credential, registry, leader_caches, ready, async {
            signals::stop_signal(arguments.exit_with_parent).await;
        });
    tokio::select! {
        result = operator => result.context("the operator ended"),
        ended = tasks.ended() => Err(ended.into()),
    }
}

/// Serves metrics and `/targets` for as long as `tasks` run.
pub fn serve_metrics(
    tasks: &mut TaskSet,
    listener: TcpListener,
    registry: Registry,
    ready: Readiness,
    leader_caches: &LeaderCaches,
) {
    let serving = russet_telemetry::admin::serve_with(listener, registry, ready, pages(leader_caches));
    tasks.spawn("metrics", async move {
        if let Err(error) = serving.await {
            tracing::error!(%error, "metrics are no longer served");
        }
    });
}

/// `/readyz`, with the kinds that the operator's caches lack.
pub fn readiness(ready: &Arc<AtomicBool>, leader_caches: &LeaderCaches) -> Readiness {
    let leader_caches = leader_caches.clone();
    Readiness { ready: ready.clone(), problems: Arc::new(move || leader_caches.problems()) }
}

/// `/targets`: metrics addresses of agents and engines, for Prometheus' HTTP service discovery.
fn pages(leader_caches: &LeaderCaches) -> Pages {
    let leader_caches = leader_caches.clone();
    Arc::new(move |path| {
        let leader_caches = leader_caches.clone();
        Box::pin(async move {
            let json = "application/json".to_owned();
            (path == "/targets").then(|| Page { content_type: json, text: leader_caches.targets() })
        })
    })
}

/// A client for the given file, or for the pod's own ServiceAccount.
async fn connect(kubeconfig: Option<PathBuf>) -> Result<Client> {
    // A single file whose name has a colon is there; a list is not.
    let source = kubeconfig.and_then(|path| match path.exists() {
        true => Some(KubeconfigSource::file(path)),
        false => KubeconfigSource::list(path.as_os_str()),
    });
    match source {
        Some(source) => client_of(source, |_| {}).await,
        None => client_in_pod(),
    }
}
