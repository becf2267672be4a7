//! `POST /v1/responses/compact`: the model sums a conversation up, and the client goes on with the summary in place of the
//! conversation. Nothing is kept for it. The summary is opaque to clients, and no secret: it is encoded and not encrypted.

use std::collections::BTreeSet;

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use russet_wire::conversation::Message;
use russet_wire::event::{Delta, FinishReason, Usage};
use russet_wire::request::{ContextOverflow, GenerationRequest};
use serde_json::{Value, json};

use super::input;
use super::response::UsageBody;
use super::stored::{Conversation, StorageFields};
use crate::body_budget::BodyPermit;
use crate::dialects::field_table::listed;
use crate::dialects::openai::error::error_body;
use crate::dialects::openai::request::parameters;
use crate::dialects::{http_error, sampling, sse, values};
use crate::error::{ErrorKind, GatewayError};
use crate::json_body::JsonBody;
use crate::serving::{ParsedRequest, RequestContext, ResponseWriter};

/// What the model is told to do.
const REQUEST: &str = "This conversation is about to be cut off: you will go on with your next message alone. Write down everything that you need for that: what the user wants and does not want, what was done, found and decided, with the names, paths, numbers and quotations that matter, and what is left to do. Call no tools, and write nothing else.";
/// What the model reads before the summary.
const PREFACE: &str = "What I wrote down before the conversation up to here was cut off:\n\n";
/// Texts of the user that are handed back beside the summary, the newest ones, in bytes.
const MAX_USER_BYTES: usize = 64 << 10;

/// Parses a request within the caller's limits.
pub(in crate::dialects::openai) fn parse(
    mut body: JsonBody<'_>,
    context: &RequestContext<'_>,
) -> Result<ParsedRequest<CompactionWriter>, GatewayError> {
    const READ: [&str; 4] = ["model", "input", "instructions", "previous_response_id"];
    let mut fields = values::fields(&mut body)?;
    let model = values::model(&fields)?;
    let mut left_out: BTreeSet<String> =
        fields.keys().filter(|name| !READ.contains(&name.as_str())).cloned().collect();
    fields.retain(|name, _| READ.contains(&name.as_str()));
    let instructions = super::request::instructions(fields.remove("instructions"))?;
    let conversation = StorageFields::parse(&fields, context.kept, &mut left_out)?.conversation()?;
    let earlier = conversation.as_ref().map(Conversation::items).into_iter().flatten();
    let input = match fields.remove("input") {
        // The kept conversation may be all of it.
        None if conversation.is_some() => json!([{"role": "user", "content": REQUEST}]),
        None => return Err(GatewayError::field("input", "`input` is missing")),
        Some(Value::String(text)) => {
            json!([{"role": "user", "content": text}, {"role": "user", "content": REQUEST}])
        }
        Some(Value::Array(mut items)) if !items.is_empty() || conversation.is_some() => {
            items.push(json!({"role": "user", "content": REQUEST}));
            items.into()
        }
        Some(other) => other,
    };
    let messages = input::parse(instructions.as_deref(), earlier, Some(input), &mut left_out)?;
    let writer = CompactionWriter {
        id: context.id.unique.to_string(),
        created_at: context.unix_seconds,
        user_texts: newest_user_texts(&messages),
        reasoning_tokens: 0,
        _inherited: conversation.map(Conversation::into_permit),
    };
    let request = GenerationRequest {
        messages,
        // It is compacted because it is long.
        context_overflow: ContextOverflow::Shift,
        max_tokens: context.limits.max_tokens(None, "max_output_tokens")?,
        ..parameters::request(&fields, &body, context, None)?
    };
    Ok(ParsedRequest {
        fallback_models: Vec::new(),
        keep_alive: None,
        model,
        prompt_field: "input",
        requests: vec![request],
        left_out: sampling::left_out(&fields),
        choices: 1,
        streamed: false,
        ignored: listed(left_out),
        writer,
    })
}

/// The user's last texts, without the request to sum up.
fn newest_user_texts(messages: &[Message]) -> Vec<String> {
    let mut bytes = 0;
    let texts =
        messages.iter().rev().filter(|message| message.role == "user").skip(1).take_while(|message| {
            bytes += message.content.len();
            bytes <= MAX_USER_BYTES
        });
    let mut texts: Vec<String> = texts.map(|message| message.content.clone()).collect();
    texts.reverse();
    texts
}

