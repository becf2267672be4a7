//! From a request to its answer, free of any dialect: choose an engine, wait for one within the
//! deadline, have another go on with an answer whose engine was lost, and turn every end into a finish
//! reason or a typed refusal (invariant 10). Dropping what is returned here drops the gRPC stream, which
//! frees the engine's slot.
//!
//! ```text
//!            ┌───────── lost, or busy: again, after the tokens that were told ────────┐
//!            ▼                                                                        │
//! request ─▶ choose ─▶ try an endpoint ─▶ first text ─▶ Answer ─▶ End or refusal      │
//!            │  ▲             └──────────────────────────┴────────────────────────────┘
//!            ▼  │ the table changed, or an endpoint rested
//!           wait ─▶ deadline ─▶ refusal
//! ```

mod answer;
mod choose;
mod deadline;
mod line;
mod search;
mod setbacks;

use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use russet_wire::event::{FinishReason, Usage};
use russet_wire::request::GenerationRequest;
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::backends::Backends;
use crate::bodies::{Bodies, Held};
use crate::demand::{Demand, Room};
use crate::keys::{Caller, Quota};
use crate::metrics::Metrics;
use crate::refusal::{Kind, Refusal};
use crate::routes::Table;
pub use answer::Answer;
pub use deadline::Deadline;
use line::closing;
use search::Asked;

/// How long the gateway is patient.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For the cluster and its keys to be known after a start.
    pub wait: Duration,
    /// For a deployment that is asked by its own name and does not answer; a ModelRoute says its own, with the same
    /// default.
    pub hold: Duration,
    /// Until a streamed answer's headers go out without a first token. Before that a failure still
    /// has a status of its own; after that heartbeats keep proxies from closing the connection, which some do
    /// after 30 s.
    pub hold_headers: Duration,
    /// Between heartbeats of a stream that has nothing to say.
    pub heartbeat: Duration,
    /// For the next event of an engine that is connected. Prompts may take minutes to read.
    pub silence: Duration,
    /// For an endpoint that just failed, before it is tried again.
    pub rest: Duration,
    /// Engines that may be lost over one request, its answer included, before the request itself is the suspect.
    pub losses: u32,
    /// For answers to end by themselves once the gateway shuts down.
    pub grace: Duration,
    /// Bytes of requests that are being read, wait for an engine or are answered, all together: many times the
    /// largest one, and little beside the memory of a machine that serves models.
    pub bodies: usize,
    /// Requests that are held.
    pub held: Room,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            wait: Duration::from_secs(30),
            hold: Duration::from_secs(300),
            hold_headers: Duration::from_secs(10),
            heartbeat: Duration::from_secs(15),
            silence: Duration::from_secs(600),
            rest: Duration::from_secs(1),
            losses: 3,
            grace: Duration::from_secs(10),
            bodies: 256 * 1024 * 1024,
            held: Room::default(),
        }
    }
}

/// A sensible moment for the next attempt when nothing tells a better one.
const TRY_AGAIN: Duration = Duration::from_secs(5);

/// What every dialect works with.
pub struct Core {
    /// The bodies it holds.
    pub bodies: Bodies,
    table: watch::Receiver<Arc<Table>>,
    backends: Backends,
    demand: Arc<Demand>,
    metrics: Arc<Metrics>,
    limits: Limits,
    closing: CancellationToken,
    started: Instant,
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Text to append, never empty.
    Text(String),
    /// The answer is complete; nothing follows.
    End {
        /// Why it ended; never `Cancelled`.
        reason: FinishReason,
        /// What it cost.
        usage: Usage,
    },
}

/// What a streamed answer says: `Opened`, any number of `Text` and `Idle`, then one `End` or `Failed`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// The stream begins.
    Opened,
    /// Nothing new; keep the connection awake.
    Idle,
    /// A part of the answer.
    Piece(Piece),
    /// The answer cannot be completed; nothing follows.
    Failed(Refusal),
}

impl Core {
    /// A core that routes by the newest table of `table` and ends running answers with a refusal
    /// when `closing` is cancelled.
    pub fn new(
        table: watch::Receiver<Arc<Table>>,
        backends: Backends,
        demand: Arc<Demand>,
        metrics: Arc<Metrics>,
        limits: Limits,
        closing: CancellationToken,
    ) -> Self {
        let bodies = Bodies::new(limits.bodies);
        Self { bodies, table, backends, demand, metrics, limits, closing, started: Instant::now() }
    }

    /// What is known of the cluster now.
    pub fn table(&self) -> Arc<Table> {
        self.table.borrow().clone()
    }

