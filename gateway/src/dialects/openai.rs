//! OpenAI's chat completions, responses, completions, embeddings and model list, and reranking beside them. Unsupported
//! features are rejected by name, so that no client believes it got them; fields that do not change the response are
//! ignored and listed in a header.

mod completion_response;
mod embeddings;
mod error;
mod pooling_request;
mod request;
mod rerank;
mod response;
mod responses;

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderMap, HeaderValue};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{any, get};
use axum::{Extension, Json, Router};
use serde_json::{Value, json};

use crate::duration::short_text;
use crate::error::GatewayError;
use crate::keys::{Caller, Quota};
use crate::serving::{ApiState, Dialect, ModelSummary, generation, pooling};
use error::error_response;
use responses::codex_models;

/// This dialect.
pub(super) static DIALECT: Dialect = Dialect {
    name: "openai",
    // Rerankers of Jina, Cohere and vLLM have no paths of their own dialect.
    prefixes: &["/v1/", "/rerank", "/v2/rerank"],
    routes: || {
        Router::new()
            .route("/v1/chat/completions", generation(&DIALECT, request::parse))
            .route("/v1/responses", generation(&DIALECT, responses::parse))
            .route("/v1/responses/{*rest}", any(responses::not_kept))
            .route("/v1/completions", generation(&DIALECT, request::completion::parse))
            .route("/v1/embeddings", pooling(&DIALECT, embeddings::parse))
            .route("/v1/rerank", pooling(&DIALECT, rerank::parse))
            .route("/v2/rerank", pooling(&DIALECT, rerank::parse))
            .route("/rerank", pooling(&DIALECT, rerank::parse))
            .route("/v1/models", get(models))
            // Names may contain slashes: `namespace/name`, `meta-llama/Llama-3`.
            .route("/v1/models/{*id}", get(model))
    },
    error_response,
    set_quota_headers,
};

fn set_quota_headers(quota: &Quota, headers: &mut HeaderMap) {
    headers.insert("x-ratelimit-limit-requests", HeaderValue::from(quota.limit));
    headers.insert("x-ratelimit-remaining-requests", HeaderValue::from(quota.remaining));
    if let Ok(reset) = HeaderValue::from_str(&short_text(quota.reset)) {
        headers.insert("x-ratelimit-reset-requests", reset);
    }
}

/// The response comes from memory: clients block their user interface on it.
async fn models(
    State(api): State<Arc<ApiState>>,
    Extension(caller): Extension<Caller>,
    RawQuery(query): RawQuery,
) -> Response {
    let models = api.models(&caller);
    let data: Vec<Value> = models.iter().map(model_body).collect();
    let mut list = json!({"object": "list", "data": data});
    if codex_models::is_asked_for(query.as_deref()) {
        list["models"] = models.iter().enumerate().map(codex_models::body).collect();
    }
    Json(list).into_response()
}

async fn model(
    State(api): State<Arc<ApiState>>,
    Extension(caller): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let Ok(Path(id)) = id else {
        return error_response(&GatewayError::field("model", "the model's name in the path is not UTF-8"));
    };
    match api.model(&id, &caller) {
        Ok(model) => Json(model_body(&model)).into_response(),
        Err(error) => error_response(&error),
    }
}

fn model_body(model: &ModelSummary) -> Value {
    let ModelSummary { id, created, context_tokens, ready, message, deployments } = model;
    json!({
        "id": id,
        "object": "model",
        "created": created,
        "owned_by": "russet",
        // Four spellings, because clients read different ones.
        "context_length": context_tokens,
        "max_model_len": context_tokens,
        "max_input_tokens": context_tokens,
        "meta": {"n_ctx_train": context_tokens},
        "russet": {"deployments": deployments, "ready": ready, "message": message},
    })
}
