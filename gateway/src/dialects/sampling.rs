//! How tokens are sampled: temperature and filters, penalties, biases.

use std::collections::BTreeMap;

use russet_wire::request::{DrySampling, Sampling};
use serde_json::Value;

use super::values::{JsonObject, boolean, field, integer, number, shown, token_ids, whole};
use crate::error::GatewayError;
use crate::request_defaults::LeftOut;

/// Maximum tokens that a request names, as the engine has it.
const MAX_TOKENS: usize = 1024;
/// As many of the most probable tokens as OpenAI tells.
pub(super) const MAX_TOP_LOGPROBS: i64 = 20;
/// Most numbers of the prompts of one response: one for each token and for each of the most probable ones beside it. With
/// their texts they take some megabytes, twice while they are written.
const MAX_PROMPT_LOGPROBS: usize = 1 << 18;
/// Maximum texts over which no repeated run goes on, and their length.
const MAX_BREAKERS: usize = 64;
const MAX_BREAKER_BYTES: usize = 64;

/// The sampling parameters.
pub(super) fn parse(fields: &JsonObject) -> Result<Sampling, GatewayError> {
    let top_p = number(fields, "top_p", 0.0, 1.0)?.unwrap_or(1.0);
    // llama.cpp, LM Studio and Ollama have another name for it.
    let repetition = number(fields, "repetition_penalty", 0.01, 10.0)?;
    let repeat = number(fields, "repeat_penalty", 0.01, 10.0)?;
    let usual = Sampling::default();
    Ok(Sampling {
        temperature: number(fields, "temperature", 0.0, 2.0)?.unwrap_or(1.0),
        // OpenAI allows 0, which means greedy sampling.
        top_p: top_p.max(1e-6),
        // Other servers write "no limit" as -1.
        top_k: integer(fields, "top_k", -1, i64::from(u32::MAX))?
            .map_or(0, |top_k| u32::try_from(top_k).unwrap_or(0)),
        min_p: number(fields, "min_p", 0.0, 1.0)?.unwrap_or(0.0),
        repetition_penalty: repetition.or(repeat).unwrap_or(1.0),
        presence_penalty: number(fields, "presence_penalty", -2.0, 2.0)?.unwrap_or(0.0),
        frequency_penalty: number(fields, "frequency_penalty", -2.0, 2.0)?.unwrap_or(0.0),
        logit_bias: logit_bias(field(fields, "logit_bias"))?,
        // 0 is off as well in llama.cpp.
        typical_p: number(fields, "typical_p", 0.0, 1.0)?.filter(|mass| *mass > 0.0).unwrap_or(1.0),
        xtc_probability: number(fields, "xtc_probability", 0.0, 1.0)?.unwrap_or(0.0),
        xtc_threshold: number(fields, "xtc_threshold", 0.0, 1.0)?.unwrap_or(usual.xtc_threshold),
        dry: dry(fields)?,
        min_tokens: integer(fields, "min_tokens", 0, i64::from(u32::MAX))?.unwrap_or(0) as u32,
        seed: seed(fields)?,
    })
}

/// What the request leaves to the deployment.
pub(super) fn left_out(fields: &JsonObject) -> LeftOut {
    let is_absent = |names: &[&str]| names.iter().all(|name| field(fields, name).is_none());
    LeftOut {
        temperature: is_absent(&["temperature"]),
        top_p: is_absent(&["top_p"]),
        top_k: is_absent(&["top_k"]),
        min_p: is_absent(&["min_p"]),
        repetition_penalty: is_absent(&["repetition_penalty", "repeat_penalty"]),
    }
}

fn seed(fields: &JsonObject) -> Result<Option<u64>, GatewayError> {
    match field(fields, "seed") {
        None => Ok(None),
        // A negative seed is as good as another: seeds are only compared for equality.
        Some(value) => match value.as_u64().or_else(|| whole(value).map(i64::cast_unsigned)) {
            Some(seed) => Ok(Some(seed)),
            None => Err(GatewayError::field(
                "seed",
                format!("`seed` must be an integer of 64 bits, not {}", shown(value)),
            )),
        },
    }
}

