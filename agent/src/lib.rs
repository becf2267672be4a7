//! The node agent: joins a machine to a cluster, reports it, keeps model files on it and runs one
//! engine process per Shard. It decides nothing about placement, and it never links MLX.
//!
//! ```text
//! join ─▶ identity            hardware ─▶ node ─▶ InferenceNode, Lease
//! ModelCopy ─▶ copies ─▶ store              Shard ─▶ decide ─▶ supervise ─▶ process
//! ```

mod address;
mod copies;
pub mod engine_activity;
mod events;
pub mod fabric;
pub mod grants;
pub mod hardware;
pub mod helper;
pub mod join;
mod lease;
pub mod leave;
pub mod linux;
pub mod machine_load;
pub mod machine_power;
pub mod macos;
mod metrics;
mod metrics_proxy;
pub mod mqtt;
mod node;
pub mod oom_guard;
pub mod peer_download;
pub mod peers;
pub mod process;
mod renew;
pub mod shard_actions;
pub mod status;
mod status_writer;
pub mod store;
mod supervise;
mod throughput_report;
pub mod token;
pub mod transfer_limits;
mod watcher;

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use kube::Client;
use thiserror::Error;
use tokio::sync::{oneshot, watch};

use russet_rpc::cache_status::CacheStatus;
use russet_rpc::informer;
use russet_rpc::tls::{Protocol, TlsError, TlsFiles};
use russet_telemetry::admin::Readiness;
use russet_telemetry::tasks::{TaskEnded, TaskSet};

use self::fabric::measure::{self, LinkMonitor};
use self::fabric::probe::{self, PortScan, Probe};
pub use self::join::access::Access;
use self::join::identity::{IdentityError, NodeIdentity};
pub use self::join::{JoinConfig, JoinError, join};
pub use self::mqtt::MqttConfig;
use self::mqtt::MqttPresence;
pub use self::node::REPORT_INTERVAL;
use self::oom_guard::Headroom;
use self::oom_guard::panics::{self, Panics};
use self::peers::PeerListener;
use self::store::StoreError;

/// Where macOS stores kernel panic reports.
const MACOS_REPORTS: &str = "/Library/Logs/DiagnosticReports";

/// Configuration of an agent.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// State directory of this machine; the agent uses `agent/` in it.
    pub data_dir: PathBuf,
    /// Name the node joined under.
    pub node_name: String,
    /// Memory size to simulate, in bytes; the real size when absent.
    pub memory: Option<u64>,
    /// Directories that `file://` models may be read from; never those in `data_dir`.
    pub allow_file_roots: Vec<PathBuf>,
    /// Addresses of sources that are not on the public internet.
    pub allow_private_sources: Vec<store::Cidr>,
    /// Address at which other machines reach this node; discovered when absent.
    pub address: Option<IpAddr>,
    /// Path of the engine program; `RUSSET_ENGINE` or the one beside this program when absent.
    pub engine_binary: Option<PathBuf>,
    /// Listen address of `/metrics`, `/healthz` and `/readyz`.
    pub metrics_listen: SocketAddr,
    /// Directory of stub programs that replace the system's port tools, to simulate a Mac; the real
    /// machine when absent.
    pub fabric_tools: Option<PathBuf>,
    /// MQTT broker to which this node and its deployments announce that they are online.
    pub mqtt: Option<MqttConfig>,
    /// Socket of this machine's root helper.
    pub helper: PathBuf,
    /// How often the node's status is written if nothing changes, and so how soon the agent learns of an edited spec or
    /// of its removal; [`REPORT_INTERVAL`] unless a test cannot wait for it.
    pub report_interval: Duration,
}

