//! The API dialects of clients. Each is one file and one line in [`ALL`]: it parses its requests into a
//! dialect-free [`russet_wire::request::GenerationRequest`] and formats responses and errors. What serves any
//! dialect is in `serving`.

mod anthropic;
mod field_table;
mod http_error;
mod json_line;
mod json_schema;
mod models;
mod ollama;
mod openai;
mod pooling_request;
mod quota_headers;
mod sampling;
mod sse;
mod stop_strings;
mod thinking;
mod token_logprobs;
mod tool_calls;
mod tools;
mod values;

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::response::Response;

use crate::error::GatewayError;
use crate::request_id::RequestId;
use crate::serving::{ApiState, Dialect, why};

/// What fuzz targets feed to each.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzed {
    pub(crate) use super::anthropic::fuzzed as anthropic;
    pub(crate) use super::ollama::fuzzed as ollama;
    pub(crate) use super::openai::fuzzed as openai;
}

/// All dialects; the first also formats errors on paths that belong to none.
const ALL: &[&Dialect] = &[&openai::DIALECT, &anthropic::DIALECT, &ollama::DIALECT];

/// The routes of all dialects, and that of the request log.
pub(crate) fn routes(api: &Arc<ApiState>) -> Router {
    let routers = ALL.iter().map(|dialect| (dialect.routes)());
    let shared = models::routes().route("/requests/{id}/why", why(error_response));
    routers.fold(shared, Router::merge).with_state(api.clone())
}

/// An error in the format of the dialect of this request: of its headers where it is for a list of models, else of its
/// path, which belongs to the one with the longest prefix.
pub(crate) fn error_response(request: &Request, error: &GatewayError) -> Response {
    let path = request.uri().path();
    let dialect = models::dialect(path, request.headers()).unwrap_or_else(|| owner(path));
    (dialect.error_response)(error, &RequestId::of(request))
}

/// The dialect with this name.
pub(crate) fn named(name: &str) -> Option<&'static Dialect> {
    ALL.iter().find(|dialect| dialect.name == name).copied()
}

/// The dialect that a path belongs to.
pub(crate) fn owner(path: &str) -> &'static Dialect {
    let owners = ALL.iter().filter_map(|dialect| Some((dialect.longest_prefix(path)?, *dialect)));
    owners.max_by_key(|(length, _)| *length).map_or(ALL[0], |(_, dialect)| dialect)
}
