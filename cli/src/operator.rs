//! `russet operator`: only the operator, for an external control plane. The kinds and the roles must be
//! installed already; the chart does that, and this process has no permission to.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use kube::Client;
use russet_operator::LeaderCaches;
use russet_telemetry::admin::{Page, Pages, Readiness};

use crate::client::{client_from, client_in_pod};
use crate::leader_identity::LeaderIdentity;
use crate::signals;

/// Arguments of `russet operator`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Kubeconfig file; without it, the ServiceAccount of this pod.
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
    let registry = prometheus::Registry::new();
    let ready = Arc::new(AtomicBool::new(false));
    let leader_caches = LeaderCaches::default();
    let listen = arguments.metrics_listen;
    let metrics = tokio::net::TcpListener::bind(listen)
        .await
        .with_context(|| format!("cannot serve metrics on {listen}; choose another --metrics-listen"))?;
    let metrics = tokio::spawn(russet_telemetry::admin::serve_with(
        metrics,
        registry.clone(),
        readiness(&ready, &leader_caches),
        pages(&leader_caches),
    ));
    tracing::info!(metrics = %listen, "the operator starts");
    let identity = arguments.identity.filter(|name| !name.is_empty());
    let identity = identity.unwrap_or_else(|| LeaderIdentity::ephemeral().identity);
    let credential = russet_operator::node_accounts::Credential::Account;
    let result = russet_operator::run(client, &identity, credential, registry, leader_caches, ready, async {
        signals::stop_signal(arguments.exit_with_parent).await;
    })
    .await;
    metrics.abort();
    result.context("the operator ended")
}

/// `/readyz`, with the kinds that the operator's caches lack.
pub fn readiness(ready: &Arc<AtomicBool>, leader_caches: &LeaderCaches) -> Readiness {
    let leader_caches = leader_caches.clone();
    Readiness { ready: ready.clone(), problems: Arc::new(move || leader_caches.problems()) }
}

/// `/targets`: metrics addresses of agents and engines, for Prometheus' HTTP service discovery.
pub fn pages(leader_caches: &LeaderCaches) -> Pages {
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
    match kubeconfig.filter(|path| !path.as_os_str().is_empty()) {
        Some(path) => client_from(&path).await,
        None => client_in_pod(),
    }
}
