//! The one thread that touches MLX, behind [`Compute`]: the rest of the engine is asynchronous and
//! never sees an array.
//!
//! Commands run in the order in which they were given, on every rank alike: rank 0 decides the order
//! and tells the others over gRPC; only activations travel through MLX. So an idle group waits on
//! nothing.

mod blocks;
mod drafter;
pub mod environment;
mod error;
mod groups;
mod prepare;
mod rank;
mod thread;

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

use russet_wire::partition::{Part, Partition};
use tokio::sync::oneshot;

use crate::{
    args::{KvCacheType, LookAhead},
    compute::{Addresses, Answer, Chosen, Compute, Draft, Memory, Progress, SampleError, Step},
    jaccl::Devices,
    kept::{Order, chain::Key, identity},
    layers,
    meter::{Meter, Totals},
    pulse::{Batches, Pulse},
    shelf::{Shelf, ShelfError},
    weights::LoadDtype,
};
pub use error::RuntimeError;
use thread::{Bytes, Command, Replies, Reply, Shared, Thread};

/// What one rank is.
#[derive(Clone, Debug)]
pub struct RuntimeConfig {
    /// A Hugging Face folder: config.json and safetensors.
    pub model_dir: PathBuf,
    /// Layers per rank, index = rank; `None` gives one rank everything.
    pub layers_per_rank: Option<Vec<u32>>,
    /// Ranks that share every layer of a stage.
    pub tensor_size: u32,
    /// This process's rank. In a group of more than one the process has to be prepared by
    /// [`environment::ensure`].
    pub rank: u32,
    /// RDMA devices between the members of the stage; without them they add up over TCP.
    pub devices: Option<Devices>,
    /// The element type weights are kept in.
    pub dtype: LoadDtype,
    /// In what form keys and values are kept.
    pub kv_cache: KvCacheType,
    /// Threads for float32 products on a CPU.
    pub blas_threads: usize,
    /// Whether batches are begun before the last one's tokens are known.
    pub look_ahead: LookAhead,
    /// Whether a GPU keeps its memory resident.
    pub wired: bool,
    /// Where blocks of the KV cache are kept on disk, if they are.
    pub shelf: Option<ShelfConfig>,
    /// Folder of a draft model; rank 0 alone loads it.
    pub draft_dir: Option<PathBuf>,
}

impl RuntimeConfig {
    /// Ranks in the group.
    fn size(&self) -> u32 {
        self.layers_per_rank.as_ref().map_or(1, Vec::len) as u32
    }

    /// Whether batches are begun before the last one's tokens are known, where it may be that a GPU computes.
    fn looks_ahead(&self, on_gpu: bool) -> bool {
        match self.look_ahead {
            LookAhead::Auto => on_gpu || self.size() == 1,
            LookAhead::On => true,
            LookAhead::Off => false,
        }
    }
}

/// A folder for blocks of the KV cache.
#[derive(Clone, Debug)]
pub struct ShelfConfig {
    /// The folder; of this rank alone.
    pub folder: PathBuf,
    /// Bytes of all files.
    pub most_bytes: u64,
}

/// What came of a step on rank 0, for whoever looks closer than [`Compute`] does.
#[derive(Clone, Debug, PartialEq)]
pub struct Stepped {
    /// The token chosen.
    pub token: u32,
    /// Log-probabilities of the whole vocabulary, before any filter.
    pub logprobs: Vec<f32>,
}

/// [`Stepped`], or why no token could be chosen, for each choice of a step.
pub type InDetail = Vec<Result<Stepped, SampleError>>;

/// The handle to the MLX thread, which ends when the handle is dropped.
#[derive(Debug)]
pub struct Runtime {
    commands: mpsc::Sender<Command>,
    bytes: Arc<Bytes>,
    batches: Batches,
    meter: Meter,
    /// Opened once the weights are loaded.
    shelf: Arc<OnceLock<Arc<Shelf>>>,
    /// Groups that it was asked to leave so far.
    disbanded: Arc<AtomicU64>,
    looks_ahead: bool,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// How long a dropped runtime waits for its thread. A thread that waits for a lost neighbour never ends.
const LAST_STEP: Duration = Duration::from_secs(2);

impl Runtime {
    /// Starts the thread. It does nothing before [`Compute::load`].
    pub fn start(config: RuntimeConfig) -> std::io::Result<Self> {
        let (commands, inbox) = mpsc::channel();
        let bytes = Arc::<Bytes>::default();
        let shelf = Arc::<OnceLock<Arc<Shelf>>>::default();
        let batches = Batches::new(config.size() / config.tensor_size.max(1));
        let meter = Meter::default();
        let disbanded = Arc::<AtomicU64>::default();
        let looks_ahead = config.looks_ahead(layers::on_gpu().unwrap_or_default());
        let shared = Shared {
            config,
            disbanded: disbanded.clone(),
            bytes: bytes.clone(),
            shelf: shelf.clone(),
            batches: batches.clone(),
            meter: meter.clone(),
            looks_ahead,
        };
        // MLX's streams belong to the thread that made them, so one thread does everything.
        let thread = std::thread::Builder::new()
            .name("mlx".to_owned())
            .spawn(move || Thread::new(shared).run(&inbox))?;
        Ok(Self { commands, bytes, shelf, batches, meter, disbanded, looks_ahead, thread: Some(thread) })
    }

