//! The one thread that calls MLX: executes commands, sends replies, and starts batches before earlier ones
//! have ended.
//!
//! A lost neighbour makes the batches fail that wait for it, and MLX's rings fail twice and then wait
//! forever. So after the first failure of the group no batch starts until the group is left
//! ([`ThreadCommand::LeaveGroup`]). From that request on, data from neighbours may be arbitrary: batches that
//! use it finish, and their results are dropped.

use std::{
    collections::VecDeque,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};

use russet_model::partition::RankPart;
use tokio::sync::oneshot;

use super::{
    DetailedOutput, DiskCacheConfig, RuntimeConfig, RuntimeError, StepOutput, cache_fingerprint,
    draft_model::DraftRunner,
    init::init,
    model_runner::{BatchRun, EndedBatch, ModelRunner},
};
use crate::{
    batch_monitor::BatchMonitor,
    executor::{
        Addresses, CacheSupport, DraftRequest, ExecutorError, LoadProgress, PooledModel, PooledText,
        SampledToken, SequenceStep, StepResult,
    },
    prefix_cache::disk::{BlockFile, DiskCache},
    prefix_cache::{CacheCommand, block_hash::BlockHash},
    step_profiler::StepProfiler,
};

/// Time for the next batch to arrive after the last one's tokens were sent, before the thread waits for the
/// tokens of the batch that is being computed.
const NEXT_BATCH_WAIT: Duration = Duration::from_micros(300);

pub(super) type ReplySender<T> = oneshot::Sender<Result<T, ExecutorError>>;

/// Level of detail of the replies.
pub(super) enum RunReply {
    Tokens(ReplySender<Vec<StepResult>>),
    Detailed(ReplySender<Vec<DetailedOutput>>),
}

impl RunReply {
    fn is_detailed(&self) -> bool {
        matches!(self, Self::Detailed(_))
    }
}

pub(super) enum ThreadCommand {
    Load(ReplySender<()>),
    Join(Addresses, ReplySender<()>),
    LeaveGroup(ReplySender<()>),
    Run(Vec<SequenceStep>, RunReply),
    Pool(Vec<PooledText>, ReplySender<Vec<Vec<f32>>>),
    Draft(Vec<DraftRequest>, ReplySender<Vec<Vec<u32>>>),
    ApplyCacheCommand(CacheCommand),
    /// Blocks to load into a slot of a group, with their disk records; replies with the number of blocks
    /// loaded.
    LoadBlocks(u64, u32, Vec<(BlockHash, Option<BlockFile>)>, mpsc::Sender<u32>),
    Stop,
}

/// Bytes of loaded weights, written by the thread and read from any thread.
#[derive(Debug, Default)]
pub(super) struct LoadCounter {
    loaded: AtomicU64,
    total: AtomicU64,
}

impl LoadCounter {
    fn set(&self, loaded: u64, total: u64) {
        self.loaded.store(loaded, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
    }

    pub(super) fn progress(&self) -> LoadProgress {
        LoadProgress {
            loaded_bytes: self.loaded.load(Ordering::Relaxed),
            total_bytes: self.total.load(Ordering::Relaxed),
        }
    }
}

/// State shared between the thread and its handle.
pub(super) struct ThreadShared {
    pub(super) config: RuntimeConfig,
    /// Number of groups that the thread was asked to leave.
    pub(super) groups_left: Arc<AtomicU64>,
    pub(super) load_counter: Arc<LoadCounter>,
    /// Set once the weights are loaded.
    pub(super) disk_cache: Arc<OnceLock<Arc<DiskCache>>>,
    pub(super) cache_support: Arc<OnceLock<CacheSupport>>,
    pub(super) pooled_model: Arc<OnceLock<Option<PooledModel>>>,
    pub(super) batches: BatchMonitor,
    pub(super) profiler: StepProfiler,
    /// Whether a batch starts before the tokens of the previous one are read.
    pub(super) overlaps_steps: bool,
}

impl ThreadShared {
    /// Whether results still count: not once the thread was asked to leave more groups than it had left at
    /// the time.
    fn check_current(&self, disbanded: u64) -> Result<(), RuntimeError> {
        if self.groups_left.load(Ordering::SeqCst) == disbanded { Ok(()) } else { Err(self.leaving_group()) }
    }

    fn leaving_group(&self) -> RuntimeError {
        RuntimeError::LeavingGroup { rank: self.config.rank, size: self.config.size() }
    }
}

/// State of the thread.
pub(super) struct MlxThread {
    shared: ThreadShared,
    runner: Option<ModelRunner>,
    draft_runner: Option<DraftRunner>,
    /// A failed command fails the next batch: the KV caches differ from rank 0's view.
    failed_command: Option<RuntimeError>,
    /// Whether a batch has failed because another rank is lost.
    group_lost: bool,
    /// Number of groups left so far.
    groups_left: u64,
}

impl MlxThread {
    pub(super) fn new(shared: ThreadShared) -> Self {
        Self {
            shared,
            runner: None,
            draft_runner: None,
            failed_command: None,
            group_lost: false,
            groups_left: 0,
        }
    }

