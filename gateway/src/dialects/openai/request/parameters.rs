//! What requests of every kind share: how long, how and how urgently a response is generated.

use russet_wire::request::{ContextOverflow, GenerationRequest};
use serde_json::Value;

use super::structured_output;
use crate::dialects::sampling;
use crate::dialects::stop_strings::stop_strings;
use crate::dialects::values::{JsonObject, boolean, field, integer, shown, whole};
use crate::error::GatewayError;
use crate::json_body::JsonBody;
use crate::request_limits::{FLEX_LEVELS, RequestLimits};
use crate::serving::RequestContext;

/// Most responses to one request, each of which takes a place in an engine; OpenAI's limit is 128.
const MAX_CHOICES: i64 = 16;
/// Longest salt in bytes: more than any secret of a user or a session needs. With the namespace before it, it stays below
/// the engine's limit of 1,024.
const MAX_SALT_BYTES: usize = 512;

/// How many responses it asks for.
pub(super) fn choices(fields: &JsonObject) -> Result<usize, GatewayError> {
    Ok(integer(fields, "n", 1, MAX_CHOICES)?.unwrap_or(1) as usize)
}

/// A request without its prompt, of this service tier.
pub(in crate::dialects::openai) fn request(
    fields: &JsonObject,
    body: &JsonBody<'_>,
    context: &RequestContext<'_>,
    service_tier: Option<&str>,
) -> Result<GenerationRequest, GatewayError> {
    let RequestContext { id, unix_seconds: _, limits, kept: _ } = context;
    Ok(GenerationRequest {
        id: id.unique.to_string(),
        structured_output: structured_output::parse(fields, body)?,
        max_tokens: max_tokens(fields, limits)?,
        sampling: sampling::parse(fields)?,
        stop: stop_strings(fields, "stop")?,
        stop_token_ids: sampling::stop_token_ids(field(fields, "stop_token_ids"))?,
        ignore_eos: boolean(fields, "ignore_eos")?.unwrap_or(false),
        truncate_prompt_tokens: truncate_prompt_tokens(fields)?,
        priority: priority(fields, service_tier, limits)?,
        cache_salt: cache_salt(field(fields, "cache_salt"))?,
        ..GenerationRequest::default()
    })
}

/// What becomes of a conversation that is too long.
pub(in crate::dialects::openai) fn context_overflow(
    value: Option<&Value>,
) -> Result<ContextOverflow, GatewayError> {
    match value.map(Value::as_str) {
        None | Some(Some("refuse")) => Ok(ContextOverflow::Refuse),
        Some(Some("shift")) => Ok(ContextOverflow::Shift),
        Some(_) => Err(GatewayError::field(
            "context_overflow",
            "`context_overflow` must be refuse, or shift, which leaves out the oldest turns",
        )),
    }
}

/// vLLM's `truncate_prompt_tokens`: -1 is as many as the context holds.
fn truncate_prompt_tokens(fields: &JsonObject) -> Result<Option<u32>, GatewayError> {
    match integer(fields, "truncate_prompt_tokens", -1, i64::from(u32::MAX))? {
        None => Ok(None),
        Some(0) => Err(GatewayError::field(
            "truncate_prompt_tokens",
            "`truncate_prompt_tokens` must be at least 1, or -1 for as many as the context holds",
        )),
        Some(tokens) => Ok(Some(u32::try_from(tokens).unwrap_or(u32::MAX))),
    }
}

fn max_tokens(fields: &JsonObject, limits: &RequestLimits) -> Result<Option<u32>, GatewayError> {
    let max_tokens = integer(fields, "max_tokens", 1, i64::from(u32::MAX))?;
    let max_completion_tokens = integer(fields, "max_completion_tokens", 1, i64::from(u32::MAX))?;
    let field = if max_completion_tokens.is_some() { "max_completion_tokens" } else { "max_tokens" };
    limits
        .max_tokens(max_completion_tokens.or(max_tokens).and_then(|tokens| u32::try_from(tokens).ok()), field)
}

/// OpenAI's `flex`: served when there is spare capacity.
const FLEX: &str = "flex";

/// The service tier of a response, in the word reported to the client. As with OpenAI, a request for a higher
/// tier than the key allows gets the key's: no tier has a higher priority than the key.
pub(in crate::dialects::openai) fn service_tier(
    value: Option<&Value>,
) -> Result<Option<&'static str>, GatewayError> {
    match value.map(Value::as_str) {
        None => Ok(None),
        Some(Some("auto" | "default" | "priority" | "scale")) => Ok(Some("default")),
        Some(Some(FLEX)) => Ok(Some(FLEX)),
        Some(_) => Err(GatewayError::field(
            "service_tier",
            "`service_tier` must be auto, default, flex or priority; flex has a lower priority, the others are the same here",
        )),
    }
}

/// The scheduling priority. `priority` is vLLM's: a larger number runs later. It counts from the key's
/// priority, so that 0 means what it means in vLLM.
fn priority(
    fields: &JsonObject,
    service_tier: Option<&str>,
    limits: &RequestLimits,
) -> Result<i32, GatewayError> {
    let max_levels = limits.max_levels();
    let levels = match field(fields, "priority") {
        None => 0,
        Some(value) => {
            let levels = whole(value).and_then(|levels| u32::try_from(levels).ok());
            levels.filter(|levels| *levels <= max_levels).ok_or_else(|| {
                GatewayError::field(
                    "priority",
                    format!(
                        "`priority` must be an integer from 0 to {max_levels}, not {}: 0 is this key's own priority ({}), and each higher number is one level lower, as in vLLM; no request has a higher priority than its key",
                        shown(value),
                        limits.priority
                    ),
                )
            })?
        }
    };
    Ok(limits.priority_below(if service_tier == Some(FLEX) { levels.max(FLEX_LEVELS) } else { levels }))
}

pub(super) fn include_usage(value: Option<&Value>) -> Result<bool, GatewayError> {
    match value {
        None => Ok(false),
        Some(Value::Object(options)) => match options.get("include_usage") {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(include)) => Ok(*include),
            Some(_) => Err(GatewayError::field(
                "stream_options.include_usage",
                "`stream_options.include_usage` must be true or false",
            )),
        },
        Some(_) => Err(GatewayError::field("stream_options", "`stream_options` must be an object")),
    }
}

/// vLLM's `cache_salt`: requests share cached prefixes only with those of the same salt.
fn cache_salt(value: Option<&Value>) -> Result<String, GatewayError> {
    match value {
        None => Ok(String::new()),
        Some(Value::String(salt)) if salt.len() <= MAX_SALT_BYTES => Ok(salt.clone()),
        Some(_) => Err(GatewayError::field(
            "cache_salt",
            format!("`cache_salt` must be a string of at most {MAX_SALT_BYTES} bytes"),
        )),
    }
}
