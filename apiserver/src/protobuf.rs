//! `application/vnd.kubernetes.protobuf` request bodies, transcoded to JSON for the kinds that clients send typed.
//!
//! Not here: protobuf responses; every client that sends protobuf also accepts JSON.

use serde_json::Value;

/// Why a protobuf body was refused.
#[derive(Debug, thiserror::Error)]
pub enum ProtobufError {
    /// No `k8s\0` prefix or broken wire data (400).
    #[error("the protobuf body is malformed: {0}")]
    Malformed(String),
    /// A kind outside our tables (415).
    #[error("no protobuf encoding of {api_version} {kind} is known here; send application/json")]
    UnknownKind {
        /// `v1`.
        api_version: String,
        /// `Pod`.
        kind: String,
    },
}

/// Decodes `k8s\0` + `runtime.Unknown` to a JSON object with apiVersion and kind.
pub fn to_json(body: &[u8]) -> Result<Value, ProtobufError> {
    let _ = body;
    Err(ProtobufError::Malformed("no decoder yet".into()))
}
