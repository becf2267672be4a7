//! The process of one rank from start to exit code: bind, load, join, serve, and end so that every open
//! stream gets the reason.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use russet_model::config::CONFIG;
use russet_rpc::engine as pb;
use russet_rpc::engine::control_server::ControlServer;
use russet_rpc::engine::engine_server::EngineServer;
use russet_rpc::tls::{TlsError, TlsFiles};
use russet_wire::engine_config::{Dtype, EngineConfig, PeerRank, Transport};
use russet_wire::engine_options::{DEFAULT_MAX_WAITING_REQUESTS, Speculation, WeightQuantization};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::Instant;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

use crate::config::{self, ConfigError};
use crate::control_service::{self, ControlService};
use crate::engine_service::{EngineService, GroupNodes, LeaderIntake, ServiceRole};
use crate::executor::{Addresses, CacheSupport, Executor, ReplyReceiver};
use crate::group::follower::Follower;
use crate::group::leader;
use crate::lifecycle::{FailureCause, FailureReport, Lifecycle, Phase, RankStatus, Reuse};
use crate::metrics::EngineMetrics;
use crate::model_modules;
use crate::pooling::{PoolingIntake, TextTokenizer};
use crate::prefix_cache::{block_hash::BlockHash, fingerprint};
use crate::reform;
use crate::rings::{RingTransports, Rings};
use crate::scheduler::{Scheduler, SchedulerConfig};
use crate::served_adapters::ServedAdapters;
use crate::speculative::Proposers;
use crate::tokenizer::{ChatTokenizer, TokenizerError};
use crate::tunnel::{StubSwitch, TunnelError};

/// HTTP/2 keepalive: a peer that froze or lost its power is disconnected after this long without a ping
/// reply.
const KEEPALIVE: Duration = Duration::from_secs(5);
/// Maximum bytes of a request: more text than the longest context of any model. A request that is too long
/// for this engine's context gets a typed failure that says so.
const MAX_REQUEST_BYTES: usize = 32 << 20;
/// Timeout for delivering the last events once everything has ended.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout for the MLX thread to leave a lost group: it finishes running batches, which may include a prefill
/// chunk. For a model whose batches take that long, reloading the weights would take longer.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(10);
/// The same timeout where the thread is usually stuck and should not delay its group. Without tunnels: MLX's
/// rings fail twice after a neighbour is lost, and the next operation waits forever. Before it has served: it
/// may be loading weights or waiting for a neighbour to join.
const STUCK_LEAVE_TIMEOUT: Duration = Duration::from_millis(250);
/// How long a reusable rank waits for its agent to start the next formation; without an agent, its memory is
/// better freed.
const REFORM_WAIT: Duration = Duration::from_secs(2);
/// An engine that fails early stays up until this age, so that its agent can read the reason.
const FIRST_WATCH_WAIT: Duration = Duration::from_secs(5);

/// Why a rank could not start.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The fields of the configuration contradict each other.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The node's identity is unusable.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// An address in use or not local.
    #[error("cannot listen on {address} ({field}); free it, or let the agent choose another")]
    Listen {
        /// The field that named it.
        field: &'static str,
        /// The address.
        address: String,
        /// Why.
        source: std::io::Error,
    },
    /// A tunnel to a neighbour failed.
    #[error(transparent)]
    Tunnel(#[from] TunnelError),
    /// A metric was defined twice.
    #[error("cannot set up metrics")]
    Metrics(#[from] prometheus::Error),
}

/// How a rank ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExitOutcome {
    /// It was asked to stop, and every request has ended.
    Stopped,
    /// It failed, with this reason.
    Failed(String),
    /// Its group was lost, and its executor becomes a rank of the next formation, with this
    /// configuration.
    Reform(Box<EngineConfig>),
}

/// A rank with bound sockets, not started yet.
pub struct EngineProcess {
    config: EngineConfig,
    followers: Vec<PeerRank>,
    tls: TlsFiles,
    compute: Arc<dyn Executor>,
    transports: RingTransports,
    addresses: Addresses,
    life: Lifecycle,
    metrics: EngineMetrics,
    engine: TcpListener,
    control: tokio::net::UnixListener,
    admin: TcpListener,
}

async fn listen(field: &'static str, address: std::net::SocketAddr) -> Result<TcpListener, ServeError> {
    TcpListener::bind(address).await.map_err(|source| ServeError::Listen {
        field,
        address: address.to_string(),
        source,
    })
}

