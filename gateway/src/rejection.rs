//! Rejections that need no dialect's handler: unknown paths, wrong methods, and requests that the middleware
//! refuses. The error has the format of the dialect that the path belongs to.

use axum::extract::Request;
use axum::response::Response;

use crate::discard::discard;
use crate::error::{ErrorKind, GatewayError};

/// Formats an error for the client of this request.
pub(crate) type ErrorFormatter = fn(request: &Request, error: &GatewayError) -> Response;

/// The response to a request that is rejected with this error.
pub(crate) async fn reject(request: Request, error: &GatewayError, format: ErrorFormatter) -> Response {
    let response = format(&request, error);
    discard(request.into_body()).await;
    response
}

/// The response to a request for an unknown path.
pub(crate) async fn unknown_path(request: Request, format: ErrorFormatter) -> Response {
    let message = format!("no such path: {} {}", request.method(), shorten(request.uri().path()));
    reject(request, &GatewayError::new(ErrorKind::UnknownPath, message), format).await
}

/// The response to a request with a method that the path does not support.
pub(crate) async fn wrong_method(request: Request, format: ErrorFormatter) -> Response {
    let message = format!("{} is not allowed on {}", request.method(), shorten(request.uri().path()));
    reject(request, &GatewayError::new(ErrorKind::MethodNotAllowed, message), format).await
}

/// Longest part of a path that a message repeats.
const MAX_PATH_CHARS: usize = 200;

fn shorten(path: &str) -> &str {
    let end = path.char_indices().nth(MAX_PATH_CHARS).map_or(path.len(), |(end, _)| end);
    &path[..end]
}
