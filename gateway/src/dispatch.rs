//! Dispatch of a request, independent of any API dialect: selects an engine, holds the request within its
//! deadline while no engine is ready, resumes the response on another engine when one is lost, and maps every
//! outcome to a finish reason or a typed error (invariant 10). Dropping the returned response drops the gRPC
//! stream, which frees the sequence in the engine.
//!
//! ```text
//!            ┌────── lost or busy: retry, resuming after the tokens already sent ─────┐
//!            ▼                                                                        │
//! request ─▶ route ─▶ try an endpoint ─▶ first text ─▶ ResponseStream ─▶ end or error │
//!            │  ▲             └──────────────────────────┴────────────────────────────┘
//!            ▼  │ the routing table changed, or an endpoint's backoff ended
//!           hold ─▶ deadline ─▶ error
//! ```

mod answer_stream;
mod attempt_loop;
mod attempts;
mod deadline;
mod dispatcher;
mod engine_meter;
mod engine_stream;
mod pending_request;
mod pooling_call;
mod reserve;
mod response;
mod response_cache;
mod route_decision;
mod suspects;
mod token_count;

use std::sync::Arc;

use jiff::Timestamp;
use russet_wire::event::Usage;
use tokio::sync::watch;
use tokio::time::timeout_at;

pub use crate::backends::ReplicaChoice;
use crate::error::{ErrorKind, GatewayError, RETRY_AFTER};
use crate::keys::Caller;
use crate::metrics::RequestTracker;
use crate::routes::{Deployment, Resolved, RoutingTable, deployments};
use attempt_loop::OpenedStream;
pub(crate) use deadline::Deadline;
pub use dispatcher::DispatchLimits;
pub(crate) use dispatcher::Dispatcher;
use engine_stream::shutdown_error;
pub(crate) use pending_request::{PendingRequest, PromptState};
pub(crate) use pooling_call::{PoolingReply, PoolingRequest};
pub(crate) use response::ResponseStream;
pub(crate) use response_cache::CacheUse;
use response_cache::{CacheOutcome, CachedResponse, ResponseRecording};
pub(crate) use suspects::PromptDigest;

/// Where an answer comes from.
enum Answer {
    /// It is kept.
    Cached(Arc<CachedResponse>),
    /// An engine generates it, and it may have to be kept.
    Opened(OpenedStream, Option<Box<ResponseRecording>>),
}

impl Dispatcher {
    /// The response to `pending` from a deployment that serves its model, from its first text on.
    pub(crate) async fn respond(
        self: &Arc<Self>,
        mut pending: Box<PendingRequest>,
    ) -> Result<ResponseStream, GatewayError> {
        let mut tracker = self.begin(&mut pending).await?;
        match self.answer(&mut pending, &mut tracker).await {
            Ok(Answer::Cached(response)) => Ok(ResponseStream::cached(&response, &pending, &mut tracker)),
            Ok(Answer::Opened(opened, recording)) => {
                Ok(ResponseStream::new(self.clone(), pending, opened, tracker).recorded(recording))
            }
            Err(error) => {
                tracker.failed(&error);
                pending.recorder().failed(&error);
                Err(error)
            }
        }
    }

    /// An answer that is kept, or the first of what an engine says.
    async fn answer(
        &self,
        pending: &mut PendingRequest,
        tracker: &mut RequestTracker,
    ) -> Result<Answer, GatewayError> {
        let recording = match self.cached(pending).await? {
            CacheOutcome::Hit(response) => return Ok(Answer::Cached(response)),
            CacheOutcome::Miss(recording) => Some(recording),
            CacheOutcome::Off => None,
        };
        let opened = self.run_attempts(pending, tracker).await?;
        let recording = recording.filter(|recording| recording.is_of(pending.answered_by())).map(Box::new);
        Ok(Answer::Opened(opened, recording))
    }

    /// The vectors or scores that `pending` asks for, of a deployment that serves its model.
    pub(crate) async fn pool(&self, mut pending: PendingRequest) -> Result<PoolingReply, GatewayError> {
        let mut tracker = self.begin(&mut pending).await?;
        let result = self.run_pooling(&mut pending, &mut tracker).await;
        match &result {
            Ok(reply) => {
                let usage = Usage { prompt_tokens: reply.tokens(), ..Usage::default() };
                tracker.finished(usage);
                pending.recorder().finished(None, usage);
                pending.settle(usage);
            }
            Err(error) => {
                tracker.failed(error);
                pending.recorder().failed(error);
            }
        }
        result
    }

