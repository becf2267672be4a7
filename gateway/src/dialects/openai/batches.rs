//! Batches of a file's requests. Like a list of models, none of the paths takes anything from the caller's quota; the requests
//! do, when they run.

mod batch_body;
mod request;
mod result;

use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::http::Uri;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use serde_json::{Value, json};

use super::DIALECT;
use super::error::error_response;
use super::page_query::PageQuery;
use crate::discard::discard;
use crate::error::GatewayError;
use crate::keys::Caller;
use crate::request_id::RequestId;
use crate::response_store::{BatchQuery, FilePurpose};
use crate::routes::RouteHeaders;
use crate::serving::{ApiState, BatchDialect, BatchPage, NewBatch, read_json};
use batch_body::batch_body;
use request::BatchRequest;

/// Batches of a list that does not say how many, and at most; OpenAI's numbers.
const DEFAULT_LIMIT: usize = 20;
const MAX_LIMIT: usize = 100;

/// OpenAI's limit of requests.
pub(super) const BATCHES: BatchDialect =
    BatchDialect { max_lines: 50_000, result_purpose: FilePurpose::BatchOutput, format: result::format };

/// The paths below `/v1/batches`.
pub(super) fn routes() -> Router<Arc<ApiState>> {
    Router::new()
        .route("/v1/batches", post(create).get(list))
        .route("/v1/batches/{id}", get(read))
        .route("/v1/batches/{id}/cancel", post(cancel))
}

async fn create(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
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
        let (body, _permit) = read_json(&api, &id, &caller, request).await?;
        let BatchRequest { endpoint, input, metadata, output_seconds } = BatchRequest::parse(body)?;
        api.own_files(&caller)?.get(&input).await?;
        let unique = &id.unique;
        let new = NewBatch {
            id: format!("batch_{unique}"),
            endpoint,
            input,
            output: format!("file-{unique}out"),
            errors: format!("file-{unique}err"),
            metadata,
            output_seconds,
            labels,
        };
        own.begin(&DIALECT, new).await
    };
    let created = created.await.map(|batch| Json(batch_body(&batch)).into_response());
    created.unwrap_or_else(|error| error_response(&error, &id))
}

async fn read(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    Path(batch): Path<String>,
) -> Response {
    let read = async { api.own_batches(&caller)?.get(&DIALECT, &batch).await };
    let read = read.await.map(|batch| Json(batch_body(&batch)).into_response());
    read.unwrap_or_else(|error| error_response(&error, &id))
}

async fn cancel(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    Path(batch): Path<String>,
    request: Request,
) -> Response {
    discard(request.into_body()).await;
    let cancelled = async { api.own_batches(&caller)?.cancel(&DIALECT, &batch).await };
    let cancelled = cancelled.await.map(|batch| Json(batch_body(&batch)).into_response());
    cancelled.unwrap_or_else(|error| error_response(&error, &id))
}

async fn list(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
) -> Response {
    let listed = async {
        let own = api.own_batches(&caller)?;
        let PageQuery { limit, after, .. } = PageQuery::parse(&uri, DEFAULT_LIMIT, MAX_LIMIT)?;
        let query = BatchQuery { dialect: DIALECT.name, after, before: None, limit };
        let BatchPage { batches, has_more } = own.list(&DIALECT, query).await?;
        Ok(Json(json!({
            "object": "list",
            "data": batches.iter().map(batch_body).collect::<Value>(),
            "first_id": batches.first().map(|batch| &batch.id),
            "last_id": batches.last().map(|batch| &batch.id),
            "has_more": has_more,
        }))
        .into_response())
    };
    listed.await.unwrap_or_else(|error: GatewayError| error_response(&error, &id))
}
