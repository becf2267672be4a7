//! Writes a response: whole, or as events. The last event has the whole response, whatever ends it.

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use russet_wire::event::{Delta, FinishReason, Usage};
use serde_json::value::to_raw_value;

use super::event::EventSequence;
use super::output::{Observer, Output, unobserved};
use super::response::{ResponseBody, ResponseState};
use super::settings::Settings;
use super::stored::ResponseRecord;
use crate::body_budget::BodyPermit;
use crate::dialects::sse::{self, KEEP_ALIVE};
use crate::error::GatewayError;
use crate::serving::{DetachedResponse, ResponseEnd, ResponseWriter};

/// Bytes of an event of one token.
const EVENT_BYTES: usize = 512;

/// Writes one response.
#[derive(Debug)]
pub(in crate::dialects::openai) struct ResponsesWriter {
    /// `resp_…`.
    pub(super) id: String,
    /// Seconds since 1970.
    pub(super) created_at: u64,
    pub(super) settings: Settings,
    pub(super) output: Output,
    pub(super) events: EventSequence,
    /// Tells the seconds since 1970.
    pub(super) clock: fn() -> u64,
    /// How it is kept, if it is.
    pub(super) record: Option<ResponseRecord>,
    /// The memory of the conversation that it continues.
    pub(super) _inherited: Option<BodyPermit>,
    /// Its end, once that is kept.
    pub(super) ending: Option<LastEvents>,
}

/// The end of a response that is kept and not sent yet.
#[derive(Debug)]
pub(super) struct LastEvents {
    /// The last events of its items.
    events: Vec<u8>,
    at: u64,
}

impl ResponsesWriter {
    fn body<'a>(&'a self, state: ResponseState<'a>) -> ResponseBody<'a> {
        ResponseBody::new(&self.id, self.created_at, &self.settings, &self.output, state)
    }

    /// Writes the events of what this does to the items.
    fn change(&mut self, out: &mut Vec<u8>, change: impl FnOnce(&mut Output, &mut Observer<'_>)) {
        let Self { output, events, .. } = self;
        change(output, &mut |index, item, change| events.item(out, index, item, change));
    }

    /// In the background, the event that says that an engine generates it, if that was not said.
    fn begin(&mut self, out: &mut Vec<u8>) {
        if self.record.as_mut().is_some_and(ResponseRecord::begin) {
            self.response_event(out, Some("response.in_progress"), ResponseState::InProgress);
        }
    }

    /// The last events of its items, and when it ended.
    fn end(&mut self, reason: FinishReason) -> LastEvents {
        let mut events = Vec::new();
        self.begin(&mut events);
        self.change(&mut events, |output, observe| output.finish(reason, observe));
        LastEvents { events, at: (self.clock)() }
    }

    /// An event about the response itself; without a name, the one that ends it.
    fn response_event(&mut self, out: &mut Vec<u8>, name: Option<&'static str>, state: ResponseState<'_>) {
        let Self { id, created_at, settings, output, events, .. } = self;
        let body = ResponseBody::new(id, *created_at, settings, output, state);
        let name = name.unwrap_or(match body.status() {
            "completed" => "response.completed",
            "failed" => "response.failed",
            _ => "response.incomplete",
        });
        events.response(out, name, &body);
    }
}

impl ResponseWriter for ResponsesWriter {
    const STREAM_TYPE: &'static str = sse::STREAM_TYPE;

    const MAY_BE_KEPT: bool = true;

    async fn detach(&mut self) -> Result<Option<DetachedResponse>, GatewayError> {
        let queued = json(&self.body(ResponseState::Queued));
        match &mut self.record {
            Some(record) => record.detach(queued).await,
            None => Ok(None),
        }
    }

    async fn keep(&mut self, end: ResponseEnd<'_>) -> Result<(), GatewayError> {
        if self.record.is_none() {
            return Ok(());
        }
        let body = match end {
            Ok((reason, usage)) => {
                let ending = self.end(reason);
                let body = json(&self.body(ResponseState::Finished(ending.at, reason, usage)));
                self.ending = Some(ending);
                body
            }
            Err(error) => {
                if self.record.as_ref().is_some_and(|record| !record.ends_by(error)) {
                    return Ok(());
                }
                self.output.abandon();
                json(&self.body(ResponseState::Failed(error)))
            }
        };
        match &self.record {
            Some(record) => record.end(body).await,
            None => Ok(()),
        }
    }

    fn observe(&mut self, _: usize, delta: &Delta) {
        self.output.add(delta, &mut unobserved);
    }

