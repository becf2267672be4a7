//! Anthropic's Messages API, which Claude Code and Anthropic's SDKs speak. As in the OpenAI dialect, unsupported features
//! are rejected by name, and fields that do not change the response are ignored and listed in a header. Betas are no
//! features: no value of the header `anthropic-beta` is refused.

mod batches;
mod body;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzed;
mod model_page;
mod page_query;
mod quota_headers;
mod request;
mod response;

use axum::response::{IntoResponse as _, Response};
use axum::{Json, Router};
use serde_json::json;

use crate::serving::{Dialect, generation, token_count};
use error::error_response;
pub(super) use model_page::MODEL_PAGES;
use quota_headers::set_quota_headers;

/// This dialect.
pub(super) static DIALECT: Dialect = Dialect {
    name: "anthropic",
    prefixes: &["/v1/messages"],
    routes: || {
        let counted = token_count(&DIALECT, request::parse_token_count, count_body);
        Router::new()
            .route("/v1/messages", generation(&DIALECT, request::parse))
            .route("/v1/messages/count_tokens", counted)
            .merge(batches::routes())
    },
    error_response,
    set_quota_headers,
    batches: Some(batches::BATCHES),
};

/// The response to a request that counts tokens.
fn count_body(tokens: u32) -> Response {
    Json(json!({"input_tokens": tokens})).into_response()
}
