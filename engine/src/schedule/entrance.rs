//! The way to a slot: a request is checked, turned into tokens off the threads that serve, and
//! queued, or refused with a typed failure.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jiff::Zoned;
use russet_wire::event::{Event, Failure, FailureKind, FinishReason, Usage};
use russet_wire::request::GenerationRequest;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::time::Instant;

use super::caller::{Caller, unavailable};
use super::desk::Desk;
use super::job::Job;
use super::places::Places;
use super::pool;
use super::queue::Standing;
use crate::guess::Sources;
use crate::kept::chain::Key;
use crate::kept::feed::{Feed, News};
use crate::life::Life;
use crate::metrics::Metrics;
use crate::sequence::{self, Sequence, TakeUpError, Telling};
use crate::tokens::{Tokens, TokensError};

/// Takes requests for the loop.
#[derive(Clone)]
pub struct Entrance {
    pub(super) jobs: UnboundedSender<Job>,
    pub(super) desk: Desk,
    pub(super) tokens: Arc<Tokens>,
    pub(super) context_tokens: u32,
    pub(super) kv_tokens: u64,
    pub(super) guesses: Sources,
    pub(super) places: Places,
    pub(super) born: Instant,
    /// Requests so far.
    pub(super) number: Arc<AtomicU64>,
    pub(super) life: Life,
    pub(super) metrics: Metrics,
    pub(super) feed: Feed,
    pub(super) root: Key,
}

impl Entrance {
    /// Takes a request; whatever becomes of it comes as events. Dropping the receiver cancels it.
    pub fn submit(&self, request: GenerationRequest) -> UnboundedReceiver<Event> {
        let (events, receiver) = mpsc::unbounded_channel();
        let caller = Caller::new(request.id.clone(), events, self.metrics.clone());
        if let Err(failure) = sequence::validate(&request) {
            caller.fail(failure);
            return receiver;
        }
        if let Some(reason) = self.life.refusal() {
            caller.fail(unavailable(reason));
            return receiver;
        }
        let standing = Standing {
            priority: request.priority,
            arrived: caller.arrived - self.born,
            number: self.number.fetch_add(1, Ordering::Relaxed),
        };
        let place = match self.places.take(standing.number, standing.priority) {
            Ok(place) => place,
            Err(failure) => {
                caller.fail(failure);
                return receiver;
            }
        };
        let entrance = self.clone();
        self.desk.take(move || {
            let (sequence, over) = match entrance.prepare(&request) {
                Ok(prepared) => prepared,
                Err(failure) => return caller.fail(failure),
            };
            if let Some(reason) = over {
                // The engine that gave this answer was lost between its last token and its end.
                caller.tell(started(&sequence));
                return caller.finish(reason, sequence.usage());
            }
            let patience = request.deadline_milliseconds.map(Duration::from_millis);
            entrance.pass(Job::new(standing, sequence, caller, patience, place));
        });
        receiver
    }

    /// Where chains of keys begin, and which are kept here, now and from now on.
    pub fn prefixes(&self) -> (Key, mpsc::Receiver<News>) {
        (self.root, self.feed.listen())
    }

    /// The sequence of a request, and how its answer ended if it came with all of it.
    fn prepare(&self, request: &GenerationRequest) -> Result<(Sequence, Option<FinishReason>), Failure> {
        let prompt = self.tokens.prompt(&request.messages, &Zoned::now());
        let prompt = prompt.map_err(|error| prompt_failure(&error))?;
        let limit = sequence::room(prompt.len(), request.max_tokens, self.context_tokens)?;
        let limit = pool::bounded(prompt.len() as u32, limit, self.kv_tokens)?;
        let seed = request.sampling.seed.unwrap_or_else(rand::random);
        let (ends, text) = (self.tokens.ends().clone(), self.tokens.stream());
        let mut telling = Telling::new(request, limit, ends, text);
        let checked = self.tokens.check(&request.emitted).map_err(TakeUpError::from);
        let over = checked.and_then(|()| telling.take_up(&request.emitted));
        let over = over.map_err(|error| error.failure())?;
        Ok((Sequence::new(request, prompt, seed, telling).guessing(self.guesses), over))
    }

    fn pass(&self, job: Job) {
        if let Some(failure) = job.refused(&self.metrics) {
            return job.caller.fail(failure);
        }
        if let Err(mpsc::error::SendError(job)) = self.jobs.send(job) {
            let reason = self.life.refusal().unwrap_or_else(|| "this engine has stopped".into());
            job.caller.fail(unavailable(reason));
        }
    }
}

/// The first event of an answer.
pub(super) fn started(sequence: &Sequence) -> Event {
    let Usage { prompt_tokens, completion_tokens, .. } = sequence.usage();
    Event::Started { prompt_tokens, emitted_tokens: completion_tokens }
}

/// What cannot be rendered is the request's fault; what the tokenizer cannot do is ours.
fn prompt_failure(error: &TokensError) -> Failure {
    let kind = match error {
        TokensError::Template(_) | TokensError::Beyond { .. } => FailureKind::InvalidRequest,
        _ => FailureKind::Internal,
    };
    Failure { kind, message: error.to_string() }
}
