//! The one thread that touches MLX, behind [`Compute`]: the rest of the engine is asynchronous and
//! never sees an array.
//!
//! Commands run in the order in which they were given, on every rank alike: rank 0 decides the order
//! and tells the others over gRPC; only activations travel through MLX. So an idle group waits on
//! nothing.

mod blocks;
mod drafter;
pub mod environment;
mod groups;
mod prepare;
mod rank;

use std::{
    collections::VecDeque,
    ops::Range,
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use russet_wire::partition::{Part, Partition, PartitionError};
use thiserror::Error;
use tokio::sync::oneshot;

use crate::{
    args::KvCacheType,
    compute::{Addresses, Answer, Chosen, Compute, ComputeError, Draft, Memory, Progress, SampleError, Step},
    jaccl::Devices,
    kept::{Order, chain::Key, identity},
    meter::{Meter, Totals},
    models::{ConfigError, ModelError},
    pulse::{Batches, Pulse},
    shelf::{Record, Shelf, ShelfError},
    weights::{LoadDtype, WeightsError},
};
use drafter::Drafter;
use prepare::prepare;
use rank::{Rank, Run};

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
    /// Whether a GPU keeps its memory resident.
    pub wired: bool,
    /// Where blocks of the KV cache are kept on disk, if they are.
    pub shelf: Option<ShelfConfig>,
    /// Folder of a draft model; rank 0 alone loads it.
    pub draft_dir: Option<PathBuf>,
}

/// A folder for blocks of the KV cache.
#[derive(Clone, Debug)]
pub struct ShelfConfig {
    /// The folder; of this rank alone.
    pub folder: PathBuf,
    /// Bytes of all files.
    pub most_bytes: u64,
}

/// A rank that cannot do what was asked.
#[derive(Debug, Error)]
pub enum RuntimeError {
    /// The configuration of the model.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The split over ranks.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// A rank outside the group.
    #[error("rank {rank} is not in a group of {size}; ranks count from 0")]
    Rank {
        /// The rank.
        rank: u32,
        /// Ranks in the group.
        size: u32,
    },
    /// Loading weights or building the model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Joining the group.
    #[error("rank {rank} cannot join its group at {addresses:?}: {reason}; the group has to be formed again")]
    Join {
        /// The rank.
        rank: u32,
        /// Where MLX was to meet the others.
        addresses: Addresses,
        /// Why.
        reason: String,
    },
    /// Something before [`Compute::load`] or [`Compute::join`].
    #[error("rank {rank} was asked to {asked} before it could; load, then join, then step")]
    TooEarly {
        /// The rank.
        rank: u32,
        /// What was asked.
        asked: &'static str,
    },
    /// Ranks disagree about a sequence.
    #[error(
        "slot {slot} holds {have} tokens, but the step starts at {wanted}; ranks are out of step, the group has to be formed again"
    )]
    OutOfStep {
        /// The sequence.
        slot: u32,
        /// Tokens in the cache.
        have: u32,
        /// Offset of the step.
        wanted: u32,
    },
    /// A step without tokens, or with tokens the model does not have.
    #[error(
        "a step needs at least one token below {vocabulary}, but holds {tokens} tokens, the largest {largest:?}"
    )]
    Tokens {
        /// Tokens in the step.
        tokens: usize,
        /// Largest id.
        largest: Option<u32>,
        /// Tokens of the vocabulary.
        vocabulary: u32,
    },
    /// MLX failed in a step; in a group, mostly because a neighbour is lost.
    #[error("MLX failed on rank {rank} of {size}: {reason}")]
    Mlx {
        /// The rank.
        rank: u32,
        /// Ranks in the group.
        size: u32,
        /// MLX's words.
        reason: String,
    },
}

impl From<WeightsError> for RuntimeError {
    fn from(error: WeightsError) -> Self {
        Self::Model(error.into())
    }
}

