//! First requests that several clients have in common. Not here: those of one client alone.

use http::Method;
use serde_json::{Value, json};

use super::setup::{ExpectedReply, FirstRequest};

/// Most tokens of an answer: clients ask for more, and a check needs none of them.
pub const MAX_TOKENS: u32 = 32;
/// What a check says.
pub const PROMPT: &str = "Say hello.";

/// A GET without a body.
pub fn get(path: &'static str, expected: ExpectedReply) -> FirstRequest {
    FirstRequest { method: Method::GET, path, headers: &[], body: None, expected }
}

/// The list of models in OpenAI's form.
pub fn list_models() -> FirstRequest {
    get("/v1/models", ExpectedReply::ModelList("data", "id"))
}

/// A POST that is answered by a stream.
pub fn stream(
    path: &'static str,
    headers: &'static [(&'static str, &'static str)],
    body: Value,
) -> FirstRequest {
    FirstRequest { method: Method::POST, path, headers, body: Some(body), expected: ExpectedReply::Stream }
}

/// A chat of OpenAI's dialect, streamed.
pub fn chat(model: &str) -> FirstRequest {
    stream("/v1/chat/completions", &[], chat_body(model))
}

/// The same by an agent: with a tool, and with the usage at its end.
pub fn agent_chat(model: &str) -> FirstRequest {
    let mut body = chat_body(model);
    body["stream_options"] = json!({"include_usage": true});
    body["tools"] = json!([{"type": "function", "function": tool()}]);
    body["tool_choice"] = json!("auto");
    stream("/v1/chat/completions", &[], body)
}

fn chat_body(model: &str) -> Value {
    json!({
        "model": model, "stream": true, "max_tokens": MAX_TOKENS,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": PROMPT},
        ],
    })
}

/// A tool as coding agents have it.
pub fn tool() -> Value {
    json!({
        "name": "read_file", "description": "Reads a file.",
        "parameters": {
            "type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"],
        },
    })
}
