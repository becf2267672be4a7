//! Scheduler: assigns requests to slots and slots to batches, in one loop that steps all sequences together.
//! With a single stage, a batch starts before the tokens of the previous one are read, so MLX always has
//! work. Requests end only here and in `intake`, so every request gets exactly one `Finished` or `Failed`
//! (invariant 10). Not here: detokenisation (`sequence`), and the pure decisions on batching, KV budget and
//! deadlines (modules of their own).
//!
//! ```text
//! submit ─▶ tokenise ─▶ waiting ─▶ slot: part of the batches ─▶ Finished
//!    │          │        │   ▲      │  │
//!    │          │        │   └──────┘  │  preempted for others
//!    └──────────┴────────┴─────────────┴────────────────────────▶ Failed
//! ```

pub mod batching;
mod cache_commands;
pub mod deadline;
mod in_flight;
mod intake;
pub mod kv_budget;
mod queue_limit;
mod request;
mod response_sink;
pub mod smoke;
mod speculation;
mod tokenizer_pool;
pub mod wait_queue;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use russet_wire::event::{FailureKind, FinishReason, GenerationFailure};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::time::Instant;

use crate::executor::{Executor, Sampled, SequenceStep};
use crate::group::Followers;
use crate::lifecycle::Lifecycle;
use crate::metrics::EngineMetrics;
use crate::prefix_cache::block_hash::BlockHash;
use crate::prefix_cache::events::BlockEvents;
use crate::prefix_cache::{self, CACHE_STEP, CacheCapacity, PrefixCache};
use crate::speculative::{CostModel, Proposers};
use crate::tokenizer::ChatTokenizer;

use batching::{Readiness, ScheduledTokens, compose_batch};
use cache_commands::FetchedBlocks;
use in_flight::{Completion, DecodeRound, InFlight, PendingBatch, WorkKind};
pub use intake::Intake;
use kv_budget::{KvAdmission, KvBudget, SequenceUsage};
pub use queue_limit::MAX_WAITING_REQUESTS;
use queue_limit::QueueLimit;
use request::ScheduledRequest;
use response_sink::unavailable;
use tokenizer_pool::TokenizerPool;
use wait_queue::WaitQueue;

/// Scheduler configuration: capacity of the group.
#[derive(Clone, Copy, Debug)]
pub struct SchedulerConfig {
    /// Maximum tokens of one sequence.
    pub context_tokens: u32,
    /// Maximum sequences at a time.
    pub max_sequences: u32,
    /// KV-cache capacity in tokens, over all sequences.
    pub kv_tokens: u64,
    /// Pipeline stages.
    pub stages: u32,
    /// Whether the prefix cache is enabled.
    pub prefix_cache: bool,
    /// Enabled proposers of draft tokens.
    pub proposers: Proposers,
}

/// The scheduler loop.
pub struct Scheduler {
    compute: Arc<dyn Executor>,
    followers: Followers,
    tokenizer: Arc<ChatTokenizer>,
    life: Lifecycle,
    metrics: EngineMetrics,
    queue_limit: QueueLimit,
    requests: UnboundedReceiver<ScheduledRequest>,
    waiting: WaitQueue<ScheduledRequest>,
    /// Requests in slots, in queue order; prompts are prefilled in this order.
    running: Vec<ScheduledRequest>,
    slots: usize,
    prefix_cache: PrefixCache,
    block_events: BlockEvents,
    fetches: (UnboundedSender<FetchedBlocks>, UnboundedReceiver<FetchedBlocks>),
    kv_budget: KvBudget,
    context_tokens: u32,
    /// Pipeline stages.
    stages: usize,
    /// Admissions so far.
    admissions: u64,
    /// Since when only this loop has had work.
    scheduling_since: Instant,
    /// When the last batch ended.
    last_ended: Instant,
    round: Option<DecodeRound>,
    cost_model: CostModel,
    draft_failed: bool,
}

