//! Every path with a body, and the form of its dialect's errors, for tests of bad input.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::harness::GatewayLab;

/// Which form errors have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorForm {
    OpenAi,
    Anthropic,
    Ollama,
}

impl ErrorForm {
    /// Checks the body of an error; returns its message, and the field it names where the form has one.
    pub fn read(self, body: &[u8]) -> (String, Option<String>) {
        let shown = String::from_utf8_lossy(body).into_owned();
        let body: Value = serde_json::from_slice(body).unwrap_or_else(|error| panic!("{error}: {shown}"));
        let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
        let has = |value: &Value, expected: &[&str]| {
            assert_eq!(keys(value), expected.iter().map(|key| (*key).to_owned()).collect(), "{shown}");
        };
        let text = |value: &Value| value.as_str().unwrap_or_else(|| panic!("{shown}")).to_owned();
        let error = &body["error"];
        let (message, param) = match self {
            Self::OpenAi => {
                has(&body, &["error"]);
                has(error, &["code", "message", "param", "type"]);
                assert!(error["type"].is_string(), "{shown}");
                (text(&error["message"]), error["param"].as_str().map(str::to_owned))
            }
            Self::Anthropic => {
                has(&body, &["error", "request_id", "type"]);
                has(error, &["message", "type"]);
                assert_eq!(body["type"], "error");
                assert!(error["type"].is_string() && body["request_id"].is_string(), "{shown}");
                (text(&error["message"]), None)
            }
            Self::Ollama => {
                has(&body, &["error"]);
                (text(error), None)
            }
        };
        assert!(!message.is_empty(), "{shown}");
        (message, param)
    }
}

/// A path that takes a body.
pub struct BodyPath {
    pub path: &'static str,
    pub form: ErrorForm,
    /// A valid body.
    pub body: &'static str,
    /// The folder of its dialect's fields in docs/gateway.md.
    pub fields: &'static str,
}

const fn path(path: &'static str, form: ErrorForm, body: &'static str, fields: &'static str) -> BodyPath {
    BodyPath { path, form, body, fields }
}

const OPENAI: &str = "openai/request";
const OLLAMA: &str = "ollama/request";

/// All of them, but for other spellings of the same.
pub const PATHS: [BodyPath; 10] = [
    path(
        "/v1/chat/completions",
        ErrorForm::OpenAi,
        r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#,
        OPENAI,
    ),
    path("/v1/completions", ErrorForm::OpenAi, r#"{"model":"m","prompt":"hi"}"#, OPENAI),
    path("/v1/responses", ErrorForm::OpenAi, r#"{"model":"m","input":"hi"}"#, "openai/responses"),
    path("/v1/embeddings", ErrorForm::OpenAi, r#"{"model":"m","input":"hi"}"#, OLLAMA),
    path("/v1/rerank", ErrorForm::OpenAi, r#"{"model":"m","query":"hi","documents":["hi"]}"#, OPENAI),
    path(
        "/v1/messages",
        ErrorForm::Anthropic,
        r#"{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"hi"}]}"#,
        "anthropic/request",
    ),
    path(
        "/v1/messages/count_tokens",
        ErrorForm::Anthropic,
        r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#,
        "anthropic/request",
    ),
    path(
        "/api/chat",
        ErrorForm::Ollama,
        r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":false}"#,
        OLLAMA,
    ),
    path("/api/generate", ErrorForm::Ollama, r#"{"model":"m","prompt":"hi","stream":false}"#, OLLAMA),
    path("/api/embed", ErrorForm::Ollama, r#"{"model":"m","input":"hi"}"#, OLLAMA),
];

/// Longest message of an error: it does not repeat what it refuses.
const MAX_MESSAGE_BYTES: usize = 2048;

impl BodyPath {
    /// Sends a body; returns the status, and message and field of the error if it is one.
    pub async fn send(&self, lab: &GatewayLab, body: impl Into<Vec<u8>>) -> (u16, String, Option<String>) {
        let response = lab.client.post(lab.url(self.path)).body(body.into()).send().await.unwrap();
        let status = response.status().as_u16();
        let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
        let answer = response.bytes().await.unwrap();
        if status == 200 {
            return (status, String::new(), None);
        }
        assert_eq!(kind, "application/json", "{}", self.path);
        let (message, param) = self.form.read(&answer);
        assert!(message.len() <= MAX_MESSAGE_BYTES, "{}: {} bytes: {message:.200}", self.path, message.len());
        (status, message, param)
    }

    /// That this body is refused as no JSON, or for another reason that these words have.
    pub async fn refuses(&self, lab: &GatewayLab, body: impl Into<Vec<u8>>, words: &str) {
        let body = body.into();
        let shown = String::from_utf8_lossy(&body[..body.len().min(200)]).into_owned();
        let (status, message, _) = self.send(lab, body).await;
        assert_eq!(status, 400, "{} {shown}: {message}", self.path);
        assert!(message.contains(words), "{} {shown}: {message}", self.path);
    }

    /// The valid body with one more field, as text.
    pub fn with(&self, field: &str) -> String {
        format!("{},{field}}}", self.body.strip_suffix('}').unwrap())
    }
}