/// The text of a compaction item for the model; `None` where it is not of this gateway.
pub(super) fn summary(encrypted_content: &str) -> Option<String> {
    let text = String::from_utf8(BASE64.decode(encrypted_content).ok()?).ok()?;
    Some(format!("{PREFACE}{text}"))
}

/// Writes a compacted conversation.
#[derive(Debug)]
pub(in crate::dialects::openai) struct CompactionWriter {
    id: String,
    created_at: u64,
    user_texts: Vec<String>,
    reasoning_tokens: u32,
    /// The memory of the conversation that is compacted.
    _inherited: Option<BodyPermit>,
}

impl CompactionWriter {
    fn body(&self, summary: &str, usage: Usage) -> Value {
        let Self { id, created_at, user_texts, reasoning_tokens, _inherited } = self;
        let message = |(index, text): (usize, &String)| {
            json!({
                "type": "message", "id": format!("msg_{id}_{index}"), "status": "completed", "role": "user",
                "content": [{"type": "input_text", "text": text}],
            })
        };
        let mut output: Vec<Value> = user_texts.iter().enumerate().map(message).collect();
        output.push(json!({
            "type": "compaction", "id": format!("cmp_{id}"), "encrypted_content": BASE64.encode(summary),
        }));
        json!({
            "id": format!("resp_{id}"),
            "object": "response.compaction",
            "created_at": created_at,
            "output": output,
            "usage": UsageBody::new(usage, *reasoning_tokens),
        })
    }
}

/// It has no stream.
impl ResponseWriter for CompactionWriter {
    const STREAM_TYPE: &'static str = sse::STREAM_TYPE;
    const MAY_BE_KEPT: bool = true;

    fn observe(&mut self, _: usize, delta: &Delta) {
        self.reasoning_tokens += u32::from(!delta.reasoning.is_empty());
    }

    fn whole(self, choices: &[(Delta, FinishReason)], usage: Usage) -> Response {
        match choices.first() {
            Some((Delta { text, .. }, reason)) if reason.is_stop() && !text.trim().is_empty() => {
                Json(self.body(text, usage)).into_response()
            }
            // A conversation must not go on without what was in it.
            _ => {
                let message = "the model wrote no complete summary of the conversation; send the request again, or summarise with a request of your own";
                let error = GatewayError::new(ErrorKind::Internal, message);
                http_error::response(&error, error_body(&error))
            }
        }
    }

    fn start(&mut self, _: Option<u32>) -> Bytes {
        Bytes::new()
    }

    fn delta(&mut self, _: usize, _: &Delta) -> Bytes {
        Bytes::new()
    }

    fn keep_alive(&mut self) -> Bytes {
        Bytes::new()
    }

    fn finish(&mut self, _: usize, _: FinishReason, _: Option<Usage>) -> Bytes {
        Bytes::new()
    }

    fn error(&mut self, _: &GatewayError) -> Bytes {
        Bytes::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_read_as_it_was_written() {
        let writer = CompactionWriter {
            id: "r".into(),
            created_at: 17,
            user_texts: vec!["hi".into()],
            reasoning_tokens: 0,
            _inherited: None,
        };
        let body = writer.body("Grüße", Usage::default());
        assert_eq!(body["output"][0]["content"][0]["text"], "hi");
        let content = body["output"][1]["encrypted_content"].as_str().unwrap();
        assert_eq!(summary(content), Some(format!("{PREFACE}Grüße")));
        for foreign in ["gAAAAB_x", "§", "/w=="] {
            assert_eq!(summary(foreign), None, "{foreign}");
        }
    }

    #[test]
    fn the_users_newest_texts_are_handed_back() {
        let message = |role: &str, content: &str| Message::new(role, content);
        let long = "x".repeat(MAX_USER_BYTES - 1);
        let messages =
            [message("user", "a"), message("assistant", "b"), message("user", &long), message("user", "c")];
        let all = [&messages[..], &[message("user", REQUEST)]].concat();
        assert_eq!(newest_user_texts(&all), [long, "c".into()]);
        assert_eq!(newest_user_texts(&all[..0]), Vec::<String>::new());
    }
}