/// Delay between the first request to an idle engine and the first batch: requests of a burst are prefilled
/// together, in far less time than one after the other.
const BURST_WINDOW: Duration = Duration::from_millis(1);

impl Scheduler {
    /// A scheduler with this configuration, and its intake.
    ///
    /// # Errors
    /// The system cannot start threads.
    pub fn new(
        compute: Arc<dyn Executor>,
        followers: Followers,
        tokens: Arc<ChatTokenizer>,
        life: Lifecycle,
        metrics: EngineMetrics,
        config: SchedulerConfig,
        root: BlockHash,
    ) -> io::Result<(Self, Intake)> {
        let SchedulerConfig { context_tokens, max_sequences, kv_tokens, stages, prefix_cache, proposers } =
            config;
        let block_events = BlockEvents::default();
        let on_disk = followers.blocks_on_every_disk(compute.blocks_on_disk());
        let most = u64::from(context_tokens) * u64::from(max_sequences);
        let rounded = u64::from(context_tokens.next_multiple_of(CACHE_STEP)) * u64::from(max_sequences);
        let limits = CacheCapacity {
            slots: max_sequences,
            tokens: if kv_tokens < most { kv_tokens } else { rounded },
            disk: compute.has_disk_cache(),
            enabled: prefix_cache,
        };
        let (sender, jobs) = mpsc::unbounded_channel();
        let queue_limit = QueueLimit::new(metrics.clone(), max_sequences);
        let started = Instant::now();
        let intake = Intake {
            requests: sender,
            tokenizer_pool: TokenizerPool::start()?,
            tokenizer: tokens.clone(),
            context_tokens,
            kv_tokens,
            proposers,
            queue_limit: queue_limit.clone(),
            started,
            next_number: Arc::default(),
            life: life.clone(),
            metrics: metrics.clone(),
            block_events: block_events.clone(),
            root,
        };
        let schedule = Self {
            compute,
            followers,
            tokenizer: tokens,
            life,
            metrics,
            queue_limit,
            requests: jobs,
            waiting: WaitQueue::default(),
            running: Vec::new(),
            slots: max_sequences as usize,
            prefix_cache: PrefixCache::new(root, limits, &on_disk),
            block_events,
            fetches: mpsc::unbounded_channel(),
            kv_budget: KvBudget::new(kv_tokens, context_tokens),
            context_tokens,
            stages: stages as usize,
            admissions: 0,
            scheduling_since: started,
            last_ended: started,
            round: None,
            cost_model: CostModel::default(),
            draft_failed: false,
        };
        Ok((schedule, intake))
    }

    /// Runs until the rank fails, or until it was asked to stop and every request has ended.
    pub async fn run(mut self) {
        let life = self.life.clone();
        let mut begun = VecDeque::new();
        loop {
            self.receive();
            self.drop_stale();
            self.admit();
            while begun.len() < self.max_batches()
                && let Some(batch) = self.begin_batch(begun.len())
            {
                begun.push_back(batch);
            }
            let Some(InFlight { admissions: rows, started: since, work }) = begun.pop_front() else {
                tokio::select! {
                    biased;
                    reason = life.wait_failed() => return self.fail_all(&reason),
                    Some(fetched) = self.fetches.1.recv() => self.finish_fetch(&fetched),
                    job = self.requests.recv() => match job {
                        Some(job) => {
                            self.waiting.push(job.queue_position, job);
                            tokio::time::sleep(BURST_WINDOW).await;
                        }
                        None => return life.stop(),
                    },
                    // Accepted requests are finished; requests still in the intake are refused.
                    _ = life.wait_until(|now| now.draining.is_some()), if !self.requests.is_closed() => {
                        self.requests.close();
                    }
                }
                self.scheduling_since = Instant::now();
                continue;
            };
            tokio::select! {
                biased;
                reason = life.wait_failed() => return self.fail_all(&reason),
                done = work.wait() => match done {
                    Ok(Completion::Draft(drafts)) => self.receive_drafts(rows, since, drafts),
                    Ok(Completion::Batch { prefills, draft_tokens, sampled }) => {
                        let now = Instant::now();
                        self.metrics.batch.observe((now - since).as_secs_f64());
                        if !prefills {
                            // The time a batch waited for earlier batches is not its own.
                            self.cost_model.record_batch(rows.len() as u32, draft_tokens, now - since.max(self.last_ended));
                        }
                        (self.scheduling_since, self.last_ended) = (now, now);
                        self.end_batch(rows, prefills || draft_tokens > 0, sampled);
                    }
                    Err(failure) => {
                        life.fail_with(failure);
                        return self.fail_all(&life.wait_failed().await);
                    }
                },
            }
        }
    }

