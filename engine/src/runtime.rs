//! The MLX runtime, which implements [`Executor`]: all MLX calls run on one thread; the rest of the engine is
//! asynchronous and never sees an array.
//!
//! Commands run in the order in which they are given, on every rank alike: rank 0 decides the order and sends
//! it to the others over gRPC; only activations travel through MLX. So an idle group waits on nothing.

mod block_store;
mod draft_model;
pub mod environment;
mod error;
mod groups;
mod init;
mod model_runner;
mod thread;
mod token_scores;

use std::{
    ops::Range,
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use russet_model::load_quantization::LoadQuantization;
use russet_model::partition::{Partition, RankPart};
use russet_wire::engine_config::{AdapterDir, OverlapScheduling};
use russet_wire::engine_options::{KvCacheType, RouterBroadcast};
use tokio::sync::oneshot;

use crate::{
    batch_monitor::BatchMonitor,
    executor::{
        Addresses, BatchProgress, CacheSupport, DraftRequest, Executor, LoadProgress, MlxMemory, PooledModel,
        PooledText, ReplyReceiver, SampleError, SequenceStep, StepResult, TopLogprobs,
    },
    jaccl::Devices,
    layers,
    prefix_cache::disk::{DiskCache, DiskCacheError},
    prefix_cache::{CacheCommand, block_hash::BlockHash, fingerprint},
    step_profiler::{StepProfiler, StepTotals},
    weights::LoadDtype,
};
pub use error::RuntimeError;
use thread::{LoadCounter, MlxThread, ReplySender, RunReply, ThreadCommand, ThreadShared};

/// Runtime configuration of one rank.
#[derive(Clone, Debug)]
pub struct RuntimeConfig {
    /// A Hugging Face model folder: config.json and safetensors.
    pub model_dir: PathBuf,
    /// Layers per stage, in rank order; `None` gives one stage all layers.
    pub layers_per_rank: Option<Vec<u32>>,
    /// Tensor parallel size.
    pub tensor_size: u32,
    /// This process's rank. In a group with more than one rank, call [`environment::ensure`] first.
    pub rank: u32,
    /// RDMA devices between the tensor ranks; without them, collectives run over TCP.
    pub devices: Option<Devices>,
    /// Element type of the weights in memory.
    pub dtype: LoadDtype,
    /// How matrices of plain numbers are packed while they are read; `None` leaves them as they are.
    pub quantization: Option<LoadQuantization>,
    /// Format of the KV cache.
    pub kv_cache: KvCacheType,
    /// Whether the first tensor rank chooses experts for all.
    pub router_broadcast: RouterBroadcast,
    /// Threads for float32 matrix products on a CPU.
    pub blas_threads: usize,
    /// Overlap scheduling.
    pub overlap: OverlapScheduling,
    /// Whether a GPU keeps its memory resident.
    pub wired: bool,
    /// Disk tier of the prefix cache; `None` without one.
    pub disk_cache: Option<DiskCacheConfig>,
    /// Folder of a draft model; rank 0 alone loads it.
    pub draft_dir: Option<PathBuf>,
    /// Adapters of the model.
    pub adapters: Vec<AdapterDir>,
}

impl RuntimeConfig {
    /// Of one rank that has the whole model, as the files have it, with one thread for products and without anything
    /// that pays only in a server.
    pub fn alone(model_dir: PathBuf) -> Self {
        Self {
            model_dir,
            layers_per_rank: None,
            tensor_size: 1,
            rank: 0,
            devices: None,
            dtype: LoadDtype::AsStored,
            quantization: None,
            kv_cache: KvCacheType::AsComputed,
            router_broadcast: RouterBroadcast::Auto,
            blas_threads: 1,
            overlap: OverlapScheduling::Off,
            wired: false,
            disk_cache: None,
            draft_dir: None,
            adapters: Vec::new(),
        }
    }

    /// Number of ranks in the group.
    fn size(&self) -> u32 {
        self.layers_per_rank.as_ref().map_or(1, Vec::len) as u32
    }

    /// The least that a batch is said to take; `on_gpu` says whether a GPU computes. Other programs take the cores from a rank
    /// that computes on them, and a rank without peers waits for nobody: what stands still there is no lost peer.
    fn min_estimate(&self, on_gpu: bool) -> Duration {
        if on_gpu || self.size() > 1 { Duration::ZERO } else { SHARED_CORES_ESTIMATE }
    }

    /// Whether batches start before the tokens of the previous one are known; `on_gpu` says whether a GPU
    /// computes.
    fn overlaps_steps(&self, on_gpu: bool) -> bool {
        match self.overlap {
            OverlapScheduling::Auto => on_gpu || self.size() == 1,
            OverlapScheduling::On => true,
            OverlapScheduling::Off => false,
        }
    }
}

/// Configuration of the disk tier.
#[derive(Clone, Debug)]
pub struct DiskCacheConfig {
    /// Its folder, used by this rank alone.
    pub folder: PathBuf,
    /// Maximum bytes of all files.
    pub max_bytes: u64,
}

/// Output of a step on rank 0 with log-probabilities, which [`Executor`] does not return.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutput {
    /// The sampled token.
    pub token: u32,
    /// Log-probabilities of the whole vocabulary, before any filter.
    pub logprobs: Vec<f32>,
    /// Those that the sample spec asks for.
    pub top_logprobs: Option<TopLogprobs>,
}

