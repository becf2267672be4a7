//! Answers in OpenAI's words: a whole `chat.completion`, or chunks as server-sent events in the order
//! clients rely on: role, texts, finish reason, usage if asked for, `[DONE]`.

use bytes::Bytes;
use russet_wire::event::{FinishReason, Usage};
use serde_json::{Value, json};

use super::error_body;
use crate::stream::{Item, Piece};

/// What every part of one answer repeats.
pub(super) struct Voice {
    /// `chatcmpl-…`.
    pub(super) id: String,
    /// Seconds since 1970.
    pub(super) created: u64,
    /// The name the client used.
    pub(super) model: String,
    /// Whether the client asked for the usage chunk; simple clients break on it.
    pub(super) include_usage: bool,
}

impl Voice {
    /// The complete answer of a request that is not streamed.
    pub(super) fn whole(&self, text: &str, reason: FinishReason, usage: Usage) -> Value {
        json!({
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
            "usage": usage_body(usage),
        })
    }

    /// The events that say `item`.
    pub(super) fn say(&self, item: Item) -> Bytes {
        match item {
            Item::Opened => event(&self.chunk(json!({"role": "assistant", "content": ""}), None)),
            Item::Idle => Bytes::from_static(b": still working\n\n"),
            Item::Piece(Piece::Text(text)) => event(&self.chunk(json!({"content": text}), None)),
            Item::Piece(Piece::End { reason, usage }) => {
                let mut bytes = event(&self.chunk(json!({}), Some(reason))).to_vec();
                if self.include_usage {
                    let mut last = self.chunk(json!({}), None);
                    last["choices"] = json!([]);
                    last["usage"] = usage_body(usage);
                    bytes.extend_from_slice(&event(&last));
                }
                bytes.extend_from_slice(b"data: [DONE]\n\n");
                bytes.into()
            }
            // The status went out long ago; an `error` key is what SDKs raise on.
            Item::Failed(refusal) => event(&error_body(&refusal)),
        }
    }

    fn chunk(&self, delta: Value, reason: Option<FinishReason>) -> Value {
        let mut chunk = json!({
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": [{
                "index": 0,
                "delta": delta,
                "logprobs": null,
                "finish_reason": reason.map(FinishReason::as_str),
            }],
        });
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

fn usage_body(usage: Usage) -> Value {
    let Usage { prompt_tokens, completion_tokens } = usage;
    json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": u64::from(prompt_tokens) + u64::from(completion_tokens),
    })
}

/// One server-sent event. JSON text holds no line break, so one `data:` line carries it.
fn event(value: &Value) -> Bytes {
    format!("data: {value}\n\n").into()
}