    /// As [`Compute::run`], with the log-probabilities too.
    pub fn run_in_detail(&self, batch: Vec<Step>) -> Answer<Vec<InDetail>> {
        self.batches.begin(&batch);
        self.ask(|reply| Command::Run(batch, Replies::InDetail(reply)))
    }

    fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Answer<T> {
        let (reply, answer) = oneshot::channel();
        // If the thread is gone, the reply is dropped with the command, and the answer says so.
        let _ = self.commands.send(command(reply));
        answer
    }
}

impl Drop for Runtime {
    /// Waits a little for the thread: MLX's own clean-up at the end of the process must not meet arrays
    /// that are still being freed. Whoever ends the process with a thread that hangs should use
    /// [`russet_mlx::leave`].
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Stop);
        let Some(thread) = self.thread.take() else { return };
        let begun = Instant::now();
        while !thread.is_finished() && begun.elapsed() < LAST_STEP {
            std::thread::sleep(Duration::from_millis(1));
        }
        if thread.is_finished() {
            let _ = thread.join();
        }
    }
}

impl Compute for Runtime {
    fn load(&self) -> Answer<()> {
        self.ask(Command::Load)
    }

    fn progress(&self) -> Progress {
        self.bytes.progress()
    }

    fn join(&self, addresses: Addresses) -> Answer<()> {
        self.ask(|reply| Command::Join(addresses, reply))
    }

    fn disband(&self) -> Answer<()> {
        // Before what comes of it: the thread looks at this behind everything it has waited for.
        self.disbanded.fetch_add(1, Ordering::SeqCst);
        self.ask(Command::Disband)
    }

    fn run(&self, batch: Vec<Step>) -> Answer<Vec<Chosen>> {
        self.batches.begin(&batch);
        self.ask(|reply| Command::Run(batch, Replies::Tokens(reply)))
    }

    fn looks_ahead(&self) -> bool {
        self.looks_ahead
    }

    fn draft(&self, drafts: Vec<Draft>) -> Answer<Vec<Vec<u32>>> {
        self.ask(|reply| Command::Draft(drafts, reply))
    }

    fn arrange(&self, order: Order) {
        let _ = self.commands.send(Command::Arrange(order));
    }

    /// Reads on a thread of its own, a few blocks at a time, while MLX goes on with others.
    fn fetch(&self, slot: u32, keys: Vec<Key>) -> Answer<u32> {
        let (reply, answer) = oneshot::channel();
        let (commands, shelf) = (self.commands.clone(), self.shelf.get().cloned());
        let group = self.disbanded.load(Ordering::SeqCst);
        let read = move |key: &Key| {
            let record = shelf.as_ref().map(|shelf| shelf.read(*key));
            let record = record.and_then(|record| {
                let say = |error: &ShelfError| match error {
                    ShelfError::Gone { .. } => tracing::debug!(%error, "it is read again"),
                    _ => tracing::warn!(%error, "a block is not on disk"),
                };
                record.inspect_err(say).ok()
            });
            (*key, record)
        };
        let fetching = std::thread::Builder::new().name("fetch".to_owned()).spawn(move || {
            let mut came = 0;
            for keys in keys.chunks(blocks::AT_ONCE) {
                let (filled, count) = mpsc::channel();
                let pieces = keys.iter().map(&read).collect();
                if commands.send(Command::Fill(group, slot, pieces, filled)).is_err() {
                    return;
                }
                let Ok(count) = count.recv() else { return };
                came += count;
                if (count as usize) < keys.len() {
                    break;
                }
            }
            let _ = reply.send(Ok(came));
        });
        if let Err(error) = fetching {
            // Its end of the answer is gone with it, so nothing came.
            tracing::warn!(%error, "no thread to read blocks from disk: the prompt is read again");
        }
        answer
    }

    fn has_shelf(&self) -> bool {
        self.shelf.get().is_some()
    }

    fn shelved(&self) -> Vec<Key> {
        self.shelf.get().map(|shelf| shelf.keys()).unwrap_or_default()
    }