    /// Takes one request from the caller's quota and counts it; `None` when there is no quota. A request
    /// that is refused for other reasons later has been taken all the same.
    pub fn admit(&self, caller: &Caller) -> Option<Quota> {
        let quota = caller.take(self.started.elapsed());
        if let Caller::Key(key) = caller {
            self.metrics.key(&key.full_name(), quota.is_some_and(|quota| quota.refused.is_some()));
        }
        quota
    }

    /// Counts a request that is refused before any model is looked at.
    pub fn turned_away(&self, refusal: &Refusal) {
        self.metrics.turned_away(refusal);
    }

    /// The refusal of a name that leads to no deployment.
    pub fn unknown(&self, model: &str, caller: &Caller) -> Refusal {
        choose::unknown(&self.table(), model, caller.scope()).unwrap_or_else(|| {
            Refusal::new(Kind::ModelNotFound, format!("model `{model}` has just been created; ask again"))
        })
    }

    /// The answer to `request` from whoever answers to `model`, from its first text on; nobody waits for any of it
    /// beyond `deadline`. What was `held` in memory is so until it is complete: another engine may have to go on with
    /// it.
    pub async fn answer(
        self: &Arc<Self>,
        model: &str,
        mut request: GenerationRequest,
        deadline: Option<Deadline>,
        held: Held,
        caller: &Caller,
    ) -> Result<Answer, Refusal> {
        let arrived = Instant::now();
        self.first_table(arrived + self.limits.wait, deadline).await?;
        if let Some(refusal) = choose::unknown(&self.table(), model, caller.scope()) {
            self.metrics.turned_away(&refusal);
            return Err(refusal);
        }
        // Whoever goes on with the answer chooses as the first engine would have.
        request.sampling.seed.get_or_insert_with(rand::random);
        let mut tracker = self.metrics.request(model);
        let mut asked = Asked::new(model, request, deadline, held, caller, arrived);
        match self.search(&mut asked, &mut tracker).await {
            Ok((first, line)) => Ok(Answer::new(self.clone(), asked, first, line, tracker)),
            Err(refusal) => {
                tracker.refused(&refusal);
                Err(refusal)
            }
        }
    }

    /// The answer as a stream, or a refusal that comes early enough to have its own status.
    pub async fn stream(
        self: Arc<Self>,
        model: String,
        request: GenerationRequest,
        deadline: Option<Deadline>,
        held: Held,
        caller: Caller,
    ) -> Result<impl Stream<Item = Item> + Send + 'static, Refusal> {
        let Limits { hold_headers, heartbeat, .. } = self.limits;
        let mut opening =
            Box::pin(async move { self.answer(&model, request, deadline, held, &caller).await });
        let begun = match timeout(hold_headers, &mut opening).await {
            Ok(answer) => Some(answer?),
            Err(_) => None,
        };
        Ok(async_stream::stream! {
            let mut heart = tokio::time::interval_at(Instant::now() + heartbeat, heartbeat);
            yield Item::Opened;
            let mut answer = match begun {
                Some(answer) => answer,
                None => loop {
                    let opened = tokio::select! {
                        opened = &mut opening => Some(opened),
                        _ = heart.tick() => None,
                    };
                    match opened {
                        Some(Ok(answer)) => break answer,
                        Some(Err(refusal)) => {
                            yield Item::Failed(refusal);
                            return;
                        }
                        None => yield Item::Idle,
                    }
                },
            };
            loop {
                let item = tokio::select! {
                    biased;
                    piece = answer.next() => match piece {
                        Some(Ok(piece)) => Item::Piece(piece),
                        Some(Err(refusal)) => Item::Failed(refusal),
                        None => break,
                    },
                    _ = heart.tick() => Item::Idle,
                };
                heart.reset();
                yield item;
            }
        })
    }

    /// Until the cluster was read once, no name can be called unknown.
    async fn first_table(&self, until: Instant, deadline: Option<Deadline>) -> Result<(), Refusal> {
        const UNREAD: &str = "the gateway has not reached the API server since it started, so it knows no models yet; \
                              check that `russet serve` runs";
        let mut table = self.table.clone();
        let bound = deadline.map_or(until, |deadline| deadline.until.min(until));
        tokio::select! {
            synced = timeout_at(bound, table.wait_for(|table| table.synced)) => match (synced, deadline) {
                (Ok(Ok(_)), _) => Ok(()),
                (_, Some(deadline)) if deadline.left().is_none() => Err(deadline.missed(UNREAD)),
                _ => Err(Refusal::new(Kind::ModelNotReady, UNREAD).retry_after(TRY_AGAIN)),
            },
            () = self.closing.cancelled() => Err(closing()),
        }
    }
}
