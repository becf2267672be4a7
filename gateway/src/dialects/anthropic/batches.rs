//! Batches of messages. None of the paths takes anything from the caller's quota; the requests do, when they run. A batch has
//! its requests and results in files of the store that only its own paths show.

mod batch_body;
mod request;
mod result;

use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::http::Uri;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use bytes::Bytes;
use serde_json::{Value, json};

use super::DIALECT;
use super::error::error_response;
use super::page_query::PageQuery;
use crate::batches::Batch;
use crate::discard::discard;
use crate::error::{ErrorKind, GatewayError};
use crate::keys::Caller;
use crate::request_id::RequestId;
use crate::response_store::{BatchQuery, FilePurpose};
use crate::routes::RouteHeaders;
use crate::serving::{ApiState, BatchDialect, BatchPage, NewBatch, OwnBatches, read_bytes};
use batch_body::{BaseUrl, batch_body};

/// Most requests; Anthropic's number.
const MAX_REQUESTS: u64 = 100_000;
/// Where they go.
const ENDPOINT: &str = "/v1/messages";

/// Batches of this dialect.
pub(super) const BATCHES: BatchDialect = BatchDialect {
    max_lines: MAX_REQUESTS,
    result_purpose: FilePurpose::MessageBatch,
    format: result::format,
};

/// The paths below `/v1/messages/batches`.
pub(super) fn routes() -> Router<Arc<ApiState>> {
    Router::new()
        .route("/v1/messages/batches", post(create).get(list))
        .route("/v1/messages/batches/{id}", get(read).delete(delete))
        .route("/v1/messages/batches/{id}/results", get(results))
        .route("/v1/messages/batches/{id}/cancel", post(cancel))
}

async fn create(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    base: BaseUrl,
    request: Request,
) -> Response {
    let created = async {
        let labels = RouteHeaders::labels_text(request.headers());
        let (own, labels) = match api.own_batches(&caller).and_then(|own| Ok((own, labels?))) {
            Ok(allowed) => allowed,
            Err(error) => {
                discard(request.into_body()).await;
                return Err(error);
            }
        };
        let (body, _permit) = read_bytes(&api, &caller, request).await?;
        let _lines = api.own_responses(&caller).map(|own| own.hold(body.len())).transpose()?;
        let parsed = tokio::task::spawn_blocking(move || request::parse(&body)).await;
        let (lines, total) = parsed.map_err(|_| {
            GatewayError::new(ErrorKind::Internal, "the gateway could not decode the body; see its log")
        })??;
        let unique = &id.unique;
        let new = NewBatch {
            id: format!("msgbatch_{unique}"),
            endpoint: ENDPOINT.to_owned(),
            input: format!("msgbatch_{unique}_requests"),
            output: format!("msgbatch_{unique}_results"),
            errors: format!("msgbatch_{unique}_errors"),
            metadata: None,
            output_seconds: None,
            labels,
        };
        own.begin_checked(&DIALECT, new, lines, total).await
    };
    let created = created.await.map(|batch| Json(batch_body(&batch, &base)).into_response());
    created.unwrap_or_else(|error| error_response(&error, &id))
}

async fn read(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    Path(batch): Path<String>,
    base: BaseUrl,
) -> Response {
    let read = async { api.own_batches(&caller)?.get(&DIALECT, &batch).await };
    let read = read.await.map(|batch| Json(batch_body(&batch, &base)).into_response());
    read.unwrap_or_else(|error| error_response(&error, &id))
}

async fn cancel(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    Path(batch): Path<String>,
    base: BaseUrl,
    request: Request,
) -> Response {
    discard(request.into_body()).await;
    let cancelled = async { api.own_batches(&caller)?.cancel(&DIALECT, &batch).await };
    let cancelled = cancelled.await.map(|batch| Json(batch_body(&batch, &base)).into_response());
    cancelled.unwrap_or_else(|error| error_response(&error, &id))
}

async fn delete(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    Path(batch): Path<String>,
) -> Response {
    let deleted = async { api.own_batches(&caller)?.delete(&DIALECT, &batch).await };
    let body = json!({"id": batch, "type": "message_batch_deleted"});
    let deleted = deleted.await.map(|()| Json(body).into_response());
    deleted.unwrap_or_else(|error| error_response(&error, &id))
}

async fn results(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    Path(batch): Path<String>,
) -> Response {
    let opened = async {
        let own = api.own_batches(&caller)?;
        let batch = own.get(&DIALECT, &batch).await?;
        if !batch.record.status.has_ended() {
            let message = format!("batch '{}' has no results yet: it has not ended", batch.id);
            return Err(GatewayError::new(ErrorKind::InvalidRequest, message));
        }
        let mut bytes = 0;
        for file in [&batch.output, &batch.errors] {
            bytes += own.bytes(file).await?.unwrap_or_default();
        }
        if bytes == 0 {
            // Each of its requests has a result: it was deleted since.
            own.get(&DIALECT, &batch.id).await?;
        }
        Ok(api.kept_stream("application/x-jsonl", bytes, result_lines(own, batch)))
    };
    opened.await.unwrap_or_else(|error| error_response(&error, &id))
}

/// The results of a batch, those that succeeded first.
fn result_lines(own: OwnBatches, batch: Batch) -> impl futures::Stream<Item = Bytes> + Send {
    async_stream::stream! {
        for file in [&batch.output, &batch.errors] {
            let mut from = 0;
            while let Ok(Some(part)) = own.part(file, from).await {
                from = part.first + 1;
                yield part.text;
            }
        }
    }
}

async fn list(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    base: BaseUrl,
    uri: Uri,
) -> Response {
    let listed = async {
        let own = api.own_batches(&caller)?;
        let PageQuery { limit, after_id, before_id } = PageQuery::parse(&uri, "batches")?;
        let query = BatchQuery { dialect: DIALECT.name, after: after_id, before: before_id, limit };
        let BatchPage { batches, has_more } = own.list(&DIALECT, query).await?;
        Ok(Json(json!({
            "data": batches.iter().map(|batch| batch_body(batch, &base)).collect::<Value>(),
            "has_more": has_more,
            "first_id": batches.first().map(|batch| &batch.id),
            "last_id": batches.last().map(|batch| &batch.id),
        }))
        .into_response())
    };
    listed.await.unwrap_or_else(|error: GatewayError| error_response(&error, &id))
}
