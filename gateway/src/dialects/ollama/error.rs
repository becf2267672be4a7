//! Errors in Ollama's format: a text, and the status.

use axum::response::Response;
use serde_json::{Value, json};

use crate::dialects::http_error;
use crate::error::{ErrorKind, GatewayError};
use crate::request_id::RequestId;

/// `{"error": "…"}`.
pub(super) fn error_body(error: &GatewayError) -> Value {
    json!({"error": text(error)})
}

/// The response to a request that failed.
pub(super) fn error_response(error: &GatewayError, _: &RequestId) -> Response {
    http_error::response(error, error_body(error))
}

/// The message; that of an unknown model begins with Ollama's words, which clients look for.
fn text(error: &GatewayError) -> String {
    let GatewayError { kind, message, param: _, retry_after: _ } = error;
    let unknown = message.strip_prefix("model `").and_then(|rest| rest.split_once("` does not exist"));
    match unknown {
        Some((model, rest)) if *kind == ErrorKind::ModelNotFound => {
            format!("model '{model}' not found{rest}")
        }
        _ => message.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_model_is_named_in_ollamas_words() {
        for (kind, message, expected) in [
            (
                ErrorKind::ModelNotFound,
                "model `nix` does not exist; existing models: m",
                "model 'nix' not found; existing models: m",
            ),
            (
                ErrorKind::ModelNotFound,
                "model `a` exists in several namespaces",
                "model `a` exists in several namespaces",
            ),
            (ErrorKind::Internal, "model `a` does not exist", "model `a` does not exist"),
        ] {
            assert_eq!(error_body(&GatewayError::new(kind, message)), json!({"error": expected}));
        }
    }
}
