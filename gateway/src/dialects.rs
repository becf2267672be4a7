//! The API dialects of clients. Each is one file and one line in [`ALL`]: it parses its requests into a
//! dialect-free [`russet_wire::request::GenerationRequest`] and formats responses and errors. What serves any
//! dialect is in `serving`.

mod field_table;
mod http_error;
mod json_schema;
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
use axum::response::Response;

use crate::error::GatewayError;
use crate::serving::{ApiState, Dialect};

/// All dialects; the first also formats errors on paths that belong to none.
const ALL: &[&Dialect] = &[&openai::DIALECT, &ollama::DIALECT];

/// The routes of all dialects.
pub(crate) fn routes(api: &Arc<ApiState>) -> Router {
    let routers = ALL.iter().map(|dialect| (dialect.routes)());
    routers.fold(Router::new(), Router::merge).with_state(api.clone())
}

/// An error in the format of the dialect that `path` belongs to: the one with the longest prefix.
pub(crate) fn error_response(path: &str, error: &GatewayError) -> Response {
    let owners = ALL.iter().filter_map(|dialect| Some((dialect.longest_prefix(path)?, dialect)));
    let (_, dialect) = owners.max_by_key(|(length, _)| *length).unwrap_or((0, &ALL[0]));
    (dialect.error_response)(error)
}
