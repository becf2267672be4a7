//! What fuzz targets feed to this dialect, and how its clients read the answers.

use serde_json::Value;

use super::{DIALECT, embeddings, request, rerank, responses};
use crate::fuzzing::client::{Answer, Client, ReadStream, events, index, items, json, typed_events};
use crate::fuzzing::exchange::{self, has_keys};

/// A chat.
pub(crate) fn chat(body: &[u8]) -> bool {
    exchange::generation(body, &DIALECT, request::parse, &ChunkClient { object: "chat.completion" })
}

/// A completion.
pub(crate) fn completion(body: &[u8]) -> bool {
    exchange::generation(
        body,
        &DIALECT,
        request::completion::parse,
        &ChunkClient { object: "text_completion" },
    )
}

/// A response.
pub(crate) fn response(body: &[u8]) -> bool {
    exchange::generation(body, &DIALECT, responses::parse, &ResponsesClient)
}

/// Vectors and scores.
pub(crate) fn pooling(body: &[u8]) -> bool {
    let vectors = exchange::pooling(body, &DIALECT, embeddings::parse, &ListClient { list: "data" });
    exchange::pooling(body, &DIALECT, rerank::parse, &ListClient { list: "results" }) || vectors
}

fn check_error(body: &Value) {
    let error = &body["error"];
    assert!(has_keys(body, &["error"]) && has_keys(error, &["code", "message", "param", "type"]), "{body}");
    assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
    assert!(error["type"].is_string(), "{body}");
    assert!(["param", "code"].iter().all(|name| error[name].is_null() || error[name].is_string()), "{body}");
}

/// Reads chunks of chats and completions.
struct ChunkClient {
    object: &'static str,
}

impl ChunkClient {
    /// Adds a choice, of which a whole response has a message and a chunk a delta.
    fn add(answer: &mut Answer, choice: &Value) {
        let part = ["message", "delta"].iter().find_map(|name| choice.get(name)).unwrap_or(choice);
        let text = ["content", "text"].iter().find_map(|name| part.get(name)).unwrap_or(&Value::Null);
        answer.add(index(choice), text);
        answer.calls += items(&part["tool_calls"]).count();
    }
}

impl Client for ChunkClient {
    fn check_error(&self, body: &Value) {
        check_error(body);
    }

    fn whole(&self, body: &Value) -> Answer {
        assert_eq!(body["object"], self.object);
        assert!(body["usage"]["total_tokens"].is_u64(), "{body}");
        let mut answer = Answer::default();
        items(&body["choices"]).for_each(|choice| Self::add(&mut answer, choice));
        answer
    }

    fn stream(&self, bytes: &[u8]) -> ReadStream {
        let mut events = events(bytes);
        let (name, last) = events.pop().expect("a stream has events");
        assert!(name.is_none() && events.iter().all(|(name, _)| name.is_none()));
        let mut answer = Answer::default();
        let mut finished = 0;
        for (_, data) in events {
            let chunk = json(data.as_bytes());
            assert!(
                chunk["object"].as_str().is_some_and(|object| object.starts_with(self.object)),
                "{chunk}"
            );
            for choice in items(&chunk["choices"]) {
                for call in items(&choice["delta"]["tool_calls"]) {
                    assert!(call["id"].is_string() && index(call) < 2, "{call}");
                }
                Self::add(&mut answer, choice);
                finished += usize::from(choice["finish_reason"].is_string());
            }
        }
        if last == "[DONE]" {
            assert_eq!(finished, answer.texts.len(), "every choice ends once");
            return ReadStream::Complete(answer);
        }
        check_error(&json(last.as_bytes()));
        ReadStream::Failed
    }
}

/// Reads responses and their events.
struct ResponsesClient;

impl Client for ResponsesClient {
    fn check_error(&self, body: &Value) {
        check_error(body);
    }

    fn whole(&self, body: &Value) -> Answer {
        assert_eq!((&body["object"], &body["status"]), (&"response".into(), &"completed".into()));
        let mut answer = Answer::default();
        for item in items(&body["output"]) {
            items(&item["content"]).for_each(|part| answer.add(0, &part["text"]));
            answer.calls += usize::from(item["call_id"].is_string());
        }
        answer
    }

    fn stream(&self, bytes: &[u8]) -> ReadStream {
        let events = typed_events(bytes);
        let mut answer = Answer::default();
        for (number, (name, event)) in events.iter().enumerate() {
            assert_eq!(event["sequence_number"], number);
            match *name {
                "response.output_text.delta" => answer.add(0, &event["delta"]),
                "response.output_item.done" => {
                    answer.calls += usize::from(event["item"]["call_id"].is_string())
                }
                _ => {}
            }
        }
        let (name, last) = events.last().expect("a stream has events");
        if *name == "response.failed" {
            assert!(last["response"]["error"]["message"].is_string(), "{last}");
            return ReadStream::Failed;
        }
        assert_eq!(*name, "response.completed", "Codex waits for it");
        assert_eq!(self.whole(&last["response"]), answer, "the last event has the whole response");
        ReadStream::Complete(answer)
    }
}

/// Reads lists of vectors or scores.
struct ListClient {
    list: &'static str,
}

impl Client for ListClient {
    fn check_error(&self, body: &Value) {
        check_error(body);
    }

    fn whole(&self, body: &Value) -> Answer {
        let list = &body[self.list];
        assert!(list.is_array() && items(list).all(|item| item["index"].is_u64()), "{body}");
        Answer::default()
    }

    fn stream(&self, _: &[u8]) -> ReadStream {
        unreachable!("they are never streamed")
    }
}
