//! What the load generator asks, in each dialect.

use bytes::Bytes;
use serde_json::json;

/// Begins a prompt that is answered by [`PACED_TOKENS`](crate::roles::PACED_TOKENS) tokens at a steady pace, each with the
/// time it was made.
pub const PACED: &str = "paced";
/// Begins a prompt whose answer goes on, slowly, until its client leaves.
pub const ENDLESS: &str = "endless";

/// An API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    Chat,
    Responses,
    Messages,
    Ollama,
}

/// A request.
#[derive(Clone)]
pub struct LoadRequest {
    pub streamed: bool,
    api: Api,
    prompt: String,
    body: Bytes,
}

impl LoadRequest {
    /// A short question.
    pub fn new(api: Api, streamed: bool) -> Self {
        Self::of(api, streamed, "What is 17 + 25?".to_owned())
    }

    /// A conversation whose text has so many bytes.
    pub fn of_bytes(bytes: usize) -> Self {
        let line = "Sort these lines by what they say: the quick brown fox \\ jumps \"over\" the lazy dog.\n";
        Self::of(Api::Chat, false, line.repeat(bytes / line.len()))
    }

    /// A stream that is answered as this word says.
    pub fn answered(word: &str) -> Self {
        Self::of(Api::Chat, true, word.to_owned())
    }

    fn of(api: Api, streamed: bool, prompt: String) -> Self {
        let messages = format!("[{{\"role\":\"user\",\"content\":{}}}]", json!(prompt));
        let more = match api {
            Api::Chat | Api::Ollama => format!("\"messages\":{messages}"),
            Api::Messages => format!("\"max_tokens\":99,\"messages\":{messages}"),
            Api::Responses => format!("\"store\":false,\"input\":{messages}"),
        };
        let body = format!("{{\"model\":\"m\",\"stream\":{streamed},{more}}}");
        Self { streamed, api, prompt, body: body.into() }
    }

    pub fn path(&self) -> &'static str {
        match self.api {
            Api::Chat => "/v1/chat/completions",
            Api::Responses => "/v1/responses",
            Api::Messages => "/v1/messages",
            Api::Ollama => "/api/chat",
        }
    }

    pub fn body(&self) -> Bytes {
        self.body.clone()
    }

    pub fn prompt(&self) -> &str {
        &self.prompt
    }
}