/// [`StepOutput`], or why no token could be sampled, for each sample spec of a step.
pub type DetailedOutput = Vec<Result<StepOutput, SampleError>>;

/// The handle to the MLX thread, which ends when the handle is dropped.
#[derive(Debug)]
pub struct Runtime {
    commands: mpsc::Sender<ThreadCommand>,
    load_counter: Arc<LoadCounter>,
    batches: BatchMonitor,
    profiler: StepProfiler,
    /// Set once the weights are loaded.
    disk_cache: Arc<OnceLock<Arc<DiskCache>>>,
    cache_support: Arc<OnceLock<CacheSupport>>,
    pooled_model: Arc<OnceLock<Option<PooledModel>>>,
    /// Number of groups that the thread was asked to leave.
    groups_left: Arc<AtomicU64>,
    overlaps_steps: bool,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// The least that a batch is said to take of a rank that shares its cores: its agent waits five times as long.
const SHARED_CORES_ESTIMATE: Duration = Duration::from_secs(12);

/// Timeout for the thread when the runtime is dropped. A thread that waits for a lost neighbour never ends.
const THREAD_JOIN_TIMEOUT: Duration = Duration::from_secs(2);

impl Runtime {
    /// Starts the thread. It does nothing before [`Executor::load`].
    pub fn start(config: RuntimeConfig) -> std::io::Result<Self> {
        let (commands, inbox) = mpsc::channel();
        let bytes = Arc::<LoadCounter>::default();
        let disk_cache = Arc::<OnceLock<Arc<DiskCache>>>::default();
        let cache_support = Arc::<OnceLock<CacheSupport>>::default();
        let pooled_model = Arc::<OnceLock<Option<PooledModel>>>::default();
        let on_gpu = layers::on_gpu().unwrap_or_default();
        let batches =
            BatchMonitor::new(config.size() / config.tensor_size.max(1), config.min_estimate(on_gpu));
        let batches = if config.rank == 0 { batches } else { batches.of_follower() };
        let meter = StepProfiler::default();
        let disbanded = Arc::<AtomicU64>::default();
        let looks_ahead = config.overlaps_steps(on_gpu);
        let shared = ThreadShared {
            config,
            groups_left: disbanded.clone(),
            load_counter: bytes.clone(),
            disk_cache: disk_cache.clone(),
            cache_support: cache_support.clone(),
            pooled_model: pooled_model.clone(),
            batches: batches.clone(),
            profiler: meter.clone(),
            overlaps_steps: looks_ahead,
        };
        // MLX's streams belong to the thread that made them, so one thread does everything.
        let thread = std::thread::Builder::new()
            .name("mlx".to_owned())
            .spawn(move || MlxThread::new(shared).run(&inbox))?;
        Ok(Self {
            commands,
            load_counter: bytes,
            disk_cache,
            cache_support,
            pooled_model,
            batches,
            profiler: meter,
            groups_left: disbanded,
            overlaps_steps: looks_ahead,
            thread: Some(thread),
        })
    }

