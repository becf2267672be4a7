//! A request from the intake to its end: its sequence, its response sink and its progress. The same object
//! while it waits, runs and is preempted.

use std::time::Duration;

use russet_wire::event::{FinishReason, GenerationFailure, Usage};
use tokio::time::Instant;

use super::batching::Readiness;
use super::deadline::{RequestProgress, deadline_failure};
use super::kv_budget::SequenceUsage;
use super::queue_limit::QueueTicket;
use super::response_sink::ResponseSink;
use super::wait_queue::QueuePosition;
use crate::executor::{SampledToken, TokenScore};
use crate::metrics::EngineMetrics;
use crate::prefix_cache::SlotAssignment;
use crate::sequence::{AcceptedToken, Sequence};

pub(super) struct ScheduledRequest {
    pub(super) queue_position: QueuePosition,
    pub(super) sequence: Sequence,
    pub(super) sink: ResponseSink,
    /// Timeout of its client.
    timeout: Option<Duration>,
    /// Queue ticket while it waits.
    pub(super) queue_ticket: Option<QueueTicket>,
    /// Admission id, never reused, unlike the slot: results of batches from an earlier admission are dropped.
    pub(super) admission_id: u64,
    /// Output tokens when it was last admitted.
    tokens_at_admission: u32,
    /// Times it was preempted.
    preemptions: u32,
    /// When it was first admitted.
    admitted_at: Option<Instant>,
    first_token_at: Option<Instant>,
    last_token_at: Instant,
    /// Whether it was the only sequence during prefill.
    pub(super) prefilled_alone: bool,
    /// Whether its slot is still being loaded from disk.
    pub(super) fetching: bool,
    /// Why no more of its prompt can be told.
    report_failure: Option<GenerationFailure>,
}

impl ScheduledRequest {
    pub(super) fn new(
        queue_position: QueuePosition,
        sequence: Sequence,
        sink: ResponseSink,
        timeout: Option<Duration>,
        ticket: QueueTicket,
    ) -> Self {
        let last_token_at = sink.arrived;
        // The tokens of a resumed output are prefilled too, and logits of a prompt take time as well: this would measure more
        // than the prompt.
        let prefilled_alone = sequence.usage().completion_tokens == 0 && !sequence.scores_prompt();
        Self {
            queue_position,
            sequence,
            sink,
            timeout,
            queue_ticket: Some(ticket),
            admission_id: 0,
            tokens_at_admission: 0,
            preemptions: 0,
            admitted_at: None,
            first_token_at: None,
            last_token_at,
            prefilled_alone,
            fetching: false,
            report_failure: None,
        }
    }

    /// Its KV usage and what it may still need.
    pub(super) fn sequence_usage(&self) -> SequenceUsage {
        let usage = self.sequence.usage();
        SequenceUsage {
            priority: self.queue_position.priority,
            number: self.queue_position.number,
            prompt: usage.prompt_tokens,
            generated: usage.completion_tokens,
            limit: self.sequence.limit(),
            tokens_since_admission: usage.completion_tokens - self.tokens_at_admission,
            cached_tokens: self.sequence.cached(),
            preemptions: self.preemptions,
            is_pinned: self.fetching,
        }
    }

    /// Why it must not wait or run any longer, if so.
    pub(super) fn rejection(&self, metrics: &EngineMetrics) -> Option<GenerationFailure> {
        if let Some(failure) = self.queue_ticket.as_ref().and_then(QueueTicket::displaced) {
            return Some(failure);
        }
        if self.report_failure.is_some() {
            return self.report_failure.clone();
        }
        let timeout = self.timeout?;
        let prefill_tokens = self.sequence.uncached_tokens();
        deadline_failure(&RequestProgress {
            timeout,
            waited: self.sink.arrived.elapsed(),
            generated: self.sequence.usage().completion_tokens,
            prefill_tokens,
            prefill_time: metrics.throughput.lock().prefill_time(prefill_tokens),
        })
    }

