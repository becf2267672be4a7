//! Ollama's native API: chats, texts, embeddings, and what its clients read and change of models. Models are objects of the
//! cluster, so most changes are not for this API; see `ollama::library`.

mod clock;
mod embed;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzed;
mod keep_alive;
mod library;
mod models;
mod request;
mod response;

use std::sync::Arc;

use axum::routing::{MethodFilter, any, get};
use axum::{Json, Router};
use serde_json::{Value, json};

use super::quota_headers::set_quota_headers;
use crate::serving::{ApiState, Dialect, generation, lookup, model_change, model_pull, pooling};

/// This dialect.
pub(super) static DIALECT: Dialect = Dialect {
    name: "ollama",
    prefixes: &["/api/", "/v1/api/", "/ollama"],
    routes,
    error_response: error::error_response,
    set_quota_headers,
    batches: None,
};

/// Where the API is. Clients put `/api` behind the address they are given, which may end in `/api`, `/v1` or `/ollama`
/// already.
const BASES: [&str; 5] = ["/api", "/api/api", "/v1/api", "/ollama/api", "/ollama/api/api"];

/// The release of Ollama that this API is like. Clients compare it to know what they may ask for: 0.12.11 is the first with
/// log-probabilities, the newest of what is honoured here, and older than what is not, such as generated images.
const VERSION: &str = "0.12.11";

fn routes() -> Router<Arc<ApiState>> {
    // GET routes answer HEAD as well, with which clients look whether a server is there.
    let routes = [
        ("chat", generation(&DIALECT, request::parse_chat)),
        ("generate", generation(&DIALECT, request::parse_generate)),
        ("embed", pooling(&DIALECT, embed::parse)),
        ("embeddings", pooling(&DIALECT, embed::parse_embeddings)),
        ("tags", get(models::tags)),
        ("ps", get(models::ps)),
        ("show", lookup(&DIALECT, models::show)),
        ("version", get(version)),
        ("pull", model_pull(&DIALECT, library::parse_pull, library::pull)),
        ("push", any(library::refuse)),
        ("create", any(library::refuse)),
        ("copy", model_change(&DIALECT, MethodFilter::POST, library::parse_copy, library::copy_unsupported)),
        (
            "delete",
            model_change(&DIALECT, MethodFilter::DELETE, library::parse_delete, library::delete_unsupported),
        ),
        ("blobs/{digest}", any(library::refuse)),
    ];
    let mut router = Router::new().route("/", get(root)).route("/ollama", get(root));
    for base in BASES {
        for (name, handler) in &routes {
            router = router.route(&format!("{base}/{name}"), handler.clone());
        }
    }
    router
}

/// Ollama says `Ollama is running` here. Of the uses of that text that were found in public code, only tests of Ollama
/// itself compare it; clients look at the status. Claude Code sees by a HEAD that there is a server.
async fn root() -> &'static str {
    "Russet is running"
}

async fn version() -> Json<Value> {
    Json(json!({"version": VERSION}))
}