/// Why an agent could not start. Once it runs, only its shutdown or its node's removal ends it.
#[derive(Debug, Error)]
pub enum Error {
    /// No identity exists.
    #[error(
        "{0} holds no identity of a node; join a cluster first: `russet join URL --token T`, with a token of `russet token create`"
    )]
    NotJoined(PathBuf),
    /// The identity belongs to another node.
    #[error(
        "{folder} belongs to node {found}, not to {asked}; use --node-name {found} or another --data-dir"
    )]
    DifferentNode {
        /// The agent's directory.
        folder: PathBuf,
        /// Node name in the identity.
        found: String,
        /// Node name that was configured.
        asked: String,
    },
    /// Another agent uses the directory.
    #[error("another agent runs with {0}; stop it, or give this one its own --data-dir")]
    Locked(PathBuf),
    /// The identity cannot be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The model store cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The hardware cannot be read.
    #[error("this machine's hardware cannot be read")]
    Hardware(#[source] std::io::Error),
    /// The metrics port is taken.
    #[error("metrics cannot be served at {address}: {source}; choose another port with --metrics-listen")]
    Metrics {
        /// Listen address.
        address: SocketAddr,
        /// System error.
        source: std::io::Error,
    },
    /// No port is free for other agents to connect to.
    #[error(
        "no port from 20000 to 29999 is free at which other agents could reach this one; stop what uses them"
    )]
    Peers(#[source] std::io::Error),
    /// The node's certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The cluster has removed the node.
    #[error(
        "node {0} was removed from the cluster, so its engines were stopped; to bring it back, join it again with a new token of `russet token create`"
    )]
    Removed(String),
    /// A task that must live is gone; engines run on and are adopted by the next agent.
    #[error(transparent)]
    Task(#[from] TaskEnded),
}

/// The agent's directory in a data directory.
pub(crate) fn agent_dir(data_dir: &Path) -> PathBuf {
    data_dir.join("agent")
}

fn engines_dir(data_dir: &Path) -> PathBuf {
    agent_dir(data_dir).join("engines")
}