    fn lost(&self) -> Vec<Key> {
        self.shelf.get().map(|shelf| shelf.lost()).unwrap_or_default()
    }

    fn memory(&self) -> Memory {
        let bytes = |result: mlx_rs::error::Result<usize>| result.map_or(0, |bytes| bytes as u64);
        Memory {
            bytes: bytes(mlx_rs::memory::active_memory()),
            peak_bytes: bytes(mlx_rs::memory::peak_memory()),
        }
    }

    fn pulse(&self) -> Pulse {
        self.batches.pulse()
    }

    fn totals(&self) -> Totals {
        self.meter.totals()
    }
}

/// The part of `config.rank`, once the number of layers is known.
fn part_of(config: &RuntimeConfig, layers: u32) -> Result<Part, RuntimeError> {
    let split = config.layers_per_rank.clone().unwrap_or_else(|| vec![layers]);
    let partition = Partition::with_tensor(split, config.tensor_size, layers)?;
    partition.part(config.rank).ok_or(RuntimeError::Rank { rank: config.rank, size: partition.size() })
}

/// Names all that changes a number of a cache, or which of them are here.
fn identity_of(config: &RuntimeConfig, part: &Part) -> String {
    let RuntimeConfig { model_dir, dtype, kv_cache, .. } = config;
    let Part { layers, tensor_index, tensor_size, .. } = part;
    let model = identity::of_model(model_dir);
    let Range { start, end } = layers;
    format!("{model}-{start}-{end}-{tensor_index}of{tensor_size}-{dtype:?}-{kv_cache:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(layers_per_rank: Option<Vec<u32>>, rank: u32) -> RuntimeConfig {
        RuntimeConfig {
            model_dir: PathBuf::from("/nowhere"),
            layers_per_rank,
            tensor_size: 1,
            rank,
            devices: None,
            dtype: LoadDtype::AsStored,
            kv_cache: KvCacheType::AsComputed,
            blas_threads: 1,
            look_ahead: LookAhead::Auto,
            wired: true,
            shelf: None,
            draft_dir: None,
        }
    }

    #[test]
    fn ranks_and_splits_that_cannot_be_are_errors() {
        assert_eq!(part_of(&config(None, 0), 5).unwrap().layers, 0..5);
        assert!(matches!(part_of(&config(None, 1), 5), Err(RuntimeError::Rank { rank: 1, size: 1 })));
        assert!(matches!(part_of(&config(Some(vec![2, 2]), 1), 5), Err(RuntimeError::Partition(_))));
    }

    #[test]
    fn groups_on_cpus_alone_wait_for_what_is_known_unless_they_are_told_to_or_not_to() {
        let (one, two) = (config(None, 0), config(Some(vec![2, 2]), 0));
        let told = |config: &RuntimeConfig, look_ahead| {
            let config = RuntimeConfig { look_ahead, ..config.clone() };
            [false, true].map(|on_gpu| config.looks_ahead(on_gpu))
        };
        assert_eq!(told(&one, LookAhead::Auto), [true, true]);
        assert_eq!(told(&two, LookAhead::Auto), [false, true]);
        for config in [one, two] {
            assert_eq!(told(&config, LookAhead::On), [true, true]);
            assert_eq!(told(&config, LookAhead::Off), [false, false]);
        }
    }

    #[test]
    fn blocks_of_another_part_or_in_another_form_have_another_name() {
        let alone = config(None, 0);
        let first = identity_of(&alone, &part_of(&alone, 4).unwrap());
        let upper = config(Some(vec![2, 2]), 0);
        for other in [
            RuntimeConfig { kv_cache: KvCacheType::Int8, ..alone.clone() },
            RuntimeConfig { kv_cache: KvCacheType::Int4, ..alone.clone() },
            RuntimeConfig { dtype: LoadDtype::Float32, ..alone.clone() },
            upper,
        ] {
            assert_ne!(identity_of(&other, &part_of(&other, 4).unwrap()), first, "{other:?}");
        }
        assert_eq!(identity_of(&alone, &part_of(&alone, 4).unwrap()), first);
    }

    #[test]
    fn a_missing_model_and_early_steps_are_answers_not_the_end() {
        let runtime = Runtime::start(config(None, 0)).unwrap();
        let early = runtime.run(vec![Step { slot: 0, offset: 0, tokens: vec![1], guesses: 0, choice: None }]);
        assert!(early.blocking_recv().unwrap().unwrap_err().to_string().contains("before it could"));
        let error = runtime.load().blocking_recv().unwrap().unwrap_err();
        assert!(error.to_string().contains("/nowhere/config.json"), "{error}");
    }
}
