//! `GET /requests/{id}/why`: what the request log has of a request, as JSON. A caller with a key sees its own requests;
//! programs of this machine that show none see all, as they see the metrics.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::header;
use axum::response::IntoResponse as _;
use axum::routing::{MethodRouter, get};
use axum::{Extension, Json};

use super::api_state::ApiState;
use crate::error::{ErrorKind, GatewayError};
use crate::keys::Caller;
use crate::rejection::ErrorFormatter;
use crate::request_log::MAX_REQUESTS;

/// Longest part of an id that a message repeats: an id is no longer.
const MAX_ID_CHARS: usize = 128;

/// The handler of the path; `format` formats its errors.
pub(crate) fn why(format: ErrorFormatter) -> MethodRouter<Arc<ApiState>> {
    get(
        move |State(api): State<Arc<ApiState>>,
              Extension(caller): Extension<Caller>,
              id: Result<Path<String>, PathRejection>,
              request: Request| async move {
            let id = id.map_or_else(|_| String::new(), |Path(id)| id);
            match api.log.find(&id, &caller) {
                // A running request goes on.
                Some(record) => ([(header::CACHE_CONTROL, "no-store")], Json(record)).into_response(),
                None => format(&request, &not_found(&id)),
            }
        },
    )
}

/// Whether a path is that of the handler.
pub(crate) fn is_why(path: &str) -> bool {
    let id = path.strip_prefix("/requests/").and_then(|rest| rest.strip_suffix("/why"));
    id.is_some_and(|id| !id.is_empty() && !id.contains('/'))
}

fn not_found(id: &str) -> GatewayError {
    let id: String = id.chars().take(MAX_ID_CHARS).collect();
    let message = format!(
        "the log has no request `{id}` of this caller; it has the last {MAX_REQUESTS} requests since this gateway \
         started, and none that was refused for its key"
    );
    GatewayError { param: Some("id".into()), ..GatewayError::new(ErrorKind::RequestNotFound, message) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_path_of_one_request_is_readable_without_a_key() {
        for (path, expected) in [
            ("/requests/r1/why", true),
            ("/requests/a%2Fb/why", true),
            ("/requests//why", false),
            ("/requests/why", false),
            ("/requests/a/b/why", false),
            ("/requests/a/why/", false),
            ("/v1/requests/a/why", false),
        ] {
            assert_eq!(is_why(path), expected, "{path}");
        }
    }
}
