//! A token bucket of Events for each user: Events live for an hour after their last change, and each change is counted, so
//! their rate bounds their number. Not here: their
//! expiry, see `gc/expiry.rs`.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Events that a user may write at once: an operator that starts tells of everything it finds.
const BURST: f64 = 2000.0;
/// Events a second afterwards. An hour's worth of it and a burst are some 5,600 Events of a user.
const RATE: f64 = 1.0;
/// A larger Event counts as several: with its ownership of fields one has about 1 KiB.
const BYTES: usize = 4096;
/// Users above which those with a full bucket are forgotten.
const MAX_USERS: usize = 1024;

/// The buckets.
#[derive(Debug, Default)]
pub struct EventRate(Mutex<HashMap<String, Bucket>>);

#[derive(Clone, Copy, Debug)]
struct Bucket {
    tokens: f64,
    filled: Instant,
}

impl Bucket {
    fn refill(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.filled);
        self.tokens = (self.tokens + elapsed.as_secs_f64() * RATE).min(BURST);
        self.filled = now;
    }
}

impl EventRate {
    /// Counts an Event of this many bytes; else returns the seconds after which it may be written.
    pub fn take(&self, user: &str, bytes: usize, now: Instant) -> Result<(), u64> {
        let mut buckets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if buckets.len() >= MAX_USERS {
            let full = Duration::from_secs_f64(BURST / RATE);
            buckets.retain(|_, bucket| now.saturating_duration_since(bucket.filled) < full);
        }
        let bucket = buckets.entry(user.to_owned()).or_insert(Bucket { tokens: BURST, filled: now });
        bucket.refill(now);
        let cost = (bytes.div_ceil(BYTES).max(1) as f64).min(BURST);
        if bucket.tokens < cost {
            return Err(((cost - bucket.tokens) / RATE).ceil() as u64);
        }
        bucket.tokens -= cost;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_beyond_a_burst_come_at_their_rate() {
        let rate = EventRate::default();
        let start = Instant::now();
        let taken = (0..3000).filter(|_| rate.take("a", 500, start).is_ok()).count();
        assert_eq!(taken, BURST as usize);
        assert_eq!(rate.take("a", 500, start), Err(1));
        assert_eq!(rate.take("a", 10 * BYTES, start), Err(10), "a large one counts as several");
        assert_eq!(rate.take("b", 500, start), Ok(()), "another user has its own");
        let later = start + Duration::from_secs(10);
        let taken = (0..100).filter(|_| rate.take("a", 500, later).is_ok()).count();
        assert_eq!(taken, 10);
        assert_eq!(rate.take("c", usize::MAX, later), Ok(()), "no Event is refused for ever");
    }
}
