//! `--check`: sends what a client sends first, and reads what comes back as the client would. Not here: what that is.

use std::time::Duration;

use futures::StreamExt as _;
use http::StatusCode;
use serde_json::Value;

use super::setup::{ExpectedReply, FirstRequest};

/// Most bytes of a response that are read: a list of thousands of models, or an answer of a few tokens.
const MAX_RESPONSE_BYTES: usize = 16 << 20;
/// Longest part of a stranger's text that is shown.
const MAX_SHOWN_CHARS: usize = 500;

/// What came back for one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckResult {
    /// Whether the client can go on.
    pub is_good: bool,
    /// What was sent, and what came back.
    pub line: String,
    /// Whether nothing answers at all.
    pub is_unreachable: bool,
}

/// Sends a request to the gateway at `url`, and judges the response.
pub async fn send(
    client: &reqwest::Client,
    url: &str,
    key: Option<&str>,
    model: &str,
    request: &FirstRequest,
    timeout: Duration,
) -> CheckResult {
    let name = format!("{} {}", request.method, request.path);
    match exchange(client, url, key, request, timeout).await {
        Ok((status, body)) => match judge(request.expected, model, status, &body) {
            Ok(words) => {
                CheckResult { is_good: true, line: format!("✓ {name}: {words}"), is_unreachable: false }
            }
            Err(words) => {
                CheckResult { is_good: false, line: format!("✗ {name}: {words}"), is_unreachable: false }
            }
        },
        Err(error) => {
            let words = failure(&error, url, timeout);
            CheckResult {
                is_good: false,
                line: format!("✗ {name}: {words}"),
                is_unreachable: error.is_connect(),
            }
        }
    }
}

/// GET of a path as JSON, or why there is none.
pub async fn get_json(
    client: &reqwest::Client,
    url: &str,
    key: Option<&str>,
    path: &'static str,
    timeout: Duration,
) -> Result<Value, String> {
    let request = super::requests::get(path, ExpectedReply::Status(200));
    let (status, body) =
        exchange(client, url, key, &request, timeout).await.map_err(|error| failure(&error, url, timeout))?;
    if status != StatusCode::OK {
        return Err(refused(status, &body));
    }
    serde_json::from_str(&body)
        .map_err(|_| format!("{url} is no gateway of Russet: it answers {}", shown(&body)))
}

async fn exchange(
    client: &reqwest::Client,
    url: &str,
    key: Option<&str>,
    request: &FirstRequest,
    timeout: Duration,
) -> Result<(StatusCode, String), reqwest::Error> {
    let FirstRequest { method, path, headers, body, expected: _ } = request;
    let mut sent = client.request(method.clone(), format!("{url}{path}")).timeout(timeout);
    for (name, value) in *headers {
        sent = sent.header(*name, *value);
    }
    if let Some(key) = key {
        sent = sent.bearer_auth(key);
    }
    if let Some(body) = body {
        sent = sent.json(body);
    }
    let response = sent.send().await?;
    let status = response.status();
    let (mut bytes, mut chunks) = (Vec::new(), response.bytes_stream());
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        let room = MAX_RESPONSE_BYTES.saturating_sub(bytes.len());
        bytes.extend_from_slice(&chunk[..chunk.len().min(room)]);
        if bytes.len() >= MAX_RESPONSE_BYTES {
            break;
        }
    }
    Ok((status, String::from_utf8_lossy(&bytes).into_owned()))
}

/// What a good response says, or what is wrong with it and what to do.
fn judge(expected: ExpectedReply, model: &str, status: StatusCode, body: &str) -> Result<String, String> {
    if let ExpectedReply::Status(expected) = expected {
        return match (status.as_u16() == expected, status.is_success()) {
            (true, true) => Ok(status.to_string()),
            (true, false) => Ok(format!("{status}, as it has to be")),
            (false, true) => Err(format!("{status}, where the client expects {expected}")),
            (false, false) => Err(refused(status, body)),
        };
    }
    if status != StatusCode::OK {
        return Err(refused(status, body));
    }
    match expected {
        ExpectedReply::Status(_) => Ok(status.to_string()),
        ExpectedReply::ModelList(page, name) => list(page, name, model, body),
        ExpectedReply::Stream => stream(body),
    }
}