    fn whole(mut self, choices: &[(Delta, FinishReason)], usage: Usage) -> Response {
        // There is one choice, and its items are there.
        let reason = choices.first().map_or(FinishReason::Stop, |(_, reason)| *reason);
        let at = self.ending.take().map_or_else(self.clock, |ending| ending.at);
        self.output.finish(reason, &mut unobserved);
        Json(self.body(ResponseState::Finished(at, reason, usage))).into_response()
    }

    fn start(&mut self, _: Option<u32>) -> Bytes {
        let (state, name) = match &self.record {
            Some(record) if record.is_background() => (ResponseState::Queued, "response.queued"),
            _ => (ResponseState::InProgress, "response.in_progress"),
        };
        // It is written once: tools make it long.
        let body = to_raw_value(&self.body(state)).unwrap_or_default();
        let mut out = Vec::with_capacity(2 * (body.get().len() + EVENT_BYTES));
        for name in ["response.created", name] {
            self.events.response(&mut out, name, &body);
        }
        out.into()
    }

    fn delta(&mut self, _: usize, delta: &Delta) -> Bytes {
        let mut out = Vec::with_capacity(EVENT_BYTES);
        self.begin(&mut out);
        self.change(&mut out, |output, observe| output.add(delta, observe));
        out.into()
    }

    fn keep_alive(&mut self) -> Bytes {
        if self.record.as_ref().is_some_and(ResponseRecord::is_background) {
            return Bytes::new();
        }
        Bytes::from_static(KEEP_ALIVE)
    }

    fn finish(&mut self, _: usize, reason: FinishReason, usage: Option<Usage>) -> Bytes {
        let LastEvents { events: mut out, at } = self.ending.take().unwrap_or_else(|| self.end(reason));
        let finished = ResponseState::Finished(at, reason, usage.unwrap_or_default());
        self.response_event(&mut out, None, finished);
        out.into()
    }

