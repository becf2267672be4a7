//! Errors in OpenAI's format: `type` and `code`.

use axum::response::Response;
use serde_json::{Value, json};

use crate::dialects::http_error;
use crate::error::{ErrorKind, GatewayError};
use crate::request_id::RequestId;

/// OpenAI's type and code where the money is spent, which clients do not try again.
pub(super) const INSUFFICIENT_QUOTA: &str = "insufficient_quota";

/// The `type` of each error class; clients match on it and on `code`.
fn error_type(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::InvalidRequest
        | ErrorKind::ContextLengthExceeded
        | ErrorKind::HeadTooLarge
        | ErrorKind::UnsupportedMediaType
        | ErrorKind::TooLarge
        | ErrorKind::BodyTimeout
        | ErrorKind::InvalidApiKey
        | ErrorKind::ModelForbidden
        | ErrorKind::UnknownPath
        | ErrorKind::ModelNotFound
        | ErrorKind::RequestNotFound
        | ErrorKind::ResponseNotFound
        | ErrorKind::FileNotFound
        | ErrorKind::ArtifactNotFound
        | ErrorKind::BatchNotFound
        | ErrorKind::IdempotencyKeyReused
        | ErrorKind::PreviousResponseNotFound
        | ErrorKind::MethodNotAllowed => "invalid_request_error",
        ErrorKind::Forbidden | ErrorKind::ZoneDenied => "permission_error",
        // The exhausted resource: OpenAI says `requests` or `tokens`.
        ErrorKind::QuotaExceeded => "requests",
        ErrorKind::BudgetExceeded => INSUFFICIENT_QUOTA,
        ErrorKind::Overloaded => "rate_limit_error",
        ErrorKind::ModelNotReady
        | ErrorKind::GatewayFull
        | ErrorKind::EngineLost
        | ErrorKind::ProviderFailed
        | ErrorKind::PipelineFailed
        | ErrorKind::ShuttingDown
        | ErrorKind::EngineSilent
        | ErrorKind::DeadlineExceeded
        | ErrorKind::Internal
        | ErrorKind::StoreFull
        | ErrorKind::PoisonRequest => "server_error",
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
        ErrorKind::BudgetExceeded => Some(INSUFFICIENT_QUOTA),
        kind => Some(kind.as_str()),
    };
    json!({"error": {"message": message, "type": error_type(*kind), "param": param, "code": code}})
}

/// The response to a request that failed.
pub(super) fn error_response(error: &GatewayError, _: &RequestId) -> Response {
    http_error::response(error, error_body(error))
}
