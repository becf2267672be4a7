//! The gateway's server: starts, serves, and shuts down gracefully so that running responses can finish.

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prometheus::Registry;
use russet_crds::Budget;
use russet_rpc::cache_status::CacheStatus;
use russet_rpc::tls::TlsFiles;
use russet_telemetry::admin::Readiness;
use russet_telemetry::tasks::{TaskEnded, TaskSet};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::audit::{AuditError, AuditLog};
use crate::backends::{self, Backends};
use crate::benchmarks;
use crate::budgets::{self, Budgets, MemoryBudgets};
use crate::demand::{DemandReporter, DemandTracker};
use crate::dialects;
use crate::dispatch::{DispatchLimits, Dispatcher};
use crate::keys::{self, Keyring};
use crate::listen::{Certificate, CertificateError, Exposure, HttpListener, ListenerLimits, ServerFiles};
use crate::managed_models::{FindCatalogModel, ManagedModels};
use crate::metrics::Metrics;
use crate::middleware::{AuthLayer, check_request};
use crate::model_copies::ModelCopies;
use crate::mqtt::{MqttGateway, MqttInbox};
use crate::offline::OfflineContext;
use crate::origins::OriginPolicy;
use crate::pipelines::{self, PipelineContext, RequestedRuns};
use crate::providers::{self, Providers, SecretReader};
use crate::rejection::{unknown_path, wrong_method};
use crate::response_store::{ResponseStoreConfig, ResponseStoreError};
use crate::routes::{self, RoutingTable};
use crate::serving::{ApiState, KeptResponses};
use crate::workers::Workers;
use crate::zone_client::ZoneClients;

/// Configuration of a gateway.
#[derive(Clone)]
pub struct GatewayConfig {
    /// Client of the API server, as `russet:gateway`.
    pub client: kube::Client,
    /// The client certificate for calls to engines.
    pub tls: TlsFiles,
    /// Addresses clients connect to: plain HTTP on loopback, TLS and keys everywhere else.
    pub listen: Vec<SocketAddr>,
    /// The server certificate that clients on other machines see.
    pub certificate: Option<ServerFiles>,
    /// Address that serves metrics without TLS, beside the loopback listeners, which serve them anyway.
    pub metrics: Option<SocketAddr>,
    /// Timeouts and limits of dispatch.
    pub dispatch: DispatchLimits,
    /// Timeouts and limits of client connections.
    pub listener_limits: ListenerLimits,
    /// Pages and names that need no key on loopback.
    pub origins: OriginPolicy,
    /// Where responses of OpenAI's Responses API, files and batches are kept; `None` keeps none.
    pub responses: Option<ResponseStoreConfig>,
    /// Finds models that clients with such a key may pull; `None` where this gateway creates and deletes none.
    pub model_management: Option<FindCatalogModel>,
    /// Folder of the audit log; `None` writes none.
    pub audit_log: Option<PathBuf>,
    /// File with what requests reserved and used of Budgets; `None` keeps that in memory.
    pub budget_journal: Option<PathBuf>,
    /// The broker that requests of the inbox may come from.
    pub mqtt: Option<MqttInbox>,
}

impl GatewayConfig {
    /// A gateway with default limits for this client, certificate and address.
    pub fn new(client: kube::Client, tls: TlsFiles, listen: SocketAddr) -> Self {
        let (dispatch, listener_limits) = (DispatchLimits::default(), ListenerLimits::default());
        Self {
            client,
            tls,
            listen: vec![listen],
            certificate: None,
            metrics: None,
            dispatch,
            listener_limits,
            origins: OriginPolicy::default(),
            responses: None,
            model_management: None,
            audit_log: None,
            budget_journal: None,
            mqtt: None,
        }
    }
}

