//! OpenAI's chat completions, completions, embeddings and model list, and reranking beside them. Unsupported features are
//! rejected by name, so that no client believes it got them; fields that do not change the response are ignored and listed
//! in a header.

mod completion_response;
mod embeddings;
mod error;
mod request;
mod rerank;
mod response;

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::{Extension, Json, Router};
use serde_json::{Value, json};

use super::quota_headers::set_quota_headers;
use crate::error::GatewayError;
use crate::keys::Caller;
use crate::serving::{ApiState, Dialect, ModelSummary, generation, pooling};
use error::error_response;

/// This dialect.
pub(super) static DIALECT: Dialect = Dialect {
    name: "openai",
    // Rerankers of Jina, Cohere and vLLM have no paths of their own dialect.
    prefixes: &["/v1/", "/rerank", "/v2/rerank"],
    routes: || {
        Router::new()
            .route("/v1/chat/completions", generation(&DIALECT, request::parse))
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

/// The response comes from memory: clients block their user interface on it.
async fn models(State(api): State<Arc<ApiState>>, Extension(caller): Extension<Caller>) -> Response {
    let data: Vec<Value> = api.models(&caller).iter().map(model_body).collect();
    Json(json!({"object": "list", "data": data})).into_response()
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