/// Runs the agent until `shutdown` completes. Engines keep running; [`stop_engines`] kills them.
pub async fn run(config: AgentConfig, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    rustls::crypto::ring::default_provider().install_default().ok();
    let folder = agent_dir(&config.data_dir);
    let identity = NodeIdentity::load(&folder)?.ok_or_else(|| Error::NotJoined(folder.clone()))?;
    if identity.node != config.node_name {
        let asked = config.node_name;
        return Err(Error::DifferentNode { folder, found: identity.node, asked });
    }
    let _lock = lock(&folder)?;
    let (client, watching) = clients(&identity).await?;
    let machine = hardware::Hardware::measure().map_err(Error::Hardware)?;
    let endpoint = std::env::var("HF_ENDPOINT").unwrap_or_else(|_| "https://huggingface.co".into());
    let paces = transfer_limits::TransferLimiters::default();
    let context = store::Context::new(&endpoint, config.allow_file_roots.clone())?;
    let mut context = context.with_private_sources(&config.allow_private_sources)?;
    context.closed_dirs.push(config.data_dir.clone());
    context.limiter = paces.sources.clone();
    let store = store::Store::open(folder.join("models"), context)?;
    let (addresses, address) = watch::channel(address::initial(config.address, &identity.server).await);

    let listener = tokio::net::TcpListener::bind(config.metrics_listen)
        .await
        .map_err(|source| Error::Metrics { address: config.metrics_listen, source })?;
    // An unspecified address (0.0.0.0) cannot be scraped: publish the node's address.
    let metrics_address = listener.local_addr().ok().map(|at| match at.ip().is_unspecified() {
        true => SocketAddr::new(*address.borrow(), at.port()).to_string(),
        false => at.to_string(),
    });
    let caches = CacheStatus::default();
    let (registry, metrics) = metrics::AgentMetrics::new(&caches);
    let ready = Arc::new(AtomicBool::new(false));

    tracing::info!(node = identity.node, address = %*address.borrow(), server = identity.server, "agent starts");
    let mut tasks = TaskSet::default();
    tasks.spawn(
        "lease",
        lease::run(client.clone(), identity.node.clone(), machine.boot_id.clone(), metrics.clone()),
    );
    let (gone, removed) = oneshot::channel();
    let (report, limits) = node::memory_channel(config.memory.unwrap_or(machine.memory));
    let before = node::last_status(&client, &identity.node).await;
    let (reported, links) = (PortScan::from_status(&before), before.links);
    let measured = measure::restored(&reported.ports, &links);
    let (fabric, ports) = watch::channel(reported);
    let (linked, links) = watch::channel(links);
    let (measured_power, power) = watch::channel(before.energy);
    let activity = engine_activity::EngineActivity::default();
    let (found, measured) = watch::channel(measured);
    let idle = peers::IdleGate::new(report.granted());
    let files = TlsFiles::in_dir(&folder);
    let peer_port = PeerListener::free_port().map_err(Error::Peers)?;
    tasks.spawn(
        "peers",
        peers::run(PeerListener {
            files: files.clone(),
            port: peer_port,
            address: address.clone(),
            ports: ports.clone(),
            server: peers::PeerServer { idle_gate: idle.clone(), store: store.clone() },
        }),
    );
    let connector = files.connector(Protocol::Agents)?;
    tasks.spawn(
        "link measurements",
        measure::run(LinkMonitor {
            connector: connector.clone(),
            links: links.clone(),
            idle_gate: idle,
            measurements: found,
            metrics: metrics.clone(),
        }),
    );
    tasks.spawn("port scan", probe::run(Probe::new(config.fabric_tools.clone()), fabric));
    let (asks, asked) = watch::channel(None);
    let (helper_conditions_sender, helped) =
        watch::channel(helper::reconcile::from_status(&before.conditions));
    tasks.spawn(
        "helper",
        helper::reconcile::run(helper::reconcile::HelperSync {
            socket: config.helper.clone(),
            node: identity.node.clone(),
            boot: machine.boot_id.clone(),
            spec: asked,
            conditions: helper_conditions_sender,
        }),
    );
    tasks.spawn(
        "node status",
        node::run(node::NodeReporter {
            client: client.clone(),
            name: identity.node.clone(),
            machine: machine.clone(),
            memory_override: config.memory,
            address: address.clone(),
            metrics_address,
            ports,
            link_measurements: measured,
            power,
            links: linked,
            peer_port,
            store: store.clone(),
            limiters: paces.clone(),
            metrics: metrics.clone(),
            ready: ready.clone(),
            channel: report,
            helper_spec: asks,
            helper_conditions: helped,
            removed: gone,
            report_interval: config.report_interval,
        }),
    );
    tasks.spawn("cache reports", {
        let caches = caches.clone();
        async move { caches.report().await }
    });
    tasks.spawn(
        "machine load",
        machine_load::run(
            config.fabric_tools.clone(),
            machine_load::LoadObserver::new(metrics.clone(), activity.clone(), before.energy, measured_power),
        ),
    );
    tasks.spawn("address", address::run(config.address, identity.server.clone(), addresses));
    tasks.spawn("certificate renewal", renew::run(identity.clone(), metrics.clone()));
    let exposition = metrics_proxy::MetricsProxy::default();
    let pages = exposition.pages();
    let readiness = Readiness {
        ready,
        problems: Arc::new({
            let caches = caches.clone();
            move || caches.problems(std::time::Instant::now())
        }),
    };
    tasks.spawn("metrics", async move {
        if let Err(error) = russet_telemetry::admin::serve_with(listener, registry, readiness, pages).await {
            tracing::error!(%error, "metrics are no longer served");
        }
    });
    let outbox = status_writer::StatusQueue::start(client.clone(), &mut tasks);
    let events = events::EventRecorder::start(client.clone(), identity.node.clone(), &mut tasks);
    let (free, left) =
        watch::channel(Headroom { total: machine.memory, available: u64::MAX, critical: false });
    tasks.spawn("OOM guard", oom_guard::run(machine.memory, free));
    let (panicked, panics) = watch::channel(Panics::default());
    let reading = panics::PanicScanner {
        known: folder.join("panics.json"),
        reports: config.fabric_tools.as_ref().map_or(MACOS_REPORTS.into(), |tools| tools.join("reports")),
        suspects: panics::suspects(&engines_dir(&config.data_dir), &machine.boot_id),
        panicked,
        events: events.clone(),
    };
    // Before any claim, and before it is recorded which ranks were lost.
    reading.scan();
    tasks.spawn("panic scan", reading.run());
    let watcher = watcher::NodeWatcher { client: watching, node: &identity.node, caches };
    let (shards, model_copies) = (watcher.shards(&mut tasks), watcher.copies(&mut tasks));
    let reach = copies::PeerAccess {
        downloader: peer_download::PeerDownloader { store, connector, limiter: paces.nodes.clone() },
        address: address.clone(),
        links: links.clone(),
    };
    let copies = copies::Copies::new(
        client,
        reach,
        paces,
        outbox.clone(),
        metrics.clone(),
        leave::leaving_marker(&folder),
    );
    let mut presence = MqttPresence::start(config.mqtt, &identity.node, &folder);
    let supervisor = supervise::Supervisor::new(supervise::Setup {
        engines: engines_dir(&config.data_dir),
        tls_dir: folder.clone(),
        binary: process::spawn::binary(config.engine_binary.as_deref()),
        address,
        boot_id: machine.boot_id,
        limits,
        status_queue: outbox,
        events,
        metrics,
        metrics_proxy: exposition,
        copies,
        links,
        headroom: left,
        panics,
        activity,
        mqtt: presence.handle(),
    });
    let mut lost = None;
    let removed = tokio::select! {
        // The reporter's task ends after it has signalled a removal.
        biased;
        Ok(()) = removed => true,
        () = leave::wait_forced(&folder) => true,
        () = shutdown => false,
        ended = tasks.ended() => {
            lost = Some(ended);
            false
        }
        ended = presence.ended() => {
            lost = Some(ended);
            false
        }
        () = supervisor.run(shards, model_copies) => false,
    };
    tasks.shutdown().await;
    presence.end(removed).await;
    if let Some(ended) = lost {
        return Err(ended.into());
    }
    if removed {
        stop_engines(&config.data_dir).await;
        helper::reconcile::release(&config.helper, &identity.node).await;
        // `russet leave` reports a removal that it requested itself.
        return if leave::leaving_marker(&folder).exists() {
            Ok(())
        } else {
            Err(Error::Removed(identity.node))
        };
    }
    tracing::info!(
        "the agent stops; engines that are not stopped with it run on for a minute and wait to be adopted"
    );
    Ok(())
}

