//! The listener and the life of the gateway: start, serve, and an end that lets answers finish.

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::extract::Request;
use axum::response::Response;
use axum::serve::ListenerExt as _;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use prometheus::Registry;
use russet_rpc::tls::Files;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::backends::Backends;
use crate::dialects;
use crate::guard::{Hosts, guard};
use crate::metrics::Metrics;
use crate::refusal::{Kind, Refusal};
use crate::routes::{self, Table};
use crate::stream::{Core, Limits};

/// How a gateway runs.
#[derive(Clone, Debug)]
pub struct GatewayConfig {
    /// Reaches the API server as `russet:gateway`.
    pub kubeconfig: PathBuf,
    /// The certificate engines are called with.
    pub tls: Files,
    /// Where clients connect.
    pub listen: SocketAddr,
    /// Whether `listen` may be reached from other machines although no keys are checked yet.
    pub insecure_listen: bool,
    /// How patient it is.
    pub limits: Limits,
}

impl GatewayConfig {
    /// The usual gateway for these files and this address.
    pub fn new(kubeconfig: PathBuf, tls: Files, listen: SocketAddr) -> Self {
        Self { kubeconfig, tls, listen, insecure_listen: false, limits: Limits::default() }
    }
}

/// Why the gateway cannot run.
#[derive(Debug, Error)]
pub enum Error {
    /// The address would open the gateway to the network.
    #[error(
        "the gateway checks no keys yet, so it does not listen on {0}, which other machines can reach; \
         listen on 127.0.0.1 instead, and let a proxy that checks keys stand before it"
    )]
    NotLoopback(SocketAddr),
    /// Another program has the port.
    #[error("port {} of {} is in use by another program; stop it, or choose another port (`russet up --gateway-port`, `russet gateway --listen`)", .0.port(), .0.ip())]
    PortInUse(SocketAddr),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The kubeconfig is missing or broken.
    #[error("cannot use {path}; `russet serve` writes it when it starts")]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<KubeconfigError>,
    },
    /// The client for the API server cannot be made.
    #[error("cannot talk to the API server that {path} names")]
    Client {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<kube::Error>,
    },
    /// The registry has the gateway's metrics already.
    #[error("cannot register the gateway's metrics; one registry takes one gateway")]
    Metrics(#[source] prometheus::Error),
    /// The listener failed.
    #[error("the gateway's listener failed")]
    Serve(#[source] std::io::Error),
}

/// Runs the gateway until `shutdown`; then running answers may end by themselves within `limits.grace`.
/// `ready` becomes true once the cluster was read.
pub async fn run(
    config: GatewayConfig,
    registry: Registry,
    ready: Arc<AtomicBool>,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Error> {
    let GatewayConfig { kubeconfig, tls, listen, insecure_listen, limits } = config;
    let hosts = match (listen.ip().is_loopback(), insecure_listen) {
        (true, _) => Hosts::Loopback,
        (false, true) => Hosts::Any,
        (false, false) => return Err(Error::NotLoopback(listen)),
    };
    // An Err means that the process has chosen its provider already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let listener = bind(listen).await?;
    let client = client(kubeconfig).await?;
    let (publish, table) = watch::channel(Arc::new(Table::default()));
    let following = tokio::spawn(routes::follow(client, publish));
    let becoming_ready = tokio::spawn({
        let mut table = table.clone();
        let ready = ready.clone();
        async move {
            if table.wait_for(|table| table.synced).await.is_ok() {
                ready.store(true, Ordering::Release);
            }
        }
    });
    tracing::info!(%listen, "the gateway listens");
    let gateway = Gateway { listener, hosts, table, tls, limits, registry, ready: ready.clone() };
    let served = gateway.serve(shutdown).await;
    following.abort();
    becoming_ready.abort();
    ready.store(false, Ordering::Release);
    served
}

/// A gateway over any source of tables; [`run`] feeds it from Kubernetes, tests from memory.
pub struct Gateway {
    listener: TcpListener,
    hosts: Hosts,
    table: watch::Receiver<Arc<Table>>,
    tls: Files,
    limits: Limits,
    registry: Registry,
    ready: Arc<AtomicBool>,
}

/// How long the refusals of those that did not may take to reach their clients.
const FAREWELL: Duration = Duration::from_secs(2);

impl Gateway {
    /// A gateway on a loopback `listener` that routes by `table`.
    pub fn new(
        listener: TcpListener,
        table: watch::Receiver<Arc<Table>>,
        tls: Files,
        limits: Limits,
    ) -> Self {
        let ready = Arc::new(AtomicBool::new(true));
        Self { listener, hosts: Hosts::Loopback, table, tls, limits, registry: Registry::new(), ready }
    }

    /// Serves until `shutdown`, then lets answers end.
    pub async fn serve(self, shutdown: impl Future<Output = ()> + Send + 'static) -> Result<(), Error> {
        let Self { listener, hosts, table, tls, limits, registry, ready } = self;
        let closing = CancellationToken::new();
        let stopping = CancellationToken::new();
        let metrics = Arc::new(Metrics::new(&registry).map_err(Error::Metrics)?);
        let core = Arc::new(Core::new(table, Backends::new(tls), metrics, limits, closing.clone()));
        let router = dialects::routes(&core)
            .merge(russet_telemetry::admin::router(registry, ready.clone()))
            .fallback(unknown_path)
            .method_not_allowed_fallback(wrong_method)
            .layer(axum::middleware::from_fn_with_state(hosts, guard));
        // Tokens are small and must not wait for the next one to fill a packet.
        let listener = listener.tap_io(|stream| {
            let _ = stream.set_nodelay(true);
        });
        let begin = {
            let stopping = stopping.clone();
            async move {
                shutdown.await;
                ready.store(false, Ordering::Release);
                stopping.cancel();
            }
        };
        let bounded = async {
            stopping.cancelled().await;
            tokio::time::sleep(limits.grace).await;
            closing.cancel();
            tokio::time::sleep(FAREWELL).await;
        };
        tokio::select! {
            served = axum::serve(listener, router).with_graceful_shutdown(begin).into_future() => served.map_err(Error::Serve),
            () = bounded => Ok(()),
        }
    }
}

async fn bind(address: SocketAddr) -> Result<TcpListener, Error> {
    TcpListener::bind(address).await.map_err(|source| match source.kind() {
        std::io::ErrorKind::AddrInUse => Error::PortInUse(address),
        _ => Error::Listen { address, source },
    })
}

async fn client(path: PathBuf) -> Result<kube::Client, Error> {
    let read = async {
        let kubeconfig = Kubeconfig::read_from(&path)?;
        kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await
    };
    let config = match read.await {
        Ok(config) => config,
        Err(source) => return Err(Error::Kubeconfig { path, source: Box::new(source) }),
    };
    kube::Client::try_from(config).map_err(|source| Error::Client { path, source: Box::new(source) })
}

async fn unknown_path(request: Request) -> Response {
    let path = request.uri().path();
    let message = format!("no such path: {} {}", request.method(), shorten(path));
    dialects::refuse(path, &Refusal::new(Kind::UnknownPath, message))
}

async fn wrong_method(request: Request) -> Response {
    let path = request.uri().path();
    let message = format!("{} is not allowed on {}", request.method(), shorten(path));
    dialects::refuse(path, &Refusal::new(Kind::MethodNotAllowed, message))
}

fn shorten(path: &str) -> &str {
    let end = path.char_indices().nth(200).map_or(path.len(), |(end, _)| end);
    &path[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_port_in_use_is_named_with_the_remedy() {
        let first = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = first.local_addr().unwrap();
        let error = bind(address).await.unwrap_err().to_string();
        assert!(error.contains(&address.port().to_string()) && error.contains("--gateway-port"), "{error}");
    }

    #[tokio::test]
    async fn an_address_of_the_network_is_refused_until_somebody_insists() {
        let config = GatewayConfig::new(
            "/nonexistent/kubeconfig".into(),
            Files::in_dir(std::path::Path::new("/nonexistent")),
            "0.0.0.0:0".parse().unwrap(),
        );
        let flag = || Arc::new(AtomicBool::new(false));
        let refused = run(config.clone(), Registry::new(), flag(), std::future::pending()).await;
        assert!(matches!(refused, Err(Error::NotLoopback(_))), "{refused:?}");
        let insisted = GatewayConfig { insecure_listen: true, ..config };
        let missing = run(insisted, Registry::new(), flag(), std::future::pending()).await;
        assert!(matches!(missing, Err(Error::Kubeconfig { .. })), "{missing:?}");
    }
}
