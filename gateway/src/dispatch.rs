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

use russet_wire::event::{FinishReason, Usage};
use tokio::sync::watch;
use tokio::time::timeout_at;
use tokio_util::sync::CancellationToken;

use crate::backends::Backends;
use crate::demand::{DemandTracker, HoldLimits};
use crate::error::{ErrorKind, GatewayError};
use crate::keys::Caller;
use crate::metrics::Metrics;
use crate::routes::RoutingTable;
pub(crate) use attempt_loop::PendingRequest;
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

/// Routes requests to engines.
pub struct Dispatcher {
    table: watch::Receiver<Arc<RoutingTable>>,
    backends: Backends,
    demand: Arc<DemandTracker>,
    metrics: Arc<Metrics>,
    limits: DispatchLimits,
    closing: CancellationToken,
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
        Self { table, backends, demand, metrics, limits, closing }
    }

    /// The latest routing table.
    pub fn table(&self) -> Arc<RoutingTable> {
        self.table.borrow().clone()
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

    /// The response to `pending` from a deployment that serves its model, from its first text on.
    pub(crate) async fn respond(
        self: &Arc<Self>,
        mut pending: PendingRequest,
    ) -> Result<ResponseStream, GatewayError> {
        self.wait_synced(&pending).await?;
        if let Some(error) = route_decision::unknown(&self.table(), pending.model(), pending.scope()) {
            self.metrics.rejected(&error);
            return Err(error);
        }
        let mut tracker = self.metrics.request(pending.model());
        match self.run_attempts(&mut pending, &mut tracker).await {
            Ok((first, line)) => Ok(ResponseStream::new(self.clone(), pending, first, line, tracker)),
            Err(refusal) => {
                tracker.refused(&refusal);
                Err(refusal)
            }
        }
    }

    /// Waits for the first synced table: before that, no name can be called unknown.
    async fn wait_synced(&self, pending: &PendingRequest) -> Result<(), GatewayError> {
        const UNREAD: &str = "the gateway has not reached the API server since it started, so it knows no models yet; \
                              check that `russet serve` runs";
        let mut table = self.table.clone();
        let deadline = pending.deadline();
        let until = pending.waiting_since() + self.limits.sync_timeout;
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
