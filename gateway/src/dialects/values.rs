//! The fields of a request's body and their values, each with an error that names the field.

use std::fmt::Display;

use serde_json::{Map, Value};

use crate::error::{ErrorKind, GatewayError};
use crate::json_body::JsonBody;

/// The error for a field that is not what it must be. Its place, as in `messages[0].content`, is mostly one that is written here
/// for the first time: who reads a request hands on [`std::fmt::Arguments`], so that a good one writes none.
pub(super) fn invalid(at: impl Display, what: &str) -> GatewayError {
    GatewayError::field(at.to_string(), format!("`{at}` must be {what}"))
}

/// Fields of a body, in the client's order.
pub(super) type JsonObject = Map<String, Value>;

/// The fields of a body, without those that are null: SDKs send it for unset ones.
pub(super) fn fields(body: &mut JsonBody<'_>) -> Result<JsonObject, GatewayError> {
    let Value::Object(mut fields) = std::mem::take(&mut body.value) else {
        return Err(GatewayError::new(ErrorKind::InvalidRequest, "the body must be a JSON object"));
    };
    fields.retain(|_, value| !value.is_null());
    Ok(fields)
}

/// The field of this name.
pub(super) fn field<'a>(fields: &'a JsonObject, name: &str) -> Option<&'a Value> {
    // Dialects look up dozens of names in bodies of a few fields, and to compare names is quicker than to hash one.
    const FEW: usize = 16;
    if fields.len() > FEW {
        return fields.get(name);
    }
    fields.iter().find_map(|(key, value)| (key == name).then_some(value))
}

/// Longest name of a model in bytes: a namespace, a name and an adapter have at most 253 each.
const MAX_MODEL_BYTES: usize = 1024;

/// The name of the model.
pub(super) fn model(fields: &JsonObject) -> Result<String, GatewayError> {
    model_of(fields, "model")
}

/// The name of a model in this field.
pub(super) fn model_of(fields: &JsonObject, name: &str) -> Result<String, GatewayError> {
    match field(fields, name) {
        // Errors repeat it.
        Some(Value::String(model)) if model.len() > MAX_MODEL_BYTES => {
            let message = format!(
                "`{name}` has {} bytes, and names of models have at most {MAX_MODEL_BYTES}; GET /v1/models lists them",
                model.len()
            );
            Err(GatewayError::field(name, message))
        }
        Some(Value::String(model)) if !model.is_empty() => Ok(model.clone()),
        Some(_) => Err(GatewayError::field(name, format!("`{name}` must be the name of a model"))),
        None => {
            Err(GatewayError::field(name, format!("`{name}` is missing; GET /v1/models lists the names")))
        }
    }
}

/// Most models of a request, as OpenRouter has it.
const MAX_FALLBACK_MODELS: usize = 16;

/// The name of the model, and those of `models` that take the request where it cannot, as OpenRouter has them: the first of
/// them is the model where no other one is named.
pub(super) fn models(fields: &JsonObject) -> Result<(String, Vec<String>), GatewayError> {
    let mut others = match field(fields, "models") {
        None => Vec::new(),
        Some(Value::Array(names)) if names.len() <= MAX_FALLBACK_MODELS => names
            .iter()
            .map(|name| match name.as_str() {
                Some(name) if !name.is_empty() && name.len() <= MAX_MODEL_BYTES => Ok(name.to_owned()),
                _ => Err(GatewayError::field("models", "`models` must have names of models")),
            })
            .collect::<Result<_, _>>()?,
        Some(_) => {
            let message = format!("`models` must be a list of at most {MAX_FALLBACK_MODELS} names of models");
            return Err(GatewayError::field("models", message));
        }
    };
    if others.is_empty() || fields.contains_key("model") {
        let model = model(fields)?;
        others.retain(|other| *other != model);
        return Ok((model, others));
    }
    Ok((others.remove(0), others))
}

pub(super) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

pub(super) fn boolean(fields: &JsonObject, name: &str) -> Result<Option<bool>, GatewayError> {
    match field(fields, name) {
        None => Ok(None),
        Some(Value::Bool(value)) => Ok(Some(*value)),
        Some(_) => Err(GatewayError::field(name, format!("`{name}` must be true or false"))),
    }
}

pub(super) fn number(
    fields: &JsonObject,
    name: &str,
    min: f64,
    max: f64,
) -> Result<Option<f32>, GatewayError> {
    match field(fields, name).map(Value::as_f64) {
        None => Ok(None),
        Some(Some(value)) if (min..=max).contains(&value) => Ok(Some(value as f32)),
        Some(_) => Err(GatewayError::field(
            name,
            format!("`{name}` must be a number from {min} to {max}, not {}", shown(&fields[name])),
        )),
    }
}

/// A number without a fraction: `64.0` and `1e3` too, which languages with one kind of number write.
pub(super) fn whole(value: &Value) -> Option<i64> {
    /// Up to here a 64-bit float holds every integer.
    const MAX_EXACT: f64 = 9_007_199_254_740_992.0;
    let float = || value.as_f64().filter(|float| float.fract() == 0.0 && float.abs() <= MAX_EXACT);
    value.as_i64().or_else(|| float().map(|float| float as i64))
}

pub(super) fn integer(
    fields: &JsonObject,
    name: &str,
    min: i64,
    max: i64,
) -> Result<Option<i64>, GatewayError> {
    match field(fields, name).map(whole) {
        None => Ok(None),
        Some(Some(value)) if (min..=max).contains(&value) => Ok(Some(value)),
        Some(_) => Err(GatewayError::field(
            name,
            format!("`{name}` must be an integer of at least {min}, not {}", shown(&fields[name])),
        )),
    }
}

/// Ids of tokens; `None` where one of them is none.
pub(super) fn token_ids(ids: &[Value]) -> Option<Vec<u32>> {
    ids.iter().map(|id| whole(id).and_then(|id| u32::try_from(id).ok())).collect()
}

/// A value in a message, shortened.
pub(super) fn shown(value: &Value) -> String {
    const MAX_SHOWN_CHARS: usize = 40;
    let text = value.to_string();
    match text.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
