//! Dispatch of a request, independent of any API dialect: selects an engine, holds the request within its
//! deadline while no engine is ready, resumes the response on another engine when one is lost, and maps every
//! outcome to a finish reason or a typed error (invariant 10). Dropping the returned response drops the gRPC
//! stream, which frees the sequence in the engine.
//!
//! ```text
//!            ┌────── lost or busy: retry, resuming after the tokens already sent ─────┐
//!            ▼                                                                        │
//! request ─▶ route ─▶ try an endpoint ─▶ first text ─▶ ResponseStream ─▶ End or error │
//!            │  ▲             └──────────────────────────┴────────────────────────────┘
//!            ▼  │ the routing table changed, or an endpoint's backoff ended
//!           hold ─▶ deadline ─▶ error
//! ```

mod attempt_loop;
mod attempts;
mod deadline;
mod engine_stream;
mod response;
mod route_decision;

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
use crate::error::{ErrorKind, GatewayError};
use crate::keys::{Caller, Quota};
use crate::metrics::Metrics;
use crate::routes::RoutingTable;
use attempt_loop::PendingRequest;
pub use deadline::Deadline;
use engine_stream::shutdown_error;
pub use response::ResponseStream;

/// Timeouts and limits of dispatch.
#[derive(Clone, Copy, Debug)]
pub struct DispatchLimits {
    /// How long a request waits for the first list of the cluster and of the keys after a start.
    pub sync_timeout: Duration,
    /// How long a request is held for a deployment requested by its own name while it is not ready. A
    /// ModelRoute sets its own value, with the same default.
    pub hold_timeout: Duration,
    /// How long a streamed response waits for its first token before the headers are sent. Until then an
    /// error has its own HTTP status. After that, keep-alives stop proxies from closing the connection, which
    /// some do after 30 s.
    pub headers_timeout: Duration,
    /// Time between keep-alives of an idle stream.
    pub heartbeat: Duration,
    /// How long a connected engine may send no event. Prefill of a long prompt can take minutes.
    pub engine_timeout: Duration,
    /// Backoff before an endpoint that failed is tried again.
    pub endpoint_backoff: Duration,
    /// Engines that one request, including its response, may lose before the request itself is suspected as
    /// the cause.
    pub max_losses: u32,
    /// How long running responses may take to finish after shutdown begins.
    pub shutdown_grace: Duration,
    /// Total bytes of request bodies that are being read, held or answered: many times the largest body, and
    /// small beside the memory of a machine that serves models.
    pub max_total_body_bytes: usize,
    /// Limits on held requests.
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

/// The `Retry-After` of errors that have no better estimate.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// Shared state of all dialects: routes requests to engines.
pub struct Dispatcher {
    /// Memory budget of request bodies.
    pub bodies: BodyBudget,
    table: watch::Receiver<Arc<RoutingTable>>,
    backends: Backends,
    demand: Arc<DemandTracker>,
    metrics: Arc<Metrics>,
    limits: DispatchLimits,
    closing: CancellationToken,
    started: Instant,
}

/// A chunk of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResponseChunk {
    /// Text to append, never empty.
    Text(String),
    /// The response is complete; nothing follows.
    End {
        /// The finish reason; never `Cancelled`.
        reason: FinishReason,
        /// Token usage.
        usage: Usage,
    },
}

/// An item of a streamed response: `Started`, any number of `Text` and `KeepAlive`, then one `End` or
/// `Error`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamItem {
    /// The stream starts.
    Started,
    /// No new text; keeps the connection open.
    KeepAlive,
    /// A chunk of the response.
    Chunk(ResponseChunk),
    /// The response cannot be completed; nothing follows.
    Error(GatewayError),
}

impl Dispatcher {
    /// A dispatcher that routes by the latest value of `table`. When `closing` is cancelled it ends running
    /// responses with an error.
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

    /// The latest routing table.
    pub fn table(&self) -> Arc<RoutingTable> {
        self.table.borrow().clone()
    }

    /// Takes one request from the caller's quota and counts it; `None` without a quota. A request that is
    /// rejected later for another reason still counts.
    pub fn admit(&self, caller: &Caller) -> Option<Quota> {
        let quota = caller.take_quota(self.started.elapsed());
        if let Caller::Key(key) = caller {
            self.metrics.key_request(&key.full_name(), quota.is_some_and(|quota| quota.refused.is_some()));
        }
        quota
    }

    /// Counts a request that is rejected before its model is resolved.
    pub fn rejected(&self, refusal: &GatewayError) {
        self.metrics.rejected(refusal);
    }

    /// The error for a model name that resolves to no deployment.
    pub fn unknown(&self, model: &str, caller: &Caller) -> GatewayError {
        route_decision::unknown(&self.table(), model, caller.scope()).unwrap_or_else(|| {
            GatewayError::new(
                ErrorKind::ModelNotFound,
                format!("model `{model}` has just been created; ask again"),
            )
        })
    }

    /// The response to `request` from a deployment that serves `model`, from its first text on, bounded by
    /// `deadline`. The body stays in memory, counted in `held`, until the response is complete, because the
    /// request may have to be resumed on another engine.
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
        // A resumed response must sample with the same seed.
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

    /// The response as a stream, or an error that is early enough to have its own HTTP status.
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

    /// Waits for the first synced table: before that, no name can be called unknown.
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
