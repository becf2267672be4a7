//! The dispatcher: the state that all requests share. Not here: how one request finds an engine, see
//! `attempt_loop`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::attempt_loop::hedge::Overtaken;
use super::engine_stream::shutdown_error;
use super::response_cache::ResponseCache;
use super::route_decision::unknown;
use super::suspects::Suspects;
use crate::backends::{Backends, ReplicaChoice};
use crate::budgets::Budgets;
use crate::demand::{DemandTracker, HeldRequest, HoldLimits};
use crate::error::{ErrorKind, GatewayError};
use crate::keys::Caller;
use crate::metrics::Metrics;
use crate::pipelines::RequestedRuns;
use crate::providers::Providers;
use crate::routes::{Deployment, RoutingTable};

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
    /// some do after 30 s, and tell people that something happens.
    pub headers_timeout: Duration,
    /// How long the headers wait, if that is longer, for an engine that prepares the prompt: a conversation that is too
    /// long, or that the chat template refuses, has its own HTTP status then.
    pub prompt_timeout: Duration,
    /// Time between keep-alives of an idle stream.
    pub heartbeat: Duration,
    /// How long a client may leave a streamed response unread: a laptop that wakes up reads at once, and each such
    /// client keeps an engine's slot busy.
    pub read_timeout: Duration,
    /// How long a connected engine may send no event. Prefill of a long prompt can take minutes.
    pub engine_timeout: Duration,
    /// Backoff before an endpoint that failed is tried again.
    pub endpoint_backoff: Duration,
    /// Engines that one request, including its response, may lose, whatever the cause. A request that ends engines
    /// while it is prepared or prefilled is stopped after two.
    pub max_losses: u32,
    /// How long running responses may take to finish after shutdown begins.
    pub shutdown_grace: Duration,
    /// Total bytes of request bodies that are being read, held or served: many times the largest body, and
    /// small beside the memory of a machine that serves models.
    pub max_total_body_bytes: usize,
    /// How long a request body may take to arrive: a slower one holds memory for nothing.
    pub body_timeout: Duration,
    /// Limits on held requests.
    pub holding: HoldLimits,
    /// How one of several replicas is chosen.
    pub replica_choice: ReplicaChoice,
    /// Bytes of answers that are kept for routes with `cache`.
    pub response_cache_bytes: u64,
}

impl Default for DispatchLimits {
    fn default() -> Self {
        Self {
            sync_timeout: Duration::from_secs(30),
            hold_timeout: Duration::from_secs(300),
            // With the last word of an engine a second.
            headers_timeout: Duration::from_millis(750),
            prompt_timeout: Duration::from_secs(10),
            heartbeat: Duration::from_secs(10),
            read_timeout: Duration::from_secs(60),
            engine_timeout: Duration::from_secs(600),
            endpoint_backoff: Duration::from_secs(1),
            max_losses: 3,
            shutdown_grace: Duration::from_secs(10),
            max_total_body_bytes: 256 * 1024 * 1024,
            body_timeout: Duration::from_secs(60),
            holding: HoldLimits::default(),
            replica_choice: ReplicaChoice::default(),
            response_cache_bytes: 64 * 1024 * 1024,
        }
    }
}

/// Routes requests to engines.
pub struct Dispatcher {
    pub(super) table: watch::Receiver<Arc<RoutingTable>>,
    pub(super) backends: Arc<Backends>,
    pub(super) demand: Arc<DemandTracker>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) limits: DispatchLimits,
    pub(super) closing: CancellationToken,
    pub(super) suspects: Suspects,
    pub(super) overtaken: Overtaken,
    pub(super) response_cache: Arc<ResponseCache>,
    pub(super) providers: Arc<Providers>,
    pub(super) budgets: Option<Arc<Budgets>>,
    pub(super) pipelines: Option<Arc<RequestedRuns>>,
}

impl Dispatcher {
    /// A dispatcher that routes by the latest value of `table`. When `closing` is cancelled it ends running
    /// responses with an error.
    pub(crate) fn new(
        table: watch::Receiver<Arc<RoutingTable>>,
        backends: Arc<Backends>,
        demand: Arc<DemandTracker>,
        metrics: Arc<Metrics>,
        limits: DispatchLimits,
        closing: CancellationToken,
        providers: Arc<Providers>,
    ) -> Self {
        let response_cache = ResponseCache::new(limits.response_cache_bytes);
        let (suspects, overtaken) = (Suspects::default(), Overtaken::default());
        Self {
            table,
            backends,
            demand,
            metrics,
            limits,
            closing,
            suspects,
            overtaken,
            response_cache,
            providers,
            budgets: None,
            pipelines: None,
        }
    }

    /// The same, which answers within these Budgets.
    pub(crate) fn with_budgets(self, budgets: Option<Arc<Budgets>>) -> Self {
        Self { budgets, ..self }
    }

    /// The same, which runs Pipelines that routes lead to.
    pub(crate) fn with_pipelines(self, pipelines: Option<Arc<RequestedRuns>>) -> Self {
        Self { pipelines, ..self }
    }

    /// The latest routing table.
    pub fn table(&self) -> Arc<RoutingTable> {
        self.table.borrow().clone()
    }

    /// Changes of the routing table.
    pub(crate) fn watch_table(&self) -> watch::Receiver<Arc<RoutingTable>> {
        self.table.clone()
    }

    /// Counts a request without a body that waits for this deployment; an error beyond the limits.
    pub(crate) fn hold(&self, deployment: &Deployment) -> Result<HeldRequest, GatewayError> {
        self.demand.hold(deployment, 0)
    }

    /// The error of everything that still runs when the gateway shuts down.
    pub(crate) async fn closed(&self) -> GatewayError {
        self.closing.cancelled().await;
        shutdown_error()
    }

    /// The error for a model name that resolves to no deployment.
    pub fn unknown(&self, model: &str, caller: &Caller) -> GatewayError {
        unknown(&self.table(), model, (caller.scope(), None)).unwrap_or_else(|| {
            GatewayError::new(
                ErrorKind::ModelNotFound,
                format!("model `{model}` has just been created; send the request again"),
            )
        })
    }
}