impl EngineProcess {
    /// Checks the configuration and binds every socket.
    pub async fn bind(config: EngineConfig, compute: Arc<dyn Executor>) -> Result<Self, ServeError> {
        let followers = config::followers(&config)?;
        let rings = Rings::of(&config)?;
        let tls = TlsFiles::in_dir(&config.tls_dir);
        let metrics = EngineMetrics::new(
            &config.served_model_name,
            config.rank,
            config.context_tokens,
            config.kv_capacity(),
        )?;
        let control = control_service::bind(&config.control_socket).map_err(|source| ServeError::Listen {
            field: "controlSocket",
            address: config.control_socket.display().to_string(),
            source,
        })?;
        let engine = listen("listen", config.listen).await?;
        let admin = listen("metricsListen", config.metrics_listen).await?;
        let (carriers, addresses) = rings.open(&config, &tls).await?;
        let life = Lifecycle::new(reform::can_rejoin(&config));
        Ok(Self {
            config,
            followers,
            tls,
            compute,
            transports: carriers,
            addresses,
            life,
            metrics,
            engine,
            control,
            admin,
        })
    }

    /// Lifecycle, for callers that end the rank.
    pub fn life(&self) -> Lifecycle {
        self.life.clone()
    }

    /// Listen address, for callers that asked for any free port.
    pub fn address(&self) -> std::io::Result<std::net::SocketAddr> {
        self.engine.local_addr()
    }

    /// Serves until stopped or failed.
    pub async fn run(self) -> Result<ExitOutcome, ServeError> {
        let started = Instant::now();
        let Self {
            config,
            followers,
            tls,
            compute,
            transports: carriers,
            addresses,
            life,
            metrics,
            engine,
            control,
            admin,
        } = self;
        let hello = pb::Hello {
            build: russet_rpc::ENGINE_BUILD.to_owned(),
            group_uid: config.group_uid.clone(),
            epoch: config.epoch,
            size: config.size(),
            tensor_size: config.tensor_size,
        };
        let intake = Arc::new(OnceLock::new());
        let role = if config.rank == 0 {
            ServiceRole::Leader(intake.clone())
        } else {
            ServiceRole::Follower(Arc::new(Follower {
                rank: config.rank,
                hello: hello.clone(),
                max_sequences: config.max_sequences,
                compute: compute.clone(),
                addresses: addresses.clone(),
                life: life.clone(),
                metrics: metrics.clone(),
                has_leader: AtomicBool::new(false),
            }))
        };
        let admin_address = admin.local_addr().map(|address| address.to_string()).unwrap_or_default();
        let ready = Arc::new(AtomicBool::new(false));
        let admin =
            tokio::spawn(russet_telemetry::admin::serve(admin, metrics.registry.clone(), ready.clone()));
        let own = Arc::new(config.clone());
        let agent =
            ControlService::new(compute.clone(), life.clone(), metrics.clone(), own.clone(), admin_address);
        let service = EngineService {
            description: describe(&config),
            role,
            nodes: GroupNodes::of(&config),
            life: life.clone(),
        };
        let engine = serve_engine(&tls, engine, service, &life)?;
        let (close_control, closed) = oneshot::channel();
        let control = serve_control(control, agent.clone(), &life, closed);

        let orphan = Duration::from_secs(config.orphan_seconds);
        let orphan = tokio::spawn({
            let agent = agent.clone();
            async move { agent.expect_adoption(orphan).await }
        });
        let drain = tokio::spawn(limit_drain(life.clone(), Duration::from_secs(config.drain_seconds)));
        let readiness = tokio::spawn(track_readiness(life.clone(), ready));
        let alone = carriers.stub_switches();
        let carriers = tokio::spawn(carriers.watch(life.clone()));
        let work = run_rank(
            config,
            followers,
            tls,
            hello,
            compute.clone(),
            addresses,
            life.clone(),
            metrics,
            intake,
        );
        let work = tokio::spawn(fail_on_panic(life.clone(), work));

        life.wait_ended().await;
        let servers = [engine.abort_handle(), control.abort_handle()];
        // The scheduler ends every stream, and the servers wait for the streams; a peer that stopped reading
        // must not block the exit.
        let flushed = tokio::time::timeout(FLUSH_TIMEOUT, async {
            let _ = work.await;
            let _ = engine.await;
        });
        let mut outcome = ExitOutcome::Stopped;
        if life.status().reuse == Reuse::Pending {
            let direct =
                own.transport == Transport::Direct && compute.batch_progress().running_estimate.is_some();
            let patience = if direct || !life.status().served { STUCK_LEAVE_TIMEOUT } else { LEAVE_TIMEOUT };
            // From here on no result of MLX is used, so the tunnels may send it anything to make it finish.
            let left = compute.leave_group();
            alone.iter().for_each(StubSwitch::activate);
            let (left, _) = tokio::join!(leave_group(left, &life, patience), flushed);
            carriers.abort();
            drop(alone);
            if left && let Some(next) = agent.next_formation(REFORM_WAIT).await {
                outcome = ExitOutcome::Reform(Box::new(next));
            }
        } else {
            let _ = flushed.await;
        }
        if let (ExitOutcome::Stopped, RankStatus { phase: Phase::Failed, message, .. }) =
            (&outcome, life.status())
        {
            outcome = ExitOutcome::Failed(message);
            wait_first_watch(&agent, started).await;
        }
        drop(close_control);
        let _ = tokio::time::timeout(FLUSH_TIMEOUT, control).await;
        for task in [orphan, drain, readiness, carriers] {
            task.abort();
        }
        servers.iter().for_each(AbortHandle::abort);
        admin.abort();
        Ok(outcome)
    }
}

