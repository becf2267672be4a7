//! What changes models in Ollama: pull, push, create, copy, delete and blobs. Here models are objects of the cluster. A pull
//! waits for the files of a model, and says how far they are. Where gateway and key may, it creates a model that is not there,
//! and a model is copied and deleted. Everything else is refused with what to do instead.

use std::sync::Arc;

use axum::extract::Request;
use axum::response::{IntoResponse as _, Response};
use axum::{Extension, Json};
use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use serde_json::{Value, json};

use super::error::{error_body, error_response};
use super::models::{name, name_in};
use super::response::{STREAM_TYPE, line};
use crate::dialects::values::{self, boolean};
use crate::discard::discard;
use crate::error::{ErrorKind, GatewayError};
use crate::json_body::JsonBody;
use crate::request_id::RequestId;
use crate::serving::{ApiState, ModelChange, ModelPull, ParsedPull, PullProgress};

/// Characters of a digest in a status.
const SHORT_DIGEST: usize = 12;

/// Parses a request to pull a model, streamed unless `stream` is false. Whether the connection is `insecure` has no
/// meaning: an agent fetches the files from the Model's own source.
pub(super) fn parse_pull(mut body: JsonBody<'_>) -> Result<ParsedPull, GatewayError> {
    let fields = values::fields(&mut body)?;
    let streamed = boolean(&fields, "stream")?.unwrap_or(true);
    Ok(ParsedPull { model: name_in(fields)?, streamed })
}

/// Says how far a model is: lines until its files are there, or one object then.
pub(super) async fn pull(
    api: Arc<ApiState>,
    pull: ModelPull,
    streamed: bool,
) -> Result<Response, GatewayError> {
    if streamed {
        let lines = lines(pull.digest().to_owned(), pull.progress());
        return Ok(api.stream(STREAM_TYPE, lines));
    }
    let mut progress = std::pin::pin!(pull.progress());
    while let Some(step) = progress.next().await {
        step?;
    }
    Ok(Json(status("success")).into_response())
}

fn lines(
    digest: String,
    progress: impl Stream<Item = Result<PullProgress, GatewayError>> + Send,
) -> impl Stream<Item = Bytes> + Send {
    async_stream::stream! {
        let mut progress = std::pin::pin!(progress);
        let mut bytes = None;
        yield line(&status("pulling manifest"));
        while let Some(step) = progress.next().await {
            match step {
                Ok(PullProgress::Waiting(reason)) => yield line(&status(&format!("waiting: {reason}"))),
                Ok(PullProgress::Downloading { completed, total }) => {
                    bytes = Some(total);
                    yield line(&layer(&digest, completed, total));
                }
                Err(error) => {
                    yield line(&error_body(&error));
                    return;
                }
            }
        }
        if let Some(total) = bytes {
            yield line(&layer(&digest, total, total));
        }
        for step in ["verifying sha256 digest", "writing manifest", "success"] {
            yield line(&status(step));
        }
    }
}

fn status(status: &str) -> Value {
    json!({"status": status})
}

/// Ollama tells the bytes of each layer; a Model is one.
fn layer(digest: &str, completed: u64, total: u64) -> Value {
    let short: String = digest.chars().take(SHORT_DIGEST).collect();
    json!({
        "status": format!("pulling {short}"),
        "digest": format!("sha256:{digest}"),
        "total": total,
        "completed": completed,
    })
}

/// Parses a request to delete a model.
pub(super) fn parse_delete(mut body: JsonBody<'_>) -> Result<ModelChange, GatewayError> {
    Ok(ModelChange::Delete { model: name(&mut body)? })
}

/// Parses a request to give a model a further name.
pub(super) fn parse_copy(mut body: JsonBody<'_>) -> Result<ModelChange, GatewayError> {
    let fields = values::fields(&mut body)?;
    let source = values::model_of(&fields, "source")?;
    Ok(ModelChange::Copy { source, destination: values::model_of(&fields, "destination")? })
}

/// The error of a gateway that deletes no models.
pub(super) fn delete_unsupported() -> GatewayError {
    unsupported("delete")
}

/// The error of a gateway that copies no models.
pub(super) fn copy_unsupported() -> GatewayError {
    unsupported("copy")
}

fn unsupported(operation: &str) -> GatewayError {
    let (name, instead) = OPERATIONS
        .iter()
        .find(|(name, _)| *name == operation)
        .copied()
        .unwrap_or(("…", "change the Model with kubectl"));
    let message = format!("/api/{name} is not supported: models are objects of the cluster; {instead}");
    GatewayError::new(ErrorKind::InvalidRequest, message)
}

/// Refuses a change.
pub(super) async fn refuse(Extension(id): Extension<RequestId>, request: Request) -> Response {
    let path = request.uri().path();
    // Of the last two parts the second may be a digest.
    let operation = OPERATIONS.iter().find(|(name, _)| path.contains(&format!("/api/{name}")));
    let response = error_response(&unsupported(operation.map_or("", |(name, _)| name)), &id);
    discard(request.into_body()).await;
    response
}

/// What to do in place of each.
const OPERATIONS: [(&str, &str); 5] = [
    ("push", "nothing is published from here"),
    (
        "create",
        "there are no Modelfiles: apply a Model and a ModelDeployment with kubectl, with an adapter or parameters",
    ),
    (
        "copy",
        "apply a ModelRoute with kubectl to give a model another name, or start the gateway with `--model-management`",
    ),
    (
        "delete",
        "delete the ModelDeployment with kubectl or `russet delete`, or start the gateway with `--model-management`",
    ),
    ("blobs", "a Model names the source of its files"),
];
