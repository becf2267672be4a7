//! What requests of every kind share: the fields of a body, and how long, how and how urgently a response is generated.

use std::collections::BTreeSet;

use russet_wire::request::GenerationRequest;
use serde_json::Value;

use super::fields::{FieldGroup, Treatment};
use super::values::{boolean, integer, shown, whole};
use super::{JsonObject, sampling, structured_output};
use crate::error::{ErrorKind, GatewayError};
use crate::json_body::JsonBody;
use crate::request_limits::{FLEX_LEVELS, RequestLimits};
use crate::serving::RequestContext;

/// The engine's limit. OpenAI's is 4, but other servers take any number, and role play needs some fifteen.
const MAX_STOPS: usize = 32;
/// Longest stop string in bytes: an engine withholds up to this much of every response.
const MAX_STOP_BYTES: usize = 1024;
/// Most responses to one request, each of which takes a place in an engine; OpenAI's limit is 128.
const MAX_CHOICES: i64 = 16;
/// Longest salt in bytes: more than any secret of a user or a session needs. With the namespace before it, it stays below
/// the engine's limit of 1,024.
const MAX_SALT_BYTES: usize = 512;
/// Clients of other servers send many fields; this limit keeps the header that lists them short.
const MAX_IGNORED_FIELDS: usize = 16;

/// The fields of a body, without those that are null: OpenAI's SDKs send it for unset ones.
pub(in crate::dialects::openai) fn fields(body: &mut JsonBody<'_>) -> Result<JsonObject, GatewayError> {
    let Value::Object(mut fields) = std::mem::take(&mut body.value) else {
        return Err(GatewayError::new(ErrorKind::InvalidRequest, "the body must be a JSON object"));
    };
    fields.retain(|_, value| !value.is_null());
    Ok(fields)
}

/// The name of the model.
pub(in crate::dialects::openai) fn model(fields: &JsonObject) -> Result<String, GatewayError> {
    match fields.get("model") {
        Some(Value::String(model)) if !model.is_empty() => Ok(model.clone()),
        Some(_) => Err(GatewayError::field("model", "`model` must be the name of a model")),
        None => Err(GatewayError::field("model", "`model` is missing; GET /v1/models lists the names")),
    }
}

/// Which group a field is in.
pub(super) type GroupOf = fn(&str) -> Option<&'static FieldGroup>;

/// An error for a field that is not supported and would change the response.
pub(super) fn refuse_unsupported(fields: &JsonObject, group_of: GroupOf) -> Result<(), GatewayError> {
    for (field, value) in fields {
        if let Some(FieldGroup { about, treatment: Treatment::Refused(is_harmless), .. }) = group_of(field)
            && !is_harmless(value)
        {
            return Err(GatewayError::field(
                field,
                format!(
                    "`{field}` is not supported by this release and would change the response; leave it out ({about})"
                ),
            ));
        }
    }
    Ok(())
}

/// How many responses it asks for.
pub(super) fn choices(fields: &JsonObject) -> Result<usize, GatewayError> {
    Ok(integer(fields, "n", 1, MAX_CHOICES)?.unwrap_or(1) as usize)
}

/// A request without its prompt, of this service tier.
pub(super) fn request(
    fields: &JsonObject,
    body: &JsonBody<'_>,
    context: &RequestContext<'_>,
    service_tier: Option<&str>,
) -> Result<GenerationRequest, GatewayError> {
    let RequestContext { id, unix_seconds: _, limits } = context;
    Ok(GenerationRequest {
        id: id.unique.clone(),
        structured_output: structured_output::parse(fields, body)?,
        max_tokens: max_tokens(fields, limits)?,
        sampling: sampling::parse(fields)?,
        stop: stop(fields.get("stop"))?,
        stop_token_ids: sampling::stop_token_ids(fields.get("stop_token_ids"))?,
        ignore_eos: boolean(fields, "ignore_eos")?.unwrap_or(false),
        truncate_prompt_tokens: truncate_prompt_tokens(fields)?,
        priority: priority(fields, service_tier, limits)?,
        cache_salt: cache_salt(fields.get("cache_salt"))?,
        ..GenerationRequest::default()
    })
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
pub(super) fn service_tier(value: Option<&Value>) -> Result<Option<&'static str>, GatewayError> {
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
    let levels = match fields.get("priority") {
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

fn stop(value: Option<&Value>) -> Result<Vec<String>, GatewayError> {
    let invalid = || {
        GatewayError::field(
            "stop",
            format!("`stop` must be a string or a list of at most {MAX_STOPS} strings"),
        )
    };
    let mut strings: Vec<String> = match value {
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
        return Err(GatewayError::field(
            "stop",
            format!("`stop` must be strings of at most {MAX_STOP_BYTES} bytes; one has {length}"),
        ));
    }
    Ok(strings)
}

/// The names of fields that are left out, as far as a header can list them, with those that are `ignored` already.
pub(super) fn ignored(fields: &JsonObject, group_of: GroupOf, mut ignored: BTreeSet<String>) -> Vec<String> {
    let is_left_out =
        |name: &&String| group_of(name).is_none_or(|group| matches!(group.treatment, Treatment::Ignored));
    ignored.extend(fields.keys().filter(is_left_out).cloned());
    listed(ignored)
}

/// The names that a header can list.
pub(in crate::dialects::openai) fn listed(names: BTreeSet<String>) -> Vec<String> {
    let is_printable = |name: &String| {
        name.len() <= 64 && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'))
    };
    names.into_iter().filter(is_printable).take(MAX_IGNORED_FIELDS).collect()
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
