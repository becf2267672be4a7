//! What a response is made of: a message with its blocks and usage, and the events of a stream. Every event has its type
//! as its name too: Anthropic's SDKs skip events without one.

use std::borrow::Cow;

use russet_wire::conversation::ToolCall;
use russet_wire::event::Usage;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::dialects::sse::named_event;

/// A message, whole or as it begins.
#[derive(Serialize)]
pub(super) struct MessageEnvelope<'a> {
    pub(super) id: &'a str,
    pub(super) r#type: &'static str,
    pub(super) role: &'static str,
    pub(super) model: &'a str,
    pub(super) content: Vec<BlockBody<'a>>,
    /// Nulls until it is known.
    #[serde(flatten)]
    pub(super) end: MessageEnd<'a>,
    pub(super) usage: MessageUsage,
}

/// A block of content, whole or as it begins.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum BlockBody<'a> {
    Thinking { thinking: &'a str, signature: &'static str },
    Text { text: &'a str },
    ToolUse { id: &'a str, name: &'a str, input: Box<RawValue> },
}

/// Tokens of a request. Those of the prompt that were cached are not among the input tokens.
#[derive(Default, Serialize)]
pub(super) struct MessageUsage {
    input_tokens: u32,
    /// What is written to the cache is not counted: it costs nothing.
    cache_creation_input_tokens: u32,
    cache_read_input_tokens: u32,
    output_tokens: u32,
}

impl From<Usage> for MessageUsage {
    fn from(usage: Usage) -> Self {
        let Usage { prompt_tokens, completion_tokens, cached_tokens } = usage;
        Self {
            input_tokens: prompt_tokens.saturating_sub(cached_tokens),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: cached_tokens,
            output_tokens: completion_tokens,
        }
    }
}

/// An event of a stream.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum StreamEvent<'a> {
    MessageStart { message: MessageEnvelope<'a> },
    ContentBlockStart { index: usize, content_block: BlockBody<'a> },
    ContentBlockDelta { index: usize, delta: BlockDelta<'a> },
    ContentBlockStop { index: usize },
    MessageDelta { delta: MessageEnd<'a>, usage: MessageUsage },
    MessageStop,
    Ping,
}

/// What is added to a block.
#[derive(Serialize)]
#[serde(tag = "type")]
pub(super) enum BlockDelta<'a> {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: &'a str },
    #[serde(rename = "signature_delta")]
    Signature { signature: &'static str },
    #[serde(rename = "text_delta")]
    Text { text: &'a str },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: &'a str },
}

/// Why a message ended.
#[derive(Default, Serialize)]
pub(super) struct MessageEnd<'a> {
    pub(super) stop_reason: Option<&'static str>,
    /// The one of the request's `stop_sequences` that the text reached.
    pub(super) stop_sequence: Option<&'a str>,
}

impl StreamEvent<'_> {
    /// Appends the event.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let name = match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
            Self::Ping => "ping",
        };
        named_event(out, name, self);
    }
}

/// JSON text of a call's input, which is an object. Engines write objects; any other text becomes a field of one, so that
/// no client fails to read the response.
pub(super) fn input_text(call: &ToolCall) -> Cow<'_, str> {
    let text = call.arguments.trim();
    let is_object = text.starts_with('{') && serde_json::from_str::<&RawValue>(text).is_ok();
    match text {
        "" => Cow::Borrowed("{}"),
        text if is_object => Cow::Borrowed(text),
        text => Cow::Owned(serde_json::json!({"arguments": Value::from(text)}).to_string()),
    }
}

/// Such a text as it is.
pub(super) fn raw_input(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_input_is_an_object_whatever_the_model_wrote() {
        for (arguments, expected) in [
            ("{}", "{}"),
            (r#" {"z": 1.0, "a": [2]} "#, r#"{"z": 1.0, "a": [2]}"#),
            ("", "{}"),
            ("7", r#"{"arguments":"7"}"#),
            (r#"{"a": "#, r#"{"arguments":"{\"a\":"}"#),
        ] {
            let call = ToolCall { arguments: arguments.into(), ..ToolCall::default() };
            let text = input_text(&call);
            assert_eq!(text, expected);
            assert_eq!(raw_input(&text).get(), expected);
        }
    }

    #[test]
    fn cached_tokens_are_not_among_the_input_tokens() {
        for (prompt_tokens, cached_tokens, input) in [(7, 2, 5), (7, 0, 7), (7, 7, 0), (7, 9, 0)] {
            let usage = MessageUsage::from(Usage { prompt_tokens, completion_tokens: 3, cached_tokens });
            let MessageUsage {
                input_tokens,
                cache_creation_input_tokens,
                cache_read_input_tokens,
                output_tokens,
            } = usage;
            assert_eq!(
                (input_tokens, cache_creation_input_tokens, cache_read_input_tokens, output_tokens),
                (input, 0, cached_tokens, 3)
            );
        }
    }
}
