//! What a response repeats of its request, so much of it that a stream can send it three times.

use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::dialects::values::{JsonObject, field, shown};
use crate::error::GatewayError;

/// Longest instructions that a response repeats, in bytes: more than those of an agent.
const MAX_REPEATED_BYTES: usize = 256 << 10;
/// Longest name that a response repeats, of a user or a cache.
const MAX_NAME_BYTES: usize = 512;
/// OpenAI's limits of `metadata`.
const MAX_METADATA: usize = 16;
const MAX_METADATA_NAME_CHARS: usize = 64;
const MAX_METADATA_CHARS: usize = 512;

/// The repeated fields.
#[derive(Debug, Serialize)]
pub(super) struct Settings {
    pub(super) model: String,
    pub(super) instructions: Option<String>,
    pub(super) max_output_tokens: Option<u32>,
    pub(super) max_tool_calls: Option<i64>,
    pub(super) metadata: JsonObject,
    pub(super) parallel_tool_calls: bool,
    pub(super) previous_response_id: Option<String>,
    pub(super) store: bool,
    pub(super) background: bool,
    pub(super) prompt_cache_key: Option<String>,
    pub(super) safety_identifier: Option<String>,
    pub(super) user: Option<String>,
    pub(super) reasoning: ReasoningSettings,
    pub(super) service_tier: &'static str,
    pub(super) temperature: f32,
    pub(super) top_p: f32,
    pub(super) presence_penalty: f32,
    pub(super) frequency_penalty: f32,
    pub(super) top_logprobs: u32,
    pub(super) text: TextSettings,
    pub(super) tool_choice: Value,
    pub(super) tools: Box<RawValue>,
    pub(super) truncation: &'static str,
}

/// How a model thinks.
#[derive(Debug, Serialize)]
pub(super) struct ReasoningSettings {
    pub(super) effort: Option<String>,
    pub(super) summary: Option<String>,
}

/// What the text has to be.
#[derive(Debug, Serialize)]
pub(super) struct TextSettings {
    /// As the client wrote it.
    pub(super) format: Box<RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) verbosity: Option<String>,
}

/// Instructions, if they are not too long.
pub(super) fn instructions(text: Option<String>) -> Option<String> {
    text.filter(|text| text.len() <= MAX_REPEATED_BYTES)
}

/// The name of a user or a cache, if it is not too long.
pub(super) fn name(fields: &JsonObject, name: &str) -> Option<String> {
    let text = field(fields, name)?.as_str()?;
    (text.len() <= MAX_NAME_BYTES).then(|| text.to_owned())
}

/// How the model thinks: the effort, which `template_arguments` has checked, and how much of the thinking the client wants
/// to read, in OpenAI's words. It gets all of it. The names of fields without effect are added to `ignored`.
pub(super) fn reasoning(fields: &JsonObject, ignored: &mut BTreeSet<String>) -> ReasoningSettings {
    /// The first two are OpenAI's, and so is the older name of the second.
    const READ: [&str; 6] = ["effort", "summary", "generate_summary", "max_tokens", "enabled", "type"];
    let given = field(fields, "reasoning").and_then(Value::as_object).into_iter().flatten();
    let left_out = given.filter(|(name, value)| !value.is_null() && !READ.contains(&name.as_str()));
    ignored.extend(left_out.map(|(name, _)| format!("reasoning.{name}")));
    let nested = |name: &str| field(fields, "reasoning")?.get(name);
    let effort = field(fields, "reasoning_effort").or_else(|| nested("effort"));
    let summary = nested("summary").and_then(Value::as_str);
    let summary = summary.filter(|word| ["auto", "concise", "detailed"].contains(word));
    ReasoningSettings {
        effort: effort.and_then(Value::as_str).map(str::to_owned),
        summary: summary.map(str::to_owned),
    }
}

/// Names and texts of the client's own, within OpenAI's limits.
pub(super) fn metadata(value: Option<&Value>) -> Result<JsonObject, GatewayError> {
    let invalid = |what: String| {
        let message = format!(
            "`metadata` must be an object of at most {MAX_METADATA} strings of {MAX_METADATA_CHARS} characters, with names of {MAX_METADATA_NAME_CHARS}; {what}"
        );
        GatewayError::field("metadata", message)
    };
    match value {
        None => Ok(JsonObject::new()),
        Some(Value::Object(entries)) if entries.len() > MAX_METADATA => {
            Err(invalid(format!("it has {}", entries.len())))
        }
        Some(Value::Object(entries)) => {
            let fits = |name: &str, value: &Value| {
                let text = value.as_str().is_some_and(|text| text.chars().count() <= MAX_METADATA_CHARS);
                text && name.chars().count() <= MAX_METADATA_NAME_CHARS
            };
            match entries.iter().find(|(name, value)| !fits(name, value)) {
                Some((_, value)) => Err(invalid(format!("{} is none", shown(value)))),
                None => Ok(entries.clone()),
            }
        }
        Some(other) => Err(invalid(format!("{} is none", shown(other)))),
    }
}