    /// Executes commands until the channel closes. A dropped reply receiver is no error: its request was
    /// cancelled.
    pub(super) fn run(mut self, inbox: &mpsc::Receiver<ThreadCommand>) {
        let mut in_flight: VecDeque<InFlightRun> = VecDeque::new();
        // Batches handed to MLX before the first one's tokens are read.
        let most = if self.shared.overlaps_steps { 2 } else { 1 };
        while let Some(command) = self.next_command(inbox, &mut in_flight) {
            match command {
                ThreadCommand::Load(reply) => drop(reply.send(self.load().map_err(ExecutorError::from))),
                ThreadCommand::Join(addresses, reply) => {
                    drop(reply.send(self.join(&addresses).map_err(ExecutorError::from)));
                }
                ThreadCommand::LeaveGroup(reply) => {
                    self.end(in_flight.drain(..));
                    self.groups_left += 1;
                    self.leave_group();
                    drop(reply.send(Ok(())));
                }
                ThreadCommand::Run(steps, reply) => {
                    run_in_turn(&mut self, &mut in_flight, most, steps, reply)
                }
                // Of a text whose client has left nothing is computed.
                ThreadCommand::Pool(texts, reply) if !reply.is_closed() => {
                    drop(reply.send(self.pool(&texts).map_err(ExecutorError::from)));
                }
                ThreadCommand::Pool(..) => {}
                ThreadCommand::Draft(drafts, reply) => {
                    drop(reply.send(self.draft(&drafts).map_err(ExecutorError::from)));
                }
                ThreadCommand::ApplyCacheCommand(order) => self.apply_cache_command(order),
                // Blocks that were read for an earlier group belong to no sequence of this one.
                ThreadCommand::LoadBlocks(group, slot, blocks, filled) if group == self.groups_left => {
                    let _ = filled.send(self.load_blocks(slot, blocks));
                }
                ThreadCommand::LoadBlocks(.., filled) => {
                    let _ = filled.send(0);
                }
                ThreadCommand::Stop => return,
            }
        }
    }

    fn load(&mut self) -> Result<(), RuntimeError> {
        if self.runner.is_some() {
            self.leave_group();
            return Ok(());
        }
        let ThreadShared {
            config,
            load_counter: bytes,
            disk_cache,
            cache_support,
            pooled_model,
            profiler: meter,
            ..
        } = &self.shared;
        init(config);
        let open = |part: &RankPart| {
            let opened = open_disk_cache(config, part)?;
            Some(disk_cache.get_or_init(|| opened).clone())
        };
        let rank = ModelRunner::load(config, meter.clone(), open, |loaded, total| bytes.set(loaded, total))?;
        let _ = cache_support.set(rank.cache_support());
        let _ = pooled_model.set(rank.pooled_model());
        if config.rank == 0 {
            self.draft_runner = DraftRunner::load(config, rank.vocabulary())?;
        }
        self.runner = Some(rank);
        Ok(())
    }

    fn join(&mut self, addresses: &Addresses) -> Result<(), RuntimeError> {
        let too_early = self.not_ready("join");
        let rank = self.runner.as_mut().ok_or(too_early)?;
        rank.join(addresses, self.shared.config.devices.as_ref())
    }

    /// Leaves the groups; only the weights stay in memory.
    fn leave_group(&mut self) {
        (self.failed_command, self.group_lost) = (None, false);
        for rank in self.runner.iter_mut().chain(self.draft_runner.as_mut().map(DraftRunner::runner)) {
            rank.leave_group();
        }
        russet_mlx::distributed::release_last_group();
        let _ = mlx_rs::memory::clear_cache();
    }

    fn begin(&mut self, steps: &[SequenceStep], in_detail: bool) -> Result<BatchRun, RuntimeError> {
        if let Some(error) = self.failed_command.take() {
            return Err(error);
        }
        let too_early = self.not_ready("step");
        let rank = self.runner.as_mut().ok_or(too_early)?;
        if self.group_lost {
            return Err(self.shared.leaving_group());
        }
        self.shared.check_current(self.groups_left)?;
        rank.begin(steps, in_detail)
    }

    fn pool(&mut self, texts: &[PooledText]) -> Result<Vec<Vec<f32>>, RuntimeError> {
        let too_early = self.not_ready("pool");
        let runner = &self.runner;
        self.shared.batches.run_other_work(|| runner.as_ref().ok_or(too_early)?.pool(texts))
    }

