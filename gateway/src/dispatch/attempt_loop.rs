//! The attempt loop: tries endpoints until one sends text, and holds the request while no endpoint is ready.
//! A started response is resumed by the same loop, limited to the endpoints that can resume it.
//!
//! ```text
//! ┌─▶ set_remaining_time ─▶ latest_table ─▶ choose ─▶ Refuse ─▶ error
//! ├──────── busy or failed ───────────────────┼─▶ Leave ─▶ try_provider ─▶ first text
//! │                                           ├─▶ Run ─▶ run_pipeline ─▶ all of its text
//! │                                           ├─▶ Try ─▶ try_endpoint ─▶ first text
//! ├──────── busy or lost: backoff ────────────┼──────────────┘
//! │                                           └─▶ Wait ─▶ hold_deadline ─▶ hold ─▶ wait_for_change
//! └───────────────────────────────────────────────────────────────────────────────────────┘
//! ```

mod first_text;
pub(super) mod hedge;
mod pipeline;
mod provider;
mod record;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use russet_crds::FallbackCause;
use russet_wire::event::GenerationEvent;
use russet_wire::request::GenerationRequest;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::answer_stream::AnswerStream;
use super::attempts::{Attempts, ends_engines, interrupted, overloaded, unsupported};
use super::deadline::Deadline;
use super::dispatcher::Dispatcher;
use super::engine_meter::EngineMeter;
use super::engine_stream::{AttemptError, EngineStream, LostWork, shutdown_error, table_changed};
use super::pending_request::{PendingRequest, PromptState, RequestKind};
use super::pooling_call::PoolingReply;
use super::route_decision::{ResumePoint, RouteDecision, RouteQuery, choose_model, choose_resume};
use super::suspects::{Isolation, Suspicion};
use super::token_count::token_count;
use crate::backends::{RankedPrompt, ReplicaScore};
use crate::budgets::Reservation;
use crate::demand::HeldRequest;
use crate::error::{ErrorKind, GatewayError};
use crate::metrics::RequestTracker;
use crate::providers::Closed;
use crate::request_log::Recorder;
use crate::routes::{
    Deployment, DeploymentState, Endpoint, Provider, Resolved, RouteTerms, RoutingTable, deployments,
};
use crate::serving::Session;
use first_text::{EngineProgress, FirstText, StreamAttempt};
use hedge::Hedge;

/// How long a request that is sent again after a crash waits for the list of Pipelines before another try.
const LISTING_WAIT: Duration = Duration::from_secs(1);

/// The first event that the client sees, `Token` or `Finished`, and the stream that it came from.
pub(super) type OpenedStream = (GenerationEvent, AnswerStream);

/// What an engine answered with.
enum Opened {
    /// The first event of generated text.
    Stream(OpenedStream),
    /// Vectors or scores, all of them.
    Pooled(PoolingReply),
    /// The number of tokens of the prompt.
    Counted(u32),
    /// A replica is ready.
    Loaded,
}

impl Dispatcher {
    /// Tries endpoints until one sends text; holds the request while none is ready.
    pub(super) async fn run_attempts(
        &self,
        request: &mut PendingRequest,
        tracker: &mut RequestTracker,
    ) -> Result<OpenedStream, GatewayError> {
        match AttemptLoop::new(self, request, tracker).run().await? {
            Opened::Stream(opened) => Ok(opened),
            Opened::Pooled(_) | Opened::Counted(_) | Opened::Loaded => Err(other_answer()),
        }
    }

    /// Tries endpoints until one answers a request for vectors or scores; holds it while none is ready.
    pub(super) async fn run_pooling(
        &self,
        request: &mut PendingRequest,
        tracker: &mut RequestTracker,
    ) -> Result<PoolingReply, GatewayError> {
        match AttemptLoop::new(self, request, tracker).run().await? {
            Opened::Pooled(reply) => Ok(reply),
            Opened::Stream(_) | Opened::Counted(_) | Opened::Loaded => Err(other_answer()),
        }
    }

    /// Tries endpoints until one counts the tokens of the prompt; holds the request while none is ready.
    pub(super) async fn run_token_count(
        &self,
        request: &mut PendingRequest,
        tracker: &mut RequestTracker,
    ) -> Result<u32, GatewayError> {
        match AttemptLoop::new(self, request, tracker).run().await? {
            Opened::Counted(tokens) => Ok(tokens),
            Opened::Stream(_) | Opened::Pooled(_) | Opened::Loaded => Err(other_answer()),
        }
    }

