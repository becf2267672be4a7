//! Requests of the inbox, in the form of OpenAI's lists and objects. Requests for answers in any dialect come there by their
//! headers, see `serving::inbox`; here its owner looks at them.

use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, Uri};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::{Extension, Json, Router};
use serde_json::json;

use super::error::error_response;
use super::page_query::{PageQuery, fields};
use crate::discard::discard;
use crate::error::GatewayError;
use crate::inbox::InboxPreference;
use crate::keys::Caller;
use crate::request_id::RequestId;
use crate::response_store::{InboxQuery, InboxRow, InboxState};
use crate::serving::{ApiState, OwnInbox};

/// Requests of a list that does not say how many, and at most.
const DEFAULT_LIMIT: usize = 20;
const MAX_LIMIT: usize = 100;

/// The paths below `/v1/inbox`.
pub(super) fn routes() -> Router<Arc<ApiState>> {
    Router::new()
        .route("/v1/inbox", get(list))
        .route("/v1/inbox/{id}", get(read).delete(delete))
        .route("/v1/inbox/{id}/response", get(response))
}

async fn list(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
) -> Response {
    let listed = async {
        let own = api.own_inbox(&caller)?;
        let PageQuery { limit, after, .. } = PageQuery::parse(&uri, DEFAULT_LIMIT, MAX_LIMIT)?;
        let state = fields(&uri)?.into_iter().find(|(name, _)| name == "status");
        let state = state.map(|(_, word)| InboxState::parse(&word).ok_or_else(unknown_state)).transpose()?;
        let (data, has_more) = own.list(InboxQuery { state, after, limit }).await?;
        Ok(Json(json!({"object": "list", "data": data, "has_more": has_more})).into_response())
    };
    listed.await.unwrap_or_else(|error: GatewayError| error_response(&error, &id))
}

/// A request of the caller, once it has ended or as long as the headers would wait.
async fn find(
    api: &ApiState,
    caller: &Caller,
    request: &str,
    headers: &HeaderMap,
) -> Result<(OwnInbox, InboxRow), GatewayError> {
    let own = api.own_inbox(caller)?;
    let row = own.get(request, InboxPreference::of_headers(headers)?.wait).await?;
    Ok((own, row))
}

async fn read(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    Path(request): Path<String>,
    headers: HeaderMap,
) -> Response {
    let read = async {
        let (own, row) = find(&api, &caller, &request, &headers).await?;
        let (record, _permit) = own.record(&api, row).await?;
        Ok(Json(record).into_response())
    };
    read.await.unwrap_or_else(|error: GatewayError| error_response(&error, &id))
}

async fn response(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    Path(request): Path<String>,
    headers: HeaderMap,
) -> Response {
    let read = async {
        let (own, row) = find(&api, &caller, &request, &headers).await?;
        own.response(&api, row, true).await
    };
    read.await.unwrap_or_else(|error: GatewayError| error_response(&error, &id))
}

async fn delete(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    Path(request): Path<String>,
    body: Request,
) -> Response {
    discard(body.into_body()).await;
    let deleted = async { api.own_inbox(&caller)?.delete(&request).await };
    match deleted.await {
        Ok(()) => Json(json!({"id": request, "object": "inbox.request", "deleted": true})).into_response(),
        Err(error) => error_response(&error, &id),
    }
}

fn unknown_state() -> GatewayError {
    GatewayError::field("status", "`status` must be pending, leased, done or failed")
}
