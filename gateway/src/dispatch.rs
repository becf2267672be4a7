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

mod response;
mod route_decision;
mod deadline;
mod engine_stream;
mod attempt_loop;
mod attempts;

use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use russet_wire::event::{FinishReason, Usage};
use russet_wire::request::GenerationRequest;
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::backends::Backends;
use crate::body_budget::{BodyBudget, BodyPermit};
use crate::demand::{DemandTracker, HoldLimits};
use crate::keys::{Caller, Quota};
use crate::metrics::Metrics;
use crate::error::{ErrorKind, GatewayError};
use crate::routes::RoutingTable;
pub use response::ResponseStream;
pub use deadline::Deadline;
use engine_stream::shutdown_error;
use attempt_loop::PendingRequest;

/// How long the gateway is patient.
#[derive(Clone, Copy, Debug)]
pub struct DispatchLimits {
    /// For the cluster and its keys to be known after a start.
    pub sync_timeout: Duration,
    /// For a deployment that is asked by its own name and does not answer; a ModelRoute says its own, with the same
    /// default.
    pub hold_timeout: Duration,
    /// Until a streamed answer's headers go out without a first token. Before that a failure still
    /// has a status of its own; after that heartbeats keep proxies from closing the connection, which some do
    /// after 30 s.
    pub headers_timeout: Duration,
    /// Between heartbeats of a stream that has nothing to say.
    pub heartbeat: Duration,
    /// For the next event of an engine that is connected. Prompts may take minutes to read.
    pub engine_timeout: Duration,
    /// For an endpoint that just failed, before it is tried again.
    pub endpoint_backoff: Duration,
    /// Engines that may be lost over one request, its answer included, before the request itself is the suspect.
    pub max_losses: u32,
    /// For answers to end by themselves once the gateway shuts down.
    pub shutdown_grace: Duration,
    /// Bytes of requests that are being read, wait for an engine or are answered, all together: many times the
    /// largest one, and little beside the memory of a machine that serves models.
    pub max_total_body_bytes: usize,
    /// Requests that are held.
    pub holding: HoldLimits,
}

impl Default for DispatchLimits {
    fn default() -> Self {
        Self {
            sync_timeout: Duration::from_secs(30),
            hold_timeout: Duration::from_secs(300),
            headers_timeout: Duration::from_secs(10),
            heartbeat: Duration::from_secs(15),
            engine_timeout: Duration::from_secs(600),
            endpoint_backoff: Duration::from_secs(1),
            max_losses: 3,
            shutdown_grace: Duration::from_secs(10),
            max_total_body_bytes: 256 * 1024 * 1024,
            holding: HoldLimits::default(),
        }
    }
}

