//! What a step does, to the letter: a request to a model or to an endpoint, with every reference in it filled. It is kept by its
//! digest before anything is sent, so that what a person approved, what is sent and what is sent again are one thing. Pure.

use std::collections::BTreeMap;

use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use russet_crds::{ChatStep, EmbedStep, HttpEndpoint, HttpStep, PipelineStep};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use thiserror::Error;

use super::references::{self, ReferenceError, fill, fill_json, fill_with};

/// Longest URL: longer ones are refused by most servers.
const MAX_URL_BYTES: usize = 8192;
/// How often a path may be encoded.
const MAX_ENCODINGS: usize = 8;
/// Headers that say how a call is made, and are not for Pipelines.
const OWN_HEADERS: [&str; 8] = [
    "authorization",
    "connection",
    "content-length",
    "cookie",
    "host",
    "idempotency-key",
    "te",
    "transfer-encoding",
];

/// What a step does for one value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Action {
    /// A model answers a request for a chat completion.
    Chat(Value),
    /// A model makes vectors.
    Embed(Value),
    /// An endpoint is called.
    Http(HttpAction),
}

/// A call of an endpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct HttpAction {
    /// The name of the HTTPEndpoint.
    pub(super) endpoint: String,
    pub(super) method: String,
    pub(super) url: String,
    pub(super) headers: BTreeMap<String, String>,
    pub(super) body: Option<String>,
}

/// Why nobody can say what a step does.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(super) enum ActionError {
    /// A reference leads nowhere.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// The endpoint is not there.
    #[error("HTTPEndpoint {0} does not exist in this namespace")]
    NoEndpoint(String),
    /// The path leads elsewhere.
    #[error("{path:?} leads out of {url}, where HTTPEndpoint {endpoint} begins")]
    Outside {
        /// The HTTPEndpoint.
        endpoint: String,
        /// Its URL.
        url: String,
        /// The path, with its references.
        path: String,
    },
    /// The URL is longer than servers take.
    #[error("its URL has more than {MAX_URL_BYTES} bytes with what its references stand for")]
    LongUrl,
    /// A header cannot be sent.
    #[error("the header {0:?} cannot be set by a step")]
    Header(String),
    /// A text that must be a list of texts.
    #[error("`embed.input` is neither a text nor a list of texts")]
    NoTexts,
    /// A newer release knows what it does.
    #[error("it is of a newer release")]
    Newer,
}

impl Action {
    /// What `step` does with these values.
    pub(super) fn of(
        step: &PipelineStep,
        values: &Value,
        endpoint: impl Fn(&str) -> Option<HttpEndpoint>,
    ) -> Result<Self, ActionError> {
        match (&step.chat, &step.embed, &step.http) {
            (Some(chat), ..) => Ok(Self::Chat(chat_body(step, chat, values)?)),
            (None, Some(embed), _) => Ok(Self::Embed(embed_body(embed, values)?)),
            (None, None, Some(http)) => HttpAction::of(http, values, endpoint).map(Self::Http),
            (None, None, None) => Err(ActionError::Newer),
        }
    }

