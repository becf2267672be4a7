//! The messages of requests by MQTT, and their topics.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use axum::http::uri::PathAndQuery;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use bytes::Bytes;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use crate::error::{ErrorKind, GatewayError, shown};
use crate::keys::{Caller, Keyring};
use crate::response_store::InboxRow;
use crate::serving::{NewInboxRequest, kept_headers};

/// Longest name of a request in a topic.
pub(super) const MAX_NAME_BYTES: usize = 255;
/// Where a message goes that names no path.
const DEFAULT_PATH: &str = "/v1/chat/completions";

/// The topics of one gateway.
#[derive(Clone, Debug)]
pub(super) struct Topics {
    inbox: Arc<str>,
}

impl Topics {
    pub(super) fn new(prefix: &str) -> Self {
        Self { inbox: format!("{prefix}/inbox/").into() }
    }

    /// The topics of requests.
    pub(super) fn filter(&self) -> String {
        format!("{}+", self.inbox)
    }

    /// The name of the request in a topic.
    pub(super) fn name<'a>(&self, topic: &'a str) -> Option<&'a str> {
        topic.strip_prefix(&*self.inbox)
    }

    /// The topic of the answer to a request.
    pub(super) fn response(&self, name: &str) -> String {
        format!("{}{name}/response", self.inbox)
    }
}

/// A request in a message.
#[derive(Debug)]
pub(super) struct RequestMessage {
    /// The header that has its key.
    pub(super) credentials: HeaderMap,
    pub(super) request: NewInboxRequest,
}

/// The fields of a message.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MessageFields<'a> {
    /// The secret of an AccessKey.
    #[serde(default)]
    key: String,
    path: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    #[serde(borrow)]
    body: &'a RawValue,
}