    /// Maximum batches in flight: with a pipeline one per stage, so that all stages work; with a single stage
    /// two, the second started before the tokens of the first are read.
    fn max_batches(&self) -> usize {
        self.stages.max(2)
    }

    /// Whether to sample a token after one that is not known yet: only in a single stage, whose ranks pass
    /// the token on themselves, and only where it pays.
    fn overlaps_steps(&self) -> bool {
        self.stages == 1 && self.compute.overlaps_steps()
    }

    fn receive(&mut self) {
        while let Ok(job) = self.requests.try_recv() {
            self.waiting.push(job.queue_position, job);
        }
        while let Ok(fetched) = self.fetches.1.try_recv() {
            self.finish_fetch(&fetched);
        }
    }

    /// Ends requests that are cancelled, past their deadline, or without a place in the queue.
    fn drop_stale(&mut self) {
        for job in self.waiting.take_where(|job| job.sink.is_closed()) {
            job.finish(FinishReason::Cancelled, &self.metrics);
        }
        let metrics = self.metrics.clone();
        for job in self.waiting.take_where(|job| job.rejection(&metrics).is_some()) {
            self.reject(job);
        }
        // A slot that is being loaded from disk keeps its request until then.
        let over = |job: &ScheduledRequest| {
            !job.fetching && (job.sink.is_closed() || job.rejection(&metrics).is_some())
        };
        let (over, running): (Vec<_>, Vec<_>) = self.running.drain(..).partition(over);
        self.running = running;
        for job in over {
            self.release_slot(&job);
            self.reject(job);
        }
    }

    /// Ends a request with its failure, or as cancelled if its client has gone.
    fn reject(&self, job: ScheduledRequest) {
        match job.rejection(&self.metrics) {
            Some(failure) if !job.sink.is_closed() => job.sink.fail(failure),
            _ => job.finish(FinishReason::Cancelled, &self.metrics),
        }
    }

    /// Admits waiting requests to slots, in queue order. No request overtakes one that does not fit yet;
    /// otherwise large requests would starve.
    fn admit(&mut self) {
        self.prefix_cache.remove_from_disk(&self.compute.take_lost_blocks());
        while let Some(first) = self.waiting.first() {
            let running: Vec<SequenceUsage> =
                self.running.iter().map(ScheduledRequest::sequence_usage).collect();
            let KvAdmission::AfterPreempting(leave) =
                self.kv_budget.admission(&first.sequence_usage(), &running, self.slots - running.len())
            else {
                break;
            };
            let Some(mut job) = self.waiting.take_first() else { break };
            for index in leave.into_iter().rev() {
                self.preempt(index);
            }
            let Some(prefix_cache::SlotAssignment { slot, cached, fetch_from_disk: fetch }) =
                self.prefix_cache.admit(job.sequence.history())
            else {
                self.waiting.push(job.queue_position, job);
                break;
            };
            self.admissions += 1;
            self.round = None;
            self.metrics.running.inc();
            job.admit(slot, cached, self.admissions, &self.metrics);
            job.fetching = !fetch.is_empty();
            self.apply_cache_commands();
            if job.fetching {
                self.fetch(slot, fetch);
            }
            let place =
                self.running.partition_point(|other| other.queue_position.precedes(&job.queue_position));
            self.running.insert(place, job);
        }
    }

