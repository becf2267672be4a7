//! Responses in OpenAI's format: a complete `chat.completion`, or chunks as server-sent events in the order
//! clients rely on: role, texts, finish reason, usage if requested, `[DONE]`. Every token is a chunk, so
//! chunks are serialised directly, without an intermediate `Value`.

use bytes::Bytes;
use russet_wire::event::{FinishReason, Usage};
use serde::Serialize;
use serde_json::{Value, json};

use super::error_body;
use crate::dispatch::{ResponseChunk, StreamItem};

/// The fields that all chunks of one response repeat.
pub(super) struct ResponseWriter {
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

impl ResponseWriter {
    /// The complete body of a response that is not streamed.
    pub(super) fn body(&self, text: &str, reason: FinishReason, usage: Usage) -> Value {
        let mut answer = json!({
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
            answer["service_tier"] = tier.into();
        }
        answer
    }

    /// The server-sent events of `item`.
    pub(super) fn event(&self, item: StreamItem) -> Bytes {
        let mut out = Vec::with_capacity(512);
        match item {
            StreamItem::Started => {
                self.choice(&mut out, Delta { role: Some("assistant"), content: Some("") }, None);
            }
            StreamItem::KeepAlive => return Bytes::from_static(b": still working\n\n"),
            StreamItem::Chunk(ResponseChunk::Text(text)) => {
                self.choice(&mut out, Delta { role: None, content: Some(&text) }, None);
            }
            StreamItem::Chunk(ResponseChunk::End { reason, usage }) => {
                self.choice(&mut out, Delta::default(), Some(reason));
                if self.include_usage {
                    self.chunk(&mut out, &[], Some(usage));
                }
                out.extend_from_slice(b"data: [DONE]\n\n");
            }
            // The HTTP status was sent long ago; SDKs raise on an `error` key.
            StreamItem::Error(refusal) => sse_event(&mut out, &error_body(&refusal)),
        }
        out.into()
    }

    fn choice(&self, out: &mut Vec<u8>, delta: Delta<'_>, reason: Option<FinishReason>) {
        let finish_reason = reason.map(FinishReason::as_str);
        self.chunk(out, &[ChunkChoice { index: 0, delta, logprobs: None, finish_reason }], None);
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
