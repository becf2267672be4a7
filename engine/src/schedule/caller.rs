//! Who waits for an answer, and the failures it may be told.

use russet_wire::event::{Event, Failure, FailureKind, FinishReason, Usage};
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::Instant;

use crate::metrics::Metrics;

/// Who waits for an answer. Dropped without an end, it says so: a stream never just ends.
pub(super) struct Caller {
    id: String,
    // Not bounded: a slow reader must not hold up the other sequences, and the context bounds an answer.
    events: UnboundedSender<Event>,
    pub(super) arrived: Instant,
    metrics: Metrics,
    ended: bool,
}

impl Caller {
    pub(super) fn new(id: String, events: UnboundedSender<Event>, metrics: Metrics) -> Self {
        Self { id, events, arrived: Instant::now(), metrics, ended: false }
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn gone(&self) -> bool {
        self.events.is_closed()
    }

    pub(super) fn tell(&self, event: Event) {
        // A caller that is gone is noticed before the next step.
        let _ = self.events.send(event);
    }

    pub(super) fn fail(mut self, failure: Failure) {
        self.end(failure);
    }

    fn end(&mut self, failure: Failure) {
        self.ended = true;
        tracing::info!(request = self.id, kind = ?failure.kind, message = failure.message, "request failed");
        self.metrics.failed(kind_label(failure.kind));
        self.tell(Event::Failed(failure));
    }

    pub(super) fn finish(mut self, reason: FinishReason, usage: Usage) {
        self.ended = true;
        self.metrics.finished(reason, usage, self.arrived.elapsed());
        tracing::info!(
            request = self.id,
            reason = reason.as_str(),
            prompt_tokens = usage.prompt_tokens,
            completion_tokens = usage.completion_tokens,
            "request finished"
        );
        self.tell(Event::Finished { reason, usage });
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        if !self.ended {
            self.end(Failure {
                kind: FailureKind::Internal,
                message: "the engine lost this request; report it with the engine's log".into(),
            });
        }
    }
}

fn kind_label(kind: FailureKind) -> &'static str {
    match kind {
        FailureKind::InvalidRequest => "invalid_request",
        FailureKind::Overloaded => "overloaded",
        FailureKind::Unavailable => "unavailable",
        FailureKind::DeadlineExceeded => "deadline_exceeded",
        FailureKind::Internal => "internal",
    }
}

pub(super) fn unavailable(message: String) -> Failure {
    Failure { kind: FailureKind::Unavailable, message }
}
