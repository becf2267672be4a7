//! Limits of a request: priority, timeout and maximum response length. The key sets the maximum; a request
//! may set a lower one and never a higher. Pure. Not here: the fields of each dialect that set them.

use std::time::Duration;

use axum::http::{HeaderMap, HeaderName};

use crate::error::GatewayError;

/// The engine's limit: priorities lie between its negative and it.
pub const MAX_PRIORITY: i32 = 100;
/// How many levels below its key's priority a flex request runs. Ten seconds of waiting are worth one level,
/// so requests that arrive within five minutes after it run before it, and later ones do not.
pub const FLEX_LEVELS: u32 = 30;
/// Header with the timeout of the whole response in seconds. No standard names one. OpenAI's clients send
/// `x-stainless-read-timeout` whether a timeout was requested or not, and mean each read of a stream.
const TIMEOUT_HEADER: HeaderName = HeaderName::from_static("x-request-timeout");
/// A day: no client keeps a connection open for longer.
const MAX_TIMEOUT_SECONDS: f64 = 86_400.0;

/// In the extensions of a request: it runs at the lowest priority there is, whatever its key and its body say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LowestPriority;

/// Limits on the requests of a caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestLimits {
    /// Scheduling priority; higher runs first.
    pub priority: i32,
    /// Maximum tokens of one response.
    pub max_tokens: Option<u32>,
    /// Maximum duration of one response.
    pub max_duration: Option<Duration>,
}

impl RequestLimits {
    /// How many levels below its key's priority a request can go.
    pub fn max_levels(&self) -> u32 {
        self.priority.saturating_add(MAX_PRIORITY).unsigned_abs()
    }

    /// The priority `levels` below the key's, or the lowest possible.
    pub fn priority_below(&self, levels: u32) -> i32 {
        self.priority.saturating_sub_unsigned(levels).max(-MAX_PRIORITY)
    }

    /// The maximum tokens of a response, as requested in `field`. A request for more than the key allows is
    /// rejected: a shorter response than requested would look complete.
    pub fn max_tokens(&self, requested: Option<u32>, field: &str) -> Result<Option<u32>, GatewayError> {
        match (requested, self.max_tokens) {
            (Some(requested), Some(limit)) if requested > limit => Err(GatewayError::field(
                field,
                format!(
                    "`{field}` is {requested}, but this key allows at most {limit} for one response; set it to {limit} or less"
                ),
            )),
            (requested, limit) => Ok(requested.or(limit)),
        }
    }

    /// The timeout of the whole response, from the request's headers and the key.
    pub fn timeout(&self, headers: &HeaderMap) -> Result<Option<Duration>, GatewayError> {
        let requested = headers.get(TIMEOUT_HEADER).map(|value| {
            let seconds = value.to_str().ok().and_then(|text| text.trim().parse::<f64>().ok());
            let seconds = seconds.filter(|seconds| *seconds > 0.0 && *seconds <= MAX_TIMEOUT_SECONDS);
            seconds.map(Duration::from_secs_f64).ok_or_else(|| {
                let shown: String = String::from_utf8_lossy(value.as_bytes()).chars().take(40).collect();
                let message = format!(
                    "the header {TIMEOUT_HEADER} must be seconds, more than 0 and at most {MAX_TIMEOUT_SECONDS}, such as 30 or 2.5, not `{shown}`"
                );
                GatewayError::field(TIMEOUT_HEADER.as_str(), message)
            })
        });
        let requested = requested.transpose()?;
        // A timeout beyond the key's is shortened to it, and the error at that time says so.
        Ok(requested.into_iter().chain(self.max_duration).min())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn priority_stays_between_that_of_the_key_and_the_lowest() {
        for (priority, levels, below) in [
            (0, 100, [(0, 0), (1, -1), (30, -30), (100, -100), (101, -100), (u32::MAX, -100)]),
            (100, 200, [(0, 100), (1, 99), (30, 70), (100, 0), (101, -1), (u32::MAX, -100)]),
            (-90, 10, [(0, -90), (1, -91), (30, -100), (100, -100), (101, -100), (u32::MAX, -100)]),
            (-100, 0, [(0, -100), (1, -100), (30, -100), (100, -100), (101, -100), (u32::MAX, -100)]),
        ] {
            let limits = RequestLimits { priority, ..RequestLimits::default() };
            assert_eq!(limits.max_levels(), levels, "{priority}");
            for (levels, expected) in below {
                assert_eq!(limits.priority_below(levels), expected, "{priority} - {levels}");
            }
        }
    }

    #[test]
    fn max_tokens_beyond_the_key_is_refused_with_the_numbers() {
        for (limit, requested, expected) in [
            (None, None, Ok(None)),
            (None, Some(9), Ok(Some(9))),
            (Some(5), None, Ok(Some(5))),
            (Some(5), Some(5), Ok(Some(5))),
            (Some(5), Some(1), Ok(Some(1))),
            (Some(5), Some(6), Err("`max_tokens` is 6, but this key allows at most 5")),
        ] {
            let limits = RequestLimits { max_tokens: limit, ..RequestLimits::default() };
            match (limits.max_tokens(requested, "max_tokens"), expected) {
                (Ok(got), Ok(expected)) => assert_eq!(got, expected, "{limit:?} {requested:?}"),
                (Err(error), Err(words)) => {
                    assert_eq!(
                        (error.kind, error.param.as_deref()),
                        (ErrorKind::InvalidRequest, Some("max_tokens"))
                    );
                    assert!(error.message.contains(words), "{error}");
                }
                (got, _) => panic!("{limit:?} {requested:?}: {got:?}"),
            }
        }
    }

    #[test]
    fn timeout_is_the_shorter_of_header_and_key_limit() {
        let ms = Duration::from_millis;
        for (max_seconds, header, expected) in [
            (None, None, Some(None)),
            (None, Some("30"), Some(Some(ms(30_000)))),
            (None, Some(" 2.5 "), Some(Some(ms(2_500)))),
            (None, Some("86400"), Some(Some(ms(86_400_000)))),
            (Some(10), None, Some(Some(ms(10_000)))),
            (Some(10), Some("30"), Some(Some(ms(10_000)))),
            (Some(10), Some("3"), Some(Some(ms(3_000)))),
            (None, Some("0"), None),
            (None, Some("-1"), None),
            (None, Some("86400.1"), None),
            (None, Some("nan"), None),
            (None, Some("inf"), None),
            (None, Some(""), None),
            (None, Some("30s"), None),
            (Some(10), Some("soon"), None),
        ] {
            let limits = RequestLimits {
                max_duration: max_seconds.map(Duration::from_secs),
                ..RequestLimits::default()
            };
            let headers = header.map(|value| (TIMEOUT_HEADER, value.parse().unwrap())).into_iter().collect();
            match limits.timeout(&headers) {
                Ok(got) => assert_eq!(Some(got), expected, "{max_seconds:?} {header:?}"),
                Err(error) => {
                    assert!(expected.is_none(), "{max_seconds:?} {header:?}: {error}");
                    assert_eq!(error.kind, ErrorKind::InvalidRequest);
                    for words in ["x-request-timeout", "86400", header.unwrap()] {
                        assert!(error.message.contains(words), "{error}");
                    }
                }
            }
        }
    }
}
