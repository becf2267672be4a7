//! The Control service for the agent of this machine, over a unix socket that only its user may open. An open
//! `Watch` marks the engine as adopted: an engine without a watcher exits. Heartbeats are sent independently
//! of the MLX thread, so they continue while it waits; missing heartbeats mean that the whole process is
//! stalled.

use std::collections::VecDeque;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use parking_lot::Mutex;
use russet_rpc::engine as pb;
use russet_rpc::engine::control_server::Control;
use russet_rpc::failure_detector::HEARTBEAT_INTERVAL;
use russet_wire::engine_config::EngineConfig;
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Response, Status};

use crate::executor::Executor;
use crate::lifecycle::{FailureCause, FailureReport, Lifecycle, Phase, RankStatus, Reuse};
use crate::metrics::EngineMetrics;
use crate::reform;
use crate::tunnel::dial::NeighbourPath;

/// Heartbeats over which the token rate is averaged.
const RATE_HEARTBEATS: usize = 12;

/// The Control service; clones share it.
#[derive(Clone)]
pub struct ControlService {
    compute: Arc<dyn Executor>,
    life: Lifecycle,
    metrics: EngineMetrics,
    adoption: Arc<Mutex<Adoption>>,
    config: Arc<EngineConfig>,
    /// Address of `/metrics`.
    metrics_address: String,
    /// Configuration of the next formation, once the rank is claimed for it.
    next_config: Arc<Mutex<Option<EngineConfig>>>,
}

/// Current watchers.
struct Adoption {
    watchers: usize,
    /// When the last watcher left, or the process started.
    since: Instant,
    adopted: bool,
}

/// One open watch.
struct Watcher(Arc<Mutex<Adoption>>);

impl Watcher {
    fn new(adoption: &Arc<Mutex<Adoption>>) -> Self {
        let mut now = adoption.lock();
        now.watchers += 1;
        now.adopted = true;
        Self(adoption.clone())
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let mut adoption = self.0.lock();
        adoption.watchers -= 1;
        adoption.since = Instant::now();
    }
}

impl ControlService {
    /// The service of this rank, started with `config`, with its metrics at an address.
    pub fn new(
        compute: Arc<dyn Executor>,
        life: Lifecycle,
        metrics: EngineMetrics,
        config: Arc<EngineConfig>,
        metrics_address: String,
    ) -> Self {
        let adoption = Adoption { watchers: 0, since: Instant::now(), adopted: false };
        let adoption = Arc::new(Mutex::new(adoption));
        Self { compute, life, metrics, adoption, config, metrics_address, next_config: Arc::default() }
    }

    /// Fails the rank once it had no watcher for this long.
    pub async fn expect_adoption(&self, patience: Duration) {
        self.wait_unwatched(patience).await;
        self.life.fail(format!("no agent has watched this engine for {} s", patience.as_secs()));
    }

    /// Waits for the next formation of a reusable rank; `None` once it is asked to stop, or had no watcher
    /// for this long.
    pub async fn next_formation(&self, patience: Duration) -> Option<EngineConfig> {
        let decided = |now: &RankStatus| now.reuse != Reuse::Yes || now.draining.is_some();
        tokio::select! {
            _ = self.life.wait_until(decided) => {}
            () = self.wait_unwatched(patience) => {}
        }
        // The code that claims the rank holds the lock until the configuration is stored.
        let next = self.next_config.lock().take();
        if next.is_none() {
            self.life.set_reuse(Reuse::No);
        }
        next
    }

    /// Waits until there was no watcher for this long.
    async fn wait_unwatched(&self, patience: Duration) {
        loop {
            let alone = {
                let adoption = self.adoption.lock();
                if adoption.watchers > 0 { Duration::ZERO } else { adoption.since.elapsed() }
            };
            if alone >= patience {
                return;
            }
            tokio::time::sleep((patience - alone).min(Duration::from_secs(1))).await;
        }
    }

    /// Whether an agent ever watched; if not, one is about to connect and needs to read the state.
    pub fn was_adopted(&self) -> bool {
        self.adoption.lock().adopted
    }