    /// Waits until an endpoint is ready.
    pub(super) async fn run_load(
        &self,
        request: &mut PendingRequest,
        tracker: &mut RequestTracker,
    ) -> Result<(), GatewayError> {
        match AttemptLoop::new(self, request, tracker).run().await? {
            Opened::Loaded => Ok(()),
            Opened::Stream(_) | Opened::Pooled(_) | Opened::Counted(_) => Err(other_answer()),
        }
    }

    /// What earlier tries of this request have shown; an error if it is not to be sent to another engine.
    pub(super) fn recall(&self, request: &mut PendingRequest) -> Result<(), GatewayError> {
        match self.suspects.recall(&request.prompt, Instant::now()) {
            None => Ok(()),
            Some(Suspicion::Suspect) => {
                request.attempts = Attempts::of_suspect();
                Ok(())
            }
            Some(Suspicion::Convicted) => Err(ends_engines("it was sent before, a few minutes ago")),
        }
    }

    /// Resumes on another engine a response that was partly sent when its engine was lost.
    pub(super) async fn resume(
        &self,
        request: &mut PendingRequest,
        stream: Box<EngineStream>,
        message: String,
        tracker: &mut RequestTracker,
    ) -> Result<OpenedStream, GatewayError> {
        let EngineStream { endpoint, emitted, .. } = *stream;
        request.request.emitted.extend(emitted);
        request.record_emitted(0);
        request.recorder.lost(&message);
        tracing::warn!(
            model = request.model,
            node = &*endpoint.node,
            epoch = endpoint.epoch,
            emitted = request.request.emitted.len(),
            "a response was interrupted: {message}"
        );
        request.waiting_since = Instant::now();
        request.last_lost = Some(endpoint);
        let (work, lost) = (LostWork::Tokens, message.clone());
        let opened = match request.attempts.record_lost(work, false, lost, self.limits.max_losses) {
            Ok(()) => self.run_attempts(request, tracker).await,
            Err(error) => Err(error),
        };
        tracker.continued(opened.is_ok());
        opened.map_err(|error| interrupted(&message, error))
    }
}

/// A replica that the request could go to.
struct ScoredReplica {
    node: Arc<str>,
    group: Arc<str>,
    /// Tokens of the prompt that it has cached.
    cached_tokens: u32,
    /// Those that it has not.
    unread_tokens: u64,
    score: ReplicaScore,
}

/// One run of the loop. A step changes the fields that name it, and no others.
struct AttemptLoop<'a> {
    dispatcher: &'a Dispatcher,
    /// `set_remaining_time` writes the engine's deadline, `try_endpoint` the attempts and the resume point.
    request: &'a mut PendingRequest,
    /// `try_endpoint` counts dispatches, retries and the first token.
    tracker: &'a mut RequestTracker,
    /// Changes of the routing table: read by `latest_table`, awaited by `wait_for_change`.
    table: watch::Receiver<Arc<RoutingTable>>,
    /// Endpoints that failed, and until when they are not tried: added by `try_endpoint`, removed by
    /// `latest_table`.
    backoffs: HashMap<Endpoint, Instant>,
    /// Endpoints that do not know what the request asks for, with what each said: added by `try_endpoint`.
    unsupported: HashMap<Endpoint, String>,
    /// The request among the held ones of a deployment: set by `hold`, dropped by `try_endpoint`.
    held: Option<HeldRequest>,
    /// Whether `hold` held it in this run.
    was_held: bool,
    /// Tokens of the prompt that the chosen endpoint has not cached: set by `choose`.
    unread_tokens: u64,
    /// Nodes and ShardGroups that it was chosen among, the tokens of the prompt that they have cached, and their scores: set by
    /// `choose`.
    scores: Vec<ScoredReplica>,
    /// The model, of those that the request names, for which it was decided last: set by `choose`.
    decided: String,
    /// The priority that the request came with; its rule may lower it.
    asked_priority: i32,
    /// What the request waits for, for the error at its deadline: set by `hold`.
    waiting_for: Option<String>,
    /// Models of providers that did not answer it, and why: set by `try_provider`.
    refusals: HashMap<(String, String), Closed>,
    /// The replica that gets the request too if the chosen one says nothing in time: set by `run`, taken by `open_stream`.
    hedge: Option<Hedge>,
    /// The error of an engine that failed with it: set by `try_endpoint`. It may go on to providers then, and to no engine.
    engine_error: Option<GatewayError>,
}

