//! Serves requests for vectors and scores: read like those for text, and answered as a whole.

use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use axum::routing::{MethodFilter, MethodRouter};
use russet_wire::request::GenerationRequest;

use super::api_state::ApiState;
use super::dialect::{Dialect, RequestContext};
use super::{ReceivedRequest, RecordedRequest, list_ignored, list_keep_alive, within_quota};
use crate::dispatch::{PendingRequest, PoolingReply, PoolingRequest, PromptDigest};
use crate::error::GatewayError;
use crate::json_body::JsonBody;
use crate::keys::Caller;
use crate::request_defaults::LeftOut;
use crate::request_limits::MAX_PRIORITY;

/// A parsed request.
pub(crate) struct ParsedPooling {
    /// The model name as the client sent it.
    pub(crate) model: String,
    /// The request for the engine.
    pub(crate) request: PoolingRequest,
    /// How long its deployment stays loaded afterwards; `None` where the request does not say it.
    pub(crate) keep_alive: Option<Duration>,
    /// Ignored fields, which a header lists.
    pub(crate) ignored: Vec<String>,
    /// Formats the response.
    pub(crate) respond: Box<dyn FnOnce(PoolingReply) -> Result<Response, GatewayError> + Send>,
}

/// Parses a decoded body.
pub(crate) type ParsePooling =
    fn(body: JsonBody<'_>, context: &RequestContext<'_>) -> Result<ParsedPooling, GatewayError>;

/// The handler of a path that answers with vectors or scores.
pub(crate) fn pooling(dialect: &'static Dialect, parse: ParsePooling) -> MethodRouter<Arc<ApiState>> {
    within_quota(MethodFilter::POST, dialect, move |request| pool(dialect, request, parse))
}

async fn pool(
    dialect: &Dialect,
    RecordedRequest { api, id, caller, request, recorder }: RecordedRequest,
    parse: ParsePooling,
) -> Result<Response, GatewayError> {
    let ReceivedRequest { unread, deadline, permit, lowest_priority, route_headers, .. } =
        ReceivedRequest::read(&api, &id, &caller, request).await?;
    let state = api.clone();
    let read = move |body: JsonBody<'_>, context: &RequestContext<'_>, caller: &Caller| {
        let parsed = parse(body, context)?;
        let prompt = PromptDigest::of_texts(caller, &parsed.model, parsed.request.texts());
        let bytes = parsed.request.texts().map(|text| text.len()).sum();
        let facts = state.pooling_facts(&parsed.model, caller, &route_headers, bytes);
        Ok((parsed, prompt, facts))
    };
    let (parsed, prompt, facts) = unread.read(read).await?;
    let ParsedPooling { model, request, keep_alive, mut ignored, respond } = parsed;
    tracing::debug!(request_id = &*id.shown, engine_id = &*id.unique, dialect = dialect.name, model, "pool");
    recorder.parsed(&model, 1, false);
    let priority = if lowest_priority.is_some() { -MAX_PRIORITY } else { caller.limits().priority };
    recorder.limits(priority, None, deadline.map(|deadline| deadline.duration()));
    list_keep_alive(&api, &model, &caller, keep_alive, &mut ignored);
    let generation = GenerationRequest { id: id.unique.to_string(), ..GenerationRequest::default() };
    let pending =
        PendingRequest::new(model, generation, LeftOut::default(), prompt, deadline, permit, caller)
            .with_pooling(request)
            .with_facts(facts)
            .with_keep_alive(keep_alive)
            .with_recorder(recorder);
    let reply = api.dispatcher.pool(pending).await?;
    let mut response = respond(reply)?;
    list_ignored(&mut response, &ignored);
    Ok(response)
}
