//! Whether, how long and how hard the model thinks: `thinking`, and the effort of `output_config`.

use serde_json::{Value, json};

use crate::dialects::thinking::{effort, set_effort, set_thinking};
use crate::dialects::values::{JsonObject, invalid, whole};
use crate::error::GatewayError;

/// What a request says of thinking. Where it says nothing, the deployment and the template decide.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ThinkingOptions {
    /// JSON text of variables for the chat template; empty without any.
    pub(super) template_arguments: String,
    /// Maximum tokens of thinking.
    pub(super) budget: Option<u32>,
}

/// Parses them.
pub(super) fn parse(fields: &JsonObject) -> Result<ThinkingOptions, GatewayError> {
    let mut variables = JsonObject::new();
    let mut budget = None;
    if let Some(thinking) = fields.get("thinking") {
        let thinks = match thinking.get("type").and_then(Value::as_str) {
            Some("enabled" | "adaptive") => true,
            Some("disabled") => false,
            _ => return Err(invalid("thinking.type", "\"enabled\", \"adaptive\" or \"disabled\"")),
        };
        set_thinking(&mut variables, thinks);
        budget = match thinking.get("budget_tokens").filter(|tokens| thinks && !tokens.is_null()) {
            None => None,
            Some(tokens) => {
                let tokens = whole(tokens).and_then(|tokens| u32::try_from(tokens).ok());
                let what = || invalid("thinking.budget_tokens", "a number of tokens");
                Some(tokens.ok_or_else(what)?)
            }
        };
    }
    let config = fields.get("output_config").and_then(|config| config.get("effort"));
    if let Some(value) = config.filter(|value| !value.is_null()) {
        set_effort(&mut variables, effort("output_config.effort", value)?);
    }
    let template_arguments = if variables.is_empty() { String::new() } else { json!(variables).to_string() };
    Ok(ThinkingOptions { template_arguments, budget })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinking_reaches_the_template_and_the_engine() {
        const ON: &str = r#"{"enable_thinking":true,"thinking":true}"#;
        const OFF: &str = r#"{"enable_thinking":false,"thinking":false}"#;
        for (fields, expected) in [
            (json!({}), Ok(("", None))),
            (json!({"thinking": {"type": "adaptive"}}), Ok((ON, None))),
            (json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}), Ok((ON, Some(1024)))),
            (json!({"thinking": {"type": "disabled", "budget_tokens": 7}}), Ok((OFF, None))),
            (json!({"output_config": {"effort": "low"}}), Ok((r#"{"reasoning_effort":"low"}"#, None))),
            (
                json!({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}),
                Ok((r#"{"enable_thinking":true,"thinking":true,"reasoning_effort":"max"}"#, None)),
            ),
            (json!({"thinking": {"type": "some"}}), Err("thinking.type")),
            (json!({"thinking": true}), Err("thinking.type")),
            (json!({"thinking": {"type": "enabled", "budget_tokens": -1}}), Err("thinking.budget_tokens")),
            (json!({"thinking": {"type": "enabled", "budget_tokens": "9"}}), Err("thinking.budget_tokens")),
            (json!({"output_config": {"effort": "all"}}), Err("output_config.effort")),
        ] {
            let parsed = parse(fields.as_object().unwrap());
            let parsed = parsed.map_err(|error| error.param.unwrap());
            let expected = expected.map(|(arguments, budget)| ThinkingOptions {
                template_arguments: arguments.to_owned(),
                budget,
            });
            assert_eq!(parsed, expected.map_err(str::to_owned), "{fields}");
        }
    }
}
