//! JSON Schemas that a text has to meet. They reach the engine as the client wrote them: a model writes the keys in their
//! order.

use russet_wire::request::StructuredOutput;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::error::GatewayError;

/// Longest schema, expression or grammar in bytes.
pub(super) const MAX_BYTES: usize = 256 << 10;

/// A JSON Schema: an object, or its text.
pub(super) fn schema(
    field: &str,
    value: &Value,
    raw: Option<&RawValue>,
) -> Result<StructuredOutput, GatewayError> {
    match value {
        Value::Object(_) | Value::Bool(_) => {
            let text = raw.map_or_else(|| value.to_string(), |raw| raw.get().to_owned());
            Ok(StructuredOutput::JsonSchema(text))
        }
        Value::String(text) => Ok(StructuredOutput::JsonSchema(text.clone())),
        _ => Err(GatewayError::field(field, format!("`{field}` must be a JSON Schema"))),
    }
}

/// The same, unless its texts are too long.
pub(super) fn check_bytes(field: &str, output: StructuredOutput) -> Result<StructuredOutput, GatewayError> {
    match output.bytes() {
        bytes if bytes > MAX_BYTES => {
            let message = format!("`{field}` must be at most {MAX_BYTES} bytes, not {bytes}");
            Err(GatewayError::field(field, message))
        }
        _ => Ok(output),
    }
}
