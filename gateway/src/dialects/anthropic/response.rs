//! Responses in Anthropic's format: a whole message, or its events in the order clients rely on. A stream has one open
//! block at most:
//!
//! ```text
//! message_start ─▶ (block_start ─▶ block_delta… ─▶ [signature_delta, if it is thinking] ─▶ block_stop)… ─▶ message_delta
//!                                                                                          ─▶ message_stop
//! ```

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use russet_wire::conversation::ToolCall;
use russet_wire::event::{Delta, FinishReason, Usage};

use super::body::{
    BlockBody, BlockDelta, MessageEnd, MessageEnvelope, MessageUsage, StreamEvent, input_text, raw_input,
};
use super::error::error_body;
use crate::dialects::sse::{self, named_event};
use crate::error::GatewayError;
use crate::request_id::RequestId;
use crate::serving::ResponseWriter;

/// The signature of every thought: clients send it back and nothing reads it. Anthropic's are in base64 too.
const SIGNATURE: &str = "cnVzc2V0";

/// Writes one response.
#[derive(Debug)]
pub(super) struct MessageWriter {
    /// `msg_…`.
    id: String,
    /// The model name the client used.
    model: String,
    /// The id that errors have.
    request_id: String,
    /// The request's `stop_sequences`, by the index that engines name.
    stop_sequences: Vec<String>,
    /// The index of the open block, or of the next one.
    index: usize,
    open: Option<OpenBlock>,
    has_calls: bool,
}

/// What the open block of a stream has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenBlock {
    Thinking,
    Text,
}

impl ResponseWriter for MessageWriter {
    const STREAM_TYPE: &'static str = sse::STREAM_TYPE;

    fn whole(self, choices: &[(Delta, FinishReason)], usage: Usage) -> Response {
        let content = choices.iter().flat_map(|(response, _)| blocks(response)).collect();
        let has_calls = choices.iter().any(|(response, _)| !response.tool_calls.is_empty());
        let end = choices.last().map(|(_, reason)| self.end(*reason, has_calls));
        Json(self.message(content, end.unwrap_or_default(), usage.into())).into_response()
    }

    fn start(&mut self, prompt_tokens: Option<u32>) -> Bytes {
        let mut out = Vec::new();
        // Which of them are cached is known at the end.
        let usage = Usage { prompt_tokens: prompt_tokens.unwrap_or_default(), ..Usage::default() };
        let message = self.message(Vec::new(), MessageEnd::default(), usage.into());
        StreamEvent::MessageStart { message }.write(&mut out);
        out.into()
    }

    fn delta(&mut self, _: usize, delta: &Delta) -> Bytes {
        let Delta { reasoning, text, tool_calls, logprobs: _ } = delta;
        let mut out = Vec::with_capacity(256);
        if !reasoning.is_empty() {
            self.add(&mut out, OpenBlock::Thinking, BlockDelta::Thinking { thinking: reasoning });
        }
        if !text.is_empty() {
            self.add(&mut out, OpenBlock::Text, BlockDelta::Text { text });
        }
        for call in tool_calls {
            self.add_call(&mut out, call);
        }
        out.into()
    }

    fn keep_alive(&mut self) -> Bytes {
        let mut out = Vec::new();
        StreamEvent::Ping.write(&mut out);
        out.into()
    }

    fn finish(&mut self, _: usize, reason: FinishReason, usage: Option<Usage>) -> Bytes {
        let mut out = Vec::new();
        self.close(&mut out);
        let delta = self.end(reason, self.has_calls);
        StreamEvent::MessageDelta { delta, usage: usage.unwrap_or_default().into() }.write(&mut out);
        StreamEvent::MessageStop.write(&mut out);
        out.into()
    }

    fn error(&mut self, error: &GatewayError) -> Bytes {
        let mut out = Vec::new();
        named_event(&mut out, "error", &error_body(error, &self.request_id));
        out.into()
    }
}