/// Why the gateway cannot run.
#[derive(Debug, Error)]
pub enum Error {
    /// A non-loopback address has no certificate.
    #[error(
        "other machines can reach {0}, so the gateway requires TLS there and needs a certificate: pass --tls-cert \
         and --tls-key (`russet up --gateway-listen` creates a certificate), or listen on 127.0.0.1"
    )]
    NoCertificate(SocketAddr),
    /// The certificate is unusable.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// Another program uses the port.
    #[error("port {} of {} is in use by another program; stop it, or choose another port (`russet up --gateway-port` or `--gateway-listen`, `russet gateway --listen`)", .0.port(), .0.ip())]
    PortInUse(SocketAddr),
    /// Listening on the address failed.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: std::io::Error,
    },
    /// The registry already has the gateway's metrics.
    #[error("cannot register the gateway's metrics: the registry has those of another gateway")]
    Metrics(#[source] prometheus::Error),
    /// The threads that serve requests do not start.
    #[error(
        "cannot start the gateway's threads; the system's limits of threads and of open files may be too low"
    )]
    Workers(#[source] std::io::Error),
    /// The audit log cannot be written.
    #[error(transparent)]
    Audit(#[from] AuditError),
    /// A task that must live is gone.
    #[error(transparent)]
    Task(#[from] TaskEnded),
}

/// Runs the gateway until `shutdown`; then running responses have `dispatch.shutdown_grace` to finish.
/// `ready` becomes true once the cluster was listed.
pub async fn run(
    config: GatewayConfig,
    registry: Registry,
    ready: Arc<AtomicBool>,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Error> {
    let GatewayConfig {
        client,
        tls,
        listen,
        certificate,
        metrics,
        dispatch: limits,
        listener_limits,
        origins,
        responses,
        model_management,
        audit_log,
        budget_journal,
        mqtt,
    } = config;
    let audit = audit_log.map(|folder| AuditLog::open(&folder)).transpose()?;
    // An Err means that the process has installed a provider already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let certificate = certificate.map(Certificate::read).transpose()?;
    let reporter = DemandReporter::new(client.clone(), listen.first().map_or(0, SocketAddr::port));
    let mut listeners = Vec::new();
    for address in listen {
        listeners.push(match (Exposure::for_address(address), &certificate) {
            (Exposure::Loopback, _) => HttpListener::loopback(bind(address).await?),
            (Exposure::Network, Some(certificate)) => {
                HttpListener::network(bind(address).await?, certificate)
            }
            (Exposure::Network, None) => return Err(Error::NoCertificate(address)),
        });
        tracing::info!(%address, "the gateway listens");
    }
    let (publish_table, table) = watch::channel(Arc::new(RoutingTable::default()));
    let (publish_keyring, keyring) = watch::channel(Arc::new(Keyring::default()));
    // All tasks end with this function.
    let mut tasks = TaskSet::default();
    let caches = CacheStatus::default();
    let collector = caches.collector().map_err(Error::Metrics)?;
    registry.register(Box::new(collector)).map_err(Error::Metrics)?;
    tasks.spawn("cache reports", {
        let caches = caches.clone();
        async move { caches.report().await }
    });
    tasks.spawn("routes", routes::follow(client.clone(), caches.clone(), publish_table));
    tasks.spawn("keys", keys::follow(client.clone(), caches.clone(), publish_keyring));
    tasks.spawn("key reports", keys::report(client.clone(), keyring.clone()));
    let gateway_metrics = Arc::new(Metrics::new(&registry).map_err(Error::Metrics)?);
    let budgets = Budgets::open(client.clone(), budget_journal.as_deref(), gateway_metrics.clone());
    let budgets = Arc::new(budgets);
    let own_budgets = budgets.clone();
    tasks.spawn("budgets", budgets::follow(client.clone(), caches.clone(), budgets.clone()));
    let backends = Backends::new(tls.clone());
    let copies = Some(ModelCopies::new(client.clone()));
    let secrets = client.clone();
    let managed = model_management.map(|find| Arc::new(ManagedModels::new(client.clone(), find)));
    tasks.spawn(
        "benchmarks",
        benchmarks::run(client, caches.clone(), table.clone(), backends, limits.engine_timeout),
    );
    if let Some(certificate) = certificate {
        tasks.spawn("certificate", certificate.follow());
    }
    if let Some(address) = metrics {
        let listener = bind(address).await?;
        let (registry, readiness) = (registry.clone(), readiness(&ready, &caches));
        tasks.spawn("metrics", async move {
            if let Err(error) = russet_telemetry::admin::serve(listener, registry, readiness).await {
                tracing::error!("the metrics endpoint failed: {error}");
            }
        });
    }
    tasks.spawn("readiness", {
        let (mut table, mut keyring, ready) = (table.clone(), keyring.clone(), ready.clone());
        let mut budgets = budgets.listed();
        async move {
            let table = table.wait_for(|table| table.synced).await.is_ok();
            let table = budgets.wait_for(|listed| *listed).await.is_ok() && table;
            if table && keyring.wait_for(|keyring| keyring.synced).await.is_ok() {
                ready.store(true, Ordering::Release);
                std::future::pending::<()>().await;
            }
        }
    });
    let gateway = GatewayServer {
        listeners,
        table,
        keyring,
        tls,
        dispatch: limits,
        listener_limits,
        registry,
        ready: ready.clone(),
        reporter: Some(reporter),
        origins,
        caches,
        responses,
        copies,
        managed,
        secrets: Some(secrets),
        audit,
        metrics: Some(gateway_metrics),
        budgets: Some(budgets),
        memory_budgets: None,
        mqtt,
    };
    let served = tokio::select! {
        served = gateway.serve(shutdown) => served,
        ended = tasks.ended() => Err(ended.into()),
    };
    ready.store(false, Ordering::Release);
    // What it was granted and does not need is there for the others at once.
    let _ = tokio::time::timeout(FINAL_REPORT_TIMEOUT, own_budgets.close()).await;
    served
}

/// A gateway over any source of routing tables and keys; [`run`] feeds it from Kubernetes, tests from memory.
pub struct GatewayServer {
    listeners: Vec<HttpListener>,
    table: watch::Receiver<Arc<RoutingTable>>,
    keyring: watch::Receiver<Arc<Keyring>>,
    tls: TlsFiles,
    dispatch: DispatchLimits,
    listener_limits: ListenerLimits,
    registry: Registry,
    ready: Arc<AtomicBool>,
    /// Reports demand to the cluster.
    reporter: Option<DemandReporter>,
    origins: OriginPolicy,
    /// What the caches lack, for `/readyz`.
    caches: CacheStatus,
    /// Where responses are kept.
    responses: Option<ResponseStoreConfig>,
    /// Reads how far the files of Models are.
    copies: Option<ModelCopies>,
    /// Creates and deletes models for clients.
    managed: Option<Arc<ManagedModels>>,
    /// Reads the keys of providers.
    secrets: Option<kube::Client>,
    /// Where is written what leaves.
    audit: Option<AuditLog>,
    /// Those of the registry, where they are registered already.
    metrics: Option<Arc<Metrics>>,
    /// What requests may use.
    budgets: Option<Arc<Budgets>>,
    /// The same without an API server, and the file of their journal.
    memory_budgets: Option<(MemoryBudgets, PathBuf)>,
    /// Where requests of the inbox come from, beside its listeners.
    mqtt: Option<MqttInbox>,
}

/// How long the errors of unfinished responses may take to reach their clients.
const FINAL_REPORT_TIMEOUT: Duration = Duration::from_secs(2);

impl GatewayServer {
    /// A gateway on these listeners that routes by `table` and authenticates by `keyring`.
    pub fn new(
        listeners: Vec<HttpListener>,
        table: watch::Receiver<Arc<RoutingTable>>,
        keyring: watch::Receiver<Arc<Keyring>>,
        tls: TlsFiles,
        dispatch: DispatchLimits,
        listener_limits: ListenerLimits,
    ) -> Self {
        let ready = Arc::new(AtomicBool::new(true));
        let registry = Registry::new();
        let origins = OriginPolicy::default();
        Self {
            listeners,
            table,
            keyring,
            tls,
            dispatch,
            listener_limits,
            registry,
            ready,
            reporter: None,
            origins,
            caches: CacheStatus::default(),
            responses: None,
            copies: None,
            managed: None,
            secrets: None,
            audit: None,
            metrics: None,
            budgets: None,
            memory_budgets: None,
            mqtt: None,
        }
    }

    /// The same, keeping responses there.
    pub fn with_responses(self, responses: ResponseStoreConfig) -> Self {
        Self { responses: Some(responses), ..self }
    }

    /// The same, writing there what leaves and how requests end.
    pub fn with_audit_log(self, audit: AuditLog) -> Self {
        Self { audit: Some(audit), ..self }
    }

    /// The same within these Budgets, which are in memory, with what requests used in that file.
    pub fn with_budgets(self, budgets: Vec<Budget>, journal: PathBuf) -> Self {
        Self { memory_budgets: Some((MemoryBudgets::of(budgets), journal)), ..self }
    }

    /// The same, taking requests of the inbox from a broker too.
    pub fn with_mqtt(self, mqtt: MqttInbox) -> Self {
        Self { mqtt: Some(mqtt), ..self }
    }

    /// Serves until `shutdown`, then lets running responses finish.
    pub async fn serve(self, shutdown: impl Future<Output = ()> + Send + 'static) -> Result<(), Error> {
        let Self {
            listeners,
            table,
            keyring,
            tls,
            dispatch: limits,
            listener_limits,
            registry,
            ready,
            reporter,
            origins,
            caches,
            responses,
            copies,
            managed,
            secrets,
            audit,
            metrics,
            budgets,
            memory_budgets,
            mqtt,
        } = self;
        let origins = Arc::new(origins);
        let closing = CancellationToken::new();
        let stopping = CancellationToken::new();
        let metrics = match metrics {
            Some(metrics) => metrics,
            None => Arc::new(Metrics::new(&registry).map_err(Error::Metrics)?),
        };
        let kept = match responses {
            Some(config) => open_store(config, metrics.clone()).await,
            None => None,
        };
        let budgets = budgets.or_else(|| {
            let (memory, journal) = memory_budgets?;
            Some(Arc::new(Budgets::in_memory(&memory, Some(&journal), metrics.clone())))
        });
        let demand = Arc::new(DemandTracker::new(limits.holding, metrics.clone()));
        // The tasks end with this function.
        let mut reporting = TaskSet::default();
        if let Some(reporter) = reporter.clone() {
            reporting.spawn("demand reports", reporter.run(demand.clone(), table.clone()));
        }
        let backends = Arc::new(Backends::new(tls).with_choice(limits.replica_choice));
        reporting.spawn("prefixes", backends::follow(backends.clone(), table.clone()));
        let (clients, client) = (ZoneClients::default(), secrets.clone());
        let (secrets, pipeline_table) = (Arc::new(SecretReader::new(secrets)), table.clone());
        let providers = Providers::new(clients.clone(), secrets.clone(), audit.clone(), metrics.clone());
        let providers = Arc::new(providers);
        if let Some(client) = client.clone() {
            let report = providers::report(client, providers.clone(), table.clone());
            reporting.spawn("provider reports", report);
        }
        let requested = kept
            .as_ref()
            .zip(client.clone())
            .map(|(kept, client)| Arc::new(RequestedRuns::new(client, kept.store())));
        let dispatcher = Dispatcher::new(
            table,
            backends,
            demand.clone(),
            metrics.clone(),
            limits,
            closing.clone(),
            providers,
        )
        .with_budgets(budgets)
        .with_pipelines(requested.clone());
        let api =
            ApiState::new(Arc::new(dispatcher), metrics.clone(), &limits, kept.clone(), copies, managed)
                .with_audit_log(audit.clone());
        let api = Arc::new(api);
        // What nobody waits for, which ends with this function at the latest.
        let mut offline = JoinSet::new();
        if let Some(kept) = &kept {
            let context = OfflineContext {
                router: dialects::routes(&api),
                keyring: keyring.clone(),
                dialect: dialects::named,
                dialect_of: dialects::owner,
                stopping: stopping.clone(),
            };
            if let Some(requested) = requested {
                let (table, metrics) = (pipeline_table, metrics.clone());
                let outside = (clients, secrets);
                let context =
                    PipelineContext::new(requested, context.clone(), table, outside, audit, metrics);
                offline.spawn(pipelines::run(context, caches.clone()));
            }
            offline.spawn(kept.clone().run(context));
        } else if client.is_some() {
            tracing::info!("no Pipelines are run: there is no store for what they make");
        }
        match (mqtt, &kept) {
            (Some(config), Some(kept)) => {
                let (api, inbox, keyring) = (api.clone(), kept.inbox(), keyring.clone());
                let gateway = MqttGateway { config, api, inbox, keyring, stopping: stopping.clone() };
                offline.spawn(gateway.run());
            }
            (Some(_), None) => tracing::error!(
                "no requests are taken from the MQTT broker: there is no inbox without a store of responses"
            ),
            (None, _) => {}
        }
        let mut serving = JoinSet::new();
        let workers = Arc::new(Workers::start().map_err(Error::Workers)?);
        for listener in listeners {
            let layer = AuthLayer {
                exposure: listener.exposure(),
                origins: origins.clone(),
                keyring: keyring.clone(),
                wait: limits.sync_timeout,
                metrics: metrics.clone(),
                format: dialects::error_response,
            };
            let router = dialects::routes(&api)
                .merge(russet_telemetry::admin::router(registry.clone(), readiness(&ready, &caches)))
                .fallback(|request| unknown_path(request, dialects::error_response))
                .method_not_allowed_fallback(|request| wrong_method(request, dialects::error_response))
                .layer(axum::middleware::from_fn_with_state(Arc::new(layer), check_request));
            serving.spawn(listener.serve(router, listener_limits, stopping.clone(), workers.clone()));
        }
        let shut_down = async {
            shutdown.await;
            ready.store(false, Ordering::Release);
            stopping.cancel();
            tokio::time::sleep(limits.shutdown_grace).await;
            closing.cancel();
            tokio::time::sleep(FINAL_REPORT_TIMEOUT).await;
        };
        let all_ended = async {
            while let Some(ended) = serving.join_next().await {
                ended.map_err(|error| TaskEnded::new("listener", error))?;
            }
            // Responses without a client have the same time to end.
            if let Some(kept) = kept {
                kept.idle().await;
            }
            while offline.join_next().await.is_some() {}
            Ok(())
        };
        let ended = tokio::select! {
            ended = all_ended => ended,
            ended = reporting.ended() => Err(ended),
            () = shut_down => Ok(()),
        };
        reporting.shutdown().await;
        // Closes what is left of connections.
        serving.shutdown().await;
        if let Some(reporter) = reporter {
            // Without the final report, this gateway's waiting and running requests would count for another
            // minute.
            let _ = tokio::time::timeout(FINAL_REPORT_TIMEOUT, reporter.final_report(&demand)).await;
        }
        // Requests that are cut here settle what they reserved.
        if tokio::time::timeout(FINAL_REPORT_TIMEOUT, workers.end()).await.is_err() {
            tracing::warn!("a thread that serves requests does not end");
        }
        Ok(ended?)
    }
}

/// Opens the store of responses. Where that fails, the gateway serves all the same, and keeps nothing.
async fn open_store(config: ResponseStoreConfig, metrics: Arc<Metrics>) -> Option<Arc<KeptResponses>> {
    let opened = tokio::task::spawn_blocking(move || KeptResponses::open(&config, metrics)).await;
    match opened.map_err(|error| ResponseStoreError::Failed(error.to_string())).flatten() {
        Ok(kept) => Some(Arc::new(kept)),
        Err(error) => {
            tracing::error!(%error, "responses are not kept until this is mended and the gateway starts again");
            None
        }
    }
}

/// Readiness, with what the caches lack.
fn readiness(ready: &Arc<AtomicBool>, caches: &CacheStatus) -> Readiness {
    let caches = caches.clone();
    Readiness { ready: ready.clone(), problems: Arc::new(move || caches.problems(std::time::Instant::now())) }
}

async fn bind(address: SocketAddr) -> Result<TcpListener, Error> {
    TcpListener::bind(address).await.map_err(|source| match source.kind() {
        std::io::ErrorKind::AddrInUse => Error::PortInUse(address),
        _ => Error::Listen { address, source },
    })
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
    async fn other_machines_get_tls_or_nothing() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let api = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let folder = std::path::Path::new("/nonexistent");
        let config = GatewayConfig::new(
            kube::Client::try_from(api).unwrap(),
            TlsFiles::in_dir(folder),
            "0.0.0.0:0".parse().unwrap(),
        );
        let flag = || Arc::new(AtomicBool::new(false));
        let result = run(config.clone(), Registry::new(), flag(), std::future::pending()).await;
        assert!(matches!(result, Err(Error::NoCertificate(_))), "{result:?}");
        let files = ServerFiles { cert: folder.join("tls.crt"), key: folder.join("tls.key") };
        let unreadable = GatewayConfig { certificate: Some(files), ..config };
        let result = run(unreadable, Registry::new(), flag(), std::future::pending()).await;
        assert!(matches!(result, Err(Error::Certificate(CertificateError::Read { .. }))), "{result:?}");
    }
}
