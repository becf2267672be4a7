//! Fields that reach the chat template. Servers and clients have many names for the switches of thinking; a template reads
//! those that its authors chose, so it gets them under each of their names.

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::dialects::thinking::{self, set_effort, set_thinking};
use crate::dialects::values::{JsonObject, boolean, field};
use crate::error::GatewayError;
use crate::json_body::JsonBody;

/// Longest variables in bytes: documents may be among them.
const MAX_BYTES: usize = 1 << 20;

/// JSON text of the template's variables; empty without any.
pub(in crate::dialects::openai) fn parse(
    fields: &JsonObject,
    body: &JsonBody<'_>,
) -> Result<String, GatewayError> {
    let mut variables = JsonObject::new();
    if let Some(effort) = effort(fields)? {
        // What OpenAI calls no effort is no thinking elsewhere.
        set_thinking(&mut variables, effort != "none");
        set_effort(&mut variables, effort);
    }
    for name in ["enable_thinking", "thinking", "think", "reasoning"] {
        if let Some(thinks) = field(fields, name).map(|value| switch(name, value)).transpose()?.flatten() {
            set_thinking(&mut variables, thinks);
        }
    }
    if let Some(add) = boolean(fields, "add_generation_prompt")? {
        variables.insert("add_generation_prompt".into(), add.into());
    }
    let mut text = if variables.is_empty() { String::new() } else { json!(variables).to_string() };
    match field(fields, "chat_template_kwargs") {
        None => {}
        Some(Value::Object(own)) if own.is_empty() => {}
        Some(own @ Value::Object(_)) => {
            let raw: Option<RawArguments<'_>> = body.read();
            let raw = raw.and_then(|raw| raw.chat_template_kwargs).map(RawValue::get);
            let own = raw.map_or_else(|| own.to_string(), str::to_owned);
            // Of a name that both have, the later one counts: what a client says of the template itself.
            text = match (text.strip_suffix('}'), own.trim_start().strip_prefix('{')) {
                (Some(first), Some(rest)) => format!("{first},{rest}"),
                _ => own,
            };
        }
        Some(_) => {
            let message = "`chat_template_kwargs` must be an object of variables for the chat template";
            return Err(GatewayError::field("chat_template_kwargs", message));
        }
    }
    if text.len() > MAX_BYTES {
        let message = format!("`chat_template_kwargs` must be at most {MAX_BYTES} bytes, not {}", text.len());
        return Err(GatewayError::field("chat_template_kwargs", message));
    }
    Ok(text)
}

/// The effort, in OpenAI's words; also within `reasoning`, as OpenRouter has it.
fn effort(fields: &JsonObject) -> Result<Option<&str>, GatewayError> {
    let nested = field(fields, "reasoning").and_then(|reasoning| reasoning.get("effort"));
    let own = field(fields, "reasoning_effort").map(|value| ("reasoning_effort", value));
    let given = own.or_else(|| nested.map(|value| ("reasoning.effort", value)));
    let given = given.filter(|(_, value)| !value.is_null());
    given.map(|(field, value)| thinking::effort(field, value)).transpose()
}

/// Whether a switch is on: `true`, or `{"type": "enabled"}`, or `{"enabled": true}`; `None` where it does not say.
fn switch(name: &str, value: &Value) -> Result<Option<bool>, GatewayError> {
    let invalid = || {
        let message = format!("`{name}` must be true or false, or an object that says so");
        GatewayError::field(name, message)
    };
    match value {
        Value::Bool(on) => Ok(Some(*on)),
        // Ollama's efforts.
        Value::String(effort) if ["low", "medium", "high"].contains(&effort.as_str()) => Ok(Some(true)),
        Value::Object(says) => match (says.get("type").and_then(Value::as_str), says.get("enabled")) {
            (Some("enabled" | "adaptive"), _) => Ok(Some(true)),
            (Some("disabled"), _) => Ok(Some(false)),
            (None, Some(Value::Bool(on))) => Ok(Some(*on)),
            (None, None | Some(Value::Null)) => Ok(None),
            _ => Err(invalid()),
        },
        _ => Err(invalid()),
    }
}

#[derive(Deserialize)]
struct RawArguments<'a> {
    #[serde(borrow)]
    chat_template_kwargs: Option<&'a RawValue>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json_body::JsonScan;

    fn arguments(text: &str) -> Result<String, Option<String>> {
        let body = JsonScan::new(text.as_bytes()).unwrap().decode(text.as_bytes()).unwrap();
        let mut fields = body.value.as_object().unwrap().clone();
        fields.retain(|_, value| !value.is_null());
        parse(&fields, &body).map_err(|error| error.param)
    }

    #[test]
    fn switches_of_thinking_reach_the_template() {
        const ON: &str = r#"{"enable_thinking":true,"thinking":true}"#;
        const OFF: &str = r#"{"enable_thinking":false,"thinking":false}"#;
        for (body, expected) in [
            ("{}", ""),
            (r#"{"enable_thinking": null, "chat_template_kwargs": {}}"#, ""),
            (r#"{"enable_thinking": false}"#, OFF),
            (r#"{"thinking": true}"#, ON),
            (r#"{"thinking": {"type": "disabled"}}"#, OFF),
            (r#"{"thinking": {"type": "enabled", "budget_tokens": 9}}"#, ON),
            (r#"{"think": "high"}"#, ON),
            (r#"{"reasoning": {"enabled": false}}"#, OFF),
            (
                r#"{"reasoning_effort": "none"}"#,
                r#"{"enable_thinking":false,"thinking":false,"reasoning_effort":"none"}"#,
            ),
            (
                r#"{"reasoning": {"effort": "low"}}"#,
                r#"{"enable_thinking":true,"thinking":true,"reasoning_effort":"low"}"#,
            ),
            (
                r#"{"chat_template_kwargs": {"z": [1.0, {"b": 1, "a": 2}], "a": "é"}}"#,
                r#"{"z": [1.0, {"b": 1, "a": 2}], "a": "é"}"#,
            ),
            (
                r#"{"enable_thinking": true, "chat_template_kwargs": { "enable_thinking": false}}"#,
                r#"{"enable_thinking":true,"thinking":true, "enable_thinking": false}"#,
            ),
            (r#"{"add_generation_prompt": false}"#, r#"{"add_generation_prompt":false}"#),
        ] {
            assert_eq!(arguments(body).as_deref(), Ok(expected), "{body}");
        }
        for (body, param) in [
            (r#"{"enable_thinking": "maybe"}"#, "enable_thinking"),
            (r#"{"thinking": {"type": "some"}}"#, "thinking"),
            (r#"{"reasoning_effort": "all"}"#, "reasoning_effort"),
            (r#"{"reasoning_effort": 3}"#, "reasoning_effort"),
            (r#"{"reasoning": {"effort": "all"}}"#, "reasoning.effort"),
            (r#"{"chat_template_kwargs": []}"#, "chat_template_kwargs"),
            (r#"{"add_generation_prompt": 1}"#, "add_generation_prompt"),
        ] {
            assert_eq!(arguments(body), Err(Some(param.to_owned())), "{body}");
        }
    }
}
