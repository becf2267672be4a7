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
mod byte_budget;
pub mod deadline;
mod engine_time;
mod in_flight;
mod intake;
pub mod kv_budget;
mod queue_limit;
mod ranks;
mod report_budget;
mod request;
mod response_sink;
mod slot_caches;
pub mod smoke;
mod speculation;
mod tokenizer_pool;
pub mod wait_queue;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use russet_wire::event::{FailureKind, FinishReason, GenerationFailure};
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::time::Instant;

use crate::executor::{Executor, Sampled, StepResult};
use crate::group::Followers;
use crate::lifecycle::Lifecycle;
use crate::metrics::EngineMetrics;
use crate::prefix_cache::block_hash::BlockHash;
use crate::prefix_cache::checkpoints::Checkpoints;
use crate::prefix_cache::events::BlockEvents;
use crate::prefix_cache::{self, CACHE_STEP, CacheCapacity, PrefixCache};
use crate::served_adapters::ServedAdapters;
use crate::speculative::Proposers;
use crate::token_masks::MaskThread;
use crate::tokenizer::ChatTokenizer;

use batching::{Readiness, ScheduledTokens, compose_batch};
use engine_time::{BatchPart, EngineClock, shares};
use in_flight::{Completion, DecodeRound, InFlight, WorkKind};
pub use intake::Intake;
use kv_budget::{KvAdmission, KvBudget, SequenceUsage};
use queue_limit::QueueLimit;
pub(crate) use queue_limit::overloaded;
use ranks::Ranks;
use report_budget::{MAX_UNREAD_BYTES, ReportBudget};
use request::ScheduledRequest;
pub(crate) use response_sink::{kind_label, unavailable};
use slot_caches::{FetchedBlocks, SlotCaches};
use smoke::SmokeError;
use speculation::{SpeculationState, propose, request_drafts};
pub(crate) use tokenizer_pool::TokenizerPool;
use wait_queue::WaitQueue;

/// Scheduler configuration: capacity of the group.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Maximum tokens of one sequence.
    pub context_tokens: u32,
    /// Maximum sequences at a time.
    pub max_sequences: u32,
    /// Maximum requests that wait while all sequences run.
    pub max_waiting_requests: u32,
    /// KV-cache capacity in tokens, over all sequences.
    pub kv_tokens: u64,
    /// Pipeline stages.
    pub stages: u32,
    /// Whether the prefix cache is enabled.
    pub prefix_cache: bool,
    /// Enabled proposers of draft tokens.
    pub proposers: Proposers,
    /// Adapters that requests may name.
    pub adapters: ServedAdapters,
}

