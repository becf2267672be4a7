//! Errors in Anthropic's format: status, `type`, message, and the headers that its SDKs retry by.

use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use crate::dialects::http_error;
use crate::error::{ErrorKind, GatewayError};
use crate::request_id::RequestId;

/// HTTP status and `type` of each error class; clients match on both. 529 is Anthropic's own, for "not now".
fn status_and_type(kind: ErrorKind) -> (u16, &'static str) {
    const INVALID: &str = "invalid_request_error";
    match kind {
        ErrorKind::InvalidRequest
        | ErrorKind::ContextLengthExceeded
        | ErrorKind::PreviousResponseNotFound => (400, INVALID),
        ErrorKind::InvalidApiKey => (401, "authentication_error"),
        ErrorKind::BudgetExceeded => (402, "billing_error"),
        ErrorKind::Forbidden | ErrorKind::ModelForbidden | ErrorKind::ZoneDenied => (403, "permission_error"),
        ErrorKind::UnknownPath
        | ErrorKind::ModelNotFound
        | ErrorKind::RequestNotFound
        | ErrorKind::ResponseNotFound
        | ErrorKind::FileNotFound
        | ErrorKind::ArtifactNotFound
        | ErrorKind::BatchNotFound => (404, "not_found_error"),
        ErrorKind::MethodNotAllowed => (405, INVALID),
        ErrorKind::BodyTimeout => (408, INVALID),
        ErrorKind::TooLarge => (413, "request_too_large"),
        ErrorKind::UnsupportedMediaType => (415, INVALID),
        ErrorKind::IdempotencyKeyReused => (422, INVALID),
        ErrorKind::QuotaExceeded => (429, "rate_limit_error"),
        ErrorKind::HeadTooLarge => (431, INVALID),
        ErrorKind::Internal | ErrorKind::PoisonRequest => (500, "api_error"),
        ErrorKind::EngineSilent | ErrorKind::DeadlineExceeded => (504, "timeout_error"),
        ErrorKind::StoreFull => (507, "api_error"),
        ErrorKind::Overloaded
        | ErrorKind::ModelNotReady
        | ErrorKind::GatewayFull
        | ErrorKind::EngineLost
        | ErrorKind::ProviderFailed
        | ErrorKind::PipelineFailed
        | ErrorKind::ShuttingDown => (529, "overloaded_error"),
    }
}

/// `{"type": "error", …}`; `request_id` is the one that the headers have.
pub(super) fn error_body(error: &GatewayError, request_id: &str) -> Value {
    let GatewayError { kind, message, param: _, retry_after: _ } = error;
    let message = match kind {
        ErrorKind::ContextLengthExceeded => prompt_too_long(message),
        _ => message.clone(),
    };
    json!({
        "type": "error",
        "error": {"type": status_and_type(*kind).1, "message": message},
        "request_id": request_id,
    })
}

/// The response to a request that failed.
pub(super) fn error_response(error: &GatewayError, id: &RequestId) -> Response {
    let (status, _) = status_and_type(error.kind);
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    http_error::response_with(status, error, error_body(error, &id.shown))
}

/// Claude Code compacts a conversation when it reads Anthropic's words and numbers. Engines say it in OpenAI's words,
/// with the same numbers; where they have none, the message alone follows.
fn prompt_too_long(message: &str) -> String {
    let after = |words: &str| message.split_once(words).map(|(_, rest)| number(rest));
    match (after("resulted in "), after("maximum context length is ")) {
        (Some(Some(tokens)), Some(Some(maximum))) => {
            format!("prompt is too long: {tokens} tokens > {maximum} maximum. {message}")
        }
        _ => format!("prompt is too long: {message}"),
    }
}

/// The number at the beginning of a text, behind `at least ` if it is a lower bound.
fn number(text: &str) -> Option<u64> {
    let text = text.strip_prefix("at least ").unwrap_or(text);
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_class_has_anthropics_status_and_type() {
        for (kind, status, name) in [
            (ErrorKind::InvalidRequest, 400, "invalid_request_error"),
            (ErrorKind::ContextLengthExceeded, 400, "invalid_request_error"),
            (ErrorKind::InvalidApiKey, 401, "authentication_error"),
            (ErrorKind::BudgetExceeded, 402, "billing_error"),
            (ErrorKind::ModelForbidden, 403, "permission_error"),
            (ErrorKind::ModelNotFound, 404, "not_found_error"),
            (ErrorKind::TooLarge, 413, "request_too_large"),
            (ErrorKind::QuotaExceeded, 429, "rate_limit_error"),
            (ErrorKind::Internal, 500, "api_error"),
            (ErrorKind::DeadlineExceeded, 504, "timeout_error"),
            (ErrorKind::Overloaded, 529, "overloaded_error"),
            (ErrorKind::ModelNotReady, 529, "overloaded_error"),
        ] {
            let id = RequestId { unique: "u".into(), shown: "req_u".into() };
            let response = error_response(&GatewayError::new(kind, "because"), &id);
            assert_eq!(response.status().as_u16(), status, "{kind:?}");
            let should_retry = response.headers().get("x-should-retry");
            assert_eq!(should_retry.is_some(), status >= 500, "{kind:?}");
            let body = error_body(&GatewayError::new(kind, "because"), "req_u");
            assert_eq!((&body["type"], &body["error"]["type"]), (&json!("error"), &json!(name)), "{kind:?}");
            assert_eq!(body["request_id"], "req_u");
        }
    }

    #[test]
    fn an_error_with_a_time_says_when_to_retry() {
        let id = RequestId { unique: "u".into(), shown: "req_u".into() };
        let error =
            GatewayError::new(ErrorKind::GatewayFull, "full").retry_after(Duration::from_millis(1500));
        let response = error_response(&error, &id);
        assert_eq!(response.headers()["retry-after"], "2");
        assert_eq!(response.headers()["retry-after-ms"], "1500");
        assert!(!response.headers().contains_key("x-should-retry"));
    }

    #[test]
    fn overflow_of_the_context_is_said_in_anthropics_words() {
        const SHORTEN: &str = "Shorten the conversation; the answer needs room too.";
        for (engine, begin) in [
            (
                "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens. ",
                "prompt is too long: 9000 tokens > 8192 maximum. This",
            ),
            (
                "This model's maximum context length is 64 tokens, all that the KV cache of this engine holds. However, your messages resulted in at least 70 tokens. ",
                "prompt is too long: 70 tokens > 64 maximum. This",
            ),
            (
                "This model's maximum context length is reached: its tokenizer takes at most 5 bytes at once. ",
                "prompt is too long: This model's maximum",
            ),
            ("because", "prompt is too long: because"),
            ("resulted in 99999999999999999999999 tokens", "prompt is too long: resulted"),
        ] {
            let error = GatewayError::new(ErrorKind::ContextLengthExceeded, format!("{engine}{SHORTEN}"));
            let body = error_body(&error, "req_u");
            let message = body["error"]["message"].as_str().unwrap();
            assert!(message.starts_with(begin) && message.ends_with(SHORTEN), "{message}");
        }
    }
}