/// Kills every engine that an agent of `data_dir` left running.
pub async fn stop_engines(data_dir: &Path) {
    let engines = engines_dir(data_dir);
    let records = process::record::load(&engines);
    for record in &records {
        if let Some(process) = &record.process {
            // The record's own boot id: after a reboot no start time matches.
            process.kill(&process.boot_id);
        }
        process::record::remove(&engines, &record.shard);
    }
}

/// Two clients: one for requests, which must fail when the server hangs, and one for watches, which
/// may be silent for as long as they last.
async fn clients(identity: &NodeIdentity) -> Result<(Client, Client), Error> {
    fn common(config: &mut kube::Config) {
        config.connect_timeout = Some(Duration::from_secs(5));
        // The agent retries itself: a busy server must not delay newer reports.
        config.default_retry = false;
    }
    let requests = identity.client(|config| {
        common(config);
        config.read_timeout = Some(Duration::from_secs(10));
        config.reset_reader_on_write = true;
    });
    let watching = identity.client(|config| {
        common(config);
        // Longer than a watch without events: a list has no timeout of its own.
        config.read_timeout = Some(Duration::from_secs(u64::from(informer::WATCH_SECONDS) + 10));
    });
    Ok((requests.await?, watching.await?))
}

/// Attempts to lock a file, and the time between them.
const MAX_LOCK_ATTEMPTS: u32 = 20;
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(50);

pub(crate) fn lock(folder: &Path) -> Result<std::fs::File, Error> {
    let path = folder.join("lock");
    let io = |source| IdentityError::Io { path: path.clone(), source };
    let file = std::fs::File::create(&path).map_err(io)?;
    match lock_file(&file) {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(Error::Locked(folder.to_owned())),
        Err(std::fs::TryLockError::Error(source)) => Err(io(source).into()),
    }
}

/// Locks a file, within a second. Blocks. Retries because the lock may be held for a moment longer: a child
/// process inherits its parent's files until it executes, a killed agent may have been starting one, and a
/// dropped disk write does not end at once.
pub(crate) fn lock_file(file: &std::fs::File) -> Result<(), std::fs::TryLockError> {
    for _ in 1..MAX_LOCK_ATTEMPTS {
        match file.try_lock() {
            Err(std::fs::TryLockError::WouldBlock) => std::thread::sleep(LOCK_RETRY_INTERVAL),
            other => return other,
        }
    }
    file.try_lock()
}
