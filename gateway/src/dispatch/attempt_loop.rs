//! The attempt loop: tries endpoints until one sends text, and holds the request while no endpoint is ready.
//! A started response is resumed by the same loop, limited to the endpoints that can resume it.

use std::collections::HashMap;
use std::sync::Arc;

use russet_rpc::engine::GenerateRequest;
use russet_wire::event::GenerationEvent;
use russet_wire::request::GenerationRequest;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::attempts::{Attempts, interrupted, overloaded, resume_mismatch};
use super::engine_stream::{
    AttemptError, EngineStream, attempt_error, event_deadline, shutdown_error, silence_error, table_changed,
};
use super::route_decision::{ResumePoint, RouteDecision, choose, choose_resume};
use super::{Deadline, Dispatcher, ResponseChunk};
use crate::body_budget::BodyPermit;
use crate::demand::HeldRequest;
use crate::error::{ErrorKind, GatewayError};
use crate::keys::Caller;
use crate::metrics::RequestTracker;
use crate::routes::{Deployment, Endpoint, ModelScope, RoutingTable};

/// A request with its caller, and how much of its response was already sent.
pub(crate) struct PendingRequest {
    model: String,
    request: GenerationRequest,
    deadline: Option<Deadline>,
    caller: Caller,
    /// When it began to wait for an engine.
    waiting_since: Instant,
    attempts: Attempts,
    resume_point: Option<ResumePoint>,
    /// The endpoint lost last; it is backed off before it is tried again.
    last_lost: Option<Endpoint>,
    body_permit: BodyPermit,
}

impl PendingRequest {
    /// A request that no engine has received yet. Its body stays in memory, counted by the permit, until the
    /// response is complete, because another engine may have to resume it.
    pub(crate) fn new(
        model: String,
        mut request: GenerationRequest,
        deadline: Option<Deadline>,
        body_permit: BodyPermit,
        caller: Caller,
    ) -> Self {
        // A resumed response must sample with the same seed.
        request.sampling.seed.get_or_insert_with(rand::random);
        Self {
            model,
            request,
            deadline,
            caller,
            waiting_since: Instant::now(),
            attempts: Attempts::default(),
            resume_point: None,
            last_lost: None,
            body_permit,
        }
    }

    /// The model name as the client sent it.
    pub(super) fn model(&self) -> &str {
        &self.model
    }

    /// The model names that its caller may use.
    pub(super) fn scope(&self) -> &ModelScope {
        self.caller.scope()
    }

    /// The deadline of the whole response.
    pub(super) fn deadline(&self) -> Option<Deadline> {
        self.deadline
    }

    /// When it began to wait for an engine.
    pub(super) fn waiting_since(&self) -> Instant {
        self.waiting_since
    }
}

impl Dispatcher {
    /// Resumes on another engine a response that was partly sent when its engine was lost.
    pub(super) async fn resume(
        &self,
        asked: &mut PendingRequest,
        line: EngineStream,
        message: String,
        tracker: &mut RequestTracker,
    ) -> Result<(ResponseChunk, EngineStream), GatewayError> {
        let EngineStream { endpoint, emitted: told, .. } = line;
        asked.request.emitted.extend(told);
        let told = asked.request.emitted.len();
        tracing::warn!(
            model = asked.model,
            node = endpoint.node,
            epoch = endpoint.epoch,
            told,
            "an answer broke off: {message}"
        );
        asked.waiting_since = Instant::now();
        asked.last_lost = Some(endpoint);
        let found = match asked.attempts.record_lost(true, message.clone(), self.limits.max_losses) {
            Ok(()) => self.run_attempts(asked, tracker).await,
            Err(refusal) => Err(refusal),
        };
        tracker.continued(found.is_ok());
        found.map_err(|refusal| interrupted(&message, refusal))
    }

