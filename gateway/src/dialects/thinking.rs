//! The variables by which chat templates are told whether and how hard to think. A template reads the one that its authors
//! chose, so it gets them all.

use serde_json::Value;

use super::values::JsonObject;
use crate::error::GatewayError;

/// Efforts in OpenAI's and Anthropic's words.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// Sets the variables by which templates ask whether to think.
pub(super) fn set_thinking(variables: &mut JsonObject, thinks: bool) {
    for name in ["enable_thinking", "thinking"] {
        variables.insert(name.into(), thinks.into());
    }
}

/// The effort that this field names.
pub(super) fn effort<'a>(field: &str, value: &'a Value) -> Result<&'a str, GatewayError> {
    value
        .as_str()
        .filter(|effort| EFFORTS.contains(effort))
        .ok_or_else(|| GatewayError::field(field, format!("`{field}` must be one of {}", EFFORTS.join(", "))))
}

/// Sets the variable by which templates ask how hard to think.
pub(super) fn set_effort(variables: &mut JsonObject, effort: &str) {
    variables.insert("reasoning_effort".into(), effort.into());
}
