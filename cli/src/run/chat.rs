//! A conversation through the gateway's OpenAI API, streamed. Only answers go to standard output.

use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use reqwest::{Client, StatusCode};
use russet_telemetry::say;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::stdout::{self, outln};

/// The input prompt.
const PROMPT_MARK: &str = ">>> ";
/// Connect timeout; an answer has no timeout.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The connection of a conversation and its parameters.
pub struct Chat {
    client: Client,
    url: String,
    key: Option<String>,
    parameters: ChatParameters,
}

/// Parameters of every request, beside the messages.
#[derive(Clone, Debug)]
pub struct ChatParameters {
    /// The gateway's name of the model.
    pub model: String,
    /// Maximum output tokens.
    pub max_tokens: Option<u32>,
    /// Sampling temperature.
    pub temperature: Option<f32>,
}

impl ChatParameters {
    fn body(&self, messages: &[Value]) -> Value {
        let Self { model, max_tokens, temperature } = self;
        let mut body = json!({"model": model, "messages": messages, "stream": true});
        if let Some(most) = max_tokens {
            body["max_tokens"] = (*most).into();
        }
        if let Some(temperature) = temperature {
            body["temperature"] = (*temperature).into();
        }
        body
    }
}

impl Chat {
    /// A conversation with a model of the gateway.
    pub fn new(gateway: &str, key: Option<String>, asked: ChatParameters) -> Result<Self> {
        // The gateway belongs to the cluster; the environment's proxies are for other networks.
        let client = Client::builder()
            .no_proxy()
            .connect_timeout(CONNECT_TIMEOUT)
            .build()
            .context("cannot set up an HTTP client")?;
        Ok(Self { client, url: url(gateway), key, parameters: asked })
    }

    /// Sends one prompt.
    pub async fn ask_once(&self, prompt: String) -> Result<()> {
        self.send(&[message("user", prompt)]).await.map(drop)
    }

    /// Sends each line of standard input as the next prompt of one conversation.
    pub async fn ask_lines(&self) -> Result<()> {
        let person = std::io::stdin().is_terminal();
        let mut lines = BufReader::new(tokio::io::stdin()).lines();
        let mut messages = Vec::new();
        loop {
            if person {
                // A prompt that cannot be shown is not needed.
                let _ = std::io::stderr().write_all(PROMPT_MARK.as_bytes());
            }
            let Some(line) = lines.next_line().await.context("standard input cannot be read")? else { break };
            if line.trim().is_empty() {
                continue;
            }
            messages.push(message("user", line));
            match self.send(&messages).await {
                Ok(answer) => messages.push(message("assistant", answer)),
                // A person may try another prompt; a script must see the failure.
                Err(error) if person => {
                    messages.pop();
                    say!("error: {error:#}");
                }
                Err(error) => return Err(error),
            }
        }
        if person {
            say!("");
        }
        Ok(())
    }

    async fn send(&self, messages: &[Value]) -> Result<String> {
        let mut request = self.client.post(&self.url).json(&self.parameters.body(messages));
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        let mut response = request.send().await.with_context(|| {
            format!("the gateway does not answer at {}; name it with --gateway http://HOST:PORT", self.url)
        })?;
        let status = response.status();
        if !status.is_success() {
            bail!(error_text(status, &response.text().await.unwrap_or_default()));
        }
        let (mut events, mut answer) = (EventParser::default(), String::new());
        while let Some(bytes) = response.chunk().await.context("the connection to the gateway broke")? {
            for event in events.read(&bytes) {
                match event {
                    ChatEvent::Text(text) => {
                        // A closed pipe means that the reader needs no more output.
                        stdout::write(&text)?;
                        answer.push_str(&text);
                    }
                    ChatEvent::Failed(words) => {
                        outln!("")?;
                        bail!("the answer ended early: {words}");
                    }
                    ChatEvent::Done => {
                        outln!("")?;
                        return Ok(answer);
                    }
                }
            }
        }
        outln!("")?;
        bail!("the gateway closed the connection before the answer's end; ask again")
    }
}

fn message(role: &str, content: String) -> Value {
    json!({"role": role, "content": content})
}

/// URL of chat completions, for a gateway given with or without `/v1`.
fn url(gateway: &str) -> String {
    format!("{}/v1/chat/completions", root(gateway))
}

/// URL of a gateway, given with or without `/v1`.
pub fn root(gateway: &str) -> &str {
    let root = gateway.trim_end_matches('/');
    root.strip_suffix("/v1").unwrap_or(root)
}

