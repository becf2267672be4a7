//! Responses in OpenAI's format: a complete `chat.completion`, or chunks as server-sent events in the order
//! clients rely on: role, texts, finish reason, usage if requested, `[DONE]`. All of them are serialised directly, without an
//! intermediate `Value`.

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use russet_wire::conversation::ToolCall;
use russet_wire::event::{Delta, FinishReason, Logprobs, PromptToken, Usage};
use serde::Serialize;

use super::error::error_body;
use crate::dialects::sse::{self, KEEP_ALIVE, sse_event};
use crate::dialects::token_logprobs::{PromptLogprobsBody, TokenBody};
use crate::error::GatewayError;
use crate::serving::ResponseWriter;

/// Writes one response: the fields that all its chunks repeat.
#[derive(Debug, PartialEq)]
pub(super) struct ChatWriter {
    /// `chatcmpl-…`.
    pub(super) id: String,
    /// Seconds since 1970.
    pub(super) created: u64,
    /// The model name the client used.
    pub(super) model: String,
    /// Whether the client requested the usage chunk; simple clients break on it.
    pub(super) include_usage: bool,
    /// The service tier in OpenAI's word, if the client set one.
    pub(super) service_tier: Option<&'static str>,
    /// Calls of tools so far, for each choice.
    pub(super) tool_calls: Vec<usize>,
    /// The tokens of the prompt, which all choices have, where they are told.
    pub(super) prompt: Option<Vec<PromptToken>>,
}

#[derive(Serialize)]
struct ChunkBody<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [ChunkChoice<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    service_tier: Option<&'static str>,
    /// Absent unless the client requested it, and null until it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    delta: ChunkDelta<'a>,
    logprobs: Option<LogprobsBody>,
    finish_reason: Option<&'static str>,
}

/// A response that is not streamed.
#[derive(Serialize)]
struct WholeBody<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<WholeChoice<'a>>,
    usage: UsageBody,
    #[serde(skip_serializing_if = "Option::is_none")]
    service_tier: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobsBody>,
}

#[derive(Serialize)]
struct WholeChoice<'a> {
    index: usize,
    message: MessageBody<'a>,
    logprobs: Option<LogprobsBody>,
    finish_reason: &'static str,
}

/// Log-probabilities of the tokens of a response, thinking and calls among them.
#[derive(Serialize)]
struct LogprobsBody {
    content: Vec<TokenBody>,
    refusal: Option<()>,
}

impl LogprobsBody {
    /// `None` where the request asks for none.
    fn new(logprobs: &[Logprobs]) -> Option<Self> {
        let content = TokenBody::list(logprobs);
        (!content.is_empty()).then_some(Self { content, refusal: None })
    }
}

/// What ends a stream that is complete.
pub(super) const STREAM_END: &[u8] = b"data: [DONE]\n\n";

#[derive(Default, Serialize)]
struct ChunkDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(flatten)]
    reasoning: ReasoningBody<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCallBody<'a>>,
}

/// Thinking, under both names by which clients look for it.
#[derive(Default, Serialize)]
struct ReasoningBody<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
}

impl<'a> ReasoningBody<'a> {
    fn new(text: &'a str) -> Self {
        let text = (!text.is_empty()).then_some(text);
        Self { reasoning_content: text, reasoning: text }
    }
}

#[derive(Serialize)]
struct ToolCallBody<'a> {
    /// In a stream: which call it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    id: &'a str,
    r#type: &'static str,
    function: FunctionBody<'a>,
}

#[derive(Serialize)]
struct FunctionBody<'a> {
    name: &'a str,
    arguments: &'a str,
}

impl<'a> ToolCallBody<'a> {
    fn new(index: Option<usize>, call: &'a ToolCall) -> Self {
        let ToolCall { id, name, arguments } = call;
        Self { index, id, r#type: "function", function: FunctionBody { name, arguments } }
    }
}

/// The message of a response that is not streamed.
#[derive(Serialize)]
struct MessageBody<'a> {
    role: &'static str,
    /// Null where there are calls alone.
    content: Option<&'a str>,
    refusal: Option<()>,
    #[serde(flatten)]
    reasoning: ReasoningBody<'a>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCallBody<'a>>,
}

/// Tokens of a request.
#[derive(Serialize)]
pub(super) struct UsageBody {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u64,
    prompt_tokens_details: PromptDetails,
}

#[derive(Serialize)]
struct PromptDetails {
    cached_tokens: u32,
}

impl From<Usage> for UsageBody {
    fn from(usage: Usage) -> Self {
        let Usage { prompt_tokens, completion_tokens, cached_tokens } = usage;
        let total_tokens = u64::from(prompt_tokens) + u64::from(completion_tokens);
        let prompt_tokens_details = PromptDetails { cached_tokens };
        Self { prompt_tokens, completion_tokens, total_tokens, prompt_tokens_details }
    }
}