    /// Like [`Executor::run`], with log-probabilities.
    pub fn run_detailed(&self, batch: Vec<SequenceStep>) -> ReplyReceiver<Vec<DetailedOutput>> {
        self.batches.begin(&batch);
        self.send(|reply| ThreadCommand::Run(batch, RunReply::Detailed(reply)))
    }

    fn send<T>(&self, command: impl FnOnce(ReplySender<T>) -> ThreadCommand) -> ReplyReceiver<T> {
        let (reply, answer) = oneshot::channel();
        // If the thread is gone, the reply sender is dropped with the command, and the receiver reports that.
        let _ = self.commands.send(command(reply));
        answer
    }
}

impl Drop for Runtime {
    /// Waits briefly for the thread: MLX's clean-up at process exit must not run while arrays are still being
    /// freed. With a hung thread, end the process with [`russet_mlx::exit_immediately`].
    fn drop(&mut self) {
        let _ = self.commands.send(ThreadCommand::Stop);
        let Some(thread) = self.thread.take() else { return };
        let started = Instant::now();
        while !thread.is_finished() && started.elapsed() < THREAD_JOIN_TIMEOUT {
            std::thread::sleep(Duration::from_millis(1));
        }
        if thread.is_finished() {
            let _ = thread.join();
        }
    }
}

impl Executor for Runtime {
    fn load(&self) -> ReplyReceiver<()> {
        self.send(ThreadCommand::Load)
    }

    fn progress(&self) -> LoadProgress {
        self.load_counter.progress()
    }

    fn join(&self, addresses: Addresses) -> ReplyReceiver<()> {
        self.send(|reply| ThreadCommand::Join(addresses, reply))
    }

    fn leave_group(&self) -> ReplyReceiver<()> {
        // Set before the command is sent: the thread reads the counter after everything it has waited for.
        self.groups_left.fetch_add(1, Ordering::SeqCst);
        self.send(ThreadCommand::LeaveGroup)
    }

    fn run(&self, batch: Vec<SequenceStep>) -> ReplyReceiver<Vec<StepResult>> {
        self.batches.begin(&batch);
        self.send(|reply| ThreadCommand::Run(batch, RunReply::Tokens(reply)))
    }

    fn overlaps_steps(&self) -> bool {
        self.overlaps_steps
    }

    fn cache_support(&self) -> CacheSupport {
        self.cache_support.get().copied().unwrap_or(CacheSupport::ALL)
    }

    fn pooled_model(&self) -> Option<PooledModel> {
        self.pooled_model.get().copied().flatten()
    }

    fn pool(&self, texts: Vec<PooledText>) -> ReplyReceiver<Vec<Vec<f32>>> {
        self.send(|reply| ThreadCommand::Pool(texts, reply))
    }

    fn draft(&self, drafts: Vec<DraftRequest>) -> ReplyReceiver<Vec<Vec<u32>>> {
        self.send(|reply| ThreadCommand::Draft(drafts, reply))
    }

    fn apply_cache_command(&self, order: CacheCommand) {
        let _ = self.commands.send(ThreadCommand::ApplyCacheCommand(order));
    }

