//! Log-probabilities of tokens, in the form that OpenAI's chats and Ollama share; and those of prompts, as vLLM tells them.

use russet_wire::event::{Logprobs, PromptLogprobs, PromptToken, TokenLogprob};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// OpenAI's number for a token that is all but impossible; JSON has no infinity.
pub(super) const MIN_LOGPROB: f32 = -9999.0;

/// A token, and where it was sampled the most probable ones.
#[derive(Serialize)]
pub(super) struct TokenBody {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<TokenBody>>,
}

impl TokenBody {
    /// Those of sampled tokens.
    pub(super) fn list(logprobs: &[Logprobs]) -> Vec<Self> {
        logprobs.iter().map(|Logprobs { sampled, top }| Self::new(sampled, Some(top))).collect()
    }

    fn new(token: &TokenLogprob, top: Option<&[TokenLogprob]>) -> Self {
        Self {
            token: String::from_utf8_lossy(&token.bytes).into_owned(),
            logprob: token.logprob.max(MIN_LOGPROB),
            bytes: token.bytes.clone(),
            top_logprobs: top.map(|top| top.iter().map(|token| Self::new(token, None)).collect()),
        }
    }
}

/// vLLM's `prompt_logprobs`: for each token of the prompt the probable tokens in its place by their ids, itself among them,
/// at most so many besides; null for the first.
pub(super) fn prompt_logprobs(tokens: &[PromptToken], top: usize) -> Value {
    tokens.iter().map(|token| places(token, top)).collect()
}

fn places(PromptToken { id, bytes, logprobs }: &PromptToken, most: usize) -> Value {
    let Some(PromptLogprobs { logprob, rank, top }) = logprobs else { return Value::Null };
    let place = |bytes: &[u8], logprob: f32, rank: usize| {
        json!({
            "logprob": logprob.max(MIN_LOGPROB),
            "rank": rank,
            "decoded_token": String::from_utf8_lossy(bytes),
        })
    };
    let mut places = Map::from_iter([(id.to_string(), place(bytes, *logprob, *rank as usize))]);
    for (index, other) in top.iter().take(most).enumerate() {
        let new = || place(&other.bytes, other.logprob, index + 1);
        places.entry(other.id.to_string()).or_insert_with(new);
    }
    Value::Object(places)
}
