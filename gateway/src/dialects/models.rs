//! The lists of models, which clients of several dialects request under the same paths: headers say of which dialect a
//! client is. The responses come from memory: clients block their user interface on them.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Uri};
use axum::response::Response;
use axum::routing::get;
use axum::{Extension, Router};

use super::{anthropic, openai};
use crate::error::GatewayError;
use crate::keys::Caller;
use crate::request_id::RequestId;
use crate::serving::{ApiState, Dialect, ModelSummary};

/// How a dialect lists models.
pub(super) struct ModelPages {
    /// The dialect, which formats errors.
    pub(super) dialect: &'static Dialect,
    /// Whether a request with these headers comes from one of its clients.
    pub(super) is_requested: fn(&HeaderMap) -> bool,
    /// Formats the list; the URI has its query.
    pub(super) list: fn(&[ModelSummary], &Uri) -> Result<Response, GatewayError>,
    /// Formats one model.
    pub(super) one: fn(&ModelSummary) -> Response,
}

/// The first that is requested responds; the last is for all other clients.
const ALL: &[&ModelPages] = &[&anthropic::MODEL_PAGES, &openai::MODEL_PAGES];

/// The path of the list.
const PATH: &str = "/v1/models";

/// The routes of the lists.
pub(super) fn routes() -> Router<Arc<ApiState>> {
    // Names may contain slashes: `namespace/name`, `meta-llama/Llama-3`.
    Router::new().route(PATH, get(models)).route("/v1/models/{*id}", get(model))
}

/// The dialect of a request with these headers, where `path` is one of a list.
pub(super) fn dialect(path: &str, headers: &HeaderMap) -> Option<&'static Dialect> {
    let rest = path.strip_prefix(PATH)?;
    (rest.is_empty() || rest.starts_with('/')).then(|| pages(headers).dialect)
}

fn pages(headers: &HeaderMap) -> &'static ModelPages {
    ALL.iter().find(|pages| (pages.is_requested)(headers)).unwrap_or(&&openai::MODEL_PAGES)
}

async fn models(
    State(api): State<Arc<ApiState>>,
    Extension(caller): Extension<Caller>,
    Extension(id): Extension<RequestId>,
    headers: HeaderMap,
    uri: Uri,
) -> Response {
    let pages = pages(&headers);
    let list = (pages.list)(&api.models(&caller), &uri);
    list.unwrap_or_else(|error| (pages.dialect.error_response)(&error, &id))
}

async fn model(
    State(api): State<Arc<ApiState>>,
    Extension(caller): Extension<Caller>,
    Extension(id): Extension<RequestId>,
    headers: HeaderMap,
    name: Result<Path<String>, PathRejection>,
) -> Response {
    let pages = pages(&headers);
    let model = match name {
        Ok(Path(name)) => api.model(&name, &caller),
        Err(_) => Err(GatewayError::field("model", "the model's name in the path is not UTF-8")),
    };
    match model {
        Ok(model) => (pages.one)(&model),
        Err(error) => (pages.dialect.error_response)(&error, &id),
    }
}
