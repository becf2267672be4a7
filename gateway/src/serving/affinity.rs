//! What a client says of the session that a request belongs to. Requests of one session go to one replica where all are
//! equally quick, through whichever gateway they come. A hint: it changes no answer.

use axum::http::{HeaderMap, HeaderName};
use serde_json::Value;
use twox_hash::XxHash3_64;

/// Headers of Claude Code, Codex, and others.
static HEADERS: [HeaderName; 6] = [
    HeaderName::from_static("x-claude-code-session-id"),
    HeaderName::from_static("session_id"),
    HeaderName::from_static("session-id"),
    HeaderName::from_static("x-session-id"),
    HeaderName::from_static("conversation_id"),
    HeaderName::from_static("x-session-affinity"),
];
/// Paths of fields: of OpenAI, Anthropic and Open WebUI, the narrower first.
const FIELDS: &[&[&str]] = &[
    &["prompt_cache_key"],
    &["session_id"],
    &["chat_id"],
    &["metadata", "user_id"],
    &["safety_identifier"],
    &["user"],
];

/// Identifies a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Session(u64);

impl Session {
    fn new(name: &str) -> Option<Self> {
        (!name.is_empty()).then(|| Self(XxHash3_64::oneshot(name.as_bytes())))
    }

    /// The session that the headers of a request name.
    pub(crate) fn of_headers(headers: &HeaderMap) -> Option<Self> {
        HEADERS.iter().find_map(|name| Self::new(headers.get(name)?.to_str().ok()?))
    }

    /// Whether a header of this name names a session.
    pub(crate) fn is_named_by(header: &str) -> bool {
        HEADERS.iter().any(|name| name == header)
    }

    /// The session that the body of a request names.
    pub(crate) fn of_body(body: &Value) -> Option<Self> {
        let fields = body.as_object()?;
        // Most bodies have few fields, and none of these.
        let named = FIELDS.iter().filter(|path| fields.keys().any(|name| *name == path[0]));
        named.into_iter().find_map(|path| {
            let field = path.iter().try_fold(body, |value, name| value.get(name))?;
            Self::new(field.as_str()?)
        })
    }

    /// The session that a conversation is, by its number.
    pub(crate) fn of_conversation(number: u64) -> Self {
        Self(number)
    }

    /// Its number, the same for all its requests.
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    /// How much this session prefers the replica of this name: it goes to the one it prefers most. Each replica is
    /// preferred by as many sessions, and one that is gone or new changes that of few.
    pub(crate) fn preference(self, replica: &str) -> u64 {
        XxHash3_64::oneshot_with_seed(self.0, replica.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn sessions_are_named_by_headers_and_fields() {
        let headers =
            |name: &'static str| HeaderMap::from_iter([(name.parse().unwrap(), "abc".parse().unwrap())]);
        let session = Session::new("abc");
        for (case, found, expected) in [
            ("Claude Code", Session::of_headers(&headers("x-claude-code-session-id")), session),
            ("Codex", Session::of_headers(&headers("session_id")), session),
            ("another header", Session::of_headers(&headers("accept")), None),
            ("OpenAI", Session::of_body(&json!({"prompt_cache_key": "abc", "user": "eve"})), session),
            ("Anthropic", Session::of_body(&json!({"metadata": {"user_id": "abc"}})), session),
            ("an empty one", Session::of_body(&json!({"prompt_cache_key": "", "user": "abc"})), session),
            ("no text", Session::of_body(&json!({"user": 7, "metadata": "abc"})), None),
            ("no object", Session::of_body(&json!(["user"])), None),
        ] {
            assert_eq!(found, expected, "{case}");
        }
    }

    #[test]
    fn sessions_are_spread_and_stay_when_a_replica_is_new() {
        let of = |session: u32, replicas: &[&str]| {
            let session = Session::new(&session.to_string()).unwrap();
            replicas.iter().max_by_key(|replica| session.preference(replica)).unwrap().to_string()
        };
        let count =
            |replica: &str| (0..3000).filter(|number| of(*number, &["a", "b", "c"]) == replica).count();
        for replica in ["a", "b", "c"] {
            assert!((800..1200).contains(&count(replica)), "{} of 3000 at {replica}", count(replica));
        }
        let moved = |number: &u32| of(*number, &["a", "b"]) != of(*number, &["a", "b", "c"]);
        let to = |number: &u32| of(*number, &["a", "b", "c"]) == "c";
        assert_eq!((0..3000).filter(moved).count(), (0..3000).filter(to).count());
    }
}
