//! `russet serve`: the embedded API server and the operator in one process; `up` starts it.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use russet_apiserver::pki;
use russet_apiserver::server::connection_limit::ConnectionLimits;
use russet_operator::install::GatewayModels;
use russet_rpc::kube_client;
use russet_rpc::tls::{self, identity_dir};
use russet_telemetry::tasks::TaskSet;

use crate::client::client_from;
use crate::data_dir::DataDir;
use crate::etcd::EtcdArguments;
use crate::fd_limit;
use crate::identities::Identities;
use crate::leader_identity::LeaderIdentity;
use crate::port_holder;
use crate::signals;

/// Arguments of `russet serve`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Folder of the control plane.
    #[arg(long)]
    data_dir: Option<PathBuf>,
    /// Port of the API server.
    #[arg(long, default_value_t = 6443)]
    api_port: u16,
    /// Address of this machine to open for other machines once a join token exists, instead of all; may repeat.
    #[arg(long = "api-listen", value_name = "ADDRESS")]
    api_listen: Vec<IpAddr>,
    /// Issue the identity of this machine's own node, which then needs no token.
    #[arg(long)]
    local_node: Option<String>,
    #[command(flatten)]
    etcd: EtcdArguments,
    /// Let gateways create models for clients, and delete what they created; see that flag of `russet up`.
    #[arg(long)]
    model_management: bool,
    /// Address that serves metrics and `/targets` without TLS; a free port is written to
    /// serve/metrics-address.
    #[arg(long, default_value = "127.0.0.1:0")]
    metrics_listen: SocketAddr,
    /// Log as JSON.
    #[arg(long)]
    json_logs: bool,
    /// Exit when standard input closes.
    #[arg(long, hide = true)]
    exit_with_parent: bool,
}

/// Time for the operator to stop; afterwards the process exits without it, and its Lease expires.
const OPERATOR_STOP_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(3);

/// Serves until a signal.
pub async fn run(arguments: Arguments) -> Result<()> {
    russet_telemetry::logs::init("serve", arguments.json_logs);
    let layout = DataDir::open(arguments.data_dir)?;
    let registry = prometheus::Registry::new();
    let open_files = fd_limit::current();
    tracing::info!(
        open_files,
        "files and sockets that may be open; connections are limited so that these suffice"
    );
    let mut config = russet_apiserver::ApiServerConfig::new(layout.serve())
        .listen(([127, 0, 0, 1], arguments.api_port).into())
        .lan(arguments.api_listen)
        .system(&[tls::OPERATOR_USER, tls::GATEWAY_USER], &[tls::NODES_GROUP])
        .connections(ConnectionLimits::for_open_files(open_files))
        .registry(registry.clone());
    if let Some(etcd) = arguments.etcd.config() {
        config = config.etcd(etcd);
    }
    let running = russet_apiserver::start(config).await;
    let holder = match &running {
        Err(russet_apiserver::Error::Listen { address, source })
            if source.kind() == std::io::ErrorKind::AddrInUse =>
        {
            port_holder::describe(*address)
        }
        _ => None,
    };
    let mut running = running.map_err(|error| port_holder::with_holder(error.into(), holder))?;
    let server = running.url();
    let authority = running.authority();

    let admin = client_from(running.kubeconfig()).await?;
    let gateway_models = match arguments.model_management {
        true => GatewayModels::Allowed,
        false => GatewayModels::Denied,
    };
    russet_operator::install::apply(&admin, gateway_models)
        .await
        .context("cannot install Russet's kinds and roles")?;

    let operator_dir = layout.serve().join("operator");
    let identities = Identities {
        authority: pki::Authority::from_pem(authority.cert_pem(), authority.key_pem())?,
        server: server.clone(),
        operator: operator_dir.clone(),
        gateway: layout.gateway(),
        admin: layout.admin_kubeconfig(),
    };
    if let Some(node) = &arguments.local_node {
        identities.local_node(&layout.agent(), node)?;
        russet_operator::node_accounts::begin_incarnation(&admin, node, None)
            .await
            .with_context(|| format!("cannot make the InferenceNode of {node}"))?;
    }
    // The administrator's file comes last: once it exists, everything else is in place.
    identities.issue()?;

    let operator = kube_client::client(&operator_dir.join(identity_dir::KUBECONFIG), |_| {}).await?;
    let mut tasks = TaskSet::default();
    tasks.spawn("identities", identities.run());
    tasks.spawn("kinds", async move { russet_operator::install::keep(&admin).await });
    let ready = Arc::new(AtomicBool::new(false));
    let leader_caches = russet_operator::LeaderCaches::default();
    let metrics = tokio::net::TcpListener::bind(arguments.metrics_listen).await.with_context(|| {
        format!("cannot serve metrics on {}; choose another --metrics-listen", arguments.metrics_listen)
    })?;
    pki::write_private(&layout.metrics_address(), metrics.local_addr()?.to_string().as_bytes())?;
    crate::operator::serve_metrics(
        &mut tasks,
        metrics,
        registry.clone(),
        crate::operator::readiness(&ready, &leader_caches),
        &leader_caches,
    );
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let candidate = LeaderIdentity::load_or_create(&operator_dir)?;
    let mut operator = tokio::spawn(async move {
        let credential = russet_operator::node_accounts::Credential::Certificate;
        russet_operator::run(
            operator,
            &candidate.identity,
            credential,
            registry,
            leader_caches,
            ready,
            async {
                let _ = stopped.await;
            },
        )
        .await
    });
    tracing::info!(%server, "the control plane serves");
    tokio::select! {
        _ = signals::stop_signal(arguments.exit_with_parent) => {
            let _ = stop.send(());
            // The operator releases its Lease, for which the API server must still respond.
            let _ = tokio::time::timeout(OPERATOR_STOP_TIMEOUT, &mut operator).await;
        }
        result = &mut operator => {
            result.context("the operator panicked")?.context("the operator ended")?;
        }
        ended = tasks.ended() => return Err(ended.into()),
        ended = running.ended() => return Err(ended.into()),
    }
    tasks.shutdown().await;
    running.shutdown().await;
    Ok(())
}