/// An error in the gateway's words, and the remedy if it is always the same.
pub fn error_text(status: StatusCode, body: &str) -> String {
    error_text_with(status, body, "--key")
}

/// The same for a verb whose option for the API key is `key_option`.
pub fn error_text_with(status: StatusCode, body: &str, key_option: &str) -> String {
    let parsed = serde_json::from_str::<Value>(body).ok();
    let words = parsed.as_ref().and_then(|parsed| parsed["error"]["message"].as_str()).unwrap_or(body).trim();
    let remedy = match status {
        StatusCode::UNAUTHORIZED => format!("; give it with {key_option} or in RUSSET_KEY"),
        _ => String::new(),
    };
    format!("the gateway answers {status}: {words}{remedy}")
}

/// A part of a streamed answer.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ChatEvent {
    Text(String),
    Failed(String),
    Done,
}

/// Parser of server-sent events from chunks that may end anywhere.
#[derive(Debug, Default)]
struct EventParser {
    partial: Vec<u8>,
}

impl EventParser {
    fn read(&mut self, bytes: &[u8]) -> Vec<ChatEvent> {
        self.partial.extend_from_slice(bytes);
        let Some(end) = self.partial.iter().rposition(|byte| *byte == b'\n') else { return Vec::new() };
        let whole: Vec<u8> = self.partial.drain(..=end).collect();
        String::from_utf8_lossy(&whole).lines().filter_map(parse_line).collect()
    }
}

fn parse_line(line: &str) -> Option<ChatEvent> {
    let data = line.strip_prefix("data:")?.trim();
    if data == "[DONE]" {
        return Some(ChatEvent::Done);
    }
    let chunk: Value = match serde_json::from_str(data) {
        Ok(chunk) => chunk,
        Err(error) => return Some(ChatEvent::Failed(format!("the gateway sent invalid JSON: {error}"))),
    };
    if let Some(error) = chunk.get("error") {
        let words = error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned);
        return Some(ChatEvent::Failed(words));
    }
    let text = chunk["choices"][0]["delta"]["content"].as_str()?;
    (!text.is_empty()).then(|| ChatEvent::Text(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_parsed_from_chunks_split_anywhere() {
        let stream =
            "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n: beat\n\n\
                      data: {\"choices\":[{\"delta\":{\"content\":\"vierzig ü\"}}]}\r\n\r\n\
                      data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n"
                .as_bytes();
        for cut in 0..stream.len() {
            let mut events = EventParser::default();
            let mut found = events.read(&stream[..cut]);
            found.extend(events.read(&stream[cut..]));
            assert_eq!(found, [ChatEvent::Text("vierzig ü".to_owned()), ChatEvent::Done], "cut at {cut}");
        }
    }

    #[test]
    fn errors_are_shown_with_the_message_of_the_gateway() {
        for (line, expected) in [
            ("data: {\"error\":{\"message\":\"the engine is lost\"}}", "the engine is lost"),
            ("data: {\"error\":7}", "7"),
            ("data: {", "invalid JSON"),
        ] {
            assert!(
                matches!(parse_line(line), Some(ChatEvent::Failed(words)) if words.contains(expected)),
                "{line}"
            );
        }
        let body = r#"{"error":{"message":"a key is needed"}}"#;
        for (status, body, expected) in [
            (StatusCode::UNAUTHORIZED, body, "401 Unauthorized: a key is needed; give it with --key"),
            (StatusCode::NOT_FOUND, "plain\n", "404 Not Found: plain"),
        ] {
            assert!(error_text(status, body).contains(expected), "{}", error_text(status, body));
        }
    }

    #[test]
    fn unset_parameters_are_left_to_the_gateway() {
        let asked = ChatParameters { model: "default/m".to_owned(), max_tokens: None, temperature: None };
        let messages = [message("user", "x".to_owned())];
        assert_eq!(
            asked.body(&messages),
            json!({"model": "default/m", "stream": true, "messages": [{"role": "user", "content": "x"}]})
        );
        let asked = ChatParameters { max_tokens: Some(5), temperature: Some(0.0), ..asked };
        let body = asked.body(&messages);
        assert_eq!((&body["max_tokens"], &body["temperature"]), (&json!(5), &json!(0.0)));
    }

    #[test]
    fn a_gateway_is_named_with_or_without_its_path() {
        for gateway in ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"] {
            assert_eq!(url(gateway), "http://a:1/v1/chat/completions");
        }
    }
}