    /// Preempts a running request; it waits for another slot. Its KV blocks stay cached as far as there is
    /// capacity; the rest is prefilled again when it resumes.
    fn preempt(&mut self, index: usize) {
        let mut job = self.running.remove(index);
        self.round = None;
        self.release_slot(&job);
        job.preempt(
            self.queue_limit.acquire_preempted(job.queue_position.number, job.queue_position.priority),
            &self.metrics,
        );
        self.waiting.push(job.queue_position, job);
    }

    /// Composes the next batch after preempting as many sequences as its tokens require; `ahead` allows
    /// sampling after tokens that are not known yet.
    fn compose(&mut self, ahead: bool) -> Vec<ScheduledTokens> {
        loop {
            let ready: Vec<Readiness> = self.running.iter().map(|job| job.readiness(ahead)).collect();
            let answering = self
                .running
                .iter()
                .zip(&ready)
                .any(|(job, ready)| !job.is_prefilling() && !matches!(ready, Readiness::Prefill(_)));
            let turns = compose_batch(&ready, self.stages, answering, self.context_tokens);
            let mut more = vec![0; ready.len()];
            for ScheduledTokens { index, tokens } in &turns {
                more[*index] = *tokens;
            }
            let running: Vec<SequenceUsage> =
                self.running.iter().map(ScheduledRequest::sequence_usage).collect();
            match self.kv_budget.victim(&running, &more) {
                Some(index) => self.preempt(index),
                // A sequence that could be preempted is preempted once its slot is loaded.
                None if running.iter().any(|one| one.is_pinned) && !self.kv_budget.fits(&running, &more) => {
                    return Vec::new();
                }
                None => return turns,
            }
        }
    }

    /// Starts the next batch, with `behind` batches in flight, if any sequence has work.
    fn begin_batch(&mut self, behind: usize) -> Option<InFlight> {
        let least = self.acceptance_threshold();
        let proposed = self.propose(least);
        if self.overlaps_steps() && proposed && behind > 0 {
            return None;
        }
        if let Some(drafts) = self.request_drafts(least) {
            return Some(drafts);
        }
        let turns = self.compose(self.overlaps_steps() && !proposed);
        if turns.is_empty() {
            return None;
        }
        let (mut rows, mut steps) = (Vec::with_capacity(turns.len()), Vec::with_capacity(turns.len()));
        let streams = self.running.len();
        let (mut read, mut draft_tokens) = (0, 0);
        for ScheduledTokens { index, tokens } in &turns {
            let job = &mut self.running[*index];
            job.prefilled_alone &= streams == 1;
            let step = job.sequence.step(*tokens);
            self.prefix_cache.grow(step.slot, job.sequence.cached());
            if job.is_prefilling() {
                self.metrics.prompt_tokens.inc_by(step.tokens.len() as u64);
            }
            if step.sample.is_none() {
                read += step.tokens.len();
            }
            draft_tokens += step.draft_tokens;
            rows.push(job.admission_id);
            steps.push(step);
        }
        self.apply_cache_commands();
        self.metrics.batch_rows.observe(rows.len() as f64);
        self.metrics.batch_prompt_tokens.observe(read as f64);
        let answer = self.dispatch(steps);
        let now = Instant::now();
        self.metrics.scheduling.observe((now - self.scheduling_since).as_secs_f64());
        self.scheduling_since = now;
        Some(InFlight {
            admissions: rows,
            started: now,
            work: WorkKind::Batch { prefills: read > 0, draft_tokens, reply: answer },
        })
    }