    /// The number of tokens of the prompt of `pending`, as a deployment that serves its model would read it.
    pub(crate) async fn count_tokens(&self, mut pending: PendingRequest) -> Result<u32, GatewayError> {
        let mut tracker = self.begin(&mut pending).await?;
        let result = self.run_token_count(&mut pending, &mut tracker).await;
        match &result {
            Ok(tokens) => {
                // Nothing is computed of them.
                tracker.finished(Usage::default());
                pending.recorder().counted(*tokens);
            }
            Err(error) => {
                tracker.failed(error);
                pending.recorder().failed(error);
            }
        }
        result
    }

    /// Waits until a deployment serves the model of `pending`, which wakes one that sleeps.
    pub(crate) async fn load(&self, mut pending: PendingRequest) -> Result<(), GatewayError> {
        let mut tracker = self.begin(&mut pending).await?;
        let result = self.run_load(&mut pending, &mut tracker).await;
        match &result {
            Ok(()) => {
                tracker.finished(Usage::default());
                pending.recorder().finished(None, Usage::default());
            }
            Err(error) => {
                tracker.failed(error);
                pending.recorder().failed(error);
            }
        }
        result
    }

    /// Lets the deployments of a model go to sleep as far as this caller is concerned; an error for an unknown name.
    pub(crate) fn unload(&self, model: &str, caller: &Caller) -> Result<(), GatewayError> {
        let table = self.table();
        let Resolved::Targets(targets) = table.resolve(model, caller.scope()) else {
            return Err(self.unknown(model, caller));
        };
        for deployment in deployments(&targets) {
            self.demand.unload(deployment, caller);
        }
        Ok(())
    }

    /// When a deployment scales to zero without further requests, as far as this gateway knows.
    pub(crate) fn expires(&self, deployment: &Deployment) -> Option<Timestamp> {
        self.demand.expires(deployment)
    }

    /// Whether requests can say how long a deployment of this model stays loaded.
    pub(crate) fn honours_keep_alive(&self, model: &str, caller: &Caller) -> bool {
        match self.table().resolve(model, caller.scope()) {
            Resolved::Targets(targets) => deployments(&targets).iter().any(|one| one.idle_limits.is_some()),
            _ => false,
        }
    }

    /// Counts a request that may be sent to engines, and records why another one is not.
    async fn begin(&self, pending: &mut PendingRequest) -> Result<RequestTracker, GatewayError> {
        let admitted = self.admit(pending).await;
        admitted.inspect_err(|error| pending.recorder().failed(error))
    }

    /// Counts a request whose model is known and that ends no engines.
    async fn admit(&self, pending: &mut PendingRequest) -> Result<RequestTracker, GatewayError> {
        self.wait_synced(pending).await?;
        if let Some(error) =
            route_decision::all_unknown(&self.table(), pending.models(), (pending.scope(), pending.facts()))
        {
            self.metrics.rejected(&error);
            return Err(error);
        }
        let mut tracker = self.metrics.request(pending.model());
        let admitted = match self.recall(pending) {
            Ok(()) => self.reserve(pending).await,
            Err(error) => Err(error),
        };
        if let Err(error) = admitted {
            tracker.failed(&error);
            return Err(error);
        }
        Ok(tracker)
    }

    /// Waits until everything was listed once; `false` where nobody lists it any more.
    async fn synced(&self, table: &mut watch::Receiver<Arc<RoutingTable>>) -> bool {
        let listed = match &self.budgets {
            Some(budgets) => budgets.listed().wait_for(|listed| *listed).await.is_ok(),
            None => true,
        };
        listed && table.wait_for(|table| table.synced).await.is_ok()
    }

    /// Waits for the first synced table: before that, no name can be called unknown.
    async fn wait_synced(&self, pending: &PendingRequest) -> Result<(), GatewayError> {
        const NOT_SYNCED: &str = "the gateway has not reached the API server since it started, so it knows no models yet; \
                              check that `russet serve` runs";
        let mut table = self.table.clone();
        let deadline = pending.deadline();
        let until = pending.waiting_since() + self.limits.sync_timeout;
        let until = deadline.map_or(until, |deadline| deadline.until.min(until));
        tokio::select! {
            synced = timeout_at(until, self.synced(&mut table)) => match (synced, deadline) {
                (Ok(true), _) => Ok(()),
                (_, Some(deadline)) if deadline.remaining().is_none() => Err(deadline.exceeded(NOT_SYNCED)),
                _ => Err(GatewayError::new(ErrorKind::ModelNotReady, NOT_SYNCED).retry_after(RETRY_AFTER)),
            },
            () = self.closing.cancelled() => Err(shutdown_error()),
        }
    }
}
