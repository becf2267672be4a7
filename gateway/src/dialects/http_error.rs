//! Errors as HTTP has them: their status, and the headers that clients retry by. The body is the dialect's.

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::Value;

use crate::error::{ErrorKind, GatewayError};

/// The status of each class, as OpenAI has it.
fn status(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::InvalidRequest
        | ErrorKind::ContextLengthExceeded
        // OpenAI's status, though what is not found is not what was requested.
        | ErrorKind::PreviousResponseNotFound => StatusCode::BAD_REQUEST,
        ErrorKind::HeadTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        ErrorKind::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        ErrorKind::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        ErrorKind::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
        ErrorKind::Forbidden | ErrorKind::ModelForbidden | ErrorKind::ZoneDenied => StatusCode::FORBIDDEN,
        ErrorKind::InvalidApiKey => StatusCode::UNAUTHORIZED,
        ErrorKind::UnknownPath
        | ErrorKind::ModelNotFound
        | ErrorKind::RequestNotFound
        | ErrorKind::ResponseNotFound
        | ErrorKind::FileNotFound
        | ErrorKind::ArtifactNotFound
        | ErrorKind::BatchNotFound => {
            StatusCode::NOT_FOUND
        }
        ErrorKind::IdempotencyKeyReused => StatusCode::UNPROCESSABLE_ENTITY,
        ErrorKind::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
        ErrorKind::Overloaded | ErrorKind::QuotaExceeded => StatusCode::TOO_MANY_REQUESTS,
        ErrorKind::BudgetExceeded => StatusCode::PAYMENT_REQUIRED,
        ErrorKind::ModelNotReady
        | ErrorKind::GatewayFull
        | ErrorKind::EngineLost
        | ErrorKind::ShuttingDown => StatusCode::SERVICE_UNAVAILABLE,
        ErrorKind::ProviderFailed | ErrorKind::PipelineFailed => StatusCode::BAD_GATEWAY,
        ErrorKind::EngineSilent | ErrorKind::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        ErrorKind::StoreFull => StatusCode::INSUFFICIENT_STORAGE,
        ErrorKind::Internal | ErrorKind::PoisonRequest => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// The response with this body to a request that failed.
pub(super) fn response(error: &GatewayError, body: Value) -> Response {
    response_with(status(error.kind), error, body)
}

/// The same with a status of the dialect's own.
pub(super) fn response_with(status: StatusCode, error: &GatewayError, body: Value) -> Response {
    let mut response = (status, Json(body)).into_response();
    let headers = response.headers_mut();
    if error.kind == ErrorKind::InvalidApiKey {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    match error.retry_after {
        Some(wait) => {
            let ms = u64::try_from(wait.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(ms.div_ceil(1000).max(1)));
            // The SDKs of OpenAI and Anthropic, which one generator makes, prefer the header with milliseconds.
            headers.insert("retry-after-ms", HeaderValue::from(ms));
        }
        // They retry every 5xx without this header; here that would only delay the failure.
        None if status.is_server_error() => {
            headers.insert(HeaderName::from_static("x-should-retry"), HeaderValue::from_static("false"));
        }
        None => {}
    }
    response
}