    /// Reads on a thread of its own, a few blocks at a time, while MLX works on other commands.
    fn fetch(&self, slot: u32, keys: Vec<BlockHash>) -> ReplyReceiver<u32> {
        let (reply, answer) = oneshot::channel();
        let (commands, disk_cache) = (self.commands.clone(), self.disk_cache.get().cloned());
        let group = self.groups_left.load(Ordering::SeqCst);
        let read = move |key: &BlockHash| {
            let record = disk_cache.as_ref().map(|disk_cache| disk_cache.read(*key));
            let record = record.and_then(|record| {
                let say = |error: &DiskCacheError| match error {
                    DiskCacheError::Evicted { .. } => tracing::debug!(%error, "it is read again"),
                    _ => tracing::warn!(%error, "a block is not on disk"),
                };
                record.inspect_err(say).ok()
            });
            (*key, record)
        };
        let fetching = std::thread::Builder::new().name("fetch".to_owned()).spawn(move || {
            let mut loaded = 0;
            for keys in keys.chunks(block_store::BLOCKS_PER_COPY) {
                let (filled, count) = mpsc::channel();
                let pieces = keys.iter().map(&read).collect();
                if commands.send(ThreadCommand::LoadBlocks(group, slot, pieces, filled)).is_err() {
                    return;
                }
                let Ok(count) = count.recv() else { return };
                loaded += count;
                if (count as usize) < keys.len() {
                    break;
                }
            }
            let _ = reply.send(Ok(loaded));
        });
        if let Err(error) = fetching {
            // The reply sender is dropped with the thread, so no block counts as loaded.
            tracing::warn!(%error, "no thread to read blocks from disk: the prompt is read again");
        }
        answer
    }

    fn has_disk_cache(&self) -> bool {
        self.disk_cache.get().is_some()
    }

    fn blocks_on_disk(&self) -> Vec<BlockHash> {
        self.disk_cache.get().map(|disk_cache| disk_cache.hashes()).unwrap_or_default()
    }

    fn take_lost_blocks(&self) -> Vec<BlockHash> {
        self.disk_cache.get().map(|disk_cache| disk_cache.take_lost()).unwrap_or_default()
    }

    fn memory(&self) -> MlxMemory {
        let bytes = |result: mlx_rs::error::Result<usize>| result.map_or(0, |bytes| bytes as u64);
        MlxMemory {
            bytes: bytes(mlx_rs::memory::active_memory()),
            peak_bytes: bytes(mlx_rs::memory::peak_memory()),
        }
    }

    fn batch_progress(&self) -> BatchProgress {
        self.batches.progress()
    }

