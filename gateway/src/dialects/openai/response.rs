//! Answers in OpenAI's words: a whole `chat.completion`, or chunks as server-sent events in the order
//! clients rely on: role, texts, finish reason, usage if asked for, `[DONE]`. A chunk is written for
//! every token, so it is written straight from what is known, without a tree of values in between.

use bytes::Bytes;
use russet_wire::event::{FinishReason, Usage};
use serde::Serialize;
use serde_json::{Value, json};

use super::error_body;
use crate::dispatch::{StreamItem, ResponseChunk};

/// What every part of one answer repeats.
pub(super) struct ResponseWriter {
    /// `chatcmpl-…`.
    pub(super) id: String,
    /// Seconds since 1970.
    pub(super) created: u64,
    /// The name the client used.
    pub(super) model: String,
    /// Whether the client asked for the usage chunk; simple clients break on it.
    pub(super) include_usage: bool,
    /// OpenAI's word for when it had its turn, if the client asked in such words.
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
    /// Absent unless the client asked for it, and null until it is known.
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
    /// The complete answer of a request that is not streamed.
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

    /// The events that say `item`.
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
            // The status went out long ago; an `error` key is what SDKs raise on.
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

/// One server-sent event. JSON text holds no line break, so one `data:` line carries it.
fn sse_event(out: &mut Vec<u8>, value: &impl Serialize) {
    out.extend_from_slice(b"data: ");
    // Texts, numbers and nothing: writing them into memory cannot fail.
    let _ = serde_json::to_writer(&mut *out, value);
    out.extend_from_slice(b"\n\n");
}
