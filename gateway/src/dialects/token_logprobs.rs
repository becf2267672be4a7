//! Log-probabilities of tokens, in the form that OpenAI's chats and Ollama share; and those of prompts, as vLLM tells them.

use russet_wire::event::{Logprobs, PromptLogprobs, PromptToken, TokenLogprob};
use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

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
/// at most so many besides; null for the first. Written as it is: a tree of a long prompt's numbers takes a hundred times its
/// memory.
#[derive(Debug)]
pub(super) struct PromptLogprobsBody {
    pub(super) tokens: Vec<PromptToken>,
    pub(super) most: usize,
}

impl Serialize for PromptLogprobsBody {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.tokens.iter().map(|token| {
            let logprobs = token.logprobs.as_ref()?;
            Some(TokenCandidates { token, logprobs, most: self.most })
        }))
    }
}

/// The tokens that are probable in the place of one.
struct TokenCandidates<'a> {
    token: &'a PromptToken,
    logprobs: &'a PromptLogprobs,
    most: usize,
}

#[derive(Serialize)]
struct CandidateBody<'a> {
    logprob: f64,
    rank: usize,
    decoded_token: std::borrow::Cow<'a, str>,
}

impl Serialize for TokenCandidates<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self {
            token: PromptToken { id, bytes, .. },
            logprobs: PromptLogprobs { logprob, rank, top },
            most,
        } = self;
        let place = |bytes, logprob: f32, rank| CandidateBody {
            logprob: logprob.max(MIN_LOGPROB).into(),
            rank,
            decoded_token: String::from_utf8_lossy(bytes),
        };
        let mut places = serializer.serialize_map(None)?;
        places.serialize_entry(&id.to_string(), &place(bytes, *logprob, *rank as usize))?;
        for (index, other) in top.iter().take(*most).enumerate().filter(|(_, other)| other.id != *id) {
            places.serialize_entry(&other.id.to_string(), &place(&other.bytes, other.logprob, index + 1))?;
        }
        places.end()
    }
}
