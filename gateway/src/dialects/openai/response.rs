//! Responses in OpenAI's format: a complete `chat.completion`, or chunks as server-sent events in the order
//! clients rely on: role, texts, finish reason, usage if requested, `[DONE]`. Every token is a chunk, so
//! chunks are serialised directly, without an intermediate `Value`.

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use russet_wire::event::{FinishReason, Usage};
use serde::Serialize;
use serde_json::{Value, json};

use super::error::error_body;
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
    index: u32,
    delta: Delta<'a>,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

#[derive(Serialize)]
struct UsageBody {
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
    const STREAM_TYPE: &'static str = "text/event-stream; charset=utf-8";

    fn whole(self, text: &str, reason: FinishReason, usage: Usage) -> Response {
        Json(self.body(text, reason, usage)).into_response()
    }

    fn start(&mut self) -> Bytes {
        self.choice(Delta { role: Some("assistant"), content: Some("") }, None).into()
    }

    fn text(&mut self, text: &str) -> Bytes {
        self.choice(Delta { role: None, content: Some(text) }, None).into()
    }

    fn keep_alive(&mut self) -> Bytes {
        Bytes::from_static(b": still working\n\n")
    }

    fn finish(&mut self, reason: FinishReason, usage: Usage) -> Bytes {
        let mut out = self.choice(Delta::default(), Some(reason));
        if self.include_usage {
            self.chunk(&mut out, &[], Some(usage));
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
        out.into()
    }

    fn error(&mut self, error: &GatewayError) -> Bytes {
        // SDKs raise on an `error` key.
        let mut out = Vec::new();
        sse_event(&mut out, &error_body(error));
        out.into()
    }
}

impl ChatWriter {
    /// The body of a response that is not streamed.
    fn body(&self, text: &str, reason: FinishReason, usage: Usage) -> Value {
        let mut body = json!({
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [{
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": null},
                "logprobs": null,
                "finish_reason": reason.as_str(),
            }],
            "usage": UsageBody::from(usage),
        });
        if let Some(tier) = self.service_tier {
            body["service_tier"] = tier.into();
        }
        body
    }

    /// A chunk with one choice.
    fn choice(&self, delta: Delta<'_>, reason: Option<FinishReason>) -> Vec<u8> {
        let mut out = Vec::with_capacity(512);
        let finish_reason = reason.map(FinishReason::as_str);
        self.chunk(&mut out, &[ChunkChoice { index: 0, delta, logprobs: None, finish_reason }], None);
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

/// One server-sent event. JSON text has no line breaks, so one `data:` line holds it.
fn sse_event(out: &mut Vec<u8>, value: &impl Serialize) {
    out.extend_from_slice(b"data: ");
    // Only strings, numbers and null: serialising them into memory cannot fail.
    let _ = serde_json::to_writer(&mut *out, value);
    out.extend_from_slice(b"\n\n");
}
