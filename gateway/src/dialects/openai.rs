//! OpenAI's chat completions, responses, completions, embeddings, files, batches and model list, and reranking beside them. Unsupported
//! features are rejected by name, so that no client believes it got them; fields that do not change the response are
//! ignored and listed in a header.

mod artifacts;
mod batches;
mod completion_response;
mod embeddings;
mod error;
mod files;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzed;
mod inbox;
mod page_query;
mod request;
mod rerank;
mod response;
mod responses;

use axum::response::IntoResponse as _;
use axum::{Json, Router};
use serde_json::{Value, json};

use super::models::ModelPages;
use super::quota_headers::set_quota_headers;
use crate::serving::{Dialect, ModelSummary, generation, pooling};
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
            .route("/v1/responses/compact", generation(&DIALECT, responses::compact::parse))
            .route("/v1/completions", generation(&DIALECT, request::completion::parse))
            .route("/v1/embeddings", pooling(&DIALECT, embeddings::parse))
            .route("/v1/rerank", pooling(&DIALECT, rerank::parse))
            .route("/v2/rerank", pooling(&DIALECT, rerank::parse))
            .route("/rerank", pooling(&DIALECT, rerank::parse))
            .merge(responses::stored::routes())
            .merge(files::routes())
            .merge(batches::routes())
            .merge(inbox::routes())
            .merge(artifacts::routes())
    },
    error_response,
    set_quota_headers,
    batches: Some(batches::BATCHES),
};

/// Its lists of models, for every client that no other dialect claims.
pub(super) static MODEL_PAGES: ModelPages = ModelPages {
    dialect: &DIALECT,
    is_requested: |_| true,
    list: |models, uri| {
        let data: Vec<Value> = models.iter().map(model_body).collect();
        let mut list = json!({"object": "list", "data": data});
        if codex_models::is_asked_for(uri.query()) {
            list["models"] = models.iter().enumerate().map(codex_models::body).collect();
        }
        Ok(Json(list).into_response())
    },
    one: |model| Json(model_body(model)).into_response(),
};

fn model_body(model: &ModelSummary) -> Value {
    let ModelSummary { id, created, context_tokens, ready, message, deployments, expires: _, files: _ } =
        model;
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
