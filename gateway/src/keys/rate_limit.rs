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
    /// Time until one more request is allowed, when this one was rejected.
    pub refused: Option<Duration>,
    /// When the quota is full again; the state to keep.
    pub(super) replenished_at: Duration,
}

impl Quota {
    /// The error for a request that exceeds the quota.
    pub fn error(&self) -> Option<GatewayError> {
        let wait = self.refused?;
        let message = format!(
            "the key's quota of {} requests a minute is used up; there is room for the next one in {}",
            self.limit,
            short_text(wait)
        );
        Some(GatewayError::new(ErrorKind::QuotaExceeded, message).retry_after(wait))
    }
}

/// Takes one request of `per_minute` at `now` from a quota that is full again at `whole_at`.
pub(super) fn take_request(whole_at: Duration, now: Duration, per_minute: u32) -> Quota {
    let limit = per_minute.max(1);
    let each = Duration::from_secs(60) / limit;
    let whole = each * limit;
    // Time until the used part has refilled; bounded, because the limit may have changed.
    let taken = whole_at.saturating_sub(now).min(whole);
    let refused = (taken + each).checked_sub(whole).filter(|wait| !wait.is_zero());
    let taken = if refused.is_some() { taken } else { taken + each };
    let remaining = (whole - taken).as_nanos() / each.as_nanos().max(1);
    Quota {
        limit,
        remaining: u32::try_from(remaining).unwrap_or(limit),
        reset: taken,
        refused,
        replenished_at: now + taken,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_quota_may_be_taken_at_once_and_grows_back_evenly() {
        let ms = Duration::from_millis;
        let mut whole_at = Duration::ZERO;
        for (now, remaining, reset, refused) in [
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
            let quota = take_request(whole_at, ms(now), 3);
            whole_at = quota.replenished_at;
            assert_eq!(
                (quota.remaining, quota.reset, quota.refused),
                (remaining, ms(reset), refused.map(ms)),
                "at {now}"
            );
        }
    }

    #[test]
    fn no_minute_after_the_first_burst_has_more_than_its_quota() {
        for per_minute in [1, 7, 60, 999, 1_000_000] {
            let mut whole_at = Duration::ZERO;
            let mut burst = 0;
            while take_request(whole_at, Duration::ZERO, per_minute).refused.is_none() {
                whole_at = take_request(whole_at, Duration::ZERO, per_minute).replenished_at;
                burst += 1;
                assert!(burst <= per_minute, "{per_minute}");
            }
            assert_eq!(burst, per_minute);
            // From then on a client retries exactly when told to, for a minute.
            let (mut now, mut granted) = (Duration::ZERO, 0);
            for _ in 0..3 * per_minute.min(1000) {
                let quota = take_request(whole_at, now, per_minute);
                whole_at = quota.replenished_at;
                match quota.refused {
                    Some(wait) => now += wait,
                    None => granted += u32::from(now <= Duration::from_secs(60)),
                }
            }
            assert!(granted > 0 && granted <= per_minute, "{granted} of {per_minute}");
        }
    }

    #[test]
    fn a_limit_that_changes_neither_locks_out_nor_opens() {
        let taken = (0..60)
            .fold(Duration::ZERO, |whole_at, _| take_request(whole_at, Duration::ZERO, 60).replenished_at);
        // Lowered: the quota is used up. Raised: the used part takes its minute to refill.
        assert_eq!(take_request(taken, Duration::ZERO, 2).refused, Some(Duration::from_secs(30)));
        assert!(
            take_request(taken, Duration::ZERO, 600)
                .refused
                .is_some_and(|wait| wait <= Duration::from_secs(1))
        );
        // Whatever the state holds, no client waits longer than a minute.
        let far = Duration::from_secs(1_000_000);
        assert!(
            take_request(far, Duration::ZERO, 1).refused.is_some_and(|wait| wait <= Duration::from_secs(60))
        );
    }
}
