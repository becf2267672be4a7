//! The embedded Kubernetes-style API server.
//!
//! A request enters through [`server`] (TLS, routing), is authenticated by [`auth`], waits for its turn in
//! [`flow_control`], is authorized, finds its
//! resource in the table of [`kinds`], becomes a [`call::Call`], and is handled by its verb in [`verbs`]. A
//! write is decoded ([`protobuf`], [`schema::strict`]), applied ([`patch`]), normalized (pruned, defaulted,
//! validated: [`schema`], [`kinds::rules`]), admitted ([`admission`]) and stored ([`store`]) unless the object
//! changed in the meantime. Watches and controllers ([`gc`]) follow the store.
//!
//! Not here: Russet's own kinds; they are custom resource definitions.

pub mod admission;
pub mod auth;
pub mod bootstrap;
pub mod call;
pub mod discovery;
pub mod flow_control;
pub mod gc;
pub mod kinds;
pub mod metrics;
pub mod object;
pub mod object_limit;
pub mod openapi;
pub mod output;
pub mod patch;
pub mod pki;
pub mod protobuf;
pub mod request;
pub mod schema;
pub mod selector;
pub mod server;
pub mod state;
pub mod status;
pub mod store;
pub mod table;
pub mod verbs;

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use russet_telemetry::tasks::TaskEnded;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use crate::auth::signer::Signer;
use crate::auth::user::MASTERS;
use crate::flow_control::{FlowControl, SystemUsers};
use crate::metrics::Metrics;
use crate::object_limit::ObjectLimits;
use crate::pki::{Authority, PkiError};
use crate::server::connection_limit::{ConnectionLimiter, ConnectionLimits};
use crate::server::host;
use crate::server::listen::{self, ConnectionService, LanListener};
use crate::server::tls::{self, Resolver};
use crate::state::ServerState;
use crate::store::embedded::Embedded;
use crate::store::etcd::{Etcd, EtcdConfig};
use crate::store::reflector::Reflector;
use crate::store::{Store, StoreError};

/// Validity of the administrator's certificate, in days; it is reissued at every start.
const ADMIN_DAYS: i64 = 365;

/// The file in the data directory that keeps the server open for other machines.
pub const LAN_MARKER: &str = "open-to-lan";

/// Configuration of a server.
#[derive(Clone, Debug)]
pub struct ApiServerConfig {
    /// Directory of the store, the keys and the kubeconfig.
    pub data_dir: PathBuf,
    /// Address to listen on; port 0 takes any free port.
    pub listen: SocketAddr,
    /// Registry of metrics; `None` creates one.
    pub registry: Option<prometheus::Registry>,
    /// Storage in etcd; `None` stores objects in a file of the data directory.
    pub etcd: Option<EtcdConfig>,
    /// Limits of connections.
    pub connections: ConnectionLimits,
    /// The users whose requests and connections have a share of their own.
    pub system: SystemUsers,
    /// The addresses to open for other machines once a join token exists; all of the host's if empty.
    pub lan: Vec<IpAddr>,
}