fn list(page: &str, name: &str, model: &str, body: &str) -> Result<String, String> {
    let parsed: Value = serde_json::from_str(body).map_err(|_| format!("no JSON: {}", shown(body)))?;
    let Some(entries) = parsed[page].as_array() else {
        return Err(format!("a list without `{page}`: {}", shown(body)));
    };
    let is_model = |entry: &Value| {
        entry[name].as_str().is_some_and(|name| name.strip_suffix(":latest").unwrap_or(name) == model)
    };
    match entries.iter().any(is_model) {
        true => Ok(format!("200, {} models, {model} among them", entries.len())),
        false => Err(format!("200, but {model} is not among the {} models", entries.len())),
    }
}

/// What a line of a stream says, of server-sent events or of Ollama's lines of JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
enum StreamLine {
    /// Part of an answer, a comment, or a field that has no data.
    Part,
    /// The end of an answer, as its dialect says it.
    End,
    /// An error in the middle.
    Error(String),
}

fn stream(body: &str) -> Result<String, String> {
    for line in body.lines() {
        match read_line(line) {
            StreamLine::Part => {}
            StreamLine::End => return Ok("200, a stream with its end".to_owned()),
            StreamLine::Error(words) => return Err(format!("200, then an error in the stream: {words}")),
        }
    }
    match body.trim().is_empty() {
        true => Err("200, but nothing came behind the headers".to_owned()),
        false => Err("200, but the stream has no end; is a proxy between that cuts it off?".to_owned()),
    }
}

fn read_line(line: &str) -> StreamLine {
    let data = line.strip_prefix("data:").unwrap_or(line).trim();
    if data == "[DONE]" {
        return StreamLine::End;
    }
    let Ok(event) = serde_json::from_str::<Value>(data) else { return StreamLine::Part };
    let kind = event["type"].as_str().unwrap_or_default();
    if !event["error"].is_null() || kind == "response.failed" {
        return StreamLine::Error(error_message(data));
    }
    match kind {
        "message_stop" | "response.completed" | "response.incomplete" => StreamLine::End,
        _ if event["done"] == true => StreamLine::End,
        _ => StreamLine::Part,
    }
}

/// A refusal in the gateway's words, and what to do.
fn refused(status: StatusCode, body: &str) -> String {
    let remedy = match status.as_u16() {
        401 => "; create a key with `russet key create NAME`, and give it with --key or in RUSSET_KEY",
        404 => "; `russet get modeldeployments` lists what is deployed, and --model names it",
        503 | 529 => "; `russet explain modeldeployment/NAME` says what keeps it from serving",
        _ => "",
    };
    format!("{status}: {}{remedy}", error_message(body))
}

/// The message of an error of any dialect.
fn error_message(body: &str) -> String {
    let parsed: Value = serde_json::from_str(body).unwrap_or_default();
    let messages = [&parsed["error"]["message"], &parsed["error"], &parsed["response"]["error"]["message"]];
    shown(messages.into_iter().find_map(Value::as_str).unwrap_or(body))
}

/// Why there is no response.
fn failure(error: &reqwest::Error, url: &str, timeout: Duration) -> String {
    if error.is_timeout() && !error.is_connect() {
        return format!("no answer within {} s; --timeout-seconds waits for longer", timeout.as_secs());
    }
    let mut words = String::new();
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = cause {
        words = error.to_string();
        cause = error.source();
    }
    match error.is_connect() {
        true => format!(
            "nothing answers at {url} ({words}); start the gateway with `russet up`, or name it with --url http://HOST:PORT"
        ),
        false => format!("the connection to {url} broke: {words}"),
    }
}

/// A stranger's text, on one line and not too long.
fn shown(text: &str) -> String {
    let line: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let short: String = line.chars().filter(|letter| !letter.is_control()).take(MAX_SHOWN_CHARS).collect();
    match short.is_empty() {
        true => "an empty response".to_owned(),
        false => short,
    }
}

#[cfg(test)]
mod tests;