    /// Admitted to a slot, with this admission id.
    pub(super) fn admit(&mut self, assignment: &SlotAssignment, admission_id: u64, metrics: &EngineMetrics) {
        let SlotAssignment { slot, cached, checkpoints, .. } = *assignment;
        let now = Instant::now();
        self.queue_ticket = None;
        self.admission_id = admission_id;
        self.tokens_at_admission = self.sequence.usage().completion_tokens;
        self.sequence.admit(slot, cached, checkpoints);
        if self.admitted_at.is_none() {
            self.admitted_at = Some(now);
            if !self.sequence.scores_prompt() {
                metrics.record_prefix_lookup(self.sequence.usage().prompt_tokens, cached);
            }
            metrics.queue.observe((now - self.sink.arrived).as_secs_f64());
            self.sink.send(self.sequence.started_event());
            self.report_failure = self.sink.report(self.sequence.prompt_events()).err();
        }
    }

    /// Whether there was no room for what it tells of its prompt: before the next step it fails with that.
    pub(super) fn lacks_report(&self) -> bool {
        self.report_failure.is_some()
    }

    /// Takes the scores of a step; returns how the request ended, if it did.
    pub(super) fn accept_scores(&mut self, scores: Vec<TokenScore>) -> Option<Result<FinishReason, String>> {
        match self.sequence.accept_scores(scores) {
            Ok(events) => self.report_failure = self.sink.report(events).err(),
            Err(error) => return Some(Err(error.to_string())),
        }
        if self.report_failure.is_some() {
            return None;
        }
        self.sequence.ends_with_prompt().then_some(Ok(FinishReason::Length))
    }

    /// Preempted; waits with this queue ticket.
    pub(super) fn preempt(&mut self, ticket: QueueTicket, metrics: &EngineMetrics) {
        self.queue_ticket = Some(ticket);
        self.preemptions += 1;
        metrics.preemptions.inc();
        tracing::info!(
            request = self.sink.id(),
            priority = self.queue_position.priority,
            tokens = self.sequence.cached(),
            times = self.preemptions,
            "preempted; tokens that are not cached then are prefilled again when it is admitted"
        );
    }

    /// Work it is ready for.
    pub(super) fn readiness(&self, ahead: bool) -> Readiness {
        if self.fetching { Readiness::Busy } else { self.sequence.readiness(ahead) }
    }

    /// Whether its prompt is being prefilled for the first time.
    pub(super) fn is_prefilling(&self) -> bool {
        self.first_token_at.is_none()
    }

    /// Takes a sampled token; returns how the request ended, if it did.
    pub(super) fn accept_token(
        &mut self,
        token: SampledToken,
        metrics: &EngineMetrics,
    ) -> Option<Result<FinishReason, String>> {
        let now = Instant::now();
        let before = self.sequence.usage().completion_tokens;
        let AcceptedToken { event, finished } = match self.sequence.accept(token) {
            Ok(accepted) => accepted,
            Err(error) => return Some(Err(error.to_string())),
        };
        let started = self.admitted_at.unwrap_or(now);
        match self.first_token_at {
            None => {
                self.first_token_at = Some(now);
                metrics.first_token.observe((now - self.sink.arrived).as_secs_f64());
                metrics.prefill.observe((now - started).as_secs_f64());
                if self.prefilled_alone {
                    let Usage { prompt_tokens, cached_tokens, .. } = self.sequence.usage();
                    metrics.throughput.lock().record_prefill(prompt_tokens - cached_tokens, now - started);
                }
            }
            Some(_) => metrics.inter_token.observe((now - self.last_token_at).as_secs_f64()),
        }
        self.last_token_at = now;
        // As in the usage, the end token is none of the response.
        metrics.generated_tokens.inc_by(u64::from(self.sequence.usage().completion_tokens - before));
        if let Some(event) = event {
            self.sink.send(event);
        }
        finished.map(Ok)
    }

    /// Ends the request.
    pub(super) fn finish(self, reason: FinishReason, metrics: &EngineMetrics) {
        if let Some(first) = self.first_token_at {
            metrics.decode.observe((self.last_token_at - first).as_secs_f64());
        }
        self.sink.finish(reason, self.sequence.usage());
    }
}
