//! Response sink: the event stream to the client of a request, and the failures it may receive.

use russet_wire::event::{EngineEvent, FailureKind, FinishReason, GenerationEvent, GenerationFailure, Usage};
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::Instant;

use super::byte_budget::ByteReservation;
use super::queue_limit::overloaded;
use super::report_budget::ReportBudget;
use crate::metrics::EngineMetrics;

/// An event on its way to the client of a request, with its room in the report budget until it is read.
pub struct SentEvent {
    /// The event.
    pub event: EngineEvent,
    _room: Option<ByteReservation>,
}

/// The event stream of a request. If dropped without an end, it sends a failure: a stream never just stops.
pub(super) struct ResponseSink {
    id: String,
    // Unbounded: a slow reader must not block the other sequences, and the context bounds the number of
    // events. What is told of prompts is more, and bounded by the budget.
    events: UnboundedSender<SentEvent>,
    reports: ReportBudget,
    pub(super) arrived: Instant,
    metrics: EngineMetrics,
    /// Time that the group has computed for it, in microseconds.
    engine_microseconds: u64,
    ended: bool,
}

impl ResponseSink {
    pub(super) fn new(
        id: String,
        events: UnboundedSender<SentEvent>,
        reports: ReportBudget,
        metrics: EngineMetrics,
    ) -> Self {
        Self { id, events, reports, arrived: Instant::now(), metrics, engine_microseconds: 0, ended: false }
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn is_closed(&self) -> bool {
        self.events.is_closed()
    }

    /// Charges it so many microseconds of a batch.
    pub(super) fn charge(&mut self, microseconds: u64) {
        self.engine_microseconds = self.engine_microseconds.saturating_add(microseconds);
    }

    pub(super) fn send(&self, event: GenerationEvent) {
        self.send_with(event, None);
    }

    /// Sends what is told of its prompt; an error where too much of that was not read. Nothing else must be sent then but the
    /// failure.
    pub(super) fn report(&self, events: Vec<GenerationEvent>) -> Result<(), GenerationFailure> {
        for event in events {
            let room = self.reports.reserve(&event).map_err(|unread| {
                overloaded(format!(
                    "{} MiB of log-probabilities and tokens of prompts wait to be read by the clients of this engine, which is the most; try again later, or ask for fewer log-probabilities",
                    unread >> 20
                ))
            })?;
            self.send_with(event, Some(room));
        }
        Ok(())
    }

    fn send_with(&self, event: GenerationEvent, room: Option<ByteReservation>) {
        // Nothing was computed when a request starts; a gateway that loses it then knows of nothing.
        let is_counted = !matches!(event, GenerationEvent::Started { .. });
        let engine_microseconds = is_counted.then_some(self.engine_microseconds);
        // A closed stream is noticed before the next step.
        let _ =
            self.events.send(SentEvent { event: EngineEvent { event, engine_microseconds }, _room: room });
    }

    pub(super) fn fail(mut self, failure: GenerationFailure) {
        self.send_failure(failure);
    }

    fn send_failure(&mut self, failure: GenerationFailure) {
        self.ended = true;
        tracing::info!(request = self.id, kind = ?failure.kind, message = failure.message, "request failed");
        self.metrics.record_failure(kind_label(failure.kind));
        self.send(GenerationEvent::Failed(failure));
    }

    pub(super) fn finish(mut self, reason: FinishReason, usage: Usage) {
        self.ended = true;
        self.metrics.record_finished(reason, usage, self.arrived.elapsed());
        tracing::info!(
            request = self.id,
            reason = reason.as_str(),
            prompt_tokens = usage.prompt_tokens,
            completion_tokens = usage.completion_tokens,
            "request finished"
        );
        self.send(GenerationEvent::Finished { reason, usage });
    }
}

impl Drop for ResponseSink {
    fn drop(&mut self) {
        if !self.ended {
            self.send_failure(GenerationFailure {
                kind: FailureKind::Internal,
                message: "the engine lost this request; report it with the engine's log".into(),
            });
        }
    }
}

/// The word of a failure in metrics.
pub(crate) fn kind_label(kind: FailureKind) -> &'static str {
    match kind {
        FailureKind::InvalidRequest | FailureKind::ContextLengthExceeded => "invalid_request",
        FailureKind::Overloaded => "overloaded",
        FailureKind::Unavailable => "unavailable",
        FailureKind::DeadlineExceeded => "deadline_exceeded",
        FailureKind::Internal => "internal",
    }
}

pub(crate) fn unavailable(message: String) -> GenerationFailure {
    GenerationFailure { kind: FailureKind::Unavailable, message }
}