/// Has MLX leave a lost group; returns whether the rank can be reused.
async fn leave_group(left: ReplyReceiver<()>, life: &Lifecycle, patience: Duration) -> bool {
    let answered = tokio::time::timeout(patience, left).await;
    let left = matches!(answered, Ok(Ok(Ok(()))));
    if left {
        tracing::info!("left the group; the weights stay for the next one");
    } else {
        tracing::warn!("MLX does not leave the group within {} s", patience.as_secs_f64());
    }
    life.set_reuse(if left { Reuse::Yes } else { Reuse::No });
    left
}

/// What keys and values of equal prompts depend on: the model, how its weights are packed while they are read, and in what they
/// are computed.
fn block_identity(config: &EngineConfig) -> String {
    let model = fingerprint::model_fingerprint(&config.model_dir);
    let computed = match config.dtype {
        Dtype::F32 => " in F32",
        // Machines of other systems compute on CPUs.
        Dtype::Auto if cfg!(not(target_os = "macos")) => " with products in F32",
        Dtype::Auto => "",
    };
    match config.options.quantization {
        // As before there were other formats, so that blocks that were kept stay valid.
        WeightQuantization::AsStored => format!("{model}{computed}"),
        packed => format!("{model} {packed:?}{computed}"),
    }
}

fn describe(config: &EngineConfig) -> pb::EngineDescription {
    pb::EngineDescription {
        build: russet_rpc::ENGINE_BUILD.to_owned(),
        group_uid: config.group_uid.clone(),
        model: config.served_model_name.clone(),
        rank: config.rank,
        size: config.size(),
        epoch: config.epoch,
        context_tokens: config.context_tokens,
        pid: u64::from(std::process::id()),
    }
}

type ServerTask = JoinHandle<()>;

fn serve_engine(
    tls: &TlsFiles,
    listener: TcpListener,
    service: EngineService,
    life: &Lifecycle,
) -> Result<ServerTask, ServeError> {
    let incoming = tls.incoming_grpc(listener)?;
    let server = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .add_service(EngineServer::new(service).max_decoding_message_size(MAX_REQUEST_BYTES))
        .serve_with_incoming_shutdown(incoming, wait_ended(life));
    Ok(tokio::spawn(fail_on_exit("engine", life.clone(), server)))
}

/// Open until `closed`, longer than the rank lives, so that the agent can still read why it ended.
fn serve_control(
    listener: tokio::net::UnixListener,
    agent: ControlService,
    life: &Lifecycle,
    closed: oneshot::Receiver<()>,
) -> ServerTask {
    let server = Server::builder().add_service(ControlServer::new(agent)).serve_with_incoming_shutdown(
        UnixListenerStream::new(listener),
        async {
            let _ = closed.await;
        },
    );
    tokio::spawn(fail_on_exit("control", life.clone(), server))
}

fn wait_ended(life: &Lifecycle) -> impl Future<Output = ()> + Send + 'static {
    let life = life.clone();
    async move { life.wait_ended().await }
}

/// A server that ends by itself leaves the rank unreachable.
async fn fail_on_exit(
    name: &str,
    life: Lifecycle,
    server: impl Future<Output = Result<(), tonic::transport::Error>>,
) {
    if let Err(error) = server.await {
        life.fail(format!("the {name} server ended: {error}"));
    }
}

