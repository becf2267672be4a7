//! Serves requests with a body that no engine answers: they are about models, and are answered from memory.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::{MethodRouter, post};

use super::ReceivedRequest;
use super::api_state::ApiState;
use super::dialect::{Dialect, RequestContext};
use crate::error::GatewayError;
use crate::json_body::JsonBody;
use crate::keys::Caller;
use crate::request_id::RequestId;

/// Answers a decoded body of this caller.
pub(crate) type AnswerLookup =
    fn(body: JsonBody<'_>, api: &ApiState, caller: &Caller) -> Result<Response, GatewayError>;

/// The handler of a path that is answered from memory. Like a model list, it takes nothing from the caller's quota.
pub(crate) fn lookup(dialect: &'static Dialect, answer: AnswerLookup) -> MethodRouter<Arc<ApiState>> {
    post(
        move |State(api): State<Arc<ApiState>>,
              Extension(id): Extension<RequestId>,
              Extension(caller): Extension<Caller>,
              request: Request| async move {
            let found = look_up(&api, &id, &caller, request, answer).await;
            found.unwrap_or_else(|error| (dialect.error_response)(&error, &id))
        },
    )
}

async fn look_up(
    api: &Arc<ApiState>,
    id: &RequestId,
    caller: &Caller,
    request: Request,
    answer: AnswerLookup,
) -> Result<Response, GatewayError> {
    let ReceivedRequest { unread, permit: _permit, .. } =
        ReceivedRequest::read(api, id, caller, request).await?;
    let api = api.clone();
    let read = move |body: JsonBody<'_>, _: &RequestContext<'_>, caller: &Caller| answer(body, &api, caller);
    unread.read(read).await
}
