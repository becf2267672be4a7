//! What a running request sends back, in order: `Started`, any number of `Token`, then exactly
//! one `Finished` or a typed [`Failure`]. A stream that ends in any other way is a bug
//! (invariant 10).

use serde::{Deserialize, Serialize};

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// The model ended its turn or a stop text was met.
    Stop,
    /// `max_tokens` or the context length was reached.
    Length,
    /// The caller went away or asked to stop.
    Cancelled,
}

impl FinishReason {
    /// The word OpenAI's API and the engine's metrics use.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Tokens counted for one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the rendered prompt.
    pub prompt_tokens: u32,
    /// Tokens of the whole answer, whoever generated them; the end-of-sequence token is not counted.
    pub completion_tokens: u32,
    /// Tokens of the prompt that were kept of earlier requests and not read again.
    #[serde(default)]
    pub cached_tokens: u32,
}

/// Why a request failed, typed so that a gateway knows whether to try elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureKind {
    /// The request itself is wrong (too long, unknown role); no other group would take it.
    InvalidRequest,
    /// No room now; the same request may succeed later or elsewhere.
    Overloaded,
    /// The engine or a peer rank is gone; the group is being re-formed.
    Unavailable,
    /// The caller's deadline passed, or passes before there could be an answer.
    DeadlineExceeded,
    /// A fault of ours.
    Internal,
}

/// One failure with the message a person sees.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GenerationFailure {
    /// The class of the failure.
    pub kind: FailureKind,
    /// What happened, to what, with the numbers, and what to do.
    pub message: String,
}

/// One event of a running request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GenerationEvent {
    /// The request was admitted.
    Started {
        /// Tokens of the rendered prompt.
        prompt_tokens: u32,
        /// Tokens of the answer it goes on after: as many as the request holds, unless the engine is of a release
        /// that does not know of them and begins anew.
        emitted_tokens: u32,
    },
    /// A token was chosen. Its event may carry the text of several tokens, or none yet of a token
    /// whose bytes are still incomplete.
    Token {
        /// The id the model chose; there is one event a token, but for an end that has nothing to tell.
        id: u32,
        /// Text to append; never splits a character.
        text: String,
    },
    /// The answer is complete.
    Finished {
        /// Why it ended.
        reason: FinishReason,
        /// What it cost.
        usage: Usage,
    },
    /// The answer cannot be completed.
    Failed(GenerationFailure),
}
