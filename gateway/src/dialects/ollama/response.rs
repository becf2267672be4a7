//! Responses in Ollama's format: one JSON object, or one for each line of a stream. There are no comments and no blank
//! lines in it: clients parse every line. The last line has `done`, why the response ended, and how long it took.

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use jiff::Timestamp;
use russet_wire::conversation::ToolCall;
use russet_wire::event::{Delta, FinishReason, Usage};
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::clock::{ResponseClock, Timings};
use super::error::error_body;
use crate::dialects::json_line::json_line;
use crate::dialects::token_logprobs::TokenBody;
use crate::error::GatewayError;
use crate::serving::ResponseWriter;

/// Which request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerForm {
    /// A chat, with a message.
    Chat,
    /// A request for a text.
    Text,
}

impl AnswerForm {
    /// The field of a request that has the prompt.
    pub(super) fn prompt_field(self) -> &'static str {
        match self {
            Self::Chat => "messages",
            Self::Text => "prompt",
        }
    }
}

/// Content type of a stream.
pub(super) const STREAM_TYPE: &str = "application/x-ndjson";

/// Writes one response.
#[derive(Debug)]
pub(super) struct OllamaWriter {
    form: AnswerForm,
    /// The model name the client used.
    model: String,
    clock: ResponseClock,
    /// What a request without a prompt did.
    load_reason: &'static str,
    /// Calls of tools so far.
    tool_calls: usize,
}

#[derive(Serialize)]
struct AnswerBody<'a> {
    model: &'a str,
    created_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<AnswerMessage<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    logprobs: Vec<TokenBody>,
    done: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    done_reason: Option<&'static str>,
    #[serde(flatten)]
    timings: Option<Timings>,
}

#[derive(Serialize)]
struct AnswerMessage<'a> {
    role: &'static str,
    content: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallBody<'a>>,
}

#[derive(Serialize)]
struct CallBody<'a> {
    id: &'a str,
    function: CallFunction<'a>,
}

#[derive(Serialize)]
struct CallFunction<'a> {
    index: usize,
    name: &'a str,
    arguments: Box<RawValue>,
}

impl<'a> CallBody<'a> {
    fn new(index: usize, call: &'a ToolCall) -> Self {
        let ToolCall { id, name, arguments } = call;
        Self { id, function: CallFunction { index, name, arguments: object(arguments) } }
    }
}

/// The arguments as an object, with the keys in the model's order.
fn object(arguments: &str) -> Box<RawValue> {
    // An engine tells whole calls alone, so the arguments are an object.
    RawValue::from_string(arguments.to_owned()).unwrap_or_else(|_| RawValue::NULL.to_owned())
}

impl OllamaWriter {
    /// Writes the response to a request that arrived when the clock was started.
    pub(super) fn new(form: AnswerForm, model: String, clock: ResponseClock) -> Self {
        Self { form, model, clock, load_reason: "load", tool_calls: 0 }
    }

    /// Says of a request without a prompt that the model is unloaded.
    pub(super) fn unloads(self) -> Self {
        Self { load_reason: "unload", ..self }
    }

    /// An object with what is added, and what ends the response.
    fn body<'a>(
        &'a self,
        delta: &'a Delta,
        reason: Option<&'static str>,
        usage: Option<Usage>,
    ) -> AnswerBody<'a> {
        let Delta { reasoning, text, tool_calls, logprobs } = delta;
        let thinking = (!reasoning.is_empty()).then_some(reasoning.as_str());
        let is_chat = self.form == AnswerForm::Chat;
        let calls = tool_calls.iter().zip(self.tool_calls..).map(|(call, index)| CallBody::new(index, call));
        let message =
            || AnswerMessage { role: "assistant", content: text, thinking, tool_calls: calls.collect() };
        AnswerBody {
            model: &self.model,
            created_at: Timestamp::now().to_string(),
            message: is_chat.then(message),
            response: (!is_chat).then_some(text),
            thinking: thinking.filter(|_| !is_chat),
            logprobs: TokenBody::list(logprobs),
            done: reason.is_some(),
            done_reason: reason,
            timings: usage.map(|usage| self.clock.timings(Instant::now(), usage)),
        }
    }
}

impl ResponseWriter for OllamaWriter {
    const STREAM_TYPE: &'static str = STREAM_TYPE;

    fn observe(&mut self, _: usize, _: &Delta) {
        self.clock.token(Instant::now());
    }

    fn whole(self, choices: &[(Delta, FinishReason)], usage: Usage) -> Response {
        match choices.first() {
            Some((delta, reason)) => {
                Json(self.body(delta, Some(reason.as_str()), Some(usage))).into_response()
            }
            None => Json(self.body(&Delta::default(), Some(self.load_reason), None)).into_response(),
        }
    }

    fn start(&mut self, _: Option<u32>) -> Bytes {
        Bytes::new()
    }

