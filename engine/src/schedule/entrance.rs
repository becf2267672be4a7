//! The way to a slot: a request is checked, turned into tokens off the threads that serve, and
//! queued, or refused with a typed failure. [`Caller`] is who waits for the answer.

use std::sync::Arc;

use jiff::Zoned;
use russet_wire::event::{Event, Failure, FailureKind, FinishReason, Usage};
use russet_wire::request::GenerationRequest;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::time::Instant;

use crate::kept::chain::Key;
use crate::kept::feed::{Feed, News};
use crate::life::Life;
use crate::metrics::Metrics;
use crate::sequence::{self, TakeUpError, Telling};
use crate::tokens::{Tokens, TokensError};

/// Most requests that wait for a slot; beyond it another group, or later, is the better place.
pub const MOST_WAITING: usize = 64;

/// Takes requests for the loop.
#[derive(Clone)]
pub struct Entrance {
    pub(super) tickets: UnboundedSender<Ticket>,
    pub(super) tokens: Arc<Tokens>,
    pub(super) context_tokens: u32,
    pub(super) life: Life,
    pub(super) metrics: Metrics,
    pub(super) feed: Feed,
    pub(super) root: Key,
}

/// A request on its way to a slot.
pub(super) struct Ticket {
    pub(super) request: GenerationRequest,
    pub(super) prompt: Vec<u32>,
    pub(super) telling: Telling,
    pub(super) caller: Caller,
    pub(super) place: Place,
}

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
        FailureKind::Internal => "internal",
    }
}

pub(super) fn unavailable(message: String) -> Failure {
    Failure { kind: FailureKind::Unavailable, message }
}

/// Takes one of the places to wait in, given back when dropped.
pub(super) struct Place(Metrics);

impl Place {
    fn take(metrics: &Metrics) -> Result<Self, Failure> {
        metrics.waiting.inc();
        let place = Self(metrics.clone());
        let waiting = metrics.waiting.get();
        if waiting > MOST_WAITING as i64 {
            return Err(Failure {
                kind: FailureKind::Overloaded,
                message: format!(
                    "{} requests are running and {MOST_WAITING} are waiting, which is the most; try again later",
                    metrics.running.get(),
                ),
            });
        }
        Ok(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.waiting.dec();
    }
}

impl Entrance {
    /// Takes a request; whatever becomes of it comes as events. Dropping the receiver cancels it.
    pub fn submit(&self, request: GenerationRequest) -> UnboundedReceiver<Event> {
        let (events, receiver) = mpsc::unbounded_channel();
        let caller = Caller {
            id: request.id.clone(),
            events,
            arrived: Instant::now(),
            metrics: self.metrics.clone(),
            ended: false,
        };
        if let Err(failure) = sequence::validate(&request) {
            caller.fail(failure);
            return receiver;
        }
        if let Some(reason) = self.life.refusal() {
            caller.fail(unavailable(reason));
            return receiver;
        }
        let place = match Place::take(&self.metrics) {
            Ok(place) => place,
            Err(failure) => {
                caller.fail(failure);
                return receiver;
            }
        };
        let entrance = self.clone();
        tokio::task::spawn_blocking(move || entrance.prepare(request, caller, place));
        receiver
    }

    /// Where chains of keys begin, and which are kept here, now and from now on.
    pub fn prefixes(&self) -> (Key, mpsc::Receiver<News>) {
        (self.root, self.feed.listen())
    }

    fn prepare(&self, request: GenerationRequest, caller: Caller, place: Place) {
        let prompt = match self.tokens.prompt(&request.messages, &Zoned::now()) {
            Ok(prompt) => prompt,
            Err(error) => return caller.fail(prompt_failure(&error)),
        };
        let limit = match sequence::room(prompt.len(), request.max_tokens, self.context_tokens) {
            Ok(limit) => limit,
            Err(failure) => return caller.fail(failure),
        };
        let (ends, text) = (self.tokens.ends().clone(), self.tokens.stream());
        let mut telling = Telling::new(&request, limit, ends, text);
        let checked = self.tokens.check(&request.emitted).map_err(TakeUpError::from);
        match checked.and_then(|()| telling.take_up(&request.emitted)) {
            Ok(None) => {}
            // The engine that gave this answer was lost between its last token and its end.
            Ok(Some(reason)) => {
                let (prompt_tokens, completion_tokens) = (prompt.len() as u32, telling.tokens());
                let usage = Usage { prompt_tokens, completion_tokens, cached_tokens: 0 };
                caller.tell(started(&request, &prompt));
                return caller.finish(reason, usage);
            }
            Err(error) => return caller.fail(error.failure()),
        }
        let ticket = Ticket { request, prompt, telling, caller, place };
        if let Err(mpsc::error::SendError(ticket)) = self.tickets.send(ticket) {
            let reason = self.life.refusal().unwrap_or_else(|| "this engine has stopped".into());
            ticket.caller.fail(unavailable(reason));
        }
    }
}

/// The first event of an answer.
pub(super) fn started(request: &GenerationRequest, prompt: &[u32]) -> Event {
    Event::Started { prompt_tokens: prompt.len() as u32, emitted_tokens: request.emitted.len() as u32 }
}

/// What cannot be rendered is the request's fault; what the tokenizer cannot do is ours.
fn prompt_failure(error: &TokensError) -> Failure {
    let kind = match error {
        TokensError::Template(_) | TokensError::Beyond { .. } => FailureKind::InvalidRequest,
        _ => FailureKind::Internal,
    };
    Failure { kind, message: error.to_string() }
}