impl From<RuntimeError> for ComputeError {
    fn from(error: RuntimeError) -> Self {
        Self(error.to_string())
    }
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

type Reply<T> = oneshot::Sender<Result<T, ComputeError>>;

/// How much of an answer is asked for.
enum Replies {
    Tokens(Reply<Vec<Chosen>>),
    InDetail(Reply<Vec<InDetail>>),
}

impl Replies {
    fn in_detail(&self) -> bool {
        matches!(self, Self::InDetail(_))
    }
}

enum Command {
    Load(Reply<()>),
    Join(Addresses, Reply<()>),
    Run(Vec<Step>, Replies),
    Draft(Vec<Draft>, Reply<Vec<Vec<u32>>>),
    Arrange(Order),
    /// Blocks for a slot, with what was read of them from disk; answered with how many came.
    Fill(u32, Vec<(Key, Option<Record>)>, mpsc::Sender<u32>),
    Stop,
}

/// Bytes of weights, written by the MLX thread and read by anyone.
#[derive(Debug, Default)]
struct Bytes {
    loaded: AtomicU64,
    total: AtomicU64,
}

/// The handle to the MLX thread, which ends when the handle is dropped.
#[derive(Debug)]
pub struct Runtime {
    commands: mpsc::Sender<Command>,
    bytes: Arc<Bytes>,
    batches: Batches,
    meter: Meter,
    /// Opened once the weights are loaded.
    shelf: Arc<OnceLock<Arc<Shelf>>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// Batches that MLX is given before the first one's tokens are read.
const AHEAD: usize = 2;
/// Time to hear of the next batch after the last one's tokens were told, before the tokens of the one that is being
/// computed are waited for.
const ANSWERING: Duration = Duration::from_micros(300);

/// How long a dropped runtime waits for its thread. A thread that waits for a lost neighbour never ends.
const LAST_STEP: Duration = Duration::from_secs(2);

impl Runtime {
    /// Starts the thread. It does nothing before [`Compute::load`].
    pub fn start(config: RuntimeConfig) -> std::io::Result<Self> {
        let (commands, inbox) = mpsc::channel();
        let bytes = Arc::<Bytes>::default();
        let seen = Arc::clone(&bytes);
        let shelf = Arc::<OnceLock<Arc<Shelf>>>::default();
        let opened = Arc::clone(&shelf);
        let ranks = config.layers_per_rank.as_ref().map_or(1, Vec::len) as u32;
        let batches = Batches::new(ranks / config.tensor_size.max(1));
        let meter = Meter::default();
        let (told, counted) = (batches.clone(), meter.clone());
        // MLX's streams belong to the thread that made them, so one thread does everything.
        let thread = std::thread::Builder::new().name("mlx".to_owned()).spawn(move || {
            run(&config, &seen, &opened, (&told, &counted), &inbox);
        })?;
        Ok(Self { commands, bytes, shelf, batches, meter, thread: Some(thread) })
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
        Progress {
            loaded_bytes: self.bytes.loaded.load(Ordering::Relaxed),
            total_bytes: self.bytes.total.load(Ordering::Relaxed),
        }
    }

    fn join(&self, addresses: Addresses) -> Answer<()> {
        self.ask(|reply| Command::Join(addresses, reply))
    }