/// A sensible moment for the next attempt when nothing tells a better one.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// What every dialect works with.
pub struct Dispatcher {
    /// The bodies it holds.
    pub bodies: BodyBudget,
    table: watch::Receiver<Arc<RoutingTable>>,
    backends: Backends,
    demand: Arc<DemandTracker>,
    metrics: Arc<Metrics>,
    limits: DispatchLimits,
    closing: CancellationToken,
    started: Instant,
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResponseChunk {
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
pub enum StreamItem {
    /// The stream begins.
    Started,
    /// Nothing new; keep the connection awake.
    KeepAlive,
    /// A part of the answer.
    Chunk(ResponseChunk),
    /// The answer cannot be completed; nothing follows.
    Error(GatewayError),
}

impl Dispatcher {
    /// A core that routes by the newest table of `table` and ends running answers with a refusal
    /// when `closing` is cancelled.
    pub fn new(
        table: watch::Receiver<Arc<RoutingTable>>,
        backends: Backends,
        demand: Arc<DemandTracker>,
        metrics: Arc<Metrics>,
        limits: DispatchLimits,
        closing: CancellationToken,
    ) -> Self {
        let bodies = BodyBudget::new(limits.max_total_body_bytes);
        Self { bodies, table, backends, demand, metrics, limits, closing, started: Instant::now() }
    }

    /// What is known of the cluster now.
    pub fn table(&self) -> Arc<RoutingTable> {
        self.table.borrow().clone()
    }

    /// Takes one request from the caller's quota and counts it; `None` when there is no quota. A request
    /// that is refused for other reasons later has been taken all the same.
    pub fn admit(&self, caller: &Caller) -> Option<Quota> {
        let quota = caller.take_quota(self.started.elapsed());
        if let Caller::Key(key) = caller {
            self.metrics.key_request(&key.full_name(), quota.is_some_and(|quota| quota.refused.is_some()));
        }
        quota
    }

    /// Counts a request that is refused before any model is looked at.
    pub fn rejected(&self, refusal: &GatewayError) {
        self.metrics.rejected(refusal);
    }

    /// The refusal of a name that leads to no deployment.
    pub fn unknown(&self, model: &str, caller: &Caller) -> GatewayError {
        route_decision::unknown(&self.table(), model, caller.scope()).unwrap_or_else(|| {
            GatewayError::new(ErrorKind::ModelNotFound, format!("model `{model}` has just been created; ask again"))
        })
    }

    /// The answer to `request` from whoever answers to `model`, from its first text on; nobody waits for any of it
    /// beyond `deadline`. What was `held` in memory is so until it is complete: another engine may have to go on with
    /// it.
    pub async fn respond(
        self: &Arc<Self>,
        model: &str,
        mut request: GenerationRequest,
        deadline: Option<Deadline>,
        held: BodyPermit,
        caller: &Caller,
    ) -> Result<ResponseStream, GatewayError> {
        let arrived = Instant::now();
        self.wait_synced(arrived + self.limits.sync_timeout, deadline).await?;
        if let Some(refusal) = route_decision::unknown(&self.table(), model, caller.scope()) {
            self.metrics.rejected(&refusal);
            return Err(refusal);
        }
        // Whoever goes on with the answer chooses as the first engine would have.
        request.sampling.seed.get_or_insert_with(rand::random);
        let mut tracker = self.metrics.request(model);
        let mut asked = PendingRequest::new(model, request, deadline, held, caller, arrived);
        match self.run_attempts(&mut asked, &mut tracker).await {
            Ok((first, line)) => Ok(ResponseStream::new(self.clone(), asked, first, line, tracker)),
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
        held: BodyPermit,
        caller: Caller,
    ) -> Result<impl Stream<Item = StreamItem> + Send + 'static, GatewayError> {
        let DispatchLimits { headers_timeout: hold_headers, heartbeat, .. } = self.limits;
        let mut opening =
            Box::pin(async move { self.respond(&model, request, deadline, held, &caller).await });
        let begun = match timeout(hold_headers, &mut opening).await {
            Ok(answer) => Some(answer?),
            Err(_) => None,
        };
        Ok(async_stream::stream! {
            let mut heart = tokio::time::interval_at(Instant::now() + heartbeat, heartbeat);
            yield StreamItem::Started;
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
                            yield StreamItem::Error(refusal);
                            return;
                        }
                        None => yield StreamItem::KeepAlive,
                    }
                },
            };
            loop {
                let item = tokio::select! {
                    biased;
                    piece = answer.next() => match piece {
                        Some(Ok(piece)) => StreamItem::Chunk(piece),
                        Some(Err(refusal)) => StreamItem::Error(refusal),
                        None => break,
                    },
                    _ = heart.tick() => StreamItem::KeepAlive,
                };
                heart.reset();
                yield item;
            }
        })
    }

    /// Until the cluster was read once, no name can be called unknown.
    async fn wait_synced(&self, until: Instant, deadline: Option<Deadline>) -> Result<(), GatewayError> {
        const UNREAD: &str = "the gateway has not reached the API server since it started, so it knows no models yet; \
                              check that `russet serve` runs";
        let mut table = self.table.clone();
        let bound = deadline.map_or(until, |deadline| deadline.until.min(until));
        tokio::select! {
            synced = timeout_at(bound, table.wait_for(|table| table.synced)) => match (synced, deadline) {
                (Ok(Ok(_)), _) => Ok(()),
                (_, Some(deadline)) if deadline.remaining().is_none() => Err(deadline.exceeded(UNREAD)),
                _ => Err(GatewayError::new(ErrorKind::ModelNotReady, UNREAD).retry_after(RETRY_AFTER)),
            },
            () = self.closing.cancelled() => Err(shutdown_error()),
        }
    }
}
