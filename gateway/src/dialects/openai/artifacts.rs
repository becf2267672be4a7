//! What steps of PipelineRuns made, by its SHA-256, for whom the run is.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::{Extension, Router};

use super::error::error_response;
use crate::keys::Caller;
use crate::request_id::RequestId;
use crate::serving::ApiState;

/// The path below `/v1/artifacts`.
pub(super) fn routes() -> Router<Arc<ApiState>> {
    Router::new().route("/v1/artifacts/{digest}", get(read))
}

async fn read(
    State(api): State<Arc<ApiState>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    Path(digest): Path<String>,
) -> Response {
    match api.artifact(&caller, &digest).await {
        // What a model or an endpoint wrote is never a page.
        Ok((bytes, permit)) => {
            let held = async_stream::stream! {
                yield Ok::<_, std::convert::Infallible>(bytes);
                drop(permit);
            };
            ([(header::CONTENT_TYPE, "application/octet-stream")], Body::from_stream(held)).into_response()
        }
        Err(error) => error_response(&error, &id),
    }
}