    /// It as bytes; the same action always has the same.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        // Maps of texts: serialising them into memory cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

fn chat_body(step: &PipelineStep, chat: &ChatStep, values: &Value) -> Result<Value, ReferenceError> {
    let message = |role: &str, text: &str| Ok(json!({"role": role, "content": fill(text, values)?}));
    let mut messages = Vec::new();
    if let Some(system) = &chat.system {
        messages.push(message("system", system)?);
    }
    messages.push(message("user", &chat.prompt)?);
    let mut body = Map::from_iter([
        ("model".to_owned(), chat.model.clone().into()),
        ("messages".to_owned(), messages.into()),
    ]);
    let options = [
        ("max_completion_tokens", chat.max_tokens.map(Value::from)),
        ("temperature", chat.temperature_percent.map(|percent| (f64::from(percent) / 100.0).into())),
        ("seed", chat.seed.map(Value::from)),
    ];
    for (name, value) in options {
        body.extend(value.map(|value| (name.to_owned(), value)));
    }
    if !step.schema.is_empty() {
        let schema = json!({"name": step.name, "strict": true, "schema": step.schema});
        let format = json!({"type": "json_schema", "json_schema": schema});
        body.insert("response_format".to_owned(), format);
    }
    Ok(Value::Object(body))
}

fn embed_body(embed: &EmbedStep, values: &Value) -> Result<Value, ActionError> {
    let input = references::value_of(&embed.input, values)?;
    let is_texts = match &input {
        Value::String(_) => true,
        Value::Array(items) => !items.is_empty() && items.iter().all(Value::is_string),
        _ => false,
    };
    if !is_texts {
        return Err(ActionError::NoTexts);
    }
    Ok(json!({"model": embed.model, "input": input}))
}

impl HttpAction {
    /// The call with these values.
    pub(super) fn of(
        http: &HttpStep,
        values: &Value,
        endpoint: impl Fn(&str) -> Option<HttpEndpoint>,
    ) -> Result<Self, ActionError> {
        let name = &http.endpoint_ref.name;
        let url = endpoint(name).ok_or_else(|| ActionError::NoEndpoint(name.clone()))?.spec.url;
        // A value is one part of a path, whatever is in it.
        let encode = |text: String| utf8_percent_encode(&text, NON_ALPHANUMERIC).to_string();
        let path = fill_with(&http.path, values, encode)?;
        if url.len() + path.len() > MAX_URL_BYTES {
            return Err(ActionError::LongUrl);
        }
        let url = below(&url, &path).ok_or_else(|| ActionError::Outside {
            endpoint: name.clone(),
            url: url.clone(),
            path: http.path.chars().take(80).collect(),
        })?;
        let mut headers = BTreeMap::new();
        for (header, value) in &http.headers {
            let (header, value) = (header.to_ascii_lowercase(), fill(value, values)?);
            let is_valid = header.parse::<axum::http::HeaderName>().is_ok()
                && value.parse::<axum::http::HeaderValue>().is_ok()
                && !OWN_HEADERS.contains(&header.as_str());
            if !is_valid {
                return Err(ActionError::Header(header));
            }
            headers.insert(header, value);
        }
        let body = match &http.body {
            Some(body) => Some(fill(body, values)?),
            None if http.json.is_empty() => None,
            None => {
                headers.entry("content-type".to_owned()).or_insert_with(|| "application/json".to_owned());
                Some(fill_json(&Value::Object(http.json.clone()), values)?.to_string())
            }
        };
        let method = http.method.as_str().ok_or(ActionError::Newer)?.to_owned();
        Ok(Self { endpoint: name.clone(), method, url, headers, body })
    }

    /// Whether this endpoint still lists its address.
    pub(super) fn is_at(&self, endpoint: &HttpEndpoint) -> bool {
        is_below(&endpoint.spec.url, &self.url)
    }
}

/// The URL with this path behind it; none where that leads out of it.
fn below(url: &str, path: &str) -> Option<String> {
    let joined = match path.as_bytes().first() {
        None => url.to_owned(),
        Some(b'/' | b'?') => format!("{}{path}", url.trim_end_matches('/')),
        Some(_) => format!("{}/{path}", url.trim_end_matches('/')),
    };
    let parsed = reqwest::Url::parse(&joined).ok()?;
    is_below(url, parsed.as_str()).then(|| parsed.into())
}

/// Whether no part of a path leads up, however a server reads it: encoded, once or twice, with backslashes, or with parameters
/// behind a semicolon.
fn goes_down(path: &str) -> bool {
    let (mut path, mut before) = (path.to_owned(), String::new());
    for _ in 0..MAX_ENCODINGS {
        if path == before {
            return true;
        }
        let is_up = |part: &str| matches!(part.split(';').next(), Some("." | ".."));
        if path.split(['/', '\\']).any(is_up) {
            return false;
        }
        before = std::mem::take(&mut path);
        path = percent_decode_str(&before).decode_utf8_lossy().into_owned();
    }
    false
}

/// Whether `url` is at or below `base`: of its scheme, host and port, and in its folder.
fn is_below(base: &str, url: &str) -> bool {
    let (Ok(base), Ok(url)) = (reqwest::Url::parse(base), reqwest::Url::parse(url)) else { return false };
    let folder = base.path().trim_end_matches('/');
    let inside = url.path().strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let is_plain = goes_down(url.path());
    let origin = |url: &reqwest::Url| {
        (url.scheme().to_owned(), url.host_str().map(str::to_owned), url.port_or_known_default())
    };
    inside
        && is_plain
        && origin(&base) == origin(&url)
        && url.username().is_empty()
        && url.password().is_none()
}

#[cfg(test)]
mod tests {
    use russet_crds::{HttpEndpointSpec, LocalReference};