    fn error(&mut self, error: &GatewayError) -> Bytes {
        if self.record.as_ref().is_some_and(|record| !record.ends_by(error)) {
            // Who follows it is told its end.
            return Bytes::new();
        }
        self.output.abandon();
        // Their numbers are taken.
        let mut out = self.ending.take().map_or_else(Vec::new, |ending| ending.events);
        self.response_event(&mut out, None, ResponseState::Failed(error));
        out.into()
    }
}

/// A response as it is kept.
fn json(body: &ResponseBody<'_>) -> Bytes {
    // Only strings, numbers and null: serialising them into memory cannot fail.
    serde_json::to_vec(body).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use russet_wire::conversation::ToolCall;
    use russet_wire::event::{Logprobs, TokenLogprob};
    use serde_json::{Value, json};

    use super::super::client_tools::{ClientTool, ClientTools};
    use super::super::settings::{ReasoningSettings, TextSettings};
    use super::*;
    use crate::error::ErrorKind;

    fn writer() -> ResponsesWriter {
        let settings = Settings {
            model: "m".into(),
            instructions: None,
            max_output_tokens: Some(9),
            max_tool_calls: None,
            metadata: Default::default(),
            parallel_tool_calls: true,
            previous_response_id: None,
            store: false,
            background: false,
            prompt_cache_key: None,
            safety_identifier: None,
            user: None,
            reasoning: ReasoningSettings { effort: None, summary: None },
            service_tier: "default",
            temperature: 0.7,
            top_p: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            top_logprobs: 0,
            text: TextSettings { format: to_raw_value(&json!({"type": "text"})).unwrap(), verbosity: None },
            tool_choice: json!("auto"),
            tools: to_raw_value(&json!([])).unwrap(),
            truncation: "disabled",
        };
        let mut tools = ClientTools::default();
        tools.add(ClientTool { is_custom: true, namespace: None, name: "patch".into() });
        ResponsesWriter {
            id: "resp_r".into(),
            created_at: 17,
            settings,
            output: Output::new("r".into(), tools),
            events: EventSequence::default(),
            clock: || 19,
            record: None,
            _inherited: None,
            ending: None,
        }
    }

    const USAGE: Usage = Usage { prompt_tokens: 7, completion_tokens: 5, cached_tokens: 2 };

    fn call(id: &str, name: &str, arguments: &str) -> Delta {
        let call = ToolCall { id: id.into(), name: name.into(), arguments: arguments.into() };
        Delta { tool_calls: vec![call], ..Delta::default() }
    }

    fn thinking(text: &str) -> Delta {
        Delta { reasoning: text.into(), ..Delta::default() }
    }

    /// The events of a stream; each is named by its type, and their numbers are 0, 1, 2, …
    fn events(bytes: &[u8]) -> Vec<Value> {
        let text = std::str::from_utf8(bytes).unwrap();
        let event = |(number, text): (usize, &str)| {
            let (name, data) = text.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
            let event: Value = serde_json::from_str(data).unwrap();
            assert_eq!((&event["type"], &event["sequence_number"]), (&name.into(), &number.into()));
            event
        };
        text.split_terminator("\n\n").enumerate().map(event).collect()
    }

    fn streamed(deltas: &[Delta], end: Result<FinishReason, &GatewayError>) -> Vec<Value> {
        let mut writer = writer();
        let mut bytes = writer.start(None).to_vec();
        for delta in deltas {
            bytes.extend(writer.delta(0, delta));
        }
        bytes.extend(match end {
            Ok(reason) => writer.finish(0, reason, Some(USAGE)),
            Err(error) => writer.error(error),
        });
        events(&bytes)
    }

    async fn whole(deltas: &[Delta], reason: FinishReason) -> Value {
        let mut writer = writer();
        let mut all = Delta::default();
        for delta in deltas {
            writer.observe(0, delta);
            all.append(delta.clone());
        }
        let body = writer.whole(&[(all, reason)], USAGE).into_body();
        serde_json::from_slice(&axum::body::to_bytes(body, 1 << 20).await.unwrap()).unwrap()
    }

    /// What an event says: its type without the beginning, its item's place, and its text.
    fn shown(event: &Value) -> String {
        let name = event["type"].as_str().unwrap().strip_prefix("response.").unwrap();
        let texts = ["delta", "text", "arguments", "input"].map(|field| event[field].as_str());
        let text = texts.into_iter().flatten().next().or_else(|| event["part"]["text"].as_str());
        let item = event["item"]["type"].as_str();
        let parts = [event["output_index"].as_u64().map(|index| index.to_string())];
        let parts = parts.iter().flatten().map(String::as_str).chain(item).chain(text);
        parts.fold(name.to_owned(), |shown, part| format!("{shown} {part}"))
    }

    #[test]
    fn events_come_in_openais_order() {
        use FinishReason::{Length, Stop};
        for (deltas, reason, expected) in [
            (
                vec![Delta::text("He"), Delta::text("y")],
                Stop,
                vec![
                    "output_item.added 0 message",
                    "content_part.added 0 ",
                    "output_text.delta 0 He",
                    "output_text.delta 0 y",
                    "output_text.done 0 Hey",
                    "content_part.done 0 Hey",
                    "output_item.done 0 message",
                    "completed",
                ],
            ),
            (
                vec![thinking("t"), Delta::text("a")],
                Length,
                vec![
                    "output_item.added 0 reasoning",
                    "reasoning_summary_part.added 0 ",
                    "reasoning_summary_text.delta 0 t",
                    "reasoning_summary_text.done 0 t",
                    "reasoning_summary_part.done 0 t",
                    "output_item.done 0 reasoning",
                    "output_item.added 1 message",
                    "content_part.added 1 ",
                    "output_text.delta 1 a",
                    "output_text.done 1 a",
                    "content_part.done 1 a",
                    "output_item.done 1 message",
                    "incomplete",
                ],
            ),
            (
                vec![call("1", "f", "{}"), call("2", "patch", r#"{"input": "x"}"#)],
                Stop,
                vec![
                    "output_item.added 0 function_call",
                    "function_call_arguments.delta 0 {}",
                    "function_call_arguments.done 0 {}",
                    "output_item.done 0 function_call",
                    "output_item.added 1 custom_tool_call",
                    "custom_tool_call_input.delta 1 x",
                    "custom_tool_call_input.done 1 x",
                    "output_item.done 1 custom_tool_call",
                    "completed",
                ],
            ),
            (
                vec![],
                Stop,
                vec![
                    "output_item.added 0 message",
                    "content_part.added 0 ",
                    "output_text.done 0 ",
                    "content_part.done 0 ",
                    "output_item.done 0 message",
                    "completed",
                ],
            ),
            (vec![], Length, vec!["incomplete"]),
        ] {
            let shown: Vec<String> = streamed(&deltas, Ok(reason)).iter().map(shown).collect();
            assert_eq!(shown[..2], ["created", "in_progress"], "{deltas:?}");
            assert_eq!(shown[2..], expected, "{deltas:?}");
        }
    }

    #[tokio::test]
    async fn the_last_event_has_the_whole_response() {
        let pieces = [
            thinking("t"),
            Delta::text("é"),
            call("1", "f", r#"{"a": 1}"#),
            call("2", "patch", r#"{"input": "x\ny"}"#),
            Delta { reasoning: "u".into(), ..Delta::text("b") },
            Delta { tool_calls: call("3", "f", "{}").tool_calls, ..Delta::text("c") },
        ];
        // Every order of up to three pieces, with repetitions.
        let count = pieces.len();
        for length in 0..=3 {
            for mut number in 0..count.pow(length) {
                let mut deltas = Vec::new();
                for _ in 0..length {
                    deltas.push(pieces[number % count].clone());
                    number /= count;
                }
                for reason in [FinishReason::Stop, FinishReason::Length] {
                    let events = streamed(&deltas, Ok(reason));
                    let response = &events.last().unwrap()["response"];
                    assert_eq!(*response, whole(&deltas, reason).await, "{deltas:?}");
                    // What the items say when they are done is what the response says.
                    let done = events.iter().filter(|event| event["type"] == "response.output_item.done");
                    let done: Vec<&Value> = done.map(|event| &event["item"]).collect();
                    assert_eq!(done, response["output"].as_array().unwrap().iter().collect::<Vec<_>>());
                }
            }
        }
    }

    #[tokio::test]
    async fn a_response_has_items_and_usage() {
        let response = whole(&[thinking("t"), thinking("u"), Delta::text("a")], FinishReason::Length).await;
        for (name, expected) in [
            ("id", json!("resp_r")),
            ("object", json!("response")),
            ("created_at", json!(17)),
            ("completed_at", Value::Null),
            ("status", json!("incomplete")),
            ("incomplete_details", json!({"reason": "max_output_tokens"})),
            ("error", Value::Null),
            ("model", json!("m")),
            (
                "output",
                json!([
                    {
                        "type": "reasoning", "id": "rs_r_0", "status": "completed",
                        "summary": [{"type": "summary_text", "text": "tu"}],
                    },
                    {
                        "type": "message", "id": "msg_r_1", "status": "incomplete", "role": "assistant",
                        "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
                    },
                ]),
            ),
            (
                "usage",
                json!({
                    "input_tokens": 7, "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
                    "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 12,
                }),
            ),
        ] {
            assert_eq!(response[name], expected, "{name}");
        }
        let response = whole(&[Delta::text("a")], FinishReason::Stop).await;
        assert_eq!((&response["status"], &response["completed_at"]), (&"completed".into(), &19.into()));
    }

    #[test]
    fn an_error_ends_a_stream_with_a_failed_response() {
        let error = |kind| GatewayError::new(kind, "why");
        for (error, code, message) in [
            (error(ErrorKind::ContextLengthExceeded), "context_length_exceeded", "why"),
            (error(ErrorKind::InvalidRequest), "invalid_prompt", "why"),
            (error(ErrorKind::EngineLost), "server_error", "why"),
            (
                error(ErrorKind::Overloaded).retry_after(Duration::from_millis(1300)),
                "rate_limit_exceeded",
                "why; try again in 1.300s",
            ),
        ] {
            let events = streamed(&[thinking("t"), Delta::text("a")], Err(&error));
            let last = events.last().unwrap();
            assert_eq!(last["type"], "response.failed");
            let response = &last["response"];
            assert_eq!(response["status"], "failed");
            assert_eq!(response["error"], json!({"code": code, "message": message}));
            assert_eq!(response["output"][0]["status"], "completed");
            assert_eq!(response["output"][1]["status"], "incomplete");
            assert_eq!(response["output"][1]["content"][0]["text"], "a");
        }
        // Before anything was said.
        let events = streamed(&[], Err(&error(ErrorKind::Internal)));
        assert_eq!(events.iter().map(shown).collect::<Vec<_>>(), ["created", "in_progress", "failed"]);
    }

    #[test]
    fn logprobs_come_with_the_text_they_are_of() {
        let sampled = TokenLogprob { id: 1, bytes: b"a".to_vec(), logprob: -0.5 };
        let delta = Delta { logprobs: vec![Logprobs { sampled, top: vec![] }], ..Delta::text("a") };
        let expected = json!([{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]);
        let events = streamed(&[delta], Ok(FinishReason::Stop));
        for event in &events {
            let name = event["type"].as_str().unwrap();
            let found = match name {
                "response.output_text.delta" | "response.output_text.done" => &event["logprobs"],
                "response.content_part.done" => &event["part"]["logprobs"],
                "response.completed" => &event["response"]["output"][0]["content"][0]["logprobs"],
                _ => continue,
            };
            assert_eq!(*found, expected, "{name}");
        }
    }
}
