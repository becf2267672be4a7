//! How tokens are sampled: temperature and filters, penalties, biases.

use std::collections::BTreeMap;

use russet_wire::request::Sampling;
use serde_json::Value;

use super::{JsonObject, integer, number, seed, shown, whole};
use crate::error::GatewayError;

/// Maximum tokens that a request names, as the engine has it.
const MAX_TOKENS: usize = 1024;

/// The sampling parameters.
pub(super) fn parse(fields: &JsonObject) -> Result<Sampling, GatewayError> {
    let top_p = number(fields, "top_p", 0.0, 1.0)?.unwrap_or(1.0);
    // llama.cpp, LM Studio and Ollama have another name for it.
    let repetition = number(fields, "repetition_penalty", 0.01, 10.0)?;
    let repeat = number(fields, "repeat_penalty", 0.01, 10.0)?;
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
        logit_bias: logit_bias(fields.get("logit_bias"))?,
        min_tokens: integer(fields, "min_tokens", 0, i64::from(u32::MAX))?.unwrap_or(0) as u32,
        seed: seed(fields)?,
    })
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
        let token = id.parse::<u32>().map_err(|_| invalid(format!("{id:?} is no token id")))?;
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
        Some(Value::Array(ids)) if ids.len() <= MAX_TOKENS => {
            let ids = ids.iter().map(|id| whole(id).and_then(|id| u32::try_from(id).ok()));
            ids.collect::<Option<_>>().ok_or_else(invalid)
        }
        Some(_) => Err(invalid()),
    }
}