/// The scheduler loop.
pub struct Scheduler {
    ranks: Ranks,
    tokenizer: Arc<ChatTokenizer>,
    life: Lifecycle,
    metrics: EngineMetrics,
    queue_limit: QueueLimit,
    requests: UnboundedReceiver<ScheduledRequest>,
    waiting: WaitQueue<ScheduledRequest>,
    /// Requests in slots, in queue order; prompts are prefilled in this order.
    running: Vec<ScheduledRequest>,
    slots: usize,
    caches: SlotCaches,
    fetched: UnboundedReceiver<FetchedBlocks>,
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
    engine_clock: EngineClock,
    round: Option<DecodeRound>,
    speculation: SpeculationState,
    masks: MaskThread,
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
        tokenizer: Arc<ChatTokenizer>,
        life: Lifecycle,
        metrics: EngineMetrics,
        config: SchedulerConfig,
        root: BlockHash,
    ) -> io::Result<(Self, Intake)> {
        let SchedulerConfig {
            context_tokens,
            max_sequences,
            max_waiting_requests,
            kv_tokens,
            stages,
            prefix_cache,
            proposers,
            adapters,
        } = config;
        let support = compute.cache_support();
        let block_events = BlockEvents::default();
        let on_disk = followers.blocks_on_every_disk(compute.blocks_on_disk());
        let all_slots = u64::from(context_tokens) * u64::from(max_sequences);
        let rounded = u64::from(context_tokens.next_multiple_of(CACHE_STEP)) * u64::from(max_sequences);
        let limits = CacheCapacity {
            slots: max_sequences,
            tokens: if kv_tokens < all_slots { kv_tokens } else { rounded },
            disk: compute.has_disk_cache(),
            enabled: prefix_cache,
            blocks: support.blocks,
            max_rewind: support.max_rewind,
        };
        let ranks = Ranks { compute, followers, metrics: metrics.clone() };
        let prefix_cache = PrefixCache::new(root, limits, &on_disk);
        let (caches, fetched) = SlotCaches::new(prefix_cache, ranks.clone(), block_events.clone());
        let (sender, requests) = mpsc::unbounded_channel();
        let queue_limit = QueueLimit::new(metrics.clone(), max_sequences, max_waiting_requests);
        let started = Instant::now();
        let intake = Intake {
            requests: sender,
            tokenizer_pool: TokenizerPool::start()?,
            tokenizer: tokenizer.clone(),
            context_tokens,
            slots: max_sequences,
            kv_tokens,
            proposers,
            draft_rewind: support.draft_rewind(),
            queue_limit: queue_limit.clone(),
            started,
            next_number: Arc::default(),
            life: life.clone(),
            metrics: metrics.clone(),
            block_events,
            root,
            adapters,
            reports: ReportBudget::new(MAX_UNREAD_BYTES),
        };
        let scheduler = Self {
            ranks,
            tokenizer,
            life,
            metrics,
            queue_limit,
            requests,
            waiting: WaitQueue::default(),
            running: Vec::new(),
            slots: max_sequences as usize,
            caches,
            fetched,
            kv_budget: KvBudget::new(kv_tokens, context_tokens),
            context_tokens,
            stages: stages as usize,
            admissions: 0,
            scheduling_since: started,
            last_ended: started,
            engine_clock: EngineClock::new(started),
            round: None,
            speculation: SpeculationState::default(),
            masks: MaskThread::start()?,
        };
        Ok((scheduler, intake))
    }

    /// Answers the smoke prompt on every rank, before the first request.
    ///
    /// # Errors
    /// A step failed, or its answer shows that weights and tokenizer do not fit together.
    pub async fn smoke(&self) -> Result<(), SmokeError> {
        smoke::run(&self.ranks, &self.tokenizer, self.context_tokens).await
    }

    /// Runs until the rank fails, or until it was asked to stop and every request has ended.
    pub async fn run(mut self) {
        let life = self.life.clone();
        let mut in_flight = VecDeque::new();
        loop {
            self.receive();
            self.drop_stale();
            self.admit();
            self.count_unread();
            while in_flight.len() < self.max_batches()
                && let Some(batch) = self.begin_batch(in_flight.len())
            {
                in_flight.push_back(batch);
            }
            let Some(InFlight { admissions, parts, started, work }) = in_flight.pop_front() else {
                tokio::select! {
                    biased;
                    reason = life.wait_failed() => return self.fail_all(&reason),
                    Some(fetched) = self.fetched.recv() => self.finish_fetch(&fetched),
                    request = self.requests.recv() => match request {
                        Some(request) => {
                            self.waiting.push(request.queue_position, request);
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
                    Ok(Completion::Draft(drafts)) => {
                        self.charge(&admissions, &parts, started, Instant::now());
                        self.speculation.receive_drafts(&mut self.running, admissions, started, drafts);
                    }
                    Ok(Completion::Batch { prefills, extra_tokens, results }) => {
                        let now = Instant::now();
                        self.metrics.batch.observe((now - started).as_secs_f64());
                        if !prefills {
                            // The time a batch waited for earlier batches is not its own.
                            let elapsed = now - started.max(self.last_ended);
                            self.speculation.cost_model.record_batch(admissions.len() as u32, extra_tokens, elapsed);
                        }
                        (self.scheduling_since, self.last_ended) = (now, now);
                        self.charge(&admissions, &parts, started, now);
                        self.end_batch(admissions, prefills || extra_tokens > 0, results);
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
        self.stages == 1 && self.ranks.compute.overlaps_steps()
    }

    fn receive(&mut self) {
        while let Ok(request) = self.requests.try_recv() {
            self.waiting.push(request.queue_position, request);
        }
        while let Ok(fetched) = self.fetched.try_recv() {
            self.finish_fetch(&fetched);
        }
    }

    /// Counts the tokens of prompts that are not in a KV cache yet.
    fn count_unread(&self) {
        let prompts =
            self.waiting.iter().chain(self.running.iter().filter(|request| request.is_prefilling()));
        let tokens: u64 = prompts.map(|request| u64::from(request.sequence.uncached_tokens())).sum();
        self.metrics.unread_tokens.set(i64::try_from(tokens).unwrap_or(i64::MAX));
    }

    /// Ends requests that are cancelled, past their deadline, or without a place in the queue.
    fn drop_stale(&mut self) {
        for request in self.waiting.take_where(|request| request.sink.is_closed()) {
            request.finish(FinishReason::Cancelled, &self.metrics);
        }
        let metrics = self.metrics.clone();
        for request in self.waiting.take_where(|request| request.rejection(&metrics).is_some()) {
            self.reject(request);
        }
        // A slot that is being loaded from disk keeps its request until then.
        let stale = |request: &ScheduledRequest| {
            !request.fetching && (request.sink.is_closed() || request.rejection(&metrics).is_some())
        };
        let (stale, running): (Vec<_>, Vec<_>) = self.running.drain(..).partition(stale);
        self.running = running;
        for request in stale {
            self.caches.release(&request);
            self.reject(request);
        }
    }

    /// Ends a request with its failure, or as cancelled if its client has gone.
    fn reject(&self, request: ScheduledRequest) {
        match request.rejection(&self.metrics) {
            Some(failure) if !request.sink.is_closed() => request.sink.fail(failure),
            _ => request.finish(FinishReason::Cancelled, &self.metrics),
        }
    }

    /// Admits waiting requests to slots, in queue order. No request overtakes one that does not fit yet;
    /// otherwise large requests would starve.
    fn admit(&mut self) {
        self.caches.drop_lost_blocks();
        while let Some(first) = self.waiting.first() {
            let running: Vec<SequenceUsage> =
                self.running.iter().map(ScheduledRequest::sequence_usage).collect();
            let KvAdmission::AfterPreempting(victims) =
                self.kv_budget.admission(&first.sequence_usage(), &running, self.slots - running.len())
            else {
                break;
            };
            let Some(mut request) = self.waiting.take_first() else { break };
            for index in victims.into_iter().rev() {
                self.preempt(index);
            }
            let Some(assignment) = self.caches.admit(&request.sequence) else {
                self.waiting.push(request.queue_position, request);
                break;
            };
            self.admissions += 1;
            self.round = None;
            request.admit(&assignment, self.admissions, &self.metrics);
            let prefix_cache::SlotAssignment { slot, fetch_from_disk, .. } = assignment;
            request.fetching = !fetch_from_disk.is_empty();
            self.caches.apply_commands();
            if request.fetching {
                self.caches.fetch(slot, self.admissions, fetch_from_disk);
            }
            let position =
                self.running.partition_point(|other| other.queue_position.precedes(&request.queue_position));
            self.running.insert(position, request);
        }
    }

    /// Preempts a running request; it waits for another slot. Its KV blocks stay cached as far as there is
    /// capacity; the rest is prefilled again when it resumes.
    fn preempt(&mut self, index: usize) {
        let mut request = self.running.remove(index);
        self.round = None;
        self.caches.release(&request);
        request.preempt(
            self.queue_limit
                .acquire_preempted(request.queue_position.number, request.queue_position.priority),
            &self.metrics,
        );
        self.waiting.push(request.queue_position, request);
    }

    /// Composes the next batch after preempting as many sequences as its tokens require; `ahead` allows
    /// sampling after tokens that are not known yet.
    fn compose(&mut self, ahead: bool) -> Vec<ScheduledTokens> {
        loop {
            let ready: Vec<Readiness> = self.running.iter().map(|request| request.readiness(ahead)).collect();
            let answering =
                self.running.iter().zip(&ready).any(|(request, ready)| {
                    !request.is_prefilling() && !matches!(ready, Readiness::Prefill(_))
                });
            let scheduled = compose_batch(&ready, self.stages, answering, self.context_tokens);
            let mut batch_tokens = vec![0; ready.len()];
            for ScheduledTokens { index, tokens } in &scheduled {
                batch_tokens[*index] = *tokens;
            }
            let running: Vec<SequenceUsage> =
                self.running.iter().map(ScheduledRequest::sequence_usage).collect();
            match self.kv_budget.victim(&running, &batch_tokens) {
                Some(index) => self.preempt(index),
                // A sequence that could be preempted is preempted once its slot is loaded.
                None if running.iter().any(|usage| usage.is_pinned)
                    && !self.kv_budget.fits(&running, &batch_tokens) =>
                {
                    return Vec::new();
                }
                None => return scheduled,
            }
        }
    }

    /// Starts the next batch, with `behind` batches in flight, if any sequence has work.
    fn begin_batch(&mut self, behind: usize) -> Option<InFlight> {
        let threshold = self.speculation.acceptance_threshold(&self.running);
        let proposed = propose(&mut self.running, threshold);
        if self.overlaps_steps() && proposed && behind > 0 {
            return None;
        }
        if let Some(drafts) = request_drafts(&mut self.running, threshold, &*self.ranks.compute) {
            return Some(drafts);
        }
        let scheduled = self.compose(self.overlaps_steps() && !proposed);
        if scheduled.is_empty() {
            return None;
        }
        let count = scheduled.len();
        let (mut admissions, mut parts, mut steps) =
            (Vec::with_capacity(count), Vec::with_capacity(count), Vec::with_capacity(count));
        let streams = self.running.len();
        let (mut prefill_tokens, mut extra_tokens) = (0, 0);
        for ScheduledTokens { index, tokens } in &scheduled {
            let request = &mut self.running[*index];
            request.prefilled_alone &= streams == 1;
            let Checkpoints { fork_at, snapshot_at } = request.sequence.take_checkpoints();
            if let Some(tokens) = fork_at {
                let shared = &request.sequence.history()[..tokens as usize];
                self.caches.fork(request.sequence.slot(), shared);
            }
            if snapshot_at.is_some() {
                self.caches.snapshot(request.sequence.slot());
            }
            let step = request.sequence.step(*tokens);
            if let Some(mask) = step.sample.as_ref().and_then(|sample| sample.mask.as_ref()) {
                self.masks.begin(mask.step());
            }
            self.caches.grow(step.slot, request.sequence.cached());
            if request.is_prefilling() {
                self.metrics.prompt_tokens.inc_by(step.tokens.len() as u64);
            }
            match step.sample {
                None => prefill_tokens += step.tokens.len(),
                Some(_) => extra_tokens += step.length() - 1,
            }
            parts.push(BatchPart::of(&step));
            admissions.push(request.admission_id);
            steps.push(step);
        }
        self.caches.apply_commands();
        self.metrics.batch_rows.observe(admissions.len() as f64);
        self.metrics.batch_prompt_tokens.observe(prefill_tokens as f64);
        let reply = self.ranks.dispatch(steps);
        let now = Instant::now();
        self.metrics.scheduling.observe((now - self.scheduling_since).as_secs_f64());
        self.scheduling_since = now;
        Some(InFlight {
            admissions,
            parts,
            started: now,
            work: WorkKind::Batch { prefills: prefill_tokens > 0, extra_tokens, reply },
        })
    }

    /// Charges a batch to its requests, by admission id. The part of one that has ended is charged to none.
    fn charge(&mut self, admissions: &[u64], parts: &[BatchPart], began: Instant, ended: Instant) {
        let microseconds = self.engine_clock.count(began, ended);
        let decoding = parts.iter().filter(|part| **part == BatchPart::Decode).count();
        let decode = self.speculation.cost_model.decode_time(decoding as u32);
        let mut charged: u64 = 0;
        for (admission_id, share) in admissions.iter().zip(shares(microseconds, parts, decode)) {
            let mut requests = self.running.iter_mut().chain(self.waiting.iter_mut());
            if let Some(request) = requests.find(|request| request.admission_id == *admission_id) {
                request.sink.charge(share);
                charged = charged.saturating_add(share);
            }
        }
        self.metrics.record_engine_time(charged, true);
        self.metrics.record_engine_time(microseconds.saturating_sub(charged), false);
    }

    /// Takes the sampled tokens of a running request; returns how it ended, if it did.
    fn accept_sampled(&mut self, index: usize, sampled: Sampled) -> Option<Result<FinishReason, String>> {
        let request = &mut self.running[index];
        let slot = request.sequence.slot();
        // A prompt is cached only if its next token can be sampled: one NaN or infinite value makes the
        // tokens that were prefilled with it unusable too.
        if request.is_prefilling() && sampled.first().is_some_and(Result::is_ok) {
            self.caches.store_prompt(slot, request.sequence.prompt());
        }
        let count = request.sequence.verify(&sampled);
        if sampled.len() > 1 {
            self.metrics.record_draft_tokens(
                request.sequence.is_from_draft_model(),
                sampled.len() - 1,
                count - 1,
            );
        }
        if count < sampled.len() {
            self.caches.shrink(slot, request.sequence.cached());
        }
        sampled.into_iter().take(count).find_map(|token| match token {
            Ok(token) => request.accept_token(token, &self.metrics),
            Err(error) => Some(Err(error.to_string())),
        })
    }

    /// Takes the results of a batch, by admission id; results of requests that ended or were preempted are
    /// dropped. An `uneven` batch, with prefill or extra tokens, says nothing about the time per token.
    fn end_batch(&mut self, admissions: Vec<u64>, uneven: bool, results: Vec<StepResult>) {
        let (streams, mut emitted, mut some_ended) = (self.running.len() as u32, 0, false);
        for (admission_id, StepResult { sampled, scores }) in admissions.into_iter().zip(results) {
            let Some(index) = self.running.iter().position(|request| request.admission_id == admission_id)
            else {
                continue;
            };
            if self.running[index].lacks_report() {
                // Its answer would come without its prompt.
                continue;
            }
            let outcome = if sampled.is_empty() {
                self.running[index].accept_scores(scores)
            } else {
                emitted += 1;
                self.accept_sampled(index, sampled)
            };
            let Some(outcome) = outcome else { continue };
            some_ended = true;
            let request = self.running.remove(index);
            match outcome {
                Ok(reason) => {
                    self.caches.release(&request);
                    if request.sequence.limit() > 0 {
                        self.kv_budget.record_answer(request.sequence.usage().completion_tokens);
                    }
                    request.finish(reason, &self.metrics);
                }
                // NaN or infinite values must not be cached.
                Err(message) => {
                    self.caches.discard(&request);
                    request.sink.fail(GenerationFailure { kind: FailureKind::Internal, message });
                }
            }
        }
        self.caches.apply_commands();
        let running: Vec<SequenceUsage> = self.running.iter().map(ScheduledRequest::sequence_usage).collect();
        self.metrics.kv_usage.set(self.kv_budget.usage(&running));
        if uneven || some_ended {
            self.round = None;
            return;
        }
        // Every stream has a token now, from one batch or from those of all stages.
        let now = Instant::now();
        let cached = running.iter().map(|usage| usage.cached_tokens).sum();
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

    /// A slot was loaded from disk; if its request was preempted or has ended, nobody needs it.
    fn finish_fetch(&mut self, fetched: &FetchedBlocks) {
        let request = self.running.iter_mut().find(|request| request.admission_id == fetched.admission_id);
        if let Some(request) = request {
            self.caches.finish_fetch(request, fetched);
        }
    }

    /// Fails all requests with the reason why this rank failed.
    fn fail_all(mut self, reason: &str) {
        self.requests.close();
        self.receive();
        for request in self.waiting.take_where(|_| true) {
            request.sink.fail(unavailable(reason.to_owned()));
        }
        for request in self.running.drain(..) {
            self.metrics.running.dec();
            request.sink.fail(unavailable(reason.to_owned()));
        }
    }
}

#[cfg(test)]
mod tests;
