//! The answer of a request that runs: its head, and its newest bytes. The older ones are in the store, so each needs little
//! memory however long it is.

use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::{Deserialize, Serialize};

use crate::response_store::{AnswerPart, InboxState};

/// Status and headers of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AnswerHead {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
}

/// What is known of an answer.
#[derive(Debug, Default)]
pub(super) struct Answer {
    /// When the request was leased, in seconds since 1970; none while it waits.
    pub(super) leased: Option<u64>,
    pub(super) head: Option<AnswerHead>,
    /// The bytes that the store does not have yet.
    pub(super) tail: AnswerPart,
    /// How it ended, once that is durable.
    pub(super) end: Option<InboxState>,
}

/// Where the bytes of an answer from some number on are.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NextBytes {
    /// Here.
    Newest(Vec<u8>),
    /// In the store.
    Stored,
    /// There are no more.
    Ended,
    /// Nothing runs the request any more, and it has not ended.
    Interrupted,
}

impl AnswerHead {
    /// That of a response, with the headers that say something of its body, of how it came about, and of what to do.
    pub(super) fn of(status: StatusCode, headers: &HeaderMap) -> Self {
        const NAMES: [&str; 5] =
            ["content-type", "x-accel-buffering", "retry-after", "retry-after-ms", "www-authenticate"];
        let is_kept =
            |name: &str| NAMES.contains(&name) || name == "x-should-retry" || name.starts_with("x-russet-");
        let kept = headers.iter().filter(|(name, _)| is_kept(name.as_str()));
        let text = |(name, value): (&HeaderName, &HeaderValue)| {
            Some((name.as_str().to_owned(), value.to_str().ok()?.to_owned()))
        };
        Self { status: status.as_u16(), headers: kept.filter_map(text).collect() }
    }

    /// The end of a stream that broke off, with this error: a stream never just ends.
    pub(crate) fn error_event(&self, error: &[u8]) -> Vec<u8> {
        let is_event_stream = self.headers.iter().any(|(_, value)| value.starts_with("text/event-stream"));
        let (before, after) = if is_event_stream { ("event: error\ndata: ", "\n\n") } else { ("", "\n") };
        [before.as_bytes(), error, after.as_bytes()].concat()
    }

    /// Its JSON in the store.
    pub(super) fn to_text(&self) -> String {
        // Texts and a number: serialising them into memory cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads it; what cannot be read was damaged.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    /// Whether its body is JSON in one piece, and no stream.
    pub(crate) fn is_whole(&self) -> bool {
        let content_type = self.headers.iter().find(|(name, _)| name == "content-type");
        content_type.is_some_and(|(_, value)| value.starts_with("application/json"))
    }
}

impl Answer {
    /// Whether it has the byte with this number.
    pub(super) fn has(&self, number: u64) -> bool {
        self.tail.end() > number
    }

    /// Where its bytes from this number on are.
    pub(super) fn bytes(&self, from: u64) -> NextBytes {
        match self.end {
            _ if self.has(from) && self.tail.start > from => NextBytes::Stored,
            _ if self.has(from) => NextBytes::Newest(self.tail.from(from).to_vec()),
            Some(_) => NextBytes::Ended,
            None => NextBytes::Interrupted,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_in_the_tail_or_in_the_store() {
        let tail = AnswerPart { start: 10, bytes: b"abcdef".to_vec() };
        let mut answer = Answer { tail, ..Answer::default() };
        for (from, expected) in [
            (0, NextBytes::Stored),
            (9, NextBytes::Stored),
            (10, NextBytes::Newest(b"abcdef".to_vec())),
            (13, NextBytes::Newest(b"def".to_vec())),
            (15, NextBytes::Newest(b"f".to_vec())),
        ] {
            assert!(answer.has(from));
            assert_eq!(answer.bytes(from), expected, "{from}");
        }
        assert!(!answer.has(16));
        answer.end = Some(InboxState::Done);
        assert_eq!(answer.bytes(16), NextBytes::Ended);
        assert_eq!(answer.bytes(15), NextBytes::Newest(b"f".to_vec()));
    }

    #[test]
    fn a_head_keeps_what_says_something_of_the_body() {
        let mut headers = HeaderMap::new();
        for (name, value) in
            [("content-type", "application/json"), ("x-russet-complexity", "0.2"), ("set-cookie", "no")]
        {
            headers.insert(name, value.parse().unwrap());
        }
        let head = AnswerHead::of(StatusCode::OK, &headers);
        assert!(head.is_whole());
        assert_eq!(AnswerHead::parse(&head.to_text()), Some(head.clone()));
        let names: Vec<_> = head.headers.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["content-type", "x-russet-complexity"]);
    }
}
