//! A request from the entrance to its end: its sequence, who waits for it, and what became of it so far. It is the
//! same one in a slot, before, and after it had to leave.

use std::time::Duration;

use russet_wire::event::{Failure, FinishReason, Usage};
use tokio::time::Instant;

use super::caller::Caller;
use super::deadline::{Progress, missed};
use super::deal::Ready;
use super::entrance::started;
use super::places::Place;
use super::pool::Tenant;
use super::queue::Standing;
use crate::metrics::Metrics;
use crate::sequence::{Accepted, Sequence};

pub(super) struct Job {
    pub(super) standing: Standing,
    pub(super) sequence: Sequence,
    pub(super) caller: Caller,
    /// How long its caller waits.
    patience: Option<Duration>,
    /// While it waits.
    pub(super) place: Option<Place>,
    /// Its stay in a slot, never used again, unlike the slot: what was begun in an earlier stay is not taken.
    pub(super) stay: u64,
    /// Tokens of its answer when it entered.
    entered_with: u32,
    /// Times it left for others.
    preemptions: u32,
    /// When it entered first.
    started: Option<Instant>,
    first: Option<Instant>,
    last: Instant,
    /// Whether nobody else had a slot while its prompt was read.
    pub(super) alone: bool,
    /// Whether blocks of its tokens are still on their way from disk.
    pub(super) fetching: bool,
}

impl Job {
    pub(super) fn new(
        standing: Standing,
        sequence: Sequence,
        caller: Caller,
        patience: Option<Duration>,
        place: Place,
    ) -> Self {
        let last = caller.arrived;
        // What is read of an answer that was begun elsewhere is more than its prompt.
        let alone = sequence.usage().completion_tokens == 0;
        Self {
            standing,
            sequence,
            caller,
            patience,
            place: Some(place),
            stay: 0,
            entered_with: 0,
            preemptions: 0,
            started: None,
            first: None,
            last,
            alone,
            fetching: false,
        }
    }

    /// What it has of the room and may still need.
    pub(super) fn tenant(&self) -> Tenant {
        let usage = self.sequence.usage();
        Tenant {
            priority: self.standing.priority,
            number: self.standing.number,
            prompt: usage.prompt_tokens,
            generated: usage.completion_tokens,
            limit: self.sequence.limit(),
            since: usage.completion_tokens - self.entered_with,
            held: self.sequence.cached(),
            preemptions: self.preemptions,
            fixed: self.fetching,
        }
    }

    /// Why it is not to wait or run on, if that is so.
    pub(super) fn refused(&self, metrics: &Metrics) -> Option<Failure> {
        if let Some(failure) = self.place.as_ref().and_then(Place::lost) {
            return Some(failure);
        }
        let patience = self.patience?;
        let unread = self.sequence.unread();
        missed(&Progress {
            patience,
            waited: self.caller.arrived.elapsed(),
            generated: self.sequence.usage().completion_tokens,
            unread,
            reading: metrics.rates.lock().reading(unread),
        })
    }

    /// Enters a slot that holds so many of its tokens, for its stay of this number.
    pub(super) fn enter(&mut self, slot: u32, cached: u32, stay: u64, metrics: &Metrics) {
        let now = Instant::now();
        self.place = None;
        self.stay = stay;
        self.entered_with = self.sequence.usage().completion_tokens;
        self.sequence.enter(slot, cached);
        if self.started.is_none() {
            self.started = Some(now);
            metrics.asked_prefix(self.sequence.usage().prompt_tokens, cached);
            metrics.queue.observe((now - self.caller.arrived).as_secs_f64());
            self.caller.tell(started(&self.sequence));
        }
    }

    /// Leaves its slot for others, to come back from `place`.
    pub(super) fn leave(&mut self, place: Place, metrics: &Metrics) {
        self.place = Some(place);
        self.preemptions += 1;
        metrics.preemptions.inc();
        tracing::info!(
            request = self.caller.id(),
            priority = self.standing.priority,
            tokens = self.sequence.cached(),
            times = self.preemptions,
            "made room for others; what is not kept of its tokens is read again when it comes back"
        );
    }

    /// What it can do next.
    pub(super) fn ready(&self, ahead: bool) -> Ready {
        if self.fetching { Ready::Busy } else { self.sequence.ready(ahead) }
    }

    /// Whether its prompt is being read for the first time.
    pub(super) fn reads_its_prompt(&self) -> bool {
        self.first.is_none()
    }

    /// Takes a chosen token; says how the answer ended if it did.
    pub(super) fn take(&mut self, token: u32, metrics: &Metrics) -> Option<Result<FinishReason, String>> {
        let now = Instant::now();
        let Accepted { event, finished } = match self.sequence.accept(token) {
            Ok(accepted) => accepted,
            Err(error) => return Some(Err(error.to_string())),
        };
        let started = self.started.unwrap_or(now);
        match self.first {
            None => {
                self.first = Some(now);
                metrics.first_token.observe((now - self.caller.arrived).as_secs_f64());
                metrics.prefill.observe((now - started).as_secs_f64());
                if self.alone {
                    let Usage { prompt_tokens, cached_tokens, .. } = self.sequence.usage();
                    metrics.rates.lock().prompt(prompt_tokens - cached_tokens, now - started);
                }
            }
            Some(_) => metrics.between_tokens.observe((now - self.last).as_secs_f64()),
        }
        self.last = now;
        metrics.generated_tokens.inc();
        if let Some(event) = event {
            self.caller.tell(event);
        }
        finished.map(Ok)
    }

    /// Ends the answer.
    pub(super) fn finish(self, reason: FinishReason, metrics: &Metrics) {
        if let Some(first) = self.first {
            metrics.decode.observe((self.last - first).as_secs_f64());
        }
        self.caller.finish(reason, self.sequence.usage());
    }
}
