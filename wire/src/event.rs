//! Events of a generation stream, in order: `Started`, where the request asks for the prompt's tokens any number of
//! `Prompt`, any number of `Token`, then exactly one `Finished` or a typed [`GenerationFailure`]. A stream that ends in any other way is a bug (invariant 10).

use serde::{Deserialize, Serialize};

use crate::conversation::ToolCall;

/// Why a response ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// The model emitted an end-of-sequence token, or its last tool call or structured output was complete.
    Stop,
    /// The text reached a stop string: the one with this index in the request's `stop`.
    StopString(u32),
    /// `max_tokens` or the context length was reached.
    Length,
    /// The client disconnected or cancelled.
    Cancelled,
}

impl FinishReason {
    /// Whether the model or a stop string ended it, so that it is whole.
    pub fn is_stop(self) -> bool {
        matches!(self, Self::Stop | Self::StopString(_))
    }

    /// The word in OpenAI's API and the engine's metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop | Self::StopString(_) => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Token counts of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the rendered prompt.
    pub prompt_tokens: u32,
    /// Tokens of the whole response, whichever engines generated them, without the end-of-sequence token.
    pub completion_tokens: u32,
    /// Prompt tokens found in the prefix cache and not prefilled again.
    #[serde(default)]
    pub cached_tokens: u32,
}

/// Class of a failure, so that a gateway knows whether to retry elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureKind {
    /// The request itself is invalid (too long, unknown role); no other group would accept it.
    InvalidRequest,
    /// The prompt, or the prompt with room for the response, is longer than the context or the KV cache. Clients
    /// shorten their history when they are told so.
    ContextLengthExceeded,
    /// No capacity now; the same request may succeed later or elsewhere.
    Overloaded,
    /// The engine or a peer rank is lost; the group is being re-formed.
    Unavailable,
    /// The client's deadline has passed, or passes before a response is possible.
    DeadlineExceeded,
    /// A bug in Russet.
    Internal,
}

/// A failure with its message for users.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GenerationFailure {
    /// Class of the failure.
    pub kind: FailureKind,
    /// Object, numbers and remedy.
    pub message: String,
}

/// A token and its log-probability.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// Its id.
    pub id: u32,
    /// Its bytes, which may be a part of a character; of a special token those of its name.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// The log-probabilities of a token of the response.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Logprobs {
    /// The sampled token.
    pub sampled: TokenLogprob,
    /// The most probable tokens, the first one first.
    pub top: Vec<TokenLogprob>,
}

/// A token of the prompt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PromptToken {
    /// Its id.
    pub id: u32,
    /// Its bytes, as in [`TokenLogprob`].
    pub bytes: Vec<u8>,
    /// Where the request asks for them; the first token has none, as nothing stands before it.
    pub logprobs: Option<PromptLogprobs>,
}

/// The log-probabilities of a token of the prompt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PromptLogprobs {
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// Its place among all tokens by their probability, from 1 on.
    pub rank: u32,
    /// The most probable tokens in its place, the first one first.
    pub top: Vec<TokenLogprob>,
}

/// What a token adds to a response, in this order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Delta {
    /// Thinking; never splits a character.
    pub reasoning: String,
    /// Text; never splits a character.
    pub text: String,
    /// Calls of tools, each told once and whole.
    pub tool_calls: Vec<ToolCall>,
    /// Of its tokens, where the request asks for them.
    #[serde(default)]
    pub logprobs: Vec<Logprobs>,
}

impl Delta {
    /// Text alone.
    pub fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), ..Self::default() }
    }

    /// Appends what comes after it.
    pub fn append(&mut self, next: Self) {
        let Self { reasoning, text, tool_calls, logprobs } = next;
        self.reasoning.push_str(&reasoning);
        self.text.push_str(&text);
        self.tool_calls.extend(tool_calls);
        self.logprobs.extend(logprobs);
    }

    /// Whether nothing is added.
    pub fn is_empty(&self) -> bool {
        let Self { reasoning, text, tool_calls, logprobs } = self;
        reasoning.is_empty() && text.is_empty() && tool_calls.is_empty() && logprobs.is_empty()
    }
}

/// One event of a generation stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum GenerationEvent {
    /// The request was admitted.
    Started {
        /// Tokens of the rendered prompt.
        prompt_tokens: u32,
        /// Number of emitted tokens that the response resumes after: all of the request's, unless the engine
        /// is of a release without resume and starts again.
        emitted_tokens: u32,
    },
    /// The next tokens of the prompt. None of them comes after a token of the response.
    Prompt {
        /// They, in order.
        tokens: Vec<PromptToken>,
    },
    /// A token was sampled. Its event may carry the text of several tokens, or none yet of a token
    /// whose bytes are still incomplete.
    Token {
        /// The sampled token's id. There is one event per token, except for an end token without text.
        id: u32,
        /// What it adds.
        delta: Delta,
    },
    /// The response is complete.
    Finished {
        /// Why it ended.
        reason: FinishReason,
        /// Token counts.
        usage: Usage,
    },
    /// The response cannot be completed.
    Failed(GenerationFailure),
}

/// An event as an engine sends it, with what the request has taken of the engine up to it.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineEvent {
    /// The event.
    pub event: GenerationEvent,
    /// Microseconds that its group has computed for the request; none from engines that do not count them.
    pub engine_microseconds: Option<u64>,
}