impl<'a> AttemptLoop<'a> {
    fn new(
        dispatcher: &'a Dispatcher,
        request: &'a mut PendingRequest,
        tracker: &'a mut RequestTracker,
    ) -> Self {
        let backoff_end = Instant::now() + dispatcher.limits.endpoint_backoff;
        Self {
            dispatcher,
            table: dispatcher.table.clone(),
            backoffs: request.last_lost.take().map(|endpoint| (endpoint, backoff_end)).into_iter().collect(),
            unsupported: HashMap::new(),
            held: None,
            was_held: false,
            unread_tokens: 0,
            scores: Vec::new(),
            decided: request.model.clone(),
            asked_priority: request.request.priority,
            waiting_for: None,
            refusals: HashMap::new(),
            hedge: None,
            engine_error: None,
            request,
            tracker,
        }
    }

    async fn run(mut self) -> Result<Opened, GatewayError> {
        loop {
            self.set_remaining_time()?;
            let now = Instant::now();
            let table = self.latest_table(now);
            let decision = self.choose(&table);
            if !matches!(decision, RouteDecision::Leave(_) | RouteDecision::Run(_))
                && let Some(error) = self.engine_error.take()
            {
                return Err(error);
            }
            match decision {
                RouteDecision::Refuse(error) => {
                    self.record_route(&table);
                    return Err(error);
                }
                RouteDecision::Leave(departure) => {
                    self.record_route(&table);
                    // In a box, as all that few requests come to: a future has room for every way that it may go.
                    if let Some(opened) = Box::pin(self.try_provider(*departure)).await? {
                        return Ok(opened);
                    }
                }
                RouteDecision::Run(route) => {
                    self.record_route(&table);
                    return Box::pin(self.run_pipeline(*route)).await;
                }
                RouteDecision::Try(deployment, endpoint, adapter) => {
                    self.lower_priority(&table);
                    self.record_attempt(&table, deployment, endpoint, adapter);
                    self.hedge = self.hedge(&table, deployment, endpoint, adapter);
                    if let Some(opened) = self.try_endpoint(deployment, endpoint, adapter).await? {
                        return Ok(opened);
                    }
                }
                // Those that are backed off may know it.
                RouteDecision::Wait(..) if self.is_unsupported(&table) => {
                    return Err(unsupported(&self.decided, &self.unsupported));
                }
                RouteDecision::Wait(deployment, reason) => {
                    let until = self.hold_deadline(&table, &reason, now)?;
                    self.hold(deployment, &reason)?;
                    self.record_route(&table);
                    self.request.recorder.held(deployment, &reason);
                    self.request.is_not_prepared();
                    self.wait_for_change(until).await?;
                }
            }
        }
    }

    /// Whether all engines that could answer cannot do what is asked, and no deployment is about to have others.
    fn is_unsupported(&self, table: &RoutingTable) -> bool {
        if self.unsupported.is_empty() {
            return false;
        }
        let resolution = table.resolve_request(&self.decided, self.request.scope(), self.request.facts());
        let Resolved::Targets(targets) = resolution.resolved else { return false };
        deployments(&targets).into_iter().all(|deployment| match deployment.endpoints.is_empty() {
            true => matches!(deployment.state, DeploymentState::Halted(_)),
            false => deployment.endpoints.iter().all(|endpoint| self.unsupported.contains_key(endpoint)),
        })
    }

