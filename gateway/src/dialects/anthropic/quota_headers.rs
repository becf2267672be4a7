//! Headers with the caller's quota of requests.

use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use jiff::{SignedDuration, Timestamp};

use crate::keys::Quota;

const LIMIT: HeaderName = HeaderName::from_static("anthropic-ratelimit-requests-limit");
const REMAINING: HeaderName = HeaderName::from_static("anthropic-ratelimit-requests-remaining");
const RESET: HeaderName = HeaderName::from_static("anthropic-ratelimit-requests-reset");

/// Sets the headers.
pub(super) fn set_quota_headers(quota: &Quota, headers: &mut HeaderMap) {
    headers.insert(LIMIT, HeaderValue::from(quota.limit));
    headers.insert(REMAINING, HeaderValue::from(quota.remaining));
    let reset = reset_time(Timestamp::now(), quota.reset);
    if let Some(reset) = reset.and_then(|reset| HeaderValue::from_str(&reset.to_string()).ok()) {
        headers.insert(RESET, reset);
    }
}

/// When the quota is full again, in whole seconds, rounded up; `None` beyond the calendar.
fn reset_time(now: Timestamp, wait: Duration) -> Option<Timestamp> {
    let reset = now.checked_add(SignedDuration::try_from(wait).ok()?).ok()?;
    Timestamp::from_second(reset.as_second() + i64::from(reset.subsec_nanosecond() > 0)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reset_is_a_time_in_whole_seconds_rounded_up() {
        for (now, reset_ms, expected) in [
            ("2026-11-28T12:00:00Z", 0, "2026-11-28T12:00:00Z"),
            ("2026-11-28T12:00:00Z", 1, "2026-11-28T12:00:01Z"),
            ("2026-11-28T12:00:00.25Z", 750, "2026-11-28T12:00:01Z"),
            ("2026-11-28T23:59:59.5Z", 60_000, "2026-11-29T00:01:00Z"),
        ] {
            let reset = reset_time(now.parse().unwrap(), Duration::from_millis(reset_ms)).unwrap();
            assert_eq!(reset.to_string(), expected, "{now} + {reset_ms} ms");
        }
        assert_eq!(reset_time(Timestamp::UNIX_EPOCH, Duration::MAX), None);
    }
}