impl RequestMessage {
    /// The request in the message of this name.
    pub(super) fn parse(name: &str, payload: &[u8]) -> Result<Self, GatewayError> {
        let is_name =
            (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_name {
            let message = format!(
                "the topic names the request {:?}: a name has 1 to {MAX_NAME_BYTES} printable ASCII characters without blanks",
                shown(name)
            );
            return Err(GatewayError::field("topic", message));
        }
        let fields = serde_json::from_slice(payload).map_err(|error| {
            let fields =
                "a message is a JSON object with `body`, `key`, and where it needs them `path` and `headers`";
            GatewayError::new(ErrorKind::InvalidRequest, format!("{error}; {fields}"))
        })?;
        let MessageFields { key, path, headers, body } = fields;
        let path = path.unwrap_or_else(|| DEFAULT_PATH.to_owned());
        let is_path =
            path.starts_with('/') && path.parse::<PathAndQuery>().is_ok_and(|parsed| parsed.path() == path);
        if !is_path {
            let message = format!("`path` is {:?}, and must be a path such as {DEFAULT_PATH}", shown(&path));
            return Err(GatewayError::field("path", message));
        }
        let mut credentials = HeaderMap::new();
        if !key.is_empty() {
            let invalid = |_| GatewayError::field("key", "`key` must be the secret of an AccessKey");
            let mut bearer = HeaderValue::try_from(format!("Bearer {key}")).map_err(invalid)?;
            bearer.set_sensitive(true);
            credentials.insert(header::AUTHORIZATION, bearer);
        }
        let mut all = HeaderMap::new();
        for (name, value) in headers {
            let header = name.parse::<HeaderName>().ok().zip(value.parse::<HeaderValue>().ok());
            let Some((name, value)) = header else {
                return Err(GatewayError::field("headers", format!("{:?} is no header", shown(&name))));
            };
            all.insert(name, value);
        }
        let kept = kept_headers(&all);
        if let Some(other) = all.keys().find(|name| !kept.contains_key(*name)) {
            let message = format!("no request reads the header {:?}; leave it out", shown(other.as_str()));
            return Err(GatewayError::field("headers", message));
        }
        let body = Bytes::copy_from_slice(body.get().as_bytes());
        let request = NewInboxRequest { path, headers: kept, body, reply: Some(name.to_owned()) };
        Ok(Self { credentials, request })
    }
}

/// The caller with these credentials. A broker says nothing of where its clients are, so only a key counts, and none that is
/// for some addresses alone.
pub(super) fn caller(keyring: &Keyring, credentials: &HeaderMap) -> Result<Caller, GatewayError> {
    let nowhere = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    keyring.caller(credentials, nowhere, false, Timestamp::now()).map_err(|_| {
        let message = "a request by MQTT needs a `key` that is accepted: the secret of an AccessKey; `russet key create NAME` makes one";
        GatewayError::new(ErrorKind::InvalidApiKey, message)
    })
}

/// What is published of a request whose answer the broker does not take.
pub(super) fn without_answer(row: &InboxRow) -> String {
    let message = format!("the broker does not take the answer; GET /v1/inbox/{} has it", row.id);
    json!({"id": row.id, "object": "inbox.request", "status": row.state, "message": message}).to_string()
}

/// What is published where a request is refused.
pub(super) fn refused(error: &GatewayError) -> String {
    let GatewayError { kind, message, param, .. } = error;
    let error = json!({"message": message, "code": kind.as_str(), "param": param});
    json!({"object": "inbox.request", "status": "refused", "error": error}).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topics_name_requests() {
        let topics = Topics::new("home/russet");
        assert_eq!(topics.filter(), "home/russet/inbox/+");
        assert_eq!(topics.name("home/russet/inbox/a-1"), Some("a-1"));
        assert_eq!(topics.name("home/other/inbox/a-1"), None);
        assert_eq!(topics.response("a-1"), "home/russet/inbox/a-1/response");
    }

    #[test]
    fn a_message_is_a_request() {
        let text =
            r#"{"key": "s", "body": {"model": "m", "a": [1,  2]}, "headers": {"x-russet-labels": "a=b"}}"#;
        let RequestMessage { credentials, request } = RequestMessage::parse("n", text.as_bytes()).unwrap();
        assert_eq!(credentials["authorization"], "Bearer s");
        assert_eq!(
            (request.path.as_str(), &request.body[..]),
            (DEFAULT_PATH, &br#"{"model": "m", "a": [1,  2]}"#[..])
        );
        assert_eq!(request.headers["x-russet-labels"], "a=b");
        let other = r#"{"path": "/api/chat", "body": {}}"#;
        assert_eq!(RequestMessage::parse("n", other.as_bytes()).unwrap().request.path, "/api/chat");
    }

    #[test]
    fn what_is_no_request_says_why() {
        let long = "n".repeat(256);
        for (name, text, words) in [
            ("", r#"{"body": {}}"#, "1 to 255"),
            ("a b", r#"{"body": {}}"#, "1 to 255"),
            (&long, r#"{"body": {}}"#, "1 to 255"),
            ("n", "", "EOF"),
            ("n", "[]", "a message is a JSON object"),
            ("n", "{}", "missing field `body`"),
            ("n", r#"{"body": {}, "model": "m"}"#, "unknown field `model`"),
            ("n", r#"{"body": {}, "path": "x"}"#, "must be a path"),
            ("n", r#"{"body": {}, "path": "/x?y"}"#, "must be a path"),
            ("n", r#"{"body": {}, "path": "/ x"}"#, "must be a path"),
            ("n", r#"{"body": {}, "key": "a\nb"}"#, "secret"),
            ("n", r#"{"body": {}, "headers": {"a b": "c"}}"#, "is no header"),
            ("n", r#"{"body": {}, "headers": {"cookie": "c"}}"#, "leave it out"),
            ("n", r#"{"body": {}, "headers": {"authorization": "c"}}"#, "leave it out"),
            ("n", "\u{0}\u{1}", "expected value"),
        ] {
            let error = RequestMessage::parse(name, text.as_bytes()).unwrap_err();
            assert!(error.message.contains(words), "{name} {text}: {error}");
            assert!(refused(&error).contains("\"status\":\"refused\""));
        }
        let deep = format!("{{\"body\": {}", "[".repeat(1 << 20));
        assert!(RequestMessage::parse("n", deep.as_bytes()).is_err());
    }
}