/// DRY, with the names of llama.cpp and text-generation-webui.
fn dry(fields: &JsonObject) -> Result<Option<DrySampling>, GatewayError> {
    let sequence_breakers = match field(fields, "dry_sequence_breakers") {
        None => None,
        Some(value) => {
            let texts = value.as_array().filter(|texts| texts.len() <= MAX_BREAKERS);
            let text = |text: &Value| {
                text.as_str().filter(|text| text.len() <= MAX_BREAKER_BYTES).map(str::to_owned)
            };
            let texts: Option<Vec<String>> = texts.and_then(|texts| texts.iter().map(text).collect());
            Some(texts.ok_or_else(|| {
                let message = format!(
                    "`dry_sequence_breakers` must be a list of at most {MAX_BREAKERS} strings of {MAX_BREAKER_BYTES} bytes"
                );
                GatewayError::field("dry_sequence_breakers", message)
            })?)
        }
    };
    let multiplier = number(fields, "dry_multiplier", 0.0, 100.0)?;
    let base = number(fields, "dry_base", 1.0, 8.0)?;
    let allowed_length = integer(fields, "dry_allowed_length", 0, 1 << 20)?;
    // -1 is all of the context.
    let last_tokens = integer(fields, "dry_penalty_last_n", -1, i64::from(u32::MAX))?;
    let Some(multiplier) = multiplier.filter(|multiplier| *multiplier > 0.0) else { return Ok(None) };
    let usual = DrySampling::default();
    Ok(Some(DrySampling {
        multiplier,
        base: base.unwrap_or(usual.base),
        allowed_length: allowed_length.map_or(usual.allowed_length, |length| length as u32),
        last_tokens: last_tokens.map_or(usual.last_tokens, |tokens| u32::try_from(tokens).unwrap_or(0)),
        sequence_breakers: sequence_breakers.unwrap_or(usual.sequence_breakers),
    }))
}

/// How many of the most probable tokens a completion tells besides the sampled one; `None` where nothing is.
pub(super) fn completion_logprobs(fields: &JsonObject) -> Result<Option<u32>, GatewayError> {
    // Some clients send the chat's form for none.
    if field(fields, "logprobs") == Some(&Value::Bool(false)) {
        return Ok(None);
    }
    Ok(integer(fields, "logprobs", 0, MAX_TOP_LOGPROBS)?.map(|top| top as u32))
}

/// vLLM's `prompt_logprobs`: the tokens of the prompt are told, with so many of the most probable ones in place of each;
/// `None` where nothing is.
pub(super) fn prompt_logprobs(fields: &JsonObject) -> Result<Option<u32>, GatewayError> {
    if field(fields, "prompt_logprobs") == Some(&Value::Bool(false)) {
        return Ok(None);
    }
    let top = integer(fields, "prompt_logprobs", 0, MAX_TOP_LOGPROBS)?.map(|top| top as u32);
    if top.is_some() && boolean(fields, "stream")? == Some(true) {
        let message = "`prompt_logprobs` are told in a whole response, as vLLM has it; leave `stream` out";
        return Err(GatewayError::field("prompt_logprobs", message));
    }
    Ok(top)
}

/// Refuses several answers to a prompt whose log-probabilities are told: each would compute all of the prompt again.
pub(super) fn check_scored_choices(choices: usize) -> Result<(), GatewayError> {
    if choices <= 1 {
        return Ok(());
    }
    let message = format!("log-probabilities of a prompt are told with one answer to it, and n = {choices}");
    Err(GatewayError::field("n", message))
}