    fn draft(&mut self, drafts: &[DraftRequest]) -> Result<Vec<Vec<u32>>, RuntimeError> {
        let too_early = self.not_ready("draft");
        let draft_runner = &mut self.draft_runner;
        self.shared.batches.run_other_work(|| draft_runner.as_mut().ok_or(too_early)?.draft(drafts))
    }

    fn apply_cache_command(&mut self, order: CacheCommand) {
        if let (CacheCommand::Reset { slot }, Some(draft_runner)) = (&order, &mut self.draft_runner)
            && let Err(error) = draft_runner.reset(*slot)
        {
            tracing::warn!(%error, slot, "the draft model keeps what it has read");
        }
        let sound = || self.shared.check_current(self.groups_left).is_ok();
        if let Some(Err(error)) = self.runner.as_mut().map(|rank| rank.apply_cache_command(order, sound)) {
            self.failed_command = Some(error);
        }
    }

    /// Number of blocks that are in the slot now.
    fn load_blocks(&mut self, slot: u32, blocks: Vec<(BlockHash, Option<BlockFile>)>) -> u32 {
        let too_early = self.not_ready("fill");
        let rank = &mut self.runner;
        let filled = || rank.as_mut().ok_or(too_early)?.load_blocks(slot, blocks);
        self.shared.batches.run_other_work(filled).unwrap_or_else(|error| {
            tracing::warn!(%error, "blocks from disk are not used");
            0
        })
    }

    /// Waits for batches and sends their replies.
    fn end(&mut self, runs: impl Iterator<Item = InFlightRun>) {
        runs.for_each(|run| self.end_run(run));
    }