    fn delta(&mut self, _: usize, delta: &Delta) -> Bytes {
        self.clock.token(Instant::now());
        let written = line(&self.body(delta, None, None));
        self.tool_calls += delta.tool_calls.len();
        written
    }

    fn keep_alive(&mut self) -> Bytes {
        line(&self.body(&Delta::default(), None, None))
    }

    fn finish(&mut self, _: usize, reason: FinishReason, usage: Option<Usage>) -> Bytes {
        line(&self.body(&Delta::default(), Some(reason.as_str()), usage))
    }

    fn error(&mut self, error: &GatewayError) -> Bytes {
        line(&error_body(error))
    }
}

/// One line of a stream.
pub(super) fn line(value: &impl Serialize) -> Bytes {
    let mut line = json_line(value);
    line.push(b'\n');
    line.into()
}

#[cfg(test)]
mod tests {
    use russet_wire::event::{Logprobs, TokenLogprob};
    use serde_json::{Value, json};

    use super::*;
    use crate::error::ErrorKind;

    fn writer(form: AnswerForm) -> OllamaWriter {
        OllamaWriter::new(form, "m:latest".into(), ResponseClock::new(Instant::now()))
    }

    /// The only object of a line, without its time.
    fn read(line: &Bytes) -> Value {
        let text = std::str::from_utf8(line).unwrap();
        assert_eq!(text.matches('\n').count(), 1, "{text}");
        let mut value: Value = serde_json::from_str(text).unwrap();
        if let Some(created) = value.as_object_mut().and_then(|fields| fields.remove("created_at")) {
            created.as_str().unwrap().parse::<Timestamp>().unwrap();
        }
        value
    }

    #[test]
    fn a_line_has_what_is_added() {
        let mut chat = writer(AnswerForm::Chat);
        let delta = Delta { reasoning: "hm".into(), ..Delta::text("a\nb") };
        let message = json!({"role": "assistant", "content": "a\nb", "thinking": "hm"});
        assert_eq!(
            read(&chat.delta(0, &delta)),
            json!({"model": "m:latest", "message": message, "done": false})
        );
        let call =
            |arguments: &str| ToolCall { id: "c".into(), name: "f".into(), arguments: arguments.into() };
        let calls = Delta {
            tool_calls: vec![call("{\n\"b\": 1,\r\n\"a\": \"x\\ny\"}"), call("{}")],
            ..Delta::default()
        };
        let written = chat.delta(0, &calls);
        let function = |index: usize, arguments: Value| json!({"id": "c", "function": {"index": index, "name": "f", "arguments": arguments}});
        let expected = json!([function(0, json!({"b": 1, "a": "x\ny"})), function(1, json!({}))]);
        assert_eq!(read(&written)["message"]["tool_calls"], expected);
        // In the model's order.
        assert!(std::str::from_utf8(&written).unwrap().contains(r#"{ "b": 1,  "a": "x\ny"}"#));
        let third = Delta { tool_calls: vec![call("{}")], ..Delta::default() };
        assert_eq!(read(&chat.delta(0, &third))["message"]["tool_calls"][0]["function"]["index"], 2);
        let mut text = writer(AnswerForm::Text);
        let expected = json!({"model": "m:latest", "response": "a\nb", "thinking": "hm", "done": false});
        assert_eq!(read(&text.delta(0, &delta)), expected);
        assert_eq!(read(&text.keep_alive()), json!({"model": "m:latest", "response": "", "done": false}));
    }

    #[test]
    fn the_last_line_says_why_and_how_long() {
        let usage = Usage { prompt_tokens: 7, completion_tokens: 3, cached_tokens: 2 };
        for (form, reason, word) in [
            (AnswerForm::Chat, FinishReason::Stop, "stop"),
            (AnswerForm::Text, FinishReason::Length, "length"),
        ] {
            let last = read(&writer(form).finish(0, reason, Some(usage)));
            assert_eq!((&last["done"], &last["done_reason"]), (&json!(true), &json!(word)));
            assert_eq!((&last["prompt_eval_count"], &last["eval_count"]), (&json!(7), &json!(3)));
            for name in ["total_duration", "load_duration", "prompt_eval_duration", "eval_duration"] {
                assert!(last[name].is_u64(), "{last}");
            }
        }
        let error = GatewayError::new(ErrorKind::EngineLost, "the engine was lost");
        assert_eq!(read(&writer(AnswerForm::Chat).error(&error)), json!({"error": "the engine was lost"}));
    }

    #[test]
    fn log_probabilities_stand_beside_the_text() {
        let token = |text: &str, logprob| TokenLogprob { id: 1, bytes: text.into(), logprob };
        let logprobs = vec![Logprobs { sampled: token("a", -0.5), top: vec![token("b", -0.25)] }];
        let line = read(&writer(AnswerForm::Chat).delta(0, &Delta { logprobs, ..Delta::text("a") }));
        let top = json!([{"token": "b", "logprob": -0.25, "bytes": [98]}]);
        let expected = json!([{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": top}]);
        assert_eq!(line["logprobs"], expected);
    }
}
