//! What changes models in Ollama: pull, push, create, copy, delete and blobs. Here models are objects of the cluster, and
//! clients of the gateway only ask them; each of these is refused with what to do instead. A model that is there is pulled
//! already.

use axum::extract::Request;
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use axum::{Extension, Json};
use serde_json::json;

use super::error::error_response;
use super::models::name;
use super::response::{STREAM_TYPE, line};
use crate::discard::discard;
use crate::error::{ErrorKind, GatewayError};
use crate::json_body::JsonBody;
use crate::keys::Caller;
use crate::request_id::RequestId;
use crate::serving::ApiState;

/// What clients expect to read while a model is pulled.
const STEPS: [&str; 4] = ["pulling manifest", "verifying sha256 digest", "writing manifest", "success"];

/// Answers that a model which is served is there, streamed unless `stream` is false.
pub(super) fn pull(
    mut body: JsonBody<'_>,
    api: &ApiState,
    caller: &Caller,
) -> Result<Response, GatewayError> {
    let whole = body.value.get("stream").is_some_and(|stream| stream == false);
    let name = name(&mut body)?;
    api.model(&name, caller).map_err(|error| match error.kind {
        ErrorKind::ModelNotFound => GatewayError::field("model", not_served(&name)),
        _ => error,
    })?;
    if whole {
        return Ok(Json(json!({"status": "success"})).into_response());
    }
    let lines: Vec<_> = STEPS.iter().map(|status| line(&json!({"status": status}))).collect();
    Ok(([(header::CONTENT_TYPE, STREAM_TYPE)], lines.concat()).into_response())
}

fn not_served(name: &str) -> String {
    format!(
        "model `{name}` is not served here, and this API cannot fetch it: deploy it with `russet run {name}`, if it is a \
         name of `russet catalog`, or apply a Model and a ModelDeployment with kubectl"
    )
}

/// Refuses a change.
pub(super) async fn refuse(Extension(id): Extension<RequestId>, request: Request) -> Response {
    let path = request.uri().path();
    // Of the last two parts the second may be a digest.
    let operation = OPERATIONS.iter().find(|(name, _)| path.contains(&format!("/api/{name}")));
    let (name, instead) = operation.copied().unwrap_or(("…", "change the Model with kubectl"));
    let message = format!("/api/{name} is not supported: models are objects of the cluster; {instead}");
    let response = error_response(&GatewayError::new(ErrorKind::InvalidRequest, message), &id);
    discard(request.into_body()).await;
    response
}

/// What to do in place of each.
const OPERATIONS: [(&str, &str); 5] = [
    ("push", "nothing is published from here"),
    ("create", "apply a Model and a ModelDeployment with kubectl"),
    ("copy", "apply a ModelRoute with kubectl to give a model another name"),
    ("delete", "delete the ModelDeployment with kubectl or `russet delete`"),
    ("blobs", "a Model names the source of its files"),
];