    fn run(&self, batch: Vec<Step>) -> Answer<Vec<Chosen>> {
        self.batches.begin(&batch);
        self.ask(|reply| Command::Run(batch, Replies::Tokens(reply)))
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
        std::thread::spawn(move || {
            let mut came = 0;
            for keys in keys.chunks(blocks::AT_ONCE) {
                let (filled, count) = mpsc::channel();
                let pieces = keys.iter().map(&read).collect();
                if commands.send(Command::Fill(slot, pieces, filled)).is_err() {
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

/// The thread. A reply nobody waits for any more is not an error: its request went away.
fn run(
    config: &RuntimeConfig,
    bytes: &Bytes,
    shelf: &OnceLock<Arc<Shelf>>,
    (batches, meter): (&Batches, &Meter),
    inbox: &mpsc::Receiver<Command>,
) {
    let mut rank: Option<Rank> = None;
    let mut drafter: Option<Drafter> = None;
    // An order that failed fails the batch after it: the caches are not what rank 0 thinks.
    let mut trouble = None;
    let mut begun: VecDeque<Begun> = VecDeque::new();
    while let Some(command) = next(inbox, &mut begun) {
        let too_early = |asked| RuntimeError::TooEarly { rank: config.rank, asked };
        match command {
            Command::Load(reply) => {
                prepare(config);
                let open = |part: &Part| {
                    let opened = open_shelf(config, part)?;
                    Some(shelf.get_or_init(|| opened).clone())
                };
                let loaded = Rank::load(config, meter.clone(), open, |loaded, total| {
                    bytes.loaded.store(loaded, Ordering::Relaxed);
                    bytes.total.store(total, Ordering::Relaxed);
                });
                let loaded = loaded.and_then(|loaded| {
                    if config.rank == 0 {
                        drafter = Drafter::load(config, loaded.vocabulary())?;
                    }
                    rank = Some(loaded);
                    Ok(())
                });
                let _ = reply.send(loaded.map_err(ComputeError::from));
            }
            Command::Join(addresses, reply) => {
                let joined = match &mut rank {
                    Some(rank) => rank.join(&addresses, config.devices.as_ref()),
                    None => Err(too_early("join")),
                };
                let _ = reply.send(joined.map_err(ComputeError::from));
            }
            Command::Run(batch, reply) => {
                let run = match trouble.take() {
                    Some(error) => Err(error),
                    None => rank
                        .as_mut()
                        .ok_or(too_early("step"))
                        .and_then(|rank| rank.begin(&batch, reply.in_detail())),
                };
                begun.push_back(Begun { run, reply, batches: batches.clone() });
            }
            Command::Stop => return,
            Command::Draft(drafts, reply) => {
                let draft = || match &mut drafter {
                    Some(drafter) => drafter.draft(&drafts),
                    None => Err(too_early("guess")),
                };
                let _ = reply.send(batches.beside(draft).map_err(ComputeError::from));
            }
            Command::Arrange(order) => {
                if let (Order::Reset { slot }, Some(drafter)) = (&order, &mut drafter)
                    && let Err(error) = drafter.reset(*slot)
                {
                    tracing::warn!(%error, slot, "the draft model keeps what it has read");
                }
                if let Some(Err(error)) = rank.as_mut().map(|rank| rank.arrange(order)) {
                    trouble = Some(error);
                }
            }
            Command::Fill(slot, blocks, filled) => {
                let fill = || rank.as_mut().ok_or(too_early("fill")).and_then(|rank| rank.fill(slot, blocks));
                let count = batches.beside(fill);
                let _ = filled.send(count.unwrap_or_else(|error| {
                    tracing::warn!(%error, "blocks from disk are not used");
                    0
                }));
            }
        }
    }
}

/// The shelf of this part of the model. Without it nothing is kept on disk, and everything else works.
fn open_shelf(config: &RuntimeConfig, part: &Part) -> Option<Arc<Shelf>> {
    let ShelfConfig { folder, most_bytes } = config.shelf.as_ref()?;
    let opened = Shelf::open(folder, &identity_of(config, part), *most_bytes);
    let folder = folder.display();
    opened
        .inspect_err(|error| tracing::warn!(%folder, %error, "the prefix cache is kept in memory only"))
        .ok()
}

/// Names all that changes a number of a cache, or which of them are here.
fn identity_of(config: &RuntimeConfig, part: &Part) -> String {
    let RuntimeConfig { model_dir, dtype, kv_cache, .. } = config;
    let Part { layers, tensor_index, tensor_size, .. } = part;
    let model = identity::of_model(model_dir);
    let Range { start, end } = layers;
    format!("{model}-{start}-{end}-{tensor_index}of{tensor_size}-{dtype:?}-{kv_cache:?}")
}

/// A batch that MLX works on, and who waits for it.
struct Begun {
    run: Result<Run, RuntimeError>,
    reply: Replies,
    batches: Batches,
}

impl Begun {
    /// Waits for it and answers.
    fn end(self) {
        let ended = self.run.and_then(Run::end);
        self.batches.end(ended.is_ok());
        match self.reply {
            Replies::Tokens(reply) => {
                let token = |stepped: Result<Stepped, _>| stepped.map(|stepped| stepped.token);
                let tokens = |step: InDetail| step.into_iter().map(token).collect();
                let steps = |steps: Vec<InDetail>| steps.into_iter().map(tokens).collect();
                let _ = reply.send(ended.map(steps).map_err(ComputeError::from));
            }
            Replies::InDetail(reply) => drop(reply.send(ended.map_err(ComputeError::from))),
        }
    }
}

/// The next command; `None` when there will be none. Batches that were begun are ended meanwhile, the oldest
/// first, but not before the next one had a chance to be begun: MLX should never be without work.
fn next(inbox: &mpsc::Receiver<Command>, begun: &mut VecDeque<Begun>) -> Option<Command> {
    loop {
        let command = match begun.len() {
            0 => return inbox.recv().ok(),
            1 => inbox.recv_timeout(ANSWERING),
            _ => inbox.try_recv().map_err(|error| match error {
                mpsc::TryRecvError::Empty => mpsc::RecvTimeoutError::Timeout,
                mpsc::TryRecvError::Disconnected => mpsc::RecvTimeoutError::Disconnected,
            }),
        };
        match command {
            // One that waits for tokens nobody knows yet is begun while others are on their way; never more than that.
            Ok(command @ Command::Run(..)) if begun.len() >= AHEAD => {
                begun.drain(..=begun.len() - AHEAD).for_each(Begun::end);
                return Some(command);
            }
            Ok(command) => return Some(command),
            Err(mpsc::RecvTimeoutError::Timeout) => begun.drain(..1).for_each(Begun::end),
            Err(mpsc::RecvTimeoutError::Disconnected) => return None,
        }
    }
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
        assert!(early.blocking_recv().unwrap().unwrap_err().0.contains("before it could"));
        let error = runtime.load().blocking_recv().unwrap().unwrap_err();
        assert!(error.0.contains("/nowhere/config.json"), "{error}");
    }
}