    /// What the route of the model that was decided for says of the request; `None` where it has none.
    fn terms<'t>(&self, table: &'t RoutingTable) -> Option<&'t RouteTerms> {
        let alias = table.matching_alias(&self.decided, self.request.scope())?;
        Some(alias.policy.select(self.request.facts()).terms)
    }

    /// Gives the request the priority of its rule, where that is lower than its own. Vectors and counts have none.
    fn lower_priority(&mut self, table: &RoutingTable) {
        if !matches!(self.request.kind, RequestKind::Text) {
            return;
        }
        let most = self.terms(table).and_then(|terms| terms.max_priority).unwrap_or(i32::MAX);
        let priority = self.asked_priority.min(most);
        if priority != self.request.request.priority {
            self.request.request.priority = priority;
            self.request.recorder.priority(priority);
        }
    }

    /// Gives the next engine the time that remains now; an error once none does.
    fn set_remaining_time(&mut self) -> Result<(), GatewayError> {
        if let Some(deadline) = self.request.deadline {
            let left = deadline.remaining_milliseconds();
            let left = left.ok_or_else(|| match &self.waiting_for {
                Some(held) => deadline.exceeded(held),
                None => {
                    let model = &self.request.model;
                    deadline.exceeded(&format!("no engine of model `{model}` has sent a token yet"))
                }
            })?;
            self.request.request.deadline_milliseconds = Some(left);
        }
        Ok(())
    }

    /// The latest routing table. Backoffs that have ended are removed.
    fn latest_table(&mut self, now: Instant) -> Arc<RoutingTable> {
        let table = self.table.borrow_and_update().clone();
        self.backoffs.retain(|_, until| *until > now);
        table
    }

    /// The next action: the endpoint without a backoff that is expected to answer first, or why there is none.
    fn choose<'t>(&mut self, table: &'t RoutingTable) -> RouteDecision<'t> {
        let (scored, skipped) = (RefCell::new(Vec::new()), RefCell::new(Vec::new()));
        let GenerationRequest { prefix_marks: marks, max_tokens, .. } = &self.request.request;
        let prompt = RankedPrompt {
            marks,
            max_tokens: *max_tokens,
            session: self.request.session,
            reads_all: self.request.request.prompt_logprobs.is_some(),
        };
        let conversation = self.request.facts().map(|facts| Session::of_conversation(facts.conversation));
        let quickest = |endpoints: Vec<&'t Endpoint>| {
            // Replicas of one model may answer by turns; a conversation that two models answer by turns is of neither.
            let is_of_several =
                endpoints.windows(2).any(|two| matches!(two, [one, other] if one.model != other.model));
            let session = prompt.session.or(conversation.filter(|_| is_of_several));
            let prompt = RankedPrompt { session, ..prompt };
            let ready = endpoints.into_iter().filter(|endpoint| {
                !self.backoffs.contains_key(*endpoint) && !self.unsupported.contains_key(*endpoint)
            });
            let mut candidates = self.dispatcher.backends.ranked(ready, &prompt);
            candidates.sort_by_key(|one| self.dispatcher.overtaken.has(one.endpoint));
            let best = candidates.first()?;
            let picked = (best.endpoint, best.score.first_token());
            scored.replace(candidates);
            Some(picked)
        };
        let cause = match (&self.engine_error, &self.request.attempts.last_busy) {
            (Some(_), _) => Some(FallbackCause::Error),
            (None, Some(_)) => Some(FallbackCause::Overloaded),
            (None, None) => None,
        };
        let decision = match &self.request.resume_point {
            None => {
                let closed = |provider: &Provider, model: &str| {
                    let closed = self.closed(provider, model)?;
                    // What did not answer this request is in the log as an attempt.
                    if !self.refusals.contains_key(&(provider.full_name(), model.to_owned())) {
                        skipped.borrow_mut().push(provider::skipped(provider, model, &closed));
                    }
                    Some(closed)
                };
                // Where it is set, the choice would be a Pipeline, as far as is known: one that may run ends the search.
                let early = Cell::new(None);
                let query = RouteQuery {
                    scope: self.request.scope(),
                    facts: self.request.facts(),
                    cause,
                    left: self.request.deadline.and_then(|deadline| deadline.remaining()),
                    closed: &closed,
                    not_run: &|pipeline| self.not_run(pipeline, &early),
                };
                let (decision, model) = choose_model(table, self.request.models(), &query, quickest);
                if self.decided != model {
                    self.decided = model.to_owned();
                }
                early.get().map_or(decision, |why| {
                    // The next try may have another answer than that of an engine before the Pipeline.
                    self.engine_error = None;
                    let message = format!("a run of a Pipeline may answer the request: {why}");
                    let error = GatewayError::new(ErrorKind::ModelNotReady, message);
                    RouteDecision::Refuse(error.retry_after(LISTING_WAIT))
                })
            }
            Some(resume_point) => choose_resume(table, resume_point, quickest),
        };
        let mut skipped = skipped.into_inner();
        if let RouteDecision::Leave(departure) = &decision {
            // It is asked after all, because nothing else answers.
            let (name, model) = (departure.provider.full_name(), departure.model);
            skipped.retain(|skipped| (&*skipped.provider, &*skipped.model) != (&*name, model));
        }
        self.request.recorder.skipped(skipped);
        let scored = scored.into_inner();
        self.unread_tokens = scored.first().map_or(0, |best| best.unread_tokens);
        let scores = scored.into_iter().map(|one| ScoredReplica {
            node: one.endpoint.node.clone(),
            group: one.endpoint.group.clone(),
            cached_tokens: one.cached_tokens,
            unread_tokens: one.unread_tokens,
            score: one.score,
        });
        self.scores = scores.collect();
        decision
    }

    /// Sends the request to an endpoint. `None` when the endpoint is busy or lost; it is then backed off.
    async fn try_endpoint(
        &mut self,
        deployment: &Deployment,
        endpoint: &Endpoint,
        adapter: &str,
    ) -> Result<Option<Opened>, GatewayError> {
        self.held = None;
        let PendingRequest { caller, keep_alive, .. } = &*self.request;
        let counted = self.dispatcher.demand.keep_alive(deployment, caller, *keep_alive);
        self.request.keep_alive_request = counted;
        let mut isolation = self.isolate(endpoint).await?;
        let opened = self.open(deployment, (endpoint, adapter), &mut isolation).await;
        if opened.as_ref().map_or_else(AttemptError::is_of_engine, |_| true) {
            isolation.iter_mut().for_each(Isolation::heard);
        }
        match opened {
            Ok(opened) => {
                if self.request.attempts.is_suspect() {
                    self.dispatcher.suspects.forget(&self.request.prompt);
                }
                return Ok(Some(opened));
            }
            Err(AttemptError::Rejected(error)) => {
                self.request.recorder.rejected(&error);
                if error.kind != ErrorKind::Internal || self.request.resume_point.is_some() {
                    return Err(error);
                }
                // The next choice returns it, unless a provider may be asked.
                self.engine_error = Some(error);
                return Ok(None);
            }
            Err(AttemptError::Busy(message)) => {
                self.request.recorder.busy(&message);
                self.request.attempts.last_busy = Some(message);
            }
            Err(AttemptError::Unsupported(message)) => {
                self.request.recorder.lost(&message);
                let model = &self.request.model;
                tracing::warn!(model, node = &*endpoint.node, "{message}");
                self.unsupported.insert(endpoint.clone(), message);
                self.tracker.retried();
                return Ok(None);
            }
            Err(AttemptError::Lost { work, message }) => {
                self.request.recorder.lost(&message);
                let model = &self.request.model;
                tracing::warn!(model, node = &*endpoint.node, epoch = endpoint.epoch, "{message}");
                let exclusive = isolation.as_ref().is_some_and(Isolation::is_exclusive);
                // Whatever it did: the next one may be sent on a connection that is dead.
                isolation.iter().for_each(Isolation::silent);
                self.record_lost(work, exclusive, message)?;
            }
        }
        self.back_off(endpoint.clone());
        self.tracker.retried();
        Ok(None)
    }

    /// Does not try an endpoint again for a while.
    fn back_off(&mut self, endpoint: Endpoint) {
        self.backoffs.insert(endpoint, Instant::now() + self.dispatcher.limits.endpoint_backoff);
    }

    /// For a suspect: waits until it is the only one at this engine.
    async fn isolate(&self, endpoint: &Endpoint) -> Result<Option<Isolation>, GatewayError> {
        if !self.request.attempts.is_suspect() {
            return Ok(None);
        }
        let deadline = self.request.deadline;
        tokio::select! {
            isolation = self.dispatcher.suspects.isolate(endpoint) => Ok(Some(isolation)),
            () = Deadline::passed(deadline) => Ok(None),
            () = self.dispatcher.closing.cancelled() => Err(shutdown_error()),
        }
    }

    /// Counts a lost engine, and remembers a request that may be the cause: its client may send it again.
    fn record_lost(&mut self, work: LostWork, exclusive: bool, message: String) -> Result<(), GatewayError> {
        let max_losses = self.dispatcher.limits.max_losses;
        let recorded = self.request.attempts.record_lost(work, exclusive, message, max_losses);
        let suspicion = match &recorded {
            Err(error) if error.kind == ErrorKind::PoisonRequest => Suspicion::Convicted,
            _ => Suspicion::Suspect,
        };
        if work == LostWork::Prompt {
            self.dispatcher.suspects.remember(self.request.prompt, suspicion, Instant::now());
        }
        recorded
    }

    /// Asks the endpoint for what the request wants.
    async fn open(
        &mut self,
        deployment: &Deployment,
        (endpoint, adapter): (&Endpoint, &str),
        isolation: &mut Option<Isolation>,
    ) -> Result<Opened, AttemptError> {
        let mut meter = self.meter(endpoint);
        let PendingRequest { request, asked, deadline, kind, prompt_field, .. } = &mut *self.request;
        let opened = match kind {
            RequestKind::Text => {
                let opened = self.open_stream(deployment, (endpoint, adapter), isolation, meter).await?;
                return Ok(Opened::Stream(opened));
            }
            RequestKind::Load => return Ok(Opened::Loaded),
            RequestKind::Pooled(pooling) => {
                let milliseconds = request.deadline_milliseconds;
                let call = pooling.send(self.dispatcher, deployment, endpoint, *deadline, milliseconds);
                let reply = within(isolation, Box::pin(call)).await?;
                meter.answered(reply.engine_microseconds());
                Opened::Pooled(reply)
            }
            RequestKind::TokenCount => {
                deployment.defaults.complete(request, asked);
                adapter.clone_into(&mut request.adapter);
                let call = token_count(
                    self.dispatcher,
                    deployment,
                    endpoint,
                    request.clone(),
                    prompt_field,
                    *deadline,
                );
                Opened::Counted(within(isolation, Box::pin(call)).await?)
            }
        };
        self.tracker.dispatched();
        self.tracker.token();
        self.request.recorder.first_token();
        Ok(opened)
    }

    /// Reads what the engine at this endpoint computes for the request.
    fn meter(&self, endpoint: &Endpoint) -> EngineMeter {
        let power = self.table.borrow().group_energy.get(&endpoint.group).copied();
        let PendingRequest { model, recorder, reservation, .. } = &*self.request;
        let charge = reservation.as_ref().and_then(Reservation::energy_charge);
        EngineMeter::new(self.dispatcher.metrics.clone(), model.clone(), recorder.of_engine(), power, charge)
    }

    /// Opens a stream to the endpoint and reads it up to the first event that the client sees; hedged, where its route says so.
    async fn open_stream(
        &mut self,
        deployment: &Deployment,
        (endpoint, adapter): (&Endpoint, &str),
        isolation: &mut Option<Isolation>,
        meter: EngineMeter,
    ) -> Result<OpenedStream, AttemptError> {
        if self.request.resume_point.is_none() {
            // A response that has begun goes on as it began.
            let PendingRequest { request, asked, .. } = &mut *self.request;
            deployment.defaults.complete(request, asked);
            adapter.clone_into(&mut request.adapter);
        }
        let FirstText { event, stream, prompt_tokens } = match self.hedge.take() {
            Some(hedge) => Box::pin(self.open_hedged(deployment, (endpoint, adapter), meter, hedge)).await?,
            None => self.open_first(deployment, endpoint, isolation, meter).await?,
        };
        self.tracker.token();
        self.request.recorder.first_token();
        let answering = &stream.endpoint;
        self.request.resume_point.get_or_insert_with(|| ResumePoint {
            deployment: deployment.full_name(),
            model: answering.model.clone(),
            adapter: (adapter.to_owned(), answering.adapters.get(adapter).cloned().unwrap_or_default()),
            prompt_tokens,
        });
        Ok((event, AnswerStream::Engine(stream)))
    }

    /// The first text of one engine.
    async fn open_first(
        &mut self,
        deployment: &Deployment,
        endpoint: &Endpoint,
        isolation: &mut Option<Isolation>,
        meter: EngineMeter,
    ) -> Result<FirstText, AttemptError> {
        let active = Some(self.dispatcher.demand.start(deployment));
        let (attempt, mut noted) = self.split();
        let at = (endpoint, noted.unread_tokens);
        attempt.first_text(at, meter, active, isolation, |progress| noted.note(progress)).await
    }

    /// What an attempt reads of the request, and what takes down how far the engine is.
    fn split(&mut self) -> (StreamAttempt<'_>, ProgressNotes<'_>) {
        let PendingRequest {
            request,
            deadline,
            resume_point,
            prompt_state,
            prompt_field,
            recorder,
            reservation,
            ..
        } = &mut *self.request;
        let attempt = StreamAttempt {
            dispatcher: self.dispatcher,
            request,
            prompt_field,
            deadline: *deadline,
            resume_point: resume_point.as_ref(),
        };
        let notes = ProgressNotes {
            prompt_state: prompt_state.as_ref(),
            recorder,
            reservation: reservation.as_mut(),
            tracker: self.tracker,
            unread_tokens: self.unread_tokens,
        };
        (attempt, notes)
    }

    /// Until when the request may be held; an error when it may not be held, or no longer.
    fn hold_deadline(
        &mut self,
        table: &RoutingTable,
        reason: &str,
        now: Instant,
    ) -> Result<Instant, GatewayError> {
        let timeout = match self.terms(table) {
            Some(terms) => terms.hold_timeout.unwrap_or_default(),
            None => self.dispatcher.limits.hold_timeout,
        };
        let PendingRequest { model, deadline, waiting_since, attempts, .. } = &mut *self.request;
        // When a replica becomes ready, more requests may be held than it admits at once; those stay held.
        if let (Some(message), None, false) = (&attempts.last_busy, &attempts.last_lost, self.was_held) {
            return Err(overloaded(message.clone()));
        }
        let until = *waiting_since + timeout;
        if now >= until {
            return Err(attempts.hold_expired(model, timeout, reason));
        }
        Ok(deadline.map_or(until, |deadline| deadline.until.min(until)))
    }

    /// Counts the request among the held ones of this deployment; an error beyond the limits.
    fn hold(&mut self, deployment: &Deployment, reason: &str) -> Result<(), GatewayError> {
        if self.held.as_ref().is_none_or(|held| !held.is_for(deployment)) {
            // Both deployments count towards one limit: the other one's request is released first.
            self.held = None;
            let bytes = self.request.body_permit.bytes();
            self.held = Some(self.dispatcher.demand.hold(deployment, bytes)?);
            self.was_held = true;
        }
        self.waiting_for = Some(format!("model `{}`: {reason}", self.request.model));
        Ok(())
    }

    /// Waits until the routing table changes, a backoff ends, or `until`.
    async fn wait_for_change(&mut self, until: Instant) -> Result<(), GatewayError> {
        let wake = self.backoffs.values().min().copied().unwrap_or(until).min(until);
        tokio::select! {
            () = table_changed(&mut self.table) => Ok(()),
            () = sleep_until(wake) => Ok(()),
            () = self.dispatcher.closing.cancelled() => Err(shutdown_error()),
        }
    }
}

