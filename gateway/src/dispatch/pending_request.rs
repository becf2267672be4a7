//! A request that is dispatched: what its client wants, within which limits, and how far its response is. Not here: how it
//! finds an engine, see `attempt_loop`.

use std::sync::Arc;
use std::time::Duration;

use russet_wire::event::Usage;
use russet_wire::request::GenerationRequest;
use tokio::sync::watch;
use tokio::time::Instant;

use super::attempts::Attempts;
use super::deadline::Deadline;
use super::pooling_call::PoolingRequest;
use super::response_cache::CacheUse;
use super::route_decision::ResumePoint;
use super::suspects::PromptDigest;
use crate::body_budget::BodyPermit;
use crate::budgets::Reservation;
use crate::demand::KeepAliveRequest;
use crate::keys::Caller;
use crate::request_defaults::{AskedParameters, LeftOut};
use crate::request_log::Recorder;
use crate::routes::{Endpoint, ModelScope, RequestFacts};
use crate::serving::Session;

/// A request with its caller, and how much of its response was already sent.
pub(crate) struct PendingRequest {
    pub(super) model: String,
    /// Models that take it where that one cannot.
    pub(super) fallback_models: Vec<String>,
    pub(super) request: GenerationRequest,
    /// What its client asks for; a deployment sets the rest.
    pub(super) asked: AskedParameters,
    pub(super) prompt: PromptDigest,
    pub(super) deadline: Option<Deadline>,
    pub(super) caller: Caller,
    /// When it began to wait for an engine.
    pub(super) waiting_since: Instant,
    pub(super) attempts: Attempts,
    pub(super) resume_point: Option<ResumePoint>,
    /// The endpoint lost last; it is backed off before it is tried again.
    pub(super) last_lost: Option<Endpoint>,
    pub(super) body_permit: BodyPermit,
    pub(super) kind: RequestKind,
    pub(super) session: Option<Session>,
    /// What rules of its ModelRoute know of it, where that has some.
    pub(super) facts: Option<Arc<RequestFacts>>,
    /// Whether an answer that is kept will do.
    pub(super) cache_use: CacheUse,
    /// How long the deployment stays loaded after it, as the request says.
    pub(super) keep_alive: Option<Duration>,
    /// The same, counted for the deployment that answers: until the response is complete.
    pub(super) keep_alive_request: Option<KeepAliveRequest>,
    /// The client's field that has the prompt.
    pub(super) prompt_field: &'static str,
    /// Where somebody waits for what becomes of its prompt.
    pub(super) prompt_state: Option<watch::Sender<PromptState>>,
    /// What it reserved of Budgets.
    pub(super) reservation: Option<Reservation>,
    pub(super) recorder: Recorder,
}

/// What became of a prompt so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PromptState {
    /// Whether it is on the way to an engine or prepared by one, and not held.
    pub(crate) preparing: bool,
    /// Its tokens, where an engine has admitted it.
    pub(crate) tokens: Option<u32>,
}

impl PromptState {
    /// Changes what is known of a prompt, and wakes those who wait for that only where it is new.
    pub(super) fn change(state: Option<&watch::Sender<Self>>, change: impl FnOnce(&mut Self)) {
        if let Some(state) = state {
            state.send_if_modified(|state| {
                let before = *state;
                change(state);
                *state != before
            });
        }
    }
}

/// What is asked of a model.
pub(super) enum RequestKind {
    /// Generated text.
    Text,
    /// Vectors or scores.
    Pooled(PoolingRequest),
    /// The number of tokens of the prompt.
    TokenCount,
    /// Nothing but that it is ready.
    Load,
}

impl PendingRequest {
    /// A request that no engine has received yet, with a seed: a resumed response must sample with the same one. Its
    /// body stays in memory, counted by the permit, until the response is complete, because another engine may have to resume it.
    pub(crate) fn new(
        model: String,
        request: GenerationRequest,
        left_out: LeftOut,
        prompt: PromptDigest,
        deadline: Option<Deadline>,
        body_permit: BodyPermit,
        caller: Caller,
    ) -> Self {
        Self {
            model,
            fallback_models: Vec::new(),
            asked: AskedParameters::of(&request, left_out),
            request,
            prompt,
            deadline,
            caller,
            waiting_since: Instant::now(),
            attempts: Attempts::default(),
            resume_point: None,
            last_lost: None,
            body_permit,
            kind: RequestKind::Text,
            session: None,
            facts: None,
            cache_use: CacheUse::default(),
            keep_alive: None,
            keep_alive_request: None,
            prompt_field: "messages",
            prompt_state: None,
            reservation: None,
            recorder: Recorder::default(),
        }
    }

