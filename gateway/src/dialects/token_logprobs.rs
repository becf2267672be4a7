//! Log-probabilities of tokens, in the form that OpenAI's chats and Ollama share.

use russet_wire::event::{Logprobs, TokenLogprob};
use serde::Serialize;

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