/// Takes down how far an engine is with a request.
struct ProgressNotes<'a> {
    prompt_state: Option<&'a watch::Sender<PromptState>>,
    recorder: &'a Recorder,
    reservation: Option<&'a mut Reservation>,
    tracker: &'a mut RequestTracker,
    /// Tokens of the prompt that the chosen endpoint has not cached.
    unread_tokens: u64,
}

impl ProgressNotes<'_> {
    /// Another engine than that whose progress was taken down has read a prompt of so many tokens.
    fn accepted_elsewhere(&mut self, prompt_tokens: u32) {
        self.note(EngineProgress::PreparingEnded);
        self.note(EngineProgress::Accepted);
        self.prompt_is(prompt_tokens);
    }

    fn prompt_is(&mut self, tokens: u32) {
        if let Some(reservation) = &mut self.reservation {
            reservation.note_prompt(tokens);
        }
        PromptState::change(self.prompt_state, |state| state.tokens = Some(tokens));
    }

    fn note(&mut self, progress: EngineProgress) {
        match progress {
            EngineProgress::Preparing => {
                PromptState::change(self.prompt_state, |state| state.preparing = true)
            }
            EngineProgress::PreparingEnded => {
                PromptState::change(self.prompt_state, |state| state.preparing = false);
            }
            EngineProgress::Prepared => self.recorder.prepared(),
            EngineProgress::Accepted => self.tracker.dispatched(),
            EngineProgress::Started(prompt_tokens) => {
                self.recorder.started(prompt_tokens);
                self.prompt_is(prompt_tokens);
            }
        }
    }
}

/// The error for an answer to what was not asked: a fault of this gateway.
fn other_answer() -> GatewayError {
    GatewayError::new(ErrorKind::Internal, "the gateway mixed up two kinds of requests; report this as a bug")
}

/// Awaits `work`, which may take longer than the request is isolated.
async fn within<T>(isolation: &mut Option<Isolation>, mut work: impl Future<Output = T> + Unpin) -> T {
    if let Some(isolation) = isolation {
        tokio::select! {
            biased;
            done = &mut work => return done,
            () = isolation.expire() => {}
        }
    }
    work.await
}