    /// The same, which asks for vectors or scores.
    pub(crate) fn with_pooling(self, pooling: PoolingRequest) -> Self {
        Self { kind: RequestKind::Pooled(pooling), ..self }
    }

    /// The same, which asks for the number of tokens of its prompt.
    pub(crate) fn with_token_count(self) -> Self {
        Self { kind: RequestKind::TokenCount, ..self }
    }

    /// The same with the field that has the prompt, for errors about its length.
    pub(crate) fn with_prompt_field(self, prompt_field: &'static str) -> Self {
        Self { prompt_field, ..self }
    }

    /// The same, which only has to find the model ready.
    pub(crate) fn with_load(self) -> Self {
        Self { kind: RequestKind::Load, ..self }
    }

    /// The same, which says how long the model stays loaded after it.
    pub(crate) fn with_keep_alive(self, keep_alive: Option<Duration>) -> Self {
        Self { keep_alive, ..self }
    }

    /// The same, which these models take where its own cannot.
    pub(crate) fn with_fallback_models(self, fallback_models: Vec<String>) -> Self {
        Self { fallback_models, ..self }
    }

    /// The same, of a session.
    pub(crate) fn with_session(self, session: Option<Session>) -> Self {
        Self { session, ..self }
    }

    /// The same, which says this of answers that are kept.
    pub(crate) fn with_cache_use(self, cache_use: CacheUse) -> Self {
        Self { cache_use, ..self }
    }

    /// The same, of which rules know this.
    pub(crate) fn with_facts(self, facts: Option<Arc<RequestFacts>>) -> Self {
        Self { facts, ..self }
    }

    /// The same, which `recorder` records in the request log.
    pub(crate) fn with_recorder(self, recorder: Recorder) -> Self {
        Self { recorder, ..self }
    }

    /// Its record in the request log.
    pub(super) fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Records that so many tokens of its response came from its last engine.
    pub(super) fn record_emitted(&mut self, tokens: usize) {
        let generated = self.request.emitted.len() + tokens;
        self.recorder.generated(generated);
        if let Some(reservation) = &mut self.reservation {
            reservation.note_answer(generated);
        }
    }

    /// Settles what it reserved of Budgets, as its complete answer says.
    pub(super) fn settle(&mut self, usage: Usage) {
        if let Some(reservation) = self.reservation.take() {
            reservation.settle(usage);
        }
    }

    /// What becomes of its prompt, from before it is sent to an engine.
    pub(crate) fn prompt(&mut self) -> watch::Receiver<PromptState> {
        let unsent = PromptState { preparing: true, tokens: None };
        self.prompt_state.get_or_insert_with(|| watch::Sender::new(unsent)).subscribe()
    }

    /// The model name as the client sent it.
    pub(super) fn model(&self) -> &str {
        &self.model
    }

    /// That name and those of the models that take it otherwise.
    pub(super) fn models(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.model).chain(&self.fallback_models).map(String::as_str)
    }

    /// The model names that its caller may use.
    pub(super) fn scope(&self) -> &ModelScope {
        self.caller.scope()
    }

    /// `namespace/name` of the deployment that answers it.
    pub(super) fn answered_by(&self) -> Option<&str> {
        self.resume_point.as_ref().map(|point| point.deployment.as_str())
    }

    /// Its prompt is not prepared now: whoever waits for that need not.
    pub(super) fn is_not_prepared(&self) {
        PromptState::change(self.prompt_state.as_ref(), |state| state.preparing = false);
    }

    /// What rules know of it.
    pub(super) fn facts(&self) -> Option<&RequestFacts> {
        self.facts.as_deref()
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