    /// The next command; `None` when the channel is closed. Meanwhile finishes running batches, oldest first,
    /// but only after the next batch had a chance to start: MLX should always have work.
    fn next_command(
        &mut self,
        inbox: &mpsc::Receiver<ThreadCommand>,
        in_flight: &mut VecDeque<InFlightRun>,
    ) -> Option<ThreadCommand> {
        loop {
            let command = match in_flight.len() {
                0 => return inbox.recv().ok(),
                1 => inbox.recv_timeout(NEXT_BATCH_WAIT),
                _ => inbox.try_recv().map_err(|error| match error {
                    mpsc::TryRecvError::Empty => mpsc::RecvTimeoutError::Timeout,
                    mpsc::TryRecvError::Disconnected => mpsc::RecvTimeoutError::Disconnected,
                }),
            };
            match command {
                Ok(command) => return Some(command),
                Err(mpsc::RecvTimeoutError::Timeout) => self.end(in_flight.drain(..1)),
                Err(mpsc::RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    fn not_ready(&self, asked: &'static str) -> RuntimeError {
        RuntimeError::NotReady { rank: self.shared.config.rank, asked }
    }
}

/// Opens the disk cache for this part of the model. On failure the engine runs without the disk tier.
fn open_disk_cache(config: &RuntimeConfig, part: &RankPart) -> Option<Arc<DiskCache>> {
    let DiskCacheConfig { folder, max_bytes: most_bytes } = config.disk_cache.as_ref()?;
    let opened = DiskCache::open(folder, &cache_fingerprint(config, part), *most_bytes);
    let folder = folder.display();
    opened
        .inspect_err(|error| tracing::warn!(%folder, %error, "the prefix cache is kept in memory only"))
        .ok()
}

/// Begins and ends batches, one command at a time.
trait BatchDriver {
    type Reply;
    /// A batch in flight.
    type Run;

    fn begin_run(&mut self, steps: &[SequenceStep], reply: Self::Reply) -> Self::Run;
    /// Waits for it and replies.
    fn end_run(&mut self, run: Self::Run);
}

/// Begins a batch. One that depends on unknown tokens begins while others are in flight, `most` with it. Scores are computed
/// as the batch begins, so one that has some overlaps no other: earlier ones would end late, and in its time.
fn run_in_turn<B: BatchDriver>(
    batches: &mut B,
    in_flight: &mut VecDeque<B::Run>,
    most: usize,
    steps: Vec<SequenceStep>,
    reply: B::Reply,
) {
    let is_scored = steps.iter().any(|step| step.score.is_some());
    let most = if is_scored { 1 } else { most };
    while in_flight.len() >= most
        && let Some(run) = in_flight.pop_front()
    {
        batches.end_run(run);
    }
    let run = batches.begin_run(&steps, reply);
    if is_scored { batches.end_run(run) } else { in_flight.push_back(run) }
}

impl BatchDriver for MlxThread {
    type Reply = RunReply;
    type Run = InFlightRun;

    fn begin_run(&mut self, steps: &[SequenceStep], reply: RunReply) -> InFlightRun {
        let run = self.begin(steps, reply.is_detailed());
        self.group_lost |= run.as_ref().is_err_and(RuntimeError::is_group_failure);
        InFlightRun { run, reply, batches: self.shared.batches.clone() }
    }

    fn end_run(&mut self, run: InFlightRun) {
        self.group_lost |= run.end(|| self.shared.check_current(self.groups_left));
    }
}

/// A batch in flight, and its reply sender.
struct InFlightRun {
    run: Result<BatchRun, RuntimeError>,
    reply: RunReply,
    batches: BatchMonitor,
}

impl InFlightRun {
    /// Waits for the batch and replies; returns whether it failed because another rank is lost.
    fn end(self, sound: impl Fn() -> Result<(), RuntimeError>) -> bool {
        let ended = self.run.and_then(BatchRun::end).and_then(|ended| sound().map(|()| ended));
        self.batches.end(ended.is_ok());
        let lost = ended.as_ref().is_err_and(RuntimeError::is_group_failure);
        match self.reply {
            RunReply::Tokens(reply) => {
                let token = |stepped: Result<StepOutput, _>| {
                    let sampled = |StepOutput { token, top_logprobs, .. }| SampledToken {
                        id: token,
                        logprobs: top_logprobs,
                    };
                    stepped.map(sampled)
                };
                let steps = |EndedBatch { outputs, scores }| {
                    let step = |(output, scores): (DetailedOutput, _)| StepResult {
                        sampled: output.into_iter().map(token).collect(),
                        scores,
                    };
                    outputs.into_iter().zip(scores).map(step).collect()
                };
                let _ = reply.send(ended.map(steps).map_err(ExecutorError::from));
            }
            RunReply::Detailed(reply) => {
                drop(reply.send(ended.map(|ended| ended.outputs).map_err(ExecutorError::from)));
            }
        }
        lost
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::executor::ScoreSpec;

    fn batch(tokens: usize, is_scored: bool) -> Vec<SequenceStep> {
        let score = is_scored.then(|| ScoreSpec { tokens: vec![1; tokens], top: 0 });
        let tokens = vec![1; tokens];
        vec![SequenceStep { slot: 0, offset: 0, tokens, draft_tokens: 0, adapter: 0, sample: None, score }]
    }

    /// Batches that take so long: scored ones as they begin, others until they end.
    struct FakeBatches {
        monitor: BatchMonitor,
        now: Instant,
        log: Vec<&'static str>,
        /// What the monitor expected of the oldest batch while one was scored.
        expected: Option<Duration>,
    }

    impl BatchDriver for FakeBatches {
        type Reply = (&'static str, Duration);
        /// What is logged at its end, and how long it still takes.
        type Run = (&'static str, Duration);

        fn begin_run(&mut self, steps: &[SequenceStep], (name, takes): Self::Reply) -> Self::Run {
            self.log.push(name);
            if steps.iter().all(|step| step.score.is_none()) {
                return (name, takes);
            }
            self.expected = self.monitor.progress().running_estimate;
            self.now += takes;
            (name, Duration::ZERO)
        }

        fn end_run(&mut self, (name, takes): Self::Run) {
            self.now += takes;
            self.monitor.end_at(true, self.now);
            self.log.push(name);
        }
    }

    #[test]
    fn a_scored_batch_overlaps_no_other_and_has_its_own_time() {
        let (plain, scored) = (Duration::from_millis(10), Duration::from_secs(9));
        let monitor = BatchMonitor::new(1, Duration::ZERO);
        let mut batches =
            FakeBatches { monitor: monitor.clone(), now: Instant::now(), log: Vec::new(), expected: None };
        let mut in_flight = VecDeque::new();
        // The scheduler sends a batch while the one before it runs.
        let mut run = |batches: &mut FakeBatches, name, tokens, is_scored| {
            let steps = batch(tokens, is_scored);
            batches.monitor.begin_at(&steps, batches.now);
            let takes = if is_scored { scored } else { plain };
            run_in_turn(batches, &mut in_flight, 2, steps, (name, takes));
        };
        run(&mut batches, "one", 1, false);
        run(&mut batches, "two", 1, false);
        run(&mut batches, "three", 1, false);
        assert_eq!(batches.log, ["one", "two", "one", "three"], "plain batches overlap");
        batches.log.clear();
        run(&mut batches, "scored", 64, true);
        run(&mut batches, "four", 1, false);
        run(&mut batches, "five", 1, false);
        assert_eq!(batches.log, ["two", "three", "scored", "scored", "four", "five"]);
        // 64 scored tokens are forecast as 512, from one of 10 ms: no batch before it was the oldest any more.
        assert_eq!(batches.expected, Some(plain * 1024));
        run(&mut batches, "six", 1, false);
        run(&mut batches, "seven", 1, false);
        assert_eq!(monitor.progress().running_estimate, Some(plain), "plain ones learned of no score");
        run(&mut batches, "scored", 64, true);
        assert_eq!(batches.expected, Some(scored));
    }
}
