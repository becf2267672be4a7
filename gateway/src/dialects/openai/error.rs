//! Errors in OpenAI's format: status, `type`, `code`, and the headers that its SDKs retry by.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};

use crate::dialects::retry_headers::set_retry_headers;
use crate::error::{ErrorKind, GatewayError};
use crate::request_id::RequestId;

/// HTTP status and `type` of each error class; clients match on them and on `code`.
fn status_and_type(kind: ErrorKind) -> (StatusCode, &'static str) {
    const CLIENT: &str = "invalid_request_error";
    const SERVER: &str = "server_error";
    match kind {
        ErrorKind::InvalidRequest | ErrorKind::ContextLengthExceeded => (StatusCode::BAD_REQUEST, CLIENT),
        ErrorKind::HeadTooLarge => (StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, CLIENT),
        ErrorKind::UnsupportedMediaType => (StatusCode::UNSUPPORTED_MEDIA_TYPE, CLIENT),
        ErrorKind::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, CLIENT),
        ErrorKind::BodyTimeout => (StatusCode::REQUEST_TIMEOUT, CLIENT),
        ErrorKind::Forbidden => (StatusCode::FORBIDDEN, "permission_error"),
        ErrorKind::InvalidApiKey => (StatusCode::UNAUTHORIZED, CLIENT),
        ErrorKind::ModelForbidden => (StatusCode::FORBIDDEN, CLIENT),
        // The exhausted resource: OpenAI says `requests` or `tokens`.
        ErrorKind::QuotaExceeded => (StatusCode::TOO_MANY_REQUESTS, "requests"),
        ErrorKind::UnknownPath | ErrorKind::ModelNotFound => (StatusCode::NOT_FOUND, CLIENT),
        ErrorKind::MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, CLIENT),
        ErrorKind::Overloaded => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error"),
        ErrorKind::ModelNotReady
        | ErrorKind::GatewayFull
        | ErrorKind::EngineLost
        | ErrorKind::ShuttingDown => (StatusCode::SERVICE_UNAVAILABLE, SERVER),
        ErrorKind::EngineSilent | ErrorKind::DeadlineExceeded => (StatusCode::GATEWAY_TIMEOUT, SERVER),
        ErrorKind::Internal | ErrorKind::PoisonRequest => (StatusCode::INTERNAL_SERVER_ERROR, SERVER),
    }
}

/// `{"error": {…}}` in OpenAI's format.
pub(super) fn error_body(error: &GatewayError) -> Value {
    let GatewayError { kind, message, param, retry_after: _ } = error;
    let code = match kind {
        // OpenAI leaves the code empty when `param` is enough.
        ErrorKind::InvalidRequest => None,
        // OpenAI's codes for models a key may not use, and for all quotas.
        ErrorKind::ModelForbidden => Some(ErrorKind::ModelNotFound.as_str()),
        ErrorKind::QuotaExceeded => Some(ErrorKind::Overloaded.as_str()),
        kind => Some(kind.as_str()),
    };
    json!({"error": {"message": message, "type": status_and_type(*kind).1, "param": param, "code": code}})
}

/// The response to a request that failed.
pub(super) fn error_response(error: &GatewayError, _: &RequestId) -> Response {
    let (status, _) = status_and_type(error.kind);
    let mut response = (status, Json(error_body(error))).into_response();
    if error.kind == ErrorKind::InvalidApiKey {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    set_retry_headers(&mut response, error.retry_after);
    response
}
