//! Files: the input of batches, uploaded here, and their results. Like a list of models, none of the paths takes anything
//! from the caller's quota.

mod upload;

use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::http::Uri;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use bytes::Bytes;
use serde_json::{Value, json};

use super::error::error_response;
use super::page_query::PageQuery;
use crate::discard::discard;
use crate::error::GatewayError;
use crate::keys::Caller;
use crate::request_id::RequestId;
use crate::response_store::{FileHead, FileQuery};
use crate::serving::{ApiState, OwnFiles, unix_seconds};
pub(super) use upload::check_seconds;

/// Files of a list that does not say how many, and at most; OpenAI's number.
const MAX_LIMIT: usize = 10_000;

/// The paths below `/v1/files`.
pub(super) fn routes() -> Router<Arc<ApiState>> {
    Router::new()
        .route("/v1/files", post(upload).layer(DefaultBodyLimit::disable()).merge(get(list)))
        .route("/v1/files/{id}", get(read).delete(delete))
        .route("/v1/files/{id}/content", get(content))
}

async fn upload(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Response {
    let uploaded = match api.own_files(&caller) {
        Ok(own) => upload::upload(&own, format!("file-{}", id.unique), request, api.body_timeout()).await,
        Err(error) => {
            discard(request.into_body()).await;
            Err(error)
        }
    };
    let uploaded = uploaded.map(|file| Json(file_body(&file)).into_response());
    uploaded.unwrap_or_else(|error| error_response(&error, &id))
}

async fn list(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
) -> Response {
    let listed = async {
        let own = api.own_files(&caller)?;
        let PageQuery { limit, newest_first, after, purpose } = PageQuery::parse(&uri, MAX_LIMIT, MAX_LIMIT)?;
        let query = FileQuery { purpose, newest_first, after, limit, now: unix_seconds() };
        let (files, has_more) = own.list(query).await?;
        Ok(Json(json!({
            "object": "list",
            "data": files.iter().map(file_body).collect::<Value>(),
            "first_id": files.first().map(|file| &file.id),
            "last_id": files.last().map(|file| &file.id),
            "has_more": has_more,
        }))
        .into_response())
    };
    listed.await.unwrap_or_else(|error: GatewayError| error_response(&error, &id))
}

async fn read(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    Path(file): Path<String>,
) -> Response {
    let read = async { api.own_files(&caller)?.get(&file).await };
    let read = read.await.map(|file| Json(file_body(&file)).into_response());
    read.unwrap_or_else(|error| error_response(&error, &id))
}

async fn delete(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    Path(file): Path<String>,
) -> Response {
    let deleted = async { api.own_files(&caller)?.delete(&file).await };
    let deleted =
        deleted.await.map(|()| Json(json!({"id": file, "object": "file", "deleted": true})).into_response());
    deleted.unwrap_or_else(|error| error_response(&error, &id))
}

async fn content(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    Path(file): Path<String>,
) -> Response {
    let opened = async {
        let own = api.own_files(&caller)?;
        Ok((own.get(&file).await?, own))
    };
    match opened.await {
        Ok((head, own)) => api.kept_stream("application/octet-stream", head.bytes, parts(own, head.id)),
        Err(error) => error_response(&error, &id),
    }
}

/// The parts of a file, each read when it is its turn.
fn parts(own: OwnFiles, file: String) -> impl futures::Stream<Item = Bytes> + Send {
    async_stream::stream! {
        let mut from = 0;
        while let Ok(Some(part)) = own.part(&file, from).await {
            from = part.first + 1;
            yield part.text;
        }
    }
}

/// A file as OpenAI shows it.
fn file_body(file: &FileHead) -> Value {
    let FileHead { id, owner: _, name, purpose, created, expires, bytes } = file;
    json!({
        "id": id,
        "object": "file",
        "bytes": bytes,
        "created_at": created,
        "expires_at": expires,
        "filename": name,
        "purpose": purpose.as_str(),
        "status": "processed",
        "status_details": null,
    })
}