/// Refuses responses that tell more of their prompts than this gateway holds for one request: so many tokens together, each
/// with so many others. The engine, which knows the tokens of a text, has the same limit for each prompt.
pub(super) fn check_prompt_logprobs(
    field: &str,
    tokens: usize,
    top: Option<u32>,
) -> Result<(), GatewayError> {
    let each = 1 + top.unwrap_or(0) as usize;
    if tokens.saturating_mul(each) <= MAX_PROMPT_LOGPROBS {
        return Ok(());
    }
    let message = format!(
        "`{field}` asks for {each} log-probabilities of each of about {tokens} tokens of prompts, those of every choice counted; a response tells of at most {}: ask for fewer, or send fewer or shorter prompts",
        MAX_PROMPT_LOGPROBS / each
    );
    Err(GatewayError::field(field, message))
}

/// How many of the most probable tokens are told besides the sampled one; `None` where nothing is.
pub(super) fn logprobs(fields: &JsonObject) -> Result<Option<u32>, GatewayError> {
    let asked = boolean(fields, "logprobs")?.unwrap_or(false);
    let top = integer(fields, "top_logprobs", 0, MAX_TOP_LOGPROBS)?;
    match (asked, top) {
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => {
            let message = "`top_logprobs` is told only where `logprobs` is true";
            Err(GatewayError::field("top_logprobs", message))
        }
        (true, top) => Ok(Some(top.unwrap_or(0) as u32)),
    }
}

/// Maximum tokens of thinking, under each of its names; `None` or a negative number for no limit.
pub(super) fn thinking_budget(fields: &JsonObject) -> Result<Option<u32>, GatewayError> {
    let of = |name: &str, fields: &JsonObject| integer(fields, name, -1, i64::from(u32::MAX));
    let nested = |outer: &str, name: &str| match fields.get(outer).and_then(Value::as_object) {
        Some(inner) if inner.get(name).is_some_and(|value| !value.is_null()) => of(name, inner),
        Some(_) | None => Ok(None),
    };
    let mut budget = None;
    for found in [
        nested("reasoning", "max_tokens")?,
        nested("thinking", "budget_tokens")?,
        of("thinking_token_budget", fields)?,
        of("thinking_budget_tokens", fields)?,
        of("thinking_budget", fields)?,
    ] {
        budget = found.or(budget);
    }
    Ok(budget.and_then(|tokens| u32::try_from(tokens).ok()))
}

/// Tokens by their ids, which JSON writes as texts.
fn logit_bias(value: Option<&Value>) -> Result<BTreeMap<u32, f32>, GatewayError> {
    let invalid = |what: String| {
        let message = format!(
            "`logit_bias` must be an object of at most {MAX_TOKENS} token ids and numbers from -100 to 100; {what}"
        );
        GatewayError::field("logit_bias", message)
    };
    let Some(value) = value else { return Ok(BTreeMap::new()) };
    let Value::Object(entries) = value else { return Err(invalid(format!("{} is none", shown(value)))) };
    if entries.len() > MAX_TOKENS {
        return Err(invalid(format!("it has {}", entries.len())));
    }
    let entry = |(id, bias): (&String, &Value)| {
        let token = id
            .parse::<u32>()
            .map_err(|_| invalid(format!("{} is no token id", shown(&Value::from(id.as_str())))))?;
        let number = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        number
            .map(|bias| (token, bias as f32))
            .ok_or_else(|| invalid(format!("token {token} has {}", shown(bias))))
    };
    entries.iter().map(entry).collect()
}

/// Tokens that end the response.
pub(super) fn stop_token_ids(value: Option<&Value>) -> Result<Vec<u32>, GatewayError> {
    let invalid = || {
        let message = format!("`stop_token_ids` must be a list of at most {MAX_TOKENS} token ids");
        GatewayError::field("stop_token_ids", message)
    };
    match value {
        None => Ok(Vec::new()),
        Some(Value::Array(ids)) if ids.len() <= MAX_TOKENS => token_ids(ids).ok_or_else(invalid),
        Some(_) => Err(invalid()),
    }
}
