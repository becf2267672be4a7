//! State of the routes of all dialects.

use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use bytes::Bytes;
use futures::Stream;
use jiff::Timestamp;
use russet_wire::request::GenerationRequest;
use tokio::time::Instant;

use super::affinity::Session;
use super::inbox::OwnInbox;
use super::kept_responses::{KeptResponses, OwnResponses, unread};
use super::model_summary::ModelSummary;
use super::own_batches::OwnBatches;
use super::own_files::OwnFiles;
use super::stalled_reader::ReadLimits;
use super::streamed_response;
use crate::audit::AuditLog;
use crate::body_budget::{BodyBudget, BodyPermit};
use crate::dispatch::{DispatchLimits, Dispatcher};
use crate::error::{ErrorKind, GatewayError, shown};
use crate::keys::{Caller, Quota};
use crate::managed_models::ManagedModels;
use crate::metrics::Metrics;
use crate::model_copies::ModelCopies;
use crate::request_log::RequestLog;
use crate::routes::{Deployment, RequestFacts, Resolved, RouteHeaders, RoutingTable, deployments};
use crate::strip_patterns::StripPatterns;

/// State of the routes of all dialects.
pub(crate) struct ApiState {
    /// Sends requests to engines.
    pub(super) dispatcher: Arc<Dispatcher>,
    /// Memory budget of request bodies.
    pub(super) bodies: BodyBudget,
    /// Counts requests that are rejected before their model is resolved.
    pub(super) metrics: Arc<Metrics>,
    /// The last requests.
    pub(super) log: RequestLog,
    /// Responses that the gateway keeps; `None` where it keeps none.
    pub(super) kept: Option<Arc<KeptResponses>>,
    /// How far files are, for pulls; `None` without an API server.
    pub(super) copies: Option<ModelCopies>,
    /// Creates and deletes models for clients; `None` where this gateway does not.
    pub(super) managed: Option<Arc<ManagedModels>>,
    /// Timeouts of streamed responses.
    pub(super) stream_timeouts: StreamTimeouts,
    /// The time that quotas count from.
    started: Instant,
}

/// Timeouts of a streamed response.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamTimeouts {
    /// How long the headers wait for the first token. Until then an error has its own HTTP status.
    pub(super) headers: Duration,
    /// How long they wait for engines that prepare its prompt, if that is longer.
    pub(super) prompt: Duration,
    /// Time between keep-alives.
    pub(super) keep_alive: Duration,
    /// How long a client may leave what it was sent unread.
    pub(super) read: Duration,
}

impl ApiState {
    /// The state of a gateway that begins to serve now.
    pub(crate) fn new(
        dispatcher: Arc<Dispatcher>,
        metrics: Arc<Metrics>,
        limits: &DispatchLimits,
        kept: Option<Arc<KeptResponses>>,
        copies: Option<ModelCopies>,
        managed: Option<Arc<ManagedModels>>,
    ) -> Self {
        Self {
            dispatcher,
            bodies: BodyBudget::new(limits.max_total_body_bytes, limits.body_timeout),
            metrics,
            log: RequestLog::default(),
            kept,
            copies,
            managed,
            stream_timeouts: StreamTimeouts {
                headers: limits.headers_timeout,
                prompt: limits.prompt_timeout,
                keep_alive: limits.heartbeat,
                read: limits.read_timeout,
            },
            started: Instant::now(),
        }
    }

    /// The same, which writes there how requests end.
    pub(crate) fn with_audit_log(self, audit: Option<AuditLog>) -> Self {
        Self { log: self.log.with_audit_log(audit), ..self }
    }

    /// The response whose body is this stream, which ends where its client does not read it.
    pub(crate) fn stream(
        &self,
        content_type: &'static str,
        body: impl Stream<Item = Bytes> + Send + 'static,
    ) -> Response {
        let limits = ReadLimits { timeout: self.stream_timeouts.read, deadline: None };
        streamed_response::response(content_type, body, limits)
    }

    /// The same, of a body of so many bytes that is in the store.
    pub(crate) fn kept_stream(
        &self,
        content_type: &'static str,
        bytes: u64,
        body: impl Stream<Item = Bytes> + Send + 'static,
    ) -> Response {
        let mut response = self.stream(content_type, body);
        streamed_response::set_length(&mut response, bytes);
        response
    }

    /// What this caller keeps; `None` where the gateway keeps no responses.
    pub(crate) fn own_responses(&self, caller: &Caller) -> Option<OwnResponses> {
        let kept = self.kept.clone()?;
        Some(OwnResponses::new(kept, caller, self.bodies.clone(), self.stream_timeouts.keep_alive))
    }

    /// The files that this caller keeps, or why there are none.
    pub(crate) fn own_files(&self, caller: &Caller) -> Result<OwnFiles, GatewayError> {
        let kept = self.kept.clone().ok_or_else(|| no_store("files"))?;
        Ok(OwnFiles::new(kept, caller, self.bodies.clone()))
    }

    /// The batches that this caller keeps, or why there are none.
    pub(crate) fn own_batches(&self, caller: &Caller) -> Result<OwnBatches, GatewayError> {
        let kept = self.kept.clone().ok_or_else(|| no_store("batches"))?;
        Ok(OwnBatches::new(kept, caller))
    }

    /// What this caller has in the inbox, or why there is none.
    pub(crate) fn own_inbox(&self, caller: &Caller) -> Result<OwnInbox, GatewayError> {
        let kept = self.kept.clone().ok_or_else(|| no_store("requests"))?;
        Ok(OwnInbox::new(kept, caller))
    }