    fn step_totals(&self) -> StepTotals {
        self.profiler.totals()
    }
}

/// The part of the model for `config.rank`, once the number of layers is known.
fn rank_part(
    config: &RuntimeConfig,
    layers: u32,
    kept_together: &[Range<u32>],
) -> Result<RankPart, RuntimeError> {
    let split = config.layers_per_rank.clone().unwrap_or_else(|| vec![layers]);
    let partition = Partition::with_tensor(split, config.tensor_size, layers)?;
    partition.keeps_together(kept_together)?;
    partition.part(config.rank).ok_or(RuntimeError::Rank { rank: config.rank, size: partition.size() })
}

/// Fingerprint of everything that changes the contents of the KV cache or selects a shard of it.
fn cache_fingerprint(config: &RuntimeConfig, part: &RankPart) -> String {
    let RuntimeConfig { model_dir, dtype, quantization, kv_cache, .. } = config;
    let RankPart { layers, tensor_index, tensor_size, .. } = part;
    let model = fingerprint::model_fingerprint(model_dir);
    let Range { start, end } = layers;
    // As before where nothing is packed, so that blocks that were kept stay valid.
    let packed = quantization.map(|quantization| format!("-{quantization:?}-weights")).unwrap_or_default();
    format!("{model}-{start}-{end}-{tensor_index}of{tensor_size}-{dtype:?}-{kv_cache:?}{packed}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(layers_per_rank: Option<Vec<u32>>, rank: u32) -> RuntimeConfig {
        RuntimeConfig {
            layers_per_rank,
            rank,
            overlap: OverlapScheduling::Auto,
            wired: true,
            ..RuntimeConfig::alone(PathBuf::from("/nowhere"))
        }
    }

    #[test]
    fn ranks_and_splits_that_cannot_be_are_errors() {
        assert_eq!(rank_part(&config(None, 0), 5, &[]).unwrap().layers, 0..5);
        assert!(matches!(rank_part(&config(None, 1), 5, &[]), Err(RuntimeError::Rank { rank: 1, size: 1 })));
        assert!(matches!(rank_part(&config(Some(vec![2, 2]), 1), 5, &[]), Err(RuntimeError::Partition(_))));
        // Layers that read the keys and values of others are on their stage.
        let kept = std::slice::from_ref(&(2..5));
        assert_eq!(rank_part(&config(Some(vec![3, 2]), 0), 5, kept).unwrap().layers, 2..5);
        let cut = rank_part(&config(Some(vec![2, 3]), 0), 5, kept);
        assert!(matches!(cut, Err(RuntimeError::Partition(_))), "{cut:?}");
    }

    #[test]
    fn only_a_lone_rank_on_cores_forecasts_for_busy_ones() {
        let (one, two) = (config(None, 0), config(Some(vec![2, 2]), 0));
        let least = |config: &RuntimeConfig| [false, true].map(|on_gpu| config.min_estimate(on_gpu));
        assert_eq!(least(&one), [SHARED_CORES_ESTIMATE, Duration::ZERO]);
        assert_eq!(least(&two), [Duration::ZERO; 2]);
    }

    #[test]
    fn cpu_groups_do_not_overlap_steps_unless_configured() {
        let (one, two) = (config(None, 0), config(Some(vec![2, 2]), 0));
        let overlaps = |config: &RuntimeConfig, overlap| {
            let config = RuntimeConfig { overlap, ..config.clone() };
            [false, true].map(|on_gpu| config.overlaps_steps(on_gpu))
        };
        assert_eq!(overlaps(&one, OverlapScheduling::Auto), [true, true]);
        assert_eq!(overlaps(&two, OverlapScheduling::Auto), [false, true]);
        for config in [one, two] {
            assert_eq!(overlaps(&config, OverlapScheduling::On), [true, true]);
            assert_eq!(overlaps(&config, OverlapScheduling::Off), [false, false]);
        }
    }

    #[test]
    fn blocks_of_another_shard_or_format_have_another_fingerprint() {
        let alone = config(None, 0);
        let first = cache_fingerprint(&alone, &rank_part(&alone, 4, &[]).unwrap());
        let upper = config(Some(vec![2, 2]), 0);
        for other in [
            RuntimeConfig { kv_cache: KvCacheType::Int8, ..alone.clone() },
            RuntimeConfig { kv_cache: KvCacheType::Int4, ..alone.clone() },
            RuntimeConfig { dtype: LoadDtype::Float32, ..alone.clone() },
            RuntimeConfig { quantization: Some(LoadQuantization::Int8), ..alone.clone() },
            RuntimeConfig { quantization: Some(LoadQuantization::Int4), ..alone.clone() },
            upper,
        ] {
            assert_ne!(cache_fingerprint(&other, &rank_part(&other, 4, &[]).unwrap()), first, "{other:?}");
        }
        assert_eq!(cache_fingerprint(&alone, &rank_part(&alone, 4, &[]).unwrap()), first);
    }

    #[test]
    fn missing_model_and_early_steps_return_errors() {
        let runtime = Runtime::start(config(None, 0)).unwrap();
        let early = runtime.run(vec![SequenceStep {
            slot: 0,
            offset: 0,
            tokens: vec![1],
            draft_tokens: 0,
            adapter: 0,
            sample: None,
            score: None,
        }]);
        assert!(early.blocking_recv().unwrap().unwrap_err().to_string().contains("before it could"));
        let error = runtime.load().blocking_recv().unwrap().unwrap_err();
        assert!(error.to_string().contains("/nowhere: config.json is missing"), "{error}");
    }
}
