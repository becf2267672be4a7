//! What fuzz targets feed to this dialect, and how its clients read the answers.

use serde_json::{Value, json};

use super::{DIALECT, request};
use crate::fuzzing::client::{Answer, Client, ReadStream, index, items, typed_events};
use crate::fuzzing::exchange::{self, has_keys};

/// A message, and the count of its tokens.
pub(crate) fn message(body: &[u8]) -> bool {
    let counted = exchange::checked(body, &DIALECT, request::parse_token_count, &MessageClient);
    exchange::generation(body, &DIALECT, request::parse, &MessageClient) || counted.is_some()
}

/// Reads messages and their events.
struct MessageClient;

impl Client for MessageClient {
    fn check_error(&self, body: &Value) {
        assert!(has_keys(body, &["error", "request_id", "type"]) && body["type"] == "error", "{body}");
        assert!(has_keys(&body["error"], &["message", "type"]), "{body}");
        assert!(body["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
        assert!(body["error"]["type"].is_string() && body["request_id"].is_string(), "{body}");
    }

    fn whole(&self, body: &Value) -> Answer {
        assert_eq!((&body["type"], &body["role"]), (&json!("message"), &json!("assistant")));
        let mut answer = Answer::default();
        for block in items(&body["content"]) {
            answer.add(0, &block["text"]);
            answer.calls += usize::from(block["type"] == "tool_use" && block["input"].is_object());
        }
        answer
    }

    fn stream(&self, bytes: &[u8]) -> ReadStream {
        let events = typed_events(bytes);
        let (mut answer, mut open, mut blocks) = (Answer::default(), None, 0);
        assert_eq!(events.first().map(|(name, _)| *name), Some("message_start"));
        for (name, event) in &events {
            match *name {
                "content_block_start" => {
                    assert_eq!((open, index(event)), (None, blocks), "one block at a time: {event}");
                    open = Some(blocks);
                    blocks += 1;
                    answer.calls += usize::from(event["content_block"]["type"] == "tool_use");
                }
                "content_block_delta" => {
                    assert_eq!(open, Some(index(event)), "{event}");
                    answer.add(0, &event["delta"]["text"]);
                }
                "content_block_stop" => assert_eq!(open.take(), Some(index(event)), "{event}"),
                "message_start" | "message_delta" | "message_stop" | "ping" | "error" => {}
                other => panic!("no event of Anthropic's: {other}"),
            }
        }
        let names: Vec<&str> = events.iter().map(|(name, _)| *name).filter(|name| *name != "ping").collect();
        if let Some(("error", error)) = events.last().map(|(name, event)| (*name, event)) {
            self.check_error(error);
            return ReadStream::Failed;
        }
        assert!(names.ends_with(&["message_delta", "message_stop"]) && open.is_none(), "{names:?}");
        ReadStream::Complete(answer)
    }
}