    /// What a step of a PipelineRun of this caller made, by `sha256:` and its digest, with the memory that it takes.
    pub(crate) async fn artifact(
        &self,
        caller: &Caller,
        digest: &str,
    ) -> Result<(Vec<u8>, BodyPermit), GatewayError> {
        let kept = self.kept.clone().ok_or_else(|| no_store("what steps make"))?;
        let missing = || {
            let message = format!("no step of a run of this key made {}", shown(digest));
            GatewayError::new(ErrorKind::ArtifactNotFound, message)
        };
        let hex = digest.strip_prefix("sha256:").ok_or_else(missing)?.to_owned();
        let owner = caller.owner();
        let bytes = {
            let (owner, hex) = (owner.clone(), hex.clone());
            kept.store.read(move |store| store.artifact_bytes(&owner, &hex)).await
        };
        let permit = self.hold(caller, bytes.map_err(|error| unread(&error))?.ok_or_else(missing)?)?;
        let read = kept.store.read(move |store| store.artifact(&owner, &hex)).await;
        let artifact = read.map_err(|error| unread(&error))?.ok_or_else(missing)?;
        Ok((artifact, permit))
    }

    /// Holds so much memory for the caller.
    pub(crate) fn hold(&self, caller: &Caller, bytes: usize) -> Result<BodyPermit, GatewayError> {
        self.bodies.hold(caller, bytes)
    }

    /// How long a part of a body may take to arrive.
    pub(crate) fn body_timeout(&self) -> Duration {
        self.bodies.timeout()
    }

    /// Takes one request from the caller's quota and counts it; `None` without a quota. A request that is
    /// rejected later for another reason still counts.
    pub(super) fn take_quota(&self, caller: &Caller) -> Option<Quota> {
        let quota = caller.take_quota(self.started.elapsed());
        if let Caller::Key(key) = caller {
            self.metrics.key_request(key.full_name(), quota.is_some_and(|quota| quota.retry_after.is_some()));
        }
        quota
    }

    /// What is taken out of this caller's prompts to a model: what its first deployment says.
    pub(super) fn strip_patterns(&self, model: &str, caller: &Caller) -> StripPatterns {
        match self.dispatcher.table().resolve_adapter(model, caller.scope()) {
            (Resolved::Targets(targets), _) => {
                let first = deployments(&targets).into_iter().next();
                first.map(|first| first.defaults.strip_patterns.clone()).unwrap_or_default()
            }
            _ => StripPatterns::default(),
        }
    }

    /// What rules know of a request for text, where the ModelRoute of its model has some.
    pub(super) fn facts(
        &self,
        model: &str,
        caller: &Caller,
        headers: &RouteHeaders,
        request: &GenerationRequest,
        session: Option<Session>,
    ) -> Option<Arc<RequestFacts>> {
        let (headers, caller) = (self.route_headers(model, caller, headers)?, caller.facts());
        let session = session.map(Session::number);
        Some(Arc::new(RequestFacts::of(request, &headers, caller, session, Timestamp::now())))
    }

    /// The same of a request for vectors or scores of texts of so many bytes.
    pub(super) fn pooling_facts(
        &self,
        model: &str,
        caller: &Caller,
        headers: &RouteHeaders,
        bytes: usize,
    ) -> Option<Arc<RequestFacts>> {
        let headers = self.route_headers(model, caller, headers)?;
        Some(Arc::new(RequestFacts::of_pooling(bytes, &headers, caller.facts(), Timestamp::now())))
    }

    /// What a request says of its way, its model's name included, where its ModelRoute looks at that.
    fn route_headers(&self, model: &str, caller: &Caller, headers: &RouteHeaders) -> Option<RouteHeaders> {
        let table = self.dispatcher.table();
        table.policy(model, caller.scope()).filter(|policy| policy.reads_requests())?;
        Some(headers.clone().or_task(table.named_task(model, caller.scope())))
    }

    /// The models that the caller may request.
    pub(crate) fn models(&self, caller: &Caller) -> Vec<ModelSummary> {
        let table = self.dispatcher.table();
        let models = table.models(caller.scope());
        let summary = |(id, deployments): (String, Vec<&Deployment>)| {
            let (_, adapter) = table.resolve_adapter(&id, caller.scope());
            self.summary(&table, &id, &deployments, adapter)
        };
        models.into_iter().map(summary).collect()
    }

    /// One model that the caller may request, or the error for its name.
    pub(crate) fn model(&self, id: &str, caller: &Caller) -> Result<ModelSummary, GatewayError> {
        let table = self.dispatcher.table();
        match table.resolve_adapter(id, caller.scope()) {
            (Resolved::Targets(targets), adapter) => {
                Ok(self.summary(&table, id, &deployments(&targets), adapter))
            }
            _ => Err(self.dispatcher.unknown(id, caller)),
        }
    }

    fn summary(
        &self,
        table: &RoutingTable,
        id: &str,
        deployments: &[&Deployment],
        adapter: &str,
    ) -> ModelSummary {
        let expires: Option<Vec<_>> = deployments.iter().map(|one| self.dispatcher.expires(one)).collect();
        let expires = expires.and_then(|all| all.into_iter().max());
        ModelSummary { expires, ..ModelSummary::new(table, id, deployments, adapter) }
    }
}

/// The error of a gateway that keeps nothing.
fn no_store(what: &str) -> GatewayError {
    let message = format!(
        "this gateway keeps no {what}: it runs without `--responses-store FILE`; start `russet gateway` with that flag, or `russet up` without `--no-responses-store`"
    );
    GatewayError::new(ErrorKind::UnknownPath, message)
}