/// A panic must not leave a rank that looks alive and answers no requests.
async fn fail_on_panic(life: Lifecycle, work: impl Future<Output = ()> + Send + 'static) {
    if let Err(error) = tokio::spawn(work).await {
        life.fail(format!("this engine has a bug, see its log: {error}"));
    }
}

/// Loads, joins, runs the smoke prompt, and then leads or follows.
#[allow(clippy::too_many_arguments, reason = "the parts of one rank, taken apart once")]
async fn run_rank(
    config: EngineConfig,
    followers: Vec<PeerRank>,
    tls: TlsFiles,
    hello: pb::Hello,
    compute: Arc<dyn Executor>,
    addresses: Addresses,
    life: Lifecycle,
    metrics: EngineMetrics,
    intake: Arc<OnceLock<LeaderIntake>>,
) {
    let loaded = load(&config, &compute, &life).await;
    let tokens = match loaded {
        Ok(tokens) => tokens,
        Err(failure) => return life.fail_with(failure),
    };
    tracing::info!("the weights are in memory");
    life.advance(Phase::Loaded, if config.rank == 0 { "" } else { "waiting for rank 0" });
    let Some(tokens) = tokens else { return };
    let gathered = tokio::select! {
        biased;
        () = life.wait_ended() => return,
        gathered = leader::gather(&followers, &tls, &hello, &compute, addresses, &life) => gathered,
    };
    let followers = match gathered {
        Ok(followers) => followers,
        Err(failure) => return life.fail_with(failure),
    };
    let tokens = match tokens {
        GroupTokenizer::Chat(tokens) => *tokens,
        GroupTokenizer::Texts(tokens) => {
            return run_pooling(&config, compute, *tokens, life, metrics, &intake).await;
        }
    };
    let support = compute.cache_support();
    if support != CacheSupport::ALL {
        tracing::info!(
            max_rewind = support.max_rewind,
            blocks = support.blocks,
            drafts = ?support.draft_rewind(),
            "the caches of this model's layers cannot go back anywhere: a prefix is shared where a conversation goes on"
        );
    }
    let opened = Scheduler::new(
        compute,
        followers.clone(),
        Arc::new(tokens),
        life.clone(),
        metrics,
        SchedulerConfig {
            context_tokens: config.context_tokens,
            max_sequences: config.max_sequences,
            max_waiting_requests: config.options.max_waiting_requests.unwrap_or(DEFAULT_MAX_WAITING_REQUESTS),
            kv_tokens: config.kv_capacity(),
            stages: config.size() / config.tensor_size.max(1),
            prefix_cache: config.prefix_cache,
            proposers: Proposers {
                prompt_lookup: config.options.speculation == Speculation::PromptLookup,
                draft_model: config.draft_dir.is_some(),
            },
            adapters: ServedAdapters::new(&config.adapters),
        },
        BlockHash::root(block_identity(&config).as_bytes()),
    );
    let (scheduler, opened_intake) = match opened {
        Ok(opened) => opened,
        Err(error) => return life.fail(format!("cannot start the threads that read requests: {error}")),
    };
    life.advance(Phase::Loaded, "joined; tries the smoke prompt");
    let smoke = async { if config.smoke_prompt { scheduler.smoke().await } else { Ok(()) } };
    let tested = tokio::select! {
        biased;
        () = life.wait_ended() => return,
        tested = smoke => tested,
    };
    if let Err(error) = tested {
        let reason = format!("the smoke prompt was not answered: {error}");
        // First its own: followers fail when they receive this, and that must not become the reason of this
        // rank.
        life.fail_at(FailureCause::Smoke, reason.clone());
        followers.report_smoke_test(Some(reason));
        // Otherwise the followers may see only the end of this process.
        return followers.wait_left().await;
    }
    followers.report_smoke_test(None);
    // Set only here, so it cannot be set already.
    let _ = intake.set(LeaderIntake::Generate(Box::new(opened_intake)));
    life.advance(Phase::Serving, "");
    tracing::info!(model = config.served_model_name, epoch = config.epoch, "serving");
    scheduler.run().await;
}

/// What turns texts into tokens on rank 0.
enum GroupTokenizer {
    /// Of a model that generates.
    Chat(Box<ChatTokenizer>),
    /// Of one that embeds or scores.
    Texts(Box<TextTokenizer>),
}

