//! Stop strings, under the name that a dialect has for them.

use serde_json::Value;

use super::values::{JsonObject, field};
use crate::error::GatewayError;

/// The engine's limit. OpenAI's is 4, but other servers take any number, and role play needs some fifteen.
const MAX_STOPS: usize = 32;
/// Longest stop string in bytes: an engine withholds up to this much of every response.
const MAX_STOP_BYTES: usize = 1024;

/// The stop strings in this field, without empty ones.
pub(super) fn stop_strings(fields: &JsonObject, name: &str) -> Result<Vec<String>, GatewayError> {
    let invalid = || {
        let message = format!("`{name}` must be a string or a list of at most {MAX_STOPS} strings");
        GatewayError::field(name, message)
    };
    let mut strings: Vec<String> = match field(fields, name) {
        None => vec![],
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(items)) => items
            .iter()
            .map(|item| item.as_str().map(str::to_owned))
            .collect::<Option<_>>()
            .ok_or_else(invalid)?,
        Some(_) => return Err(invalid()),
    };
    // Some clients send an empty text for none.
    strings.retain(|text| !text.is_empty());
    if strings.len() > MAX_STOPS {
        return Err(invalid());
    }
    if let Some(long) = strings.iter().find(|text| text.len() > MAX_STOP_BYTES) {
        let length = long.len();
        let message = format!("`{name}` must be strings of at most {MAX_STOP_BYTES} bytes; one has {length}");
        return Err(GatewayError::field(name, message));
    }
    Ok(strings)
}
