//! What fuzz targets feed to this dialect, and how its clients read the answers.

use serde_json::Value;

use super::{DIALECT, embed, request};
use crate::fuzzing::client::{Answer, Client, ReadStream, items, json};
use crate::fuzzing::exchange::{self, has_keys};

/// A chat, and a request for a text.
pub(crate) fn text(body: &[u8]) -> bool {
    let chat = exchange::generation(body, &DIALECT, request::parse_chat, &LineClient);
    exchange::generation(body, &DIALECT, request::parse_generate, &LineClient) || chat
}

/// Vectors, in both forms.
pub(crate) fn pooling(body: &[u8]) -> bool {
    let texts = exchange::pooling(body, &DIALECT, embed::parse, &VectorClient { vectors: "embeddings" });
    let one = VectorClient { vectors: "embedding" };
    exchange::pooling(body, &DIALECT, embed::parse_embeddings, &one) || texts
}

fn check_error(body: &Value) {
    assert!(has_keys(body, &["error"]), "{body}");
    assert!(body["error"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
}

/// Reads answers, and streams of lines.
struct LineClient;

impl LineClient {
    fn add(answer: &mut Answer, body: &Value) {
        assert!(body["model"].is_string() && body["created_at"].is_string(), "{body}");
        let text = body.get("response").unwrap_or(&body["message"]["content"]);
        answer.add(0, text);
        for call in items(&body["message"]["tool_calls"]) {
            assert!(call["function"]["arguments"].is_object(), "{call}");
            assert_eq!(call["function"]["index"], answer.calls);
            answer.calls += 1;
        }
    }
}

impl Client for LineClient {
    fn check_error(&self, body: &Value) {
        check_error(body);
    }

    fn whole(&self, body: &Value) -> Answer {
        assert!(body["done"] == true && body["done_reason"].is_string(), "{body}");
        let mut answer = Answer::default();
        Self::add(&mut answer, body);
        answer
    }

    fn stream(&self, bytes: &[u8]) -> ReadStream {
        let lines: Vec<Value> = bytes.split_inclusive(|byte| *byte == b'\n').map(json).collect();
        assert!(bytes.ends_with(b"\n") && !bytes.contains(&b'\r'), "a line is cut off");
        let Some((last, lines)) = lines.split_last() else { panic!("a stream has lines") };
        let mut answer = Answer::default();
        for line in lines {
            assert_eq!(line["done"], false);
            Self::add(&mut answer, line);
        }
        if last.get("error").is_some() {
            check_error(last);
            return ReadStream::Failed;
        }
        assert!(last["done"] == true && last["eval_count"].is_u64(), "{last}");
        Self::add(&mut answer, last);
        ReadStream::Complete(answer)
    }
}

/// Reads vectors.
struct VectorClient {
    vectors: &'static str,
}

impl Client for VectorClient {
    fn check_error(&self, body: &Value) {
        check_error(body);
    }

    fn whole(&self, body: &Value) -> Answer {
        assert!(body[self.vectors].is_array(), "{body}");
        Answer::default()
    }

    fn stream(&self, _: &[u8]) -> ReadStream {
        unreachable!("they are never streamed")
    }
}