impl ResponseWriter for ChatWriter {
    const STREAM_TYPE: &'static str = sse::STREAM_TYPE;

    fn observe_prompt(&mut self, _: usize, tokens: Vec<PromptToken>) {
        self.prompt = Some(tokens);
    }

    fn whole(mut self, choices: &[(Delta, FinishReason)], usage: Usage) -> Response {
        let prompt = self.prompt.take();
        let prompt_logprobs = prompt.map(|tokens| PromptLogprobsBody { tokens, most: usize::MAX });
        Json(WholeBody { prompt_logprobs, ..self.body(choices, usage) }).into_response()
    }

    fn start(&mut self, _: Option<u32>) -> Bytes {
        let chunks = (0..self.tool_calls.len()).map(|choice| {
            let delta = ChunkDelta { role: Some("assistant"), content: Some(""), ..ChunkDelta::default() };
            self.choice(choice, delta, None, None)
        });
        chunks.collect::<Vec<_>>().concat().into()
    }

    fn delta(&mut self, choice: usize, delta: &Delta) -> Bytes {
        let Delta { reasoning, text, tool_calls, logprobs } = delta;
        let first = self.tool_calls.get(choice).copied().unwrap_or_default();
        if let Some(calls) = self.tool_calls.get_mut(choice) {
            *calls += tool_calls.len();
        }
        let calls = tool_calls.iter().zip(first..).map(|(call, index)| ToolCallBody::new(Some(index), call));
        let delta = ChunkDelta {
            role: None,
            reasoning: ReasoningBody::new(reasoning),
            content: (!text.is_empty()).then_some(text),
            tool_calls: calls.collect(),
        };
        self.choice(choice, delta, LogprobsBody::new(logprobs), None).into()
    }

    fn keep_alive(&mut self) -> Bytes {
        Bytes::from_static(KEEP_ALIVE)
    }

    fn finish(&mut self, choice: usize, reason: FinishReason, usage: Option<Usage>) -> Bytes {
        let reason = finish_reason(reason, self.tool_calls.get(choice).copied().unwrap_or_default());
        let mut out = self.choice(choice, ChunkDelta::default(), None, Some(reason));
        if let Some(usage) = usage {
            if self.include_usage {
                self.chunk(&mut out, &[], Some(usage));
            }
            out.extend_from_slice(STREAM_END);
        }
        out.into()
    }

    fn error(&mut self, error: &GatewayError) -> Bytes {
        error_event(error)
    }
}

impl ChatWriter {
    /// The body of a response that is not streamed, without the tokens of its prompt.
    fn body<'a>(&'a self, choices: &'a [(Delta, FinishReason)], usage: Usage) -> WholeBody<'a> {
        let choices = choices.iter().enumerate().map(|(index, (response, reason))| {
            let Delta { reasoning, text, tool_calls, logprobs } = response;
            let message = MessageBody {
                role: "assistant",
                content: (!text.is_empty() || tool_calls.is_empty()).then_some(text),
                refusal: None,
                reasoning: ReasoningBody::new(reasoning),
                tool_calls: tool_calls.iter().map(|call| ToolCallBody::new(None, call)).collect(),
            };
            let finish_reason = finish_reason(*reason, tool_calls.len());
            WholeChoice { index, message, logprobs: LogprobsBody::new(logprobs), finish_reason }
        });
        WholeBody {
            id: &self.id,
            object: "chat.completion",
            created: self.created,
            model: &self.model,
            choices: choices.collect(),
            usage: usage.into(),
            service_tier: self.service_tier,
            prompt_logprobs: None,
        }
    }

    /// A chunk with one choice.
    fn choice(
        &self,
        index: usize,
        delta: ChunkDelta<'_>,
        logprobs: Option<LogprobsBody>,
        finish_reason: Option<&'static str>,
    ) -> Vec<u8> {
        let mut out = Vec::with_capacity(512);
        self.chunk(&mut out, &[ChunkChoice { index, delta, logprobs, finish_reason }], None);
        out
    }

    fn chunk(&self, out: &mut Vec<u8>, choices: &[ChunkChoice<'_>], usage: Option<Usage>) {
        let chunk = ChunkBody {
            id: &self.id,
            object: "chat.completion.chunk",
            created: self.created,
            model: &self.model,
            choices,
            service_tier: self.service_tier,
            usage: self.include_usage.then(|| usage.map(UsageBody::from)),
        };
        sse_event(out, &chunk);
    }
}

/// Why a response ended: agents call the tools only where it says so.
fn finish_reason(reason: FinishReason, tool_calls: usize) -> &'static str {
    match reason {
        reason if reason.is_stop() && tool_calls > 0 => "tool_calls",
        reason => reason.as_str(),
    }
}

/// The event of an error in the middle of a stream: SDKs raise on an `error` key.
pub(super) fn error_event(error: &GatewayError) -> Bytes {
    let mut out = Vec::new();
    sse_event(&mut out, &error_body(error));
    out.into()
}
