//! Whole responses and streams, as a client reads them.

use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use super::*;
use crate::error::ErrorKind;

fn writer() -> MessageWriter {
    MessageWriter::new(
        &RequestId { unique: "u".into(), shown: "req_u".into() },
        "m".into(),
        vec!["###".into(), "END".into()],
    )
}

fn text(text: &str) -> Delta {
    Delta::text(text)
}

fn thinking(reasoning: &str) -> Delta {
    Delta { reasoning: reasoning.into(), ..Delta::default() }
}

fn call(id: &str, arguments: &str) -> Delta {
    let call = ToolCall { id: id.into(), name: "add".into(), arguments: arguments.into() };
    Delta { tool_calls: vec![call], ..Delta::default() }
}

const USAGE: Usage = Usage { prompt_tokens: 7, completion_tokens: 3, cached_tokens: 2 };

/// The events of a stream, each with the name that its data has as type.
fn events(bytes: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(bytes).unwrap();
    let events = text.split_terminator("\n\n").map(|event| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str(), "{event}");
        data
    });
    events.collect()
}

/// The events between the first and the last two, in one word each: `+kind` begins a block, `-` ends it.
fn stream(deltas: &[Delta], reason: FinishReason) -> (String, &'static str) {
    let mut writer = writer();
    let mut bytes = writer.start(Some(7)).to_vec();
    for delta in deltas {
        bytes.extend(writer.delta(0, delta));
    }
    bytes.extend(writer.finish(0, reason, Some(USAGE)));
    let events = events(&bytes);
    let (first, rest) = events.split_first().unwrap();
    let usage = |input: u32, read: u32, output: u32| json!({"input_tokens": input, "cache_creation_input_tokens": 0, "cache_read_input_tokens": read, "output_tokens": output});
    assert_eq!(
        first["message"],
        json!({
            "id": "msg_u", "type": "message", "role": "assistant", "model": "m", "content": [],
            "stop_reason": null, "stop_sequence": null, "usage": usage(7, 0, 0),
        })
    );
    let [blocks @ .., delta, stop] = rest else { panic!("{rest:?}") };
    assert_eq!((&delta["usage"], &stop["type"]), (&usage(5, 2, 3), &json!("message_stop")));
    let reason = ["end_turn", "max_tokens", "tool_use", "stop_sequence"];
    let reason = reason.into_iter().find(|reason| delta["delta"]["stop_reason"] == *reason).unwrap();
    let sequence = (reason == "stop_sequence").then_some("END");
    assert_eq!(delta["delta"]["stop_sequence"].as_str(), sequence);
    let words = blocks.iter().map(|event| {
        let (block, delta) = (&event["content_block"], &event["delta"]);
        let added = ["thinking", "signature", "text", "partial_json"]
            .into_iter()
            .find_map(|name| delta[name].as_str());
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                let kind = block["type"].as_str().unwrap();
                let expected = match kind {
                    "thinking" => json!({"type": kind, "thinking": "", "signature": ""}),
                    "text" => json!({"type": kind, "text": ""}),
                    _ => json!({"type": kind, "id": block["id"], "name": "add", "input": {}}),
                };
                assert_eq!(*block, expected);
                format!("{}+{kind}", event["index"])
            }
            "content_block_delta" => added.unwrap().to_owned(),
            "content_block_stop" => format!("{}-", event["index"]),
            other => panic!("{other}"),
        }
    });
    (words.collect::<Vec<_>>().join(" "), reason)
}