    fn engine_state(&self, now: &RankStatus, tokens_per_second: f64) -> pb::EngineState {
        let loading = self.compute.progress();
        let memory = self.compute.memory();
        let batches = self.compute.batch_progress();
        self.metrics.observe(memory, loading, self.compute.step_totals());
        let phase = match now.phase {
            Phase::Loading => pb::Phase::Loading,
            Phase::Loaded => pb::Phase::Loaded,
            Phase::Serving => pb::Phase::Serving,
            Phase::Failed => pb::Phase::Failed,
        };
        let cause = match now.cause {
            FailureCause::Other => pb::FailureCause::Unspecified,
            FailureCause::Smoke => pb::FailureCause::Smoke,
            FailureCause::Group => pb::FailureCause::Group,
            FailureCause::Model => pb::FailureCause::Model,
        };
        let reuse = match now.reuse {
            Reuse::No | Reuse::Taken => pb::Reuse::No,
            Reuse::Pending => pb::Reuse::Pending,
            Reuse::Yes => pb::Reuse::Yes,
        };
        let message = match (&now.draining, now.phase) {
            (Some(reason), Phase::Loading | Phase::Loaded | Phase::Serving) => format!("stopping: {reason}"),
            _ => now.message.clone(),
        };
        pb::EngineState {
            phase: phase as i32,
            loaded_bytes: loading.loaded_bytes,
            total_bytes: loading.total_bytes,
            memory_bytes: memory.bytes,
            peak_memory_bytes: memory.peak_bytes,
            running: u32::try_from(self.metrics.running.get()).unwrap_or(0),
            waiting: u32::try_from(self.metrics.waiting.get()).unwrap_or(0),
            tokens_per_second,
            message,
            build: russet_rpc::ENGINE_BUILD.to_owned(),
            epoch: self.config.epoch,
            shard_uid: self.config.shard_uid.clone(),
            metrics_address: self.metrics_address.clone(),
            throughput: self.metrics.throughput.lock().average(),
            cause: cause as i32,
            batches_ended: batches.ended_batches,
            batch_estimate_seconds: batches.running_estimate.map_or(0.0, |estimate| estimate.as_secs_f64()),
            heartbeat_milliseconds: HEARTBEAT_INTERVAL.as_millis() as u32,
            reuse: reuse as i32,
            paths: now.paths.iter().map(path_message).collect(),
        }
    }

    async fn stream_states(self, sender: mpsc::UnboundedSender<Result<pb::EngineState, Status>>) {
        let _watcher = Watcher::new(&self.adoption);
        let mut life = self.life.watch();
        let mut counts = VecDeque::from([(Instant::now(), self.metrics.generated_tokens.get())]);
        loop {
            let now = life.borrow_and_update().clone();
            // From now on the next formation reports the state.
            if now.reuse == Reuse::Taken {
                return;
            }
            // Sent also without news, as a heartbeat: it shows that this process runs.
            if sender.send(Ok(self.engine_state(&now, tokens_per_second(&counts)))).is_err() {
                return;
            }
            if (now.phase == Phase::Failed && now.reuse == Reuse::No) || now.stopped {
                return;
            }
            // A phase change is sent at once; a message alone waits for the next heartbeat.
            let heartbeat = tokio::time::sleep(HEARTBEAT_INTERVAL);
            tokio::select! {
                () = heartbeat => {}
                _ = life.wait_for(|next| {
                    next.phase != now.phase || next.reuse != now.reuse || next.stopped
                }) => {}
                () = sender.closed() => return,
            }
            counts.push_back((Instant::now(), self.metrics.generated_tokens.get()));
            if counts.len() > RATE_HEARTBEATS {
                counts.pop_front();
            }
        }
    }
}

fn path_message(path: &NeighbourPath) -> pb::Path {
    let NeighbourPath { node, from, to, over_cable: _, fallback } = path.clone();
    let fallback = fallback.unwrap_or_default();
    pb::Path { node, from: from.to_string(), to: to.to_string(), fallback }
}

/// Tokens per second over the recorded counts.
fn tokens_per_second(counts: &VecDeque<(Instant, u64)>) -> f64 {
    match (counts.front(), counts.back()) {
        (Some((start, before)), Some((end, after))) if end > start => {
            (after - before) as f64 / (*end - *start).as_secs_f64()
        }
        _ => 0.0,
    }
}

#[tonic::async_trait]
impl Control for ControlService {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<pb::EngineState, Status>> + Send>>;

    async fn watch(&self, _: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (sender, receiver) = mpsc::unbounded_channel();
        tokio::spawn(self.clone().stream_states(sender));
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(receiver))))
    }

    async fn stop(&self, _: Request<pb::StopRequest>) -> Result<Response<pb::StopReply>, Status> {
        self.life.drain("its agent asked it to");
        Ok(Response::new(pb::StopReply {}))
    }

    async fn disband(
        &self,
        request: Request<pb::DisbandRequest>,
    ) -> Result<Response<pb::DisbandReply>, Status> {
        self.life.fail_with(FailureReport::group(request.into_inner().reason));
        Ok(Response::new(pb::DisbandReply {}))
    }

    async fn form(&self, request: Request<pb::FormRequest>) -> Result<Response<pb::FormReply>, Status> {
        let next = reform::next_config(&self.config, &request.into_inner().config);
        let next = next.map_err(|refused| Status::invalid_argument(refused.to_string()))?;
        let mut place = self.next_config.lock();
        if !self.life.claim() {
            let reuse = self.life.status().reuse;
            return Err(Status::failed_precondition(format!(
                "this engine is of no use to another formation (reuse: {reuse:?}); start a new one"
            )));
        }
        *place = Some(next);
        Ok(Response::new(pb::FormReply {}))
    }
}

/// Binds the socket with access for this user only. Replaces one left by a process that died.
pub fn bind(path: &Path) -> std::io::Result<UnixListener> {
    use std::os::unix::fs::PermissionsExt as _;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}