impl ApiServerConfig {
    /// A server in `data_dir` on loopback and the default port.
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            data_dir: data_dir.into(),
            listen: SocketAddr::from(([127, 0, 0, 1], 6443)),
            registry: None,
            etcd: None,
            connections: ConnectionLimits::default(),
            system: SystemUsers::default(),
            lan: Vec::new(),
        }
    }

    /// Sets the listen address.
    #[must_use]
    pub fn listen(mut self, listen: SocketAddr) -> Self {
        self.listen = listen;
        self
    }

    /// Sets the metrics registry.
    #[must_use]
    pub fn registry(mut self, registry: prometheus::Registry) -> Self {
        self.registry = Some(registry);
        self
    }

    /// Stores objects in etcd, which several servers may share.
    #[must_use]
    pub fn etcd(mut self, etcd: EtcdConfig) -> Self {
        self.etcd = Some(etcd);
        self
    }

    /// Sets the limits of connections.
    #[must_use]
    pub fn connections(mut self, connections: ConnectionLimits) -> Self {
        self.connections = connections;
        self
    }

    /// Names further components of the cluster.
    #[must_use]
    pub fn system(mut self, users: &[&str], groups: &[&str]) -> Self {
        self.system.users.extend(users.iter().map(ToString::to_string));
        self.system.groups.extend(groups.iter().map(ToString::to_string));
        self
    }

    /// Opens only these addresses for other machines.
    #[must_use]
    pub fn lan(mut self, addresses: Vec<IpAddr>) -> Self {
        self.lan = addresses;
        self
    }
}

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The data directory is unusable.
    #[error("cannot use the data directory {}: {source}; make it, or choose another with --data-dir", .path.display())]
    DataDir {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// Listening failed.
    #[error("cannot listen on {address}: {source}; if another server holds port {}, stop it or choose another port with --api-port", .address.port())]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: std::io::Error,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Keys or certificates are unusable.
    #[error(transparent)]
    Pki(#[from] PkiError),
    /// The keys that several servers share are unusable.
    #[error(transparent)]
    Shared(#[from] pki::shared::SharedError),
    /// Metrics could not be registered.
    #[error("cannot register the metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The bootstrap objects could not be written.
    #[error("cannot create the bootstrap objects: {0}")]
    Bootstrap(#[from] status::ApiError),
}

/// A running server.
pub struct RunningServer {
    addr: SocketAddr,
    authority: Arc<Authority>,
    kubeconfig: PathBuf,
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
    closed: mpsc::Receiver<Infallible>,
}

impl RunningServer {
    /// Its listen address.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its `https://…` URL.
    pub fn url(&self) -> String {
        format!("https://{}", self.addr)
    }

    /// The certificate of its CA.
    pub fn ca_pem(&self) -> &str {
        self.authority.cert_pem()
    }

    /// Its CA.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// The path of the administrator's kubeconfig.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Waits until one of the server's tasks ends, which none does before the server stops. Without it requests
    /// fail, or nothing is collected any more, so the process must end. Cancel safe.
    pub async fn ended(&mut self) -> TaskEnded {
        let (result, index, _) = futures::future::select_all(self.tasks.iter_mut()).await;
        self.tasks.swap_remove(index);
        match result {
            Ok(()) => TaskEnded { name: "API server", how: "returned".to_owned() },
            Err(error) => TaskEnded::new("API server", error),
        }
    }

    /// Stops the server: watches end, connections drain, the store closes. Its file is released, unless a
    /// request takes more than 5 s.
    pub async fn shutdown(self) {
        let Self { stop, tasks, mut closed, .. } = self;
        stop.send_replace(true);
        for task in tasks {
            if let Err(error) = task.await
                && error.is_panic()
            {
                tracing::error!(%error, "a task of the server panicked");
            }
        }
        // Handlers run to completion even after their connections are closed.
        if tokio::time::timeout(REQUEST_DRAIN_TIMEOUT, closed.recv()).await.is_err() {
            tracing::warn!(
                "a request still runs {} s after the server stopped",
                REQUEST_DRAIN_TIMEOUT.as_secs()
            );
        }
    }
}

/// How long running requests may take after their connections are closed at shutdown.
const REQUEST_DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Starts a server; it serves requests once this returns.
pub async fn start(config: ApiServerConfig) -> Result<RunningServer, Error> {
    let data = |source| Error::DataDir { path: config.data_dir.clone(), source };
    let pki_dir = config.data_dir.join("pki");
    std::fs::create_dir_all(&pki_dir).map_err(data)?;
    // Keys and every Secret are stored here; an existing directory may be readable by other users.
    for folder in [&config.data_dir, &pki_dir] {
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o700)).map_err(data)?;
    }
    let listener = TcpListener::bind(config.listen)
        .await
        .map_err(|source| Error::Listen { address: config.listen, source })?;
    let addr = listener.local_addr().map_err(|source| Error::Listen { address: config.listen, source })?;

    let store: Arc<dyn Store> = match &config.etcd {
        None => Arc::new(Embedded::open(&config.data_dir.join("store.redb"))?),
        Some(etcd) => {
            let store = Etcd::open(etcd).await?;
            pki::shared::adopt(&store, &pki_dir).await?;
            Arc::new(store)
        }
    };
    let authority = Arc::new(Authority::ensure(&pki_dir)?);
    let addresses = host::certificate_addresses(&host::host_addresses());
    let resolver = Arc::new(Resolver::new(&authority, &addresses)?);
    let acceptor = TlsAcceptor::from(Arc::new(tls::config(&authority, resolver.clone())?));

    let metrics = Metrics::new(config.registry.unwrap_or_default())?;
    let (stop, stopping) = watch::channel(false);
    let (open, closed) = mpsc::channel(1);
    let api = Arc::new(ServerState {
        kinds: Reflector::load(&*store),
        policies: Reflector::load(&*store),
        admission: Reflector::load(&*store),
        signer: Signer::ensure(&pki_dir.join("sa.key"))?,
        flow: FlowControl::new(config.system.clone(), metrics.clone()),
        limits: ObjectLimits::default(),
        metrics: metrics.clone(),
        documents: discovery::OpenApiDocuments::default(),
        store,
        stopping,
        closed: open,
    });
    bootstrap::run(&api, &authority).await?;

    let kubeconfig = config.data_dir.join("kubeconfig");
    let (cert, key) = authority.issue_client("russet-admin", &[MASTERS], ADMIN_DAYS)?;
    let host = if addr.ip().is_unspecified() { "127.0.0.1".into() } else { addr.ip().to_string() };
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    let url = format!("https://{host}:{}", addr.port());
    pki::write_kubeconfig(&kubeconfig, &url, authority.cert_pem(), &cert, &key)?;

    let limiter = ConnectionLimiter::new(config.connections, config.system, metrics);
    let service = ConnectionService { api: api.clone(), acceptor, limiter };
    let (accepted, connections) = mpsc::channel(1);
    let lan = LanListener {
        accepted: accepted.clone(),
        api: api.clone(),
        authority: authority.clone(),
        resolver,
        port: addr.port(),
        main: addr,
        addresses: config.lan,
        marker: config.data_dir.join(LAN_MARKER),
    };
    let mut tasks = vec![
        tokio::spawn(listen::accept(listener, accepted)),
        tokio::spawn(listen::serve(service, connections)),
        tokio::spawn(lan.run()),
    ];
    tasks.extend(gc::spawn(&api));
    if config.etcd.is_some() {
        tasks.push(gc::until_stopped(&api, gc::cache_refresh::run(api.clone())));
    }
    let ConnectionLimits { anonymous, authenticated, system, .. } = config.connections;
    tracing::info!(%addr, anonymous, authenticated, system, "the API server answers; these many connections fit");
    Ok(RunningServer { addr, authority, kubeconfig, stop, tasks, closed })
}