    /// Tries endpoints until one sends text; holds the request while none is ready.
    pub(super) async fn run_attempts(
        &self,
        asked: &mut PendingRequest,
        tracker: &mut RequestTracker,
    ) -> Result<(ResponseChunk, EngineStream), GatewayError> {
        let PendingRequest {
            model,
            request,
            deadline,
            caller,
            waiting_since: since,
            attempts: setbacks,
            resume_point: begun,
            last_lost: left,
            body_permit: body,
        } = asked;
        let scope = caller.scope();
        let mut changes = self.table.clone();
        let mut resting: HashMap<Endpoint, Instant> = HashMap::new();
        resting.extend(left.take().map(|left| (left, Instant::now() + self.limits.endpoint_backoff)));
        let mut place: Option<HeldRequest> = None;
        let mut held = false;
        let mut state = format!("no engine of model `{model}` began to answer");
        loop {
            if let Some(deadline) = deadline {
                // Every engine is given the time that remains now.
                let left = deadline.remaining().ok_or_else(|| deadline.exceeded(&state))?;
                request.deadline_milliseconds = Some(u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
            }
            let table = changes.borrow_and_update().clone();
            self.backends.prune(&table);
            let now = Instant::now();
            resting.retain(|_, until| *until > now);
            let pick = |endpoints: Vec<_>| {
                let rested = endpoints.into_iter().filter(|endpoint| !resting.contains_key(*endpoint));
                self.backends.least_busy(rested)
            };
            let choice = match begun {
                None => choose(&table, model, scope, pick),
                Some(begun) => choose_resume(&table, begun, pick),
            };
            let (deployment, waiting_for) = match choice {
                RouteDecision::Refuse(refusal) => return Err(refusal),
                RouteDecision::Try(deployment, endpoint) => {
                    place = None;
                    match self.try_endpoint(deployment, endpoint, request, *deadline, begun, tracker).await {
                        Ok(opened) => return Ok(opened),
                        Err(AttemptError::Rejected(refusal)) => return Err(refusal),
                        Err(AttemptError::Busy(message)) => setbacks.last_busy = Some(message),
                        Err(AttemptError::Lost { accepted, message }) => {
                            tracing::warn!(model, node = endpoint.node, epoch = endpoint.epoch, "{message}");
                            setbacks.record_lost(accepted, message, self.limits.max_losses)?;
                        }
                    }
                    resting.insert(endpoint.clone(), Instant::now() + self.limits.endpoint_backoff);
                    tracker.retried();
                    continue;
                }
                RouteDecision::Wait(deployment, message) => (deployment, message),
            };
            // When a replica wakes, more requests may be held than it admits at once; those stay held.
            if let (Some(message), None, false) = (&setbacks.last_busy, &setbacks.last_lost, held) {
                return Err(overloaded(message.clone()));
            }
            let hold = match table.matching_alias(model, scope) {
                Some(name) => name.hold_timeout.unwrap_or_default(),
                None => self.limits.hold_timeout,
            };
            let held_until = *since + hold;
            if now >= held_until {
                return Err(setbacks.hold_expired(model, hold, &waiting_for));
            }
            let until = deadline.map_or(held_until, |deadline| deadline.until.min(held_until));
            if place.as_ref().is_none_or(|place| !place.is_for(deployment)) {
                drop(place.take());
                place = Some(self.demand.hold(deployment, body.bytes())?);
                held = true;
            }
            state = format!("model `{model}`: {waiting_for}");
            let wake = resting.values().min().copied().unwrap_or(until).min(until);
            tokio::select! {
                () = table_changed(&mut changes) => {}
                () = sleep_until(wake) => {}
                () = self.closing.cancelled() => return Err(shutdown_error()),
            }
        }
    }

    async fn try_endpoint(
        &self,
        deployment: &Deployment,
        endpoint: &Endpoint,
        request: &GenerationRequest,
        deadline: Option<Deadline>,
        begun: &mut Option<ResumePoint>,
        tracker: &mut RequestTracker,
    ) -> Result<(ResponseChunk, EngineStream), AttemptError> {
        let silence = self.limits.engine_timeout;
        let (mut client, lease) = self.backends.acquire(endpoint).map_err(|error| {
            tracing::error!("{}", russet_telemetry::errors::chain(&error));
            AttemptError::Rejected(GatewayError::new(
                ErrorKind::Internal,
                "the gateway cannot use its certificate; its log says why",
            ))
        })?;
        let active = self.demand.start(deployment);
        let mut table = self.table.clone();
        let bound = event_deadline(Instant::now(), silence, deadline);
        let opened = tokio::select! {
            opened = timeout_at(bound, client.generate(GenerateRequest::from(request.clone()))) => opened,
            // A frozen machine accepts connections and sends nothing; its group may be ready elsewhere by
            // now.
            () = endpoint_removed(&mut table, endpoint) => {
                let Endpoint { address, node, .. } = endpoint;
                let message = format!("the engine on node {node} at {address} does not answer and is being replaced");
                return Err(AttemptError::Lost { accepted: false, message });
            }
            () = self.closing.cancelled() => return Err(AttemptError::Rejected(shutdown_error())),
        };
        let events = match opened {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) => return Err(attempt_error(endpoint, &status, false)),
            Err(_) => return Err(AttemptError::Rejected(silence_error(endpoint, silence, deadline))),
        };
        let mut line = EngineStream::new(self, endpoint, events, deadline, active, lease);
        let mut prompt = 0;
        loop {
            let event = line.event().await?;
            if line.accepted {
                tracker.dispatched();
            }
            if let GenerationEvent::Started { prompt_tokens, emitted_tokens } = event {
                prompt = prompt_tokens;
                let here = (prompt_tokens, emitted_tokens as usize);
                if let Some(begun) = begun.as_ref()
                    && here != (begun.prompt_tokens, request.emitted.len())
                {
                    return Err(AttemptError::Rejected(resume_mismatch(
                        endpoint,
                        here,
                        begun,
                        request.emitted.len(),
                    )));
                }
            }
            if let Some(piece) = line.interpret(event) {
                let first = piece?;
                tracker.token();
                begun.get_or_insert_with(|| ResumePoint {
                    deployment: deployment.full_name(),
                    model: endpoint.model.clone(),
                    prompt_tokens: prompt,
                });
                return Ok((first, line));
            }
        }
    }
}

/// Waits until no deployment of the table lists this endpoint.
async fn endpoint_removed(table: &mut watch::Receiver<Arc<RoutingTable>>, endpoint: &Endpoint) {
    let known =
        |table: &Arc<RoutingTable>| table.deployments.iter().any(|one| one.endpoints.contains(endpoint));
    if table.wait_for(|table| !known(table)).await.is_err() {
        std::future::pending().await
    }
}
