//! Serves requests for the number of tokens that a prompt has: read like those for text, and answered by an engine, which
//! renders the prompt as it would to generate.

use std::sync::Arc;

use axum::response::Response;
use axum::routing::{MethodFilter, MethodRouter};

use super::api_state::ApiState;
use super::dialect::{Dialect, ParseRequest, ParsedRequest};
use super::{ReceivedRequest, RecordedRequest, list_ignored, within_quota};
use crate::dispatch::{PendingRequest, PromptDigest};
use crate::error::GatewayError;

/// The handler of a path that counts tokens: `parse` reads its request, of which the first prompt counts, and `respond`
/// formats the number.
pub(crate) fn token_count<W: Send + 'static>(
    dialect: &'static Dialect,
    parse: ParseRequest<W>,
    respond: fn(u32) -> Response,
) -> MethodRouter<Arc<ApiState>> {
    within_quota(MethodFilter::POST, dialect, move |request| count(request, parse, respond))
}

async fn count<W: Send + 'static>(
    RecordedRequest { api, id, caller, request, recorder }: RecordedRequest,
    parse: ParseRequest<W>,
    respond: fn(u32) -> Response,
) -> Result<Response, GatewayError> {
    let ReceivedRequest { unread, deadline, permit, session, route_headers, .. } =
        ReceivedRequest::read(&api, &id, &caller, request).await?;
    let state = api.clone();
    let parsed = unread.read(move |body, context, caller| {
        let mut parsed = parse(body, context)?;
        let mut request = parsed.requests.drain(..).next().unwrap_or_default();
        state.strip_patterns(&parsed.model, caller).strip(&mut request);
        let prompt = PromptDigest::new(caller, &parsed.model, &request);
        let facts = state.facts(&parsed.model, caller, &route_headers, &request, session);
        Ok((parsed, request, prompt, facts))
    });
    let (ParsedRequest { model, prompt_field, left_out, ignored, .. }, request, prompt, facts) =
        parsed.await?;
    tracing::debug!(request_id = &*id.shown, engine_id = &*id.unique, model, "count tokens");
    recorder.parsed(&model, 1, false);
    recorder.limits(request.priority, None, deadline.map(|deadline| deadline.duration()));
    let pending = PendingRequest::new(model, request, left_out, prompt, deadline, permit, caller);
    let pending = pending.with_prompt_field(prompt_field).with_facts(facts);
    let pending = pending.with_token_count().with_recorder(recorder);
    let tokens = api.dispatcher.count_tokens(pending).await?;
    let mut response = respond(tokens);
    list_ignored(&mut response, &ignored);
    Ok(response)
}
