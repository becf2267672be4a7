//! OpenAI's Responses API: requests of items, and responses that are items too, whole or as a stream of typed events. No
//! response is kept: what needs a kept one is refused by name.

pub(super) mod codex_models;
mod event;
mod fields;
mod input;
mod output;
mod request;
mod response;
mod settings;
mod text_format;
mod tools;
mod writer;

use axum::extract::Request;
use axum::response::Response;

use super::error::error_response;
use crate::error::{ErrorKind, GatewayError};
use crate::rejection::reject;
use crate::request_id::RequestId;
pub(super) use request::parse;

/// The response to a request for a response that would have been kept.
pub(super) async fn not_kept(request: Request) -> Response {
    let message = "this gateway keeps no responses: none can be read, deleted, cancelled or compacted; send the whole conversation as the `input` of POST /v1/responses";
    reject(request, &GatewayError::new(ErrorKind::UnknownPath, message), |request, error| {
        error_response(error, &RequestId::of(request))
    })
    .await
}