impl MessageWriter {
    /// The writer of the response to this request.
    pub(super) fn new(id: &RequestId, model: String, stop_sequences: Vec<String>) -> Self {
        let RequestId { unique, shown } = id;
        Self {
            id: format!("msg_{unique}"),
            model,
            request_id: shown.to_string(),
            stop_sequences,
            index: 0,
            open: None,
            has_calls: false,
        }
    }

    fn message<'a>(
        &'a self,
        content: Vec<BlockBody<'a>>,
        end: MessageEnd<'a>,
        usage: MessageUsage,
    ) -> MessageEnvelope<'a> {
        MessageEnvelope {
            id: &self.id,
            r#type: "message",
            role: "assistant",
            model: &self.model,
            content,
            end,
            usage,
        }
    }

    /// Why the message ended. Calls that came before a stop string are whole: a client has to answer them.
    fn end(&self, reason: FinishReason, has_calls: bool) -> MessageEnd<'_> {
        let stop_sequence = match reason {
            FinishReason::StopString(index) if !has_calls => self.stop_sequences.get(index as usize),
            _ => None,
        };
        let stop_reason = match reason {
            _ if stop_sequence.is_some() => "stop_sequence",
            FinishReason::Stop | FinishReason::StopString(_) if has_calls => "tool_use",
            FinishReason::Stop | FinishReason::StopString(_) => "end_turn",
            // Cancelled: nobody reads it, and it is not whole.
            FinishReason::Length | FinishReason::Cancelled => "max_tokens",
        };
        MessageEnd { stop_reason: Some(stop_reason), stop_sequence: stop_sequence.map(String::as_str) }
    }

    /// Adds to the open block if it is of this kind, else to a new one.
    fn add(&mut self, out: &mut Vec<u8>, kind: OpenBlock, delta: BlockDelta<'_>) {
        if self.open != Some(kind) {
            self.close(out);
            let content_block = match kind {
                OpenBlock::Thinking => BlockBody::Thinking { thinking: "", signature: "" },
                OpenBlock::Text => BlockBody::Text { text: "" },
            };
            StreamEvent::ContentBlockStart { index: self.index, content_block }.write(out);
            self.open = Some(kind);
        }
        StreamEvent::ContentBlockDelta { index: self.index, delta }.write(out);
    }

    /// A call is a block of its own, which is complete at once.
    fn add_call(&mut self, out: &mut Vec<u8>, call: &ToolCall) {
        self.close(out);
        self.has_calls = true;
        let ToolCall { id, name, arguments: _ } = call;
        let index = self.index;
        let content_block = BlockBody::ToolUse { id, name, input: raw_input("{}") };
        StreamEvent::ContentBlockStart { index, content_block }.write(out);
        let delta = BlockDelta::InputJson { partial_json: &input_text(call) };
        StreamEvent::ContentBlockDelta { index, delta }.write(out);
        StreamEvent::ContentBlockStop { index }.write(out);
        self.index += 1;
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        let Some(kind) = self.open.take() else { return };
        let index = self.index;
        if kind == OpenBlock::Thinking {
            let delta = BlockDelta::Signature { signature: SIGNATURE };
            StreamEvent::ContentBlockDelta { index, delta }.write(out);
        }
        StreamEvent::ContentBlockStop { index }.write(out);
        self.index += 1;
    }
}

/// The blocks of a whole response; none that is empty.
fn blocks(response: &Delta) -> Vec<BlockBody<'_>> {
    let Delta { reasoning, text, tool_calls, logprobs: _ } = response;
    let thinking = BlockBody::Thinking { thinking: reasoning, signature: SIGNATURE };
    let thinking = (!reasoning.is_empty()).then_some(thinking);
    let text = (!text.is_empty()).then_some(BlockBody::Text { text });
    let calls = tool_calls.iter().map(|call| {
        let input = raw_input(&input_text(call));
        BlockBody::ToolUse { id: &call.id, name: &call.name, input }
    });
    thinking.into_iter().chain(text).chain(calls).collect()
}

#[cfg(test)]
mod tests;