impl GroupTokenizer {
    fn load(dir: &Path) -> Result<Self, TokenizerError> {
        let read = |path: PathBuf, source| TokenizerError::Read { path, source };
        let modules = model_modules::read(dir).map_err(|(path, source)| read(path, source))?;
        // A model whose weights are GGUF has no such file, and generates.
        let config = std::fs::read(dir.join(CONFIG)).unwrap_or_default();
        // What is wrong with a configuration, the weights tell.
        match russet_model::pools(&config, &modules).unwrap_or(false) {
            true => Ok(Self::Texts(Box::new(TextTokenizer::load(dir)?))),
            false => Ok(Self::Chat(Box::new(ChatTokenizer::load(dir)?))),
        }
    }
}

/// Tries a text and serves requests for vectors or scores.
async fn run_pooling(
    config: &EngineConfig,
    compute: Arc<dyn Executor>,
    tokenizer: TextTokenizer,
    life: Lifecycle,
    metrics: EngineMetrics,
    intake: &OnceLock<LeaderIntake>,
) {
    let Some(model) = compute.pooled_model() else {
        return life.fail("the model was loaded as one that generates; see the engine's log");
    };
    let opened = PoolingIntake::new(compute, model, tokenizer, config.context_tokens, life.clone(), metrics);
    let pooling = match opened {
        Ok(pooling) => pooling,
        Err(error) => return life.fail(error.to_string()),
    };
    life.advance(Phase::Loaded, "tries a text");
    let smoke = async { if config.smoke_prompt { pooling.smoke().await } else { Ok(()) } };
    let tested = tokio::select! {
        biased;
        () = life.wait_ended() => return,
        tested = smoke => tested,
    };
    if let Err(error) = tested {
        return life.fail_at(FailureCause::Smoke, error.to_string());
    }
    // Set only here, so it cannot be set already.
    let _ = intake.set(LeaderIntake::Pool(pooling.clone()));
    life.advance(Phase::Serving, "");
    tracing::info!(model = config.served_model_name, task = ?model.task, width = model.width, "serving");
    pooling.run().await;
}

/// Loads the weights on every rank, and the tokenizer on rank 0.
async fn load(
    config: &EngineConfig,
    compute: &Arc<dyn Executor>,
    life: &Lifecycle,
) -> Result<Option<GroupTokenizer>, FailureReport> {
    let weights = compute.load();
    let tokens = if config.rank == 0 {
        let (dir, draft) = (config.model_dir.clone(), config.draft_dir.clone());
        let tokens = tokio::task::spawn_blocking(move || {
            draft.map_or(Ok(()), |draft| ChatTokenizer::check_draft(&dir, &draft))?;
            GroupTokenizer::load(&dir)
        })
        .await;
        let tokens = tokens.map_err(|error| FailureReport::from(error.to_string()))?;
        Some(tokens.map_err(|error| match error.is_refusal() {
            true => FailureReport::model(error.to_string()),
            false => error.to_string().into(),
        })?)
    } else {
        None
    };
    tokio::select! {
        biased;
        () = life.wait_ended() => Err("stopped while loading".to_owned().into()),
        result = weights => match result {
            Ok(Ok(())) => Ok(tokens),
            Ok(Err(error)) => Err(error.into()),
            Err(_) => Err("the compute thread ended while loading; see the engine's log".to_owned().into()),
        },
    }
}

/// Bounds a drain: ends at once if no request can be running, otherwise after the timeout.
async fn limit_drain(life: Lifecycle, patience: Duration) {
    let now = life.wait_until(|now| now.draining.is_some()).await;
    if now.phase < Phase::Serving {
        return life.stop();
    }
    tokio::time::sleep(patience).await;
    life.fail(format!(
        "{} after {} s of draining, requests were still running",
        now.draining.unwrap_or_default(),
        patience.as_secs()
    ));
}

async fn track_readiness(life: Lifecycle, ready: Arc<AtomicBool>) {
    let mut watch = life.watch();
    loop {
        let serving = {
            let now = watch.borrow_and_update();
            now.phase == Phase::Serving && now.draining.is_none()
        };
        ready.store(serving, Ordering::Release);
        if watch.changed().await.is_err() {
            return;
        }
    }
}

/// An engine may fail before its agent opens the watch; the reason should not be lost in a log.
async fn wait_first_watch(agent: &ControlService, started: Instant) {
    let asked = async {
        while !agent.was_adopted() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let _ = tokio::time::timeout_at(started + FIRST_WATCH_WAIT, asked).await;
}

#[cfg(test)]
mod tests;