    /// Takes the sampled tokens of a running request; returns how it ended, if it did.
    fn accept_sampled(&mut self, index: usize, chosen: Sampled) -> Option<Result<FinishReason, String>> {
        let job = &mut self.running[index];
        let slot = job.sequence.slot();
        // A prompt is cached only if its next token can be sampled: one NaN or infinite value makes the
        // tokens that were prefilled with it unusable too.
        if job.is_prefilling() && chosen.first().is_some_and(Result::is_ok) {
            self.prefix_cache.store_prompt(slot, job.sequence.prompt());
        }
        let count = job.sequence.verify(&chosen);
        if chosen.len() > 1 {
            self.metrics.record_draft_tokens(job.sequence.is_from_draft_model(), chosen.len() - 1, count - 1);
        }
        if count < chosen.len() {
            self.prefix_cache.shrink(slot, job.sequence.cached());
        }
        chosen.into_iter().take(count).find_map(|token| match token {
            Ok(token) => job.accept_token(token, &self.metrics),
            Err(error) => Some(Err(error.to_string())),
        })
    }

    /// Takes the results of a batch, by admission id; results of requests that ended or were preempted are
    /// dropped. An `uneven` batch, with prefill or draft tokens, says nothing about the time per token.
    fn end_batch(&mut self, rows: Vec<u64>, uneven: bool, chosen: Vec<Sampled>) {
        let (streams, mut emitted, mut some_ended) = (self.running.len() as u32, 0, false);
        for (stay, chosen) in rows.into_iter().zip(chosen) {
            let Some(index) = self.running.iter().position(|job| job.admission_id == stay) else { continue };
            if chosen.is_empty() {
                continue;
            }
            emitted += 1;
            let Some(end) = self.accept_sampled(index, chosen) else { continue };
            some_ended = true;
            let job = self.running.remove(index);
            match end {
                Ok(reason) => {
                    self.release_slot(&job);
                    self.kv_budget.record_answer(job.sequence.usage().completion_tokens);
                    job.finish(reason, &self.metrics);
                }
                // NaN or infinite values must not be cached.
                Err(message) => {
                    self.discard_slot(&job);
                    job.sink.fail(GenerationFailure { kind: FailureKind::Internal, message });
                }
            }
        }
        self.apply_cache_commands();
        let running: Vec<SequenceUsage> = self.running.iter().map(ScheduledRequest::sequence_usage).collect();
        self.metrics.kv_usage.set(self.kv_budget.usage(&running));
        if uneven || some_ended {
            self.round = None;
            return;
        }
        // Every stream has a token now, from one batch or from those of all stages.
        let now = Instant::now();
        let cached = running.iter().map(|one| one.cached_tokens).sum();
        let round = self.round.take().filter(|round| round.streams == streams);
        self.round = Some(match round {
            Some(round) if round.emitted + emitted < streams => {
                DecodeRound { emitted: round.emitted + emitted, ..round }
            }
            round => {
                if let Some(round) = round {
                    self.metrics.throughput.lock().record_decode(streams, cached, now - round.started);
                }
                DecodeRound { started: now, emitted: 0, streams }
            }
        });
    }

    /// Runs the steps as one batch on every rank.
    fn dispatch(&self, batch: Vec<SequenceStep>) -> PendingBatch {
        let choices = batch.iter().map(|step| step.samples().count()).collect();
        self.metrics.steps.inc_by(batch.len() as u64);
        self.followers.run(&batch);
        PendingBatch { sample_counts: choices, reply: self.compute.run(batch) }
    }

    /// Fails all requests with the reason why this rank failed.
    fn fail_all(mut self, reason: &str) {
        self.requests.close();
        self.receive();
        for job in self.waiting.take_where(|_| true) {
            job.sink.fail(unavailable(reason.to_owned()));
        }
        for job in self.running.drain(..) {
            self.metrics.running.dec();
            job.sink.fail(unavailable(reason.to_owned()));
        }
    }
}

#[cfg(test)]
mod tests;
