//! Log-probabilities, and the tokens of a prompt, between the protos and [`russet_wire::event`]. Destructured whole, so that no
//! field is lost.

use russet_wire::event::{Logprobs, PromptLogprobs, PromptToken, TokenLogprob};

use super::conversation::all;
use crate::engine as pb;

impl From<Logprobs> for pb::Logprobs {
    fn from(logprobs: Logprobs) -> Self {
        let Logprobs { sampled, top } = logprobs;
        Self { sampled: Some(sampled.into()), top: all(top) }
    }
}

impl From<pb::Logprobs> for Logprobs {
    fn from(logprobs: pb::Logprobs) -> Self {
        let pb::Logprobs { sampled, top } = logprobs;
        Self { sampled: sampled.map(TokenLogprob::from).unwrap_or_default(), top: all(top) }
    }
}

impl From<TokenLogprob> for pb::TokenLogprob {
    fn from(token: TokenLogprob) -> Self {
        let TokenLogprob { id, bytes, logprob } = token;
        Self { id, bytes, logprob }
    }
}

impl From<pb::TokenLogprob> for TokenLogprob {
    fn from(token: pb::TokenLogprob) -> Self {
        let pb::TokenLogprob { id, bytes, logprob } = token;
        Self { id, bytes, logprob }
    }
}

impl From<PromptToken> for pb::PromptToken {
    fn from(token: PromptToken) -> Self {
        let PromptToken { id, bytes, logprobs } = token;
        Self { id, bytes, logprobs: logprobs.map(pb::PromptLogprobs::from) }
    }
}

impl From<pb::PromptToken> for PromptToken {
    fn from(token: pb::PromptToken) -> Self {
        let pb::PromptToken { id, bytes, logprobs } = token;
        Self { id, bytes, logprobs: logprobs.map(PromptLogprobs::from) }
    }
}

impl From<PromptLogprobs> for pb::PromptLogprobs {
    fn from(logprobs: PromptLogprobs) -> Self {
        let PromptLogprobs { logprob, rank, top } = logprobs;
        Self { logprob, rank, top: all(top) }
    }
}

impl From<pb::PromptLogprobs> for PromptLogprobs {
    fn from(logprobs: pb::PromptLogprobs) -> Self {
        let pb::PromptLogprobs { logprob, rank, top } = logprobs;
        Self { logprob, rank, top: all(top) }
    }
}