    use super::*;

    fn endpoint(name: &str) -> Option<HttpEndpoint> {
        let spec =
            HttpEndpointSpec { url: "https://hooks.lan/team".to_owned(), ..HttpEndpointSpec::default() };
        (name == "hooks").then(|| HttpEndpoint::new(name, spec))
    }

    fn call(http: Value, item: &str) -> Result<HttpAction, String> {
        let step: HttpStep = serde_json::from_value(http).unwrap();
        let called = HttpAction::of(&step, &json!({"item": item}), endpoint);
        called.map_err(|error| error.to_string())
    }

    #[test]
    fn a_call_stays_below_its_endpoint() {
        let url = |path: &str, item: &str| {
            let http = json!({"endpointRef": {"name": "hooks"}, "path": path});
            call(http, item).map(|call| call.url)
        };
        for (path, item, expected) in [
            ("", "", "https://hooks.lan/team"),
            ("/messages?to=$(item)", "a b&c=d", "https://hooks.lan/team/messages?to=a%20b%26c%3Dd"),
            ("messages/$(item)", "x/y", "https://hooks.lan/team/messages/x%2Fy"),
            ("?list=1", "", "https://hooks.lan/team?list=1"),
        ] {
            assert_eq!(url(path, item).as_deref(), Ok(expected), "{path}");
        }
        for (path, item) in [
            ("/../other", ""),
            ("/a/../../../b", ""),
            ("/%2e%2e/other", ""),
            ("/.%2E/b", ""),
            ("/$(item)/x", ".."),
            ("/..%2Fb", ""),
            ("/..;x/b", ""),
            ("/%252e%252e/b", ""),
            ("/..$(item)", "/b"),
            ("/a\\..\\..\\b", ""),
        ] {
            let error = url(path, item).unwrap_err();
            assert!(error.contains("leads out of https://hooks.lan/team"), "{path}: {error}");
        }
        assert!(!is_below("https://hooks.lan/team", "https://hooks.lan/teamwork"));
        assert!(!is_below("https://hooks.lan/team", "https://hooks.lan:444/team"));
        assert!(!is_below("https://hooks.lan/team", "https://u@hooks.lan/team"));
        assert!(is_below("https://hooks.lan", "https://hooks.lan:443/anything"));
    }

    #[test]
    fn headers_that_say_how_a_call_is_made_are_refused() {
        let http = |name: &str, value: &str| json!({"endpointRef": {"name": "hooks"}, "headers": {name: value}, "body": "$(item)"});
        let sent = call(http("X-Team", "<$(item)>"), "red").unwrap();
        assert_eq!((sent.method.as_str(), sent.headers["x-team"].as_str()), ("POST", "<red>"));
        assert_eq!(sent.body.as_deref(), Some("red"));
        for (name, value) in
            [("Authorization", "x"), ("HOST", "x"), ("a b", "x"), ("x-team", "a\r\nb: $(item)")]
        {
            assert!(call(http(name, value), "").unwrap_err().contains("cannot be set"), "{name}");
        }
    }

    #[test]
    fn one_action_has_one_digest() {
        let step = PipelineStep {
            name: "ask".to_owned(),
            chat: Some(ChatStep {
                model: "m".into(),
                prompt: "On $(item)".into(),
                seed: Some(1),
                ..Default::default()
            }),
            schema: Map::from_iter([("type".to_owned(), "object".into())]),
            ..PipelineStep::default()
        };
        let action = Action::of(&step, &json!({"item": "tea"}), endpoint).unwrap();
        let text = String::from_utf8(action.to_bytes()).unwrap();
        let schema = json!({"name": "ask", "strict": true, "schema": {"type": "object"}});
        let body = json!({
            "model": "m", "messages": [{"role": "user", "content": "On tea"}], "seed": 1,
            "response_format": {"type": "json_schema", "json_schema": schema},
        });
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), json!({"chat": body}));
        assert_eq!(Action::of(&step, &json!({"item": "tea"}), endpoint).unwrap().to_bytes(), text.as_bytes());
        assert_eq!(serde_json::from_str::<Action>(&text).unwrap(), action);
        let http = PipelineStep {
            http: Some(HttpStep { endpoint_ref: LocalReference::new("gone"), ..HttpStep::default() }),
            ..PipelineStep::default()
        };
        assert_eq!(Action::of(&http, &Value::Null, endpoint), Err(ActionError::NoEndpoint("gone".into())));
    }
}
