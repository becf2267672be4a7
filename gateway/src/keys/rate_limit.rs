//! Rate limit: a quota of requests per minute with one number of state per key, the time at which the quota
//! is full again (the generic cell rate algorithm). The whole quota may be used in a burst; then it refills
//! evenly. Pure: the clock is an argument.

use std::time::Duration;

use crate::duration::short_text;
use crate::error::{ErrorKind, GatewayError};

/// The quota after a request, and how long to wait if the request exceeds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Requests per minute.
    pub limit: u32,
    /// Requests remaining now.
    pub remaining: u32,
    /// Time until the quota is full again.
    pub reset: Duration,
    /// Time until one more request is allowed, when this one exceeds the quota.
    pub retry_after: Option<Duration>,
    /// When the quota is full again; the state to keep.
    pub(super) replenished_at: Duration,
}

impl Quota {
    /// The error for a request that exceeds the quota.
    pub fn error(&self) -> Option<GatewayError> {
        let wait = self.retry_after?;
        let message = format!(
            "the key's quota of {} requests a minute is used up; it allows the next request in {}",
            self.limit,
            short_text(wait)
        );
        Some(GatewayError::new(ErrorKind::QuotaExceeded, message).retry_after(wait))
    }
}

/// Takes one request of `per_minute` at `now` from a quota that is full again at
/// `replenished_at`.
pub(super) fn take_request(replenished_at: Duration, now: Duration, per_minute: u32) -> Quota {
    let limit = per_minute.max(1);
    let interval = Duration::from_secs(60) / limit;
    let capacity = interval * limit;
    // Time until the used part has refilled; bounded, because the limit may have changed.
    let used = replenished_at.saturating_sub(now).min(capacity);
    let retry_after = (used + interval).checked_sub(capacity).filter(|wait| !wait.is_zero());
    let used = if retry_after.is_some() { used } else { used + interval };
    let remaining = (capacity - used).as_nanos() / interval.as_nanos().max(1);
    Quota {
        limit,
        remaining: u32::try_from(remaining).unwrap_or(limit),
        reset: used,
        retry_after,
        replenished_at: now + used,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_quota_may_be_taken_at_once_and_grows_back_evenly() {
        let ms = Duration::from_millis;
        let mut replenished_at = Duration::ZERO;
        for (now, remaining, reset, retry_after) in [
            (1_000, 2, 20_000, None),
            (1_000, 1, 40_000, None),
            (1_000, 0, 60_000, None),
            (1_000, 0, 60_000, Some(20_000)),
            (1_500, 0, 59_500, Some(19_500)),
            (20_999, 0, 40_001, Some(1)),
            (21_000, 0, 60_000, None),
            (21_001, 0, 59_999, Some(19_999)),
            (61_000, 1, 40_000, None),
            (1_000_000, 2, 20_000, None),
        ] {
            let quota = take_request(replenished_at, ms(now), 3);
            replenished_at = quota.replenished_at;
            assert_eq!(
                (quota.remaining, quota.reset, quota.retry_after),
                (remaining, ms(reset), retry_after.map(ms)),
                "at {now}"
            );
        }
    }

    #[test]
    fn no_minute_after_the_first_burst_has_more_than_its_quota() {
        for per_minute in [1, 7, 60, 999, 1_000_000] {
            let mut replenished_at = Duration::ZERO;
            let mut burst = 0;
            while take_request(replenished_at, Duration::ZERO, per_minute).retry_after.is_none() {
                replenished_at = take_request(replenished_at, Duration::ZERO, per_minute).replenished_at;
                burst += 1;
                assert!(burst <= per_minute, "{per_minute}");
            }
            assert_eq!(burst, per_minute);
            // From then on a client retries exactly after `retry_after`, for a minute.
            let (mut now, mut granted) = (Duration::ZERO, 0);
            for _ in 0..3 * per_minute.min(1000) {
                let quota = take_request(replenished_at, now, per_minute);
                replenished_at = quota.replenished_at;
                match quota.retry_after {
                    Some(wait) => now += wait,
                    None => granted += u32::from(now <= Duration::from_secs(60)),
                }
            }
            assert!(granted > 0 && granted <= per_minute, "{granted} of {per_minute}");
        }
    }

    #[test]
    fn a_limit_that_changes_neither_locks_out_nor_opens() {
        let used_up = (0..60).fold(Duration::ZERO, |replenished_at, _| {
            take_request(replenished_at, Duration::ZERO, 60).replenished_at
        });
        // Lowered: the quota is used up. Raised: the used part takes its minute to refill.
        assert_eq!(take_request(used_up, Duration::ZERO, 2).retry_after, Some(Duration::from_secs(30)));
        assert!(
            take_request(used_up, Duration::ZERO, 600)
                .retry_after
                .is_some_and(|wait| wait <= Duration::from_secs(1))
        );
        // Whatever the state holds, no client waits longer than a minute.
        let far = Duration::from_secs(1_000_000);
        assert!(
            take_request(far, Duration::ZERO, 1)
                .retry_after
                .is_some_and(|wait| wait <= Duration::from_secs(60))
        );
    }
}