#[test]
fn blocks_of_a_stream_follow_each_other() {
    let both = Delta { text: "Sum.".into(), ..thinking("hm") };
    for (deltas, reason, expected) in [
        (vec![], FinishReason::Stop, ("", "end_turn")),
        (vec![text("")], FinishReason::Length, ("", "max_tokens")),
        (
            vec![text("Hel"), Delta::default(), text("lo")],
            FinishReason::Stop,
            ("0+text Hel lo 0-", "end_turn"),
        ),
        (vec![text("Hel")], FinishReason::Length, ("0+text Hel 0-", "max_tokens")),
        (
            vec![thinking("a"), thinking("b"), text("Hi")],
            FinishReason::Stop,
            ("0+thinking a b cnVzc2V0 0- 1+text Hi 1-", "end_turn"),
        ),
        (vec![thinking("a")], FinishReason::Length, ("0+thinking a cnVzc2V0 0-", "max_tokens")),
        (vec![both], FinishReason::Stop, ("0+thinking hm cnVzc2V0 0- 1+text Sum. 1-", "end_turn")),
        (vec![call("c1", "{}")], FinishReason::Stop, ("0+tool_use {} 0-", "tool_use")),
        (
            vec![thinking("a"), call("c1", r#"{"b":1}"#), call("c2", "")],
            FinishReason::Stop,
            (r#"0+thinking a cnVzc2V0 0- 1+tool_use {"b":1} 1- 2+tool_use {} 2-"#, "tool_use"),
        ),
        (
            vec![text("x"), call("c1", "{}"), text("y")],
            FinishReason::Length,
            ("0+text x 0- 1+tool_use {} 1- 2+text y 2-", "max_tokens"),
        ),
        (vec![text("Hi")], FinishReason::StopString(1), ("0+text Hi 0-", "stop_sequence")),
        (vec![call("c1", "{}")], FinishReason::StopString(1), ("0+tool_use {} 0-", "tool_use")),
        // Of an engine that names a stop string there is not.
        (vec![text("Hi")], FinishReason::StopString(2), ("0+text Hi 0-", "end_turn")),
    ] {
        let (words, stop_reason) = stream(&deltas, reason);
        assert_eq!((words.as_str(), stop_reason), expected);
    }
}

#[test]
fn keep_alives_and_errors_of_a_stream_have_names() {
    let mut writer = writer();
    assert_eq!(&writer.keep_alive()[..], b"event: ping\ndata: {\"type\":\"ping\"}\n\n");
    writer.delta(0, &text("x"));
    let error = writer.error(&GatewayError::new(ErrorKind::EngineLost, "lost"));
    let expected = json!({
        "type": "error", "error": {"type": "overloaded_error", "message": "lost"}, "request_id": "req_u",
    });
    assert_eq!(events(&error), [expected]);
}

#[tokio::test]
async fn a_whole_message_has_no_empty_block() {
    let thought = json!({"type": "thinking", "thinking": "hm", "signature": SIGNATURE});
    let said = json!({"type": "text", "text": "Hi"});
    let used = json!({"type": "tool_use", "id": "c1", "name": "add", "input": {"z": 1.0, "a": 2}});
    let mut all = Delta { text: "Hi".into(), ..thinking("hm") };
    all.append(call("c1", r#"{"z": 1.0, "a": 2}"#));
    for (response, reason, content, stop_reason) in [
        (text("Hi"), FinishReason::StopString(1), json!([said]), "stop_sequence"),
        (Delta::default(), FinishReason::Stop, json!([]), "end_turn"),
        (text("Hi"), FinishReason::Length, json!([said]), "max_tokens"),
        (thinking("hm"), FinishReason::Stop, json!([thought]), "end_turn"),
        (call("c1", r#"{"z": 1.0, "a": 2}"#), FinishReason::Stop, json!([used]), "tool_use"),
        (all, FinishReason::Stop, json!([thought, said, used]), "tool_use"),
    ] {
        let response = writer().whole(&[(response, reason)], USAGE);
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let expected = json!({
            "id": "msg_u", "type": "message", "role": "assistant", "model": "m", "content": content,
            "stop_reason": stop_reason, "stop_sequence": (stop_reason == "stop_sequence").then_some("END"),
            "usage": {
                "input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 3,
            },
        });
        assert_eq!(serde_json::from_slice::<Value>(&body).unwrap(), expected);
    }
}
