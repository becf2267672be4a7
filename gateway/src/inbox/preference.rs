//! What the headers of a request say of the inbox: `Idempotency-Key`, and `Prefer: respond-async, wait=SECONDS` of RFC 7240.

use std::time::Duration;

use axum::http::{HeaderMap, HeaderName};

use crate::error::{ErrorKind, GatewayError};

/// The header with the key that stands for one request of its owner.
pub(crate) const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// The header with preferences.
pub(crate) const PREFER: HeaderName = HeaderName::from_static("prefer");
/// Longest key.
const MAX_KEY_BYTES: usize = 255;
/// Longest time that a client is kept waiting because it asks for it.
const MAX_WAIT: Duration = Duration::from_secs(600);

/// How a request wants to be kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct InboxPreference {
    /// The same key stands for the same request.
    pub(crate) key: Option<String>,
    /// The client does not wait for the answer: it looks for it later.
    pub(crate) respond_async: bool,
    /// How long it waits all the same.
    pub(crate) wait: Duration,
}

impl InboxPreference {
    /// What these headers say.
    pub(crate) fn of_headers(headers: &HeaderMap) -> Result<Self, GatewayError> {
        let mut preference = Self::default();
        if let Some(value) = headers.get(IDEMPOTENCY_KEY) {
            preference.key = Some(read_key(value.as_bytes())?);
        }
        // A preference is no demand: one that cannot be read is left out.
        let lines = headers.get_all(PREFER).into_iter().filter_map(|line| line.to_str().ok());
        for part in lines.flat_map(|line| line.split(',')) {
            // Parameters of a preference follow a semicolon.
            let part = part.split(';').next().unwrap_or_default().trim();
            match part.split_once('=') {
                None if part.eq_ignore_ascii_case("respond-async") => preference.respond_async = true,
                Some((name, seconds)) if name.trim().eq_ignore_ascii_case("wait") => {
                    let seconds = seconds.trim().trim_matches('"').parse().unwrap_or_default();
                    preference.wait = Duration::from_secs(seconds).min(MAX_WAIT);
                }
                _ => {}
            }
        }
        Ok(preference)
    }

    /// Whether the request is to be kept at all.
    pub(crate) fn is_kept(&self) -> bool {
        self.key.is_some() || self.respond_async
    }
}

/// A key, with or without the quotes of a structured field.
fn read_key(value: &[u8]) -> Result<String, GatewayError> {
    let text = std::str::from_utf8(value).unwrap_or_default().trim();
    let key = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text);
    if (1..=MAX_KEY_BYTES).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(key.to_owned());
    }
    let message = format!(
        "`Idempotency-Key` has {} bytes, and must have 1 to {MAX_KEY_BYTES} printable ASCII characters without blanks",
        value.len()
    );
    let param = Some(IDEMPOTENCY_KEY.as_str().to_owned());
    Err(GatewayError { param, ..GatewayError::new(ErrorKind::InvalidRequest, message) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_say_how_a_request_is_kept() {
        for (lines, key, respond_async, wait) in [
            (&[][..], None, false, 0),
            (&[("prefer", "respond-async")], None, true, 0),
            (&[("prefer", "return=minimal, Respond-Async; a=b , wait = 10")], None, true, 10),
            (&[("prefer", "wait=\"7\""), ("prefer", "respond-async")], None, true, 7),
            (&[("prefer", "wait=99999999999999999999")], None, false, 0),
            (&[("prefer", "wait=9999")], None, false, 600),
            (&[("prefer", "respond-async=1")], None, false, 0),
            (&[("idempotency-key", "a1-_.~")], Some("a1-_.~"), false, 0),
            (&[("idempotency-key", " \"8e03978e\" ")], Some("8e03978e"), false, 0),
        ] {
            let mut headers = HeaderMap::new();
            for (name, value) in lines {
                headers.append(*name, value.parse().unwrap());
            }
            let expected = InboxPreference {
                key: key.map(str::to_owned),
                respond_async,
                wait: Duration::from_secs(wait),
            };
            assert_eq!(InboxPreference::of_headers(&headers), Ok(expected.clone()), "{lines:?}");
            assert_eq!(expected.is_kept(), key.is_some() || respond_async);
        }
        for wrong in ["", "\"\"", "a b", "é", &"k".repeat(256)] {
            let mut headers = HeaderMap::new();
            let value = axum::http::HeaderValue::from_bytes(wrong.as_bytes()).unwrap();
            headers.insert("idempotency-key", value);
            let error = InboxPreference::of_headers(&headers).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("idempotency-key"), "{wrong}");
        }
    }
}
