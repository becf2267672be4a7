//! Heartbeat failure detector that tolerates its own pauses: it does not take this process's own suspension
//! for the peer's silence. Pure: times are arguments.
//!
//! The listener checks at regular intervals, and the checks are counted, not the clock. On a machine without
//! free cores checks come late and the timeout grows accordingly. After a suspension (SIGSTOP, a laptop's
//! lid, a paused virtual machine) the detector starts again, even before heartbeats received meanwhile are
//! read.

use std::time::{Duration, Instant};

/// Interval of heartbeats, and of checks. Four a second have no measurable cost, and seven of them fit into
/// the two seconds in which a lost rank must be detected, so one or a few late ones are tolerated.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(250);

/// A peer that others wait for is lost after this silence (seven checks in a row). Checks fall between
/// heartbeats, so the first counts for less, and the timeout may be noticed one check later: after 1.85 s at
/// most, which leaves a busy machine some of the two seconds.
pub const BUSY_TIMEOUT: Duration = Duration::from_millis(1600);

/// The same for an idle peer. A machine may page, or its Wi-Fi scan for another channel, and an idle group
/// loses less by waiting than by loading all its weights again. Shorter than the timeout of an unanswered
/// HTTP/2 ping (10 s), which would give no reason.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(8);

/// A check that is later than this means that this process was suspended.
const SUSPEND_THRESHOLD: Duration = Duration::from_secs(1);

/// Time without a heartbeat.
#[derive(Clone, Copy, Debug)]
pub struct SilenceDetector {
    silent_for: Duration,
    last_tick: Instant,
}

impl SilenceDetector {
    /// Starts now.
    pub fn new(now: Instant) -> Self {
        Self { silent_for: Duration::ZERO, last_tick: now }
    }

    /// Takes a heartbeat.
    pub fn reset(&mut self, now: Instant) {
        *self = Self::new(now);
    }

    /// Returns the silence so far. A check counts for one interval at most, however late it is.
    pub fn tick(&mut self, now: Instant) -> Duration {
        let since = now.saturating_duration_since(self.last_tick);
        self.last_tick = now;
        self.silent_for = if since > SUSPEND_THRESHOLD {
            Duration::ZERO
        } else {
            self.silent_for + since.min(HEARTBEAT_INTERVAL)
        };
        self.silent_for
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_detector_counts_ticks_not_wall_time() {
        for (story, looks, passed) in [
            ("looks in time add up", vec![250; 7], 1750),
            ("a look that comes late counts as one", vec![250, 300, 260], 750),
            ("a machine without a free core is patient", vec![900; 4], 1000),
            ("who was suspended begins anew", vec![250, 250, 250, 30_000, 250], 250),
            ("and again", vec![250, 1001], 0),
            ("looks that pile up count no time", vec![250, 0, 0, 0], 250),
        ] {
            let mut now = Instant::now();
            let mut detector = SilenceDetector::new(now);
            let mut last = Duration::ZERO;
            for milliseconds in looks {
                now += Duration::from_millis(milliseconds);
                last = detector.tick(now);
            }
            assert_eq!(last, Duration::from_millis(passed), "{story}");
            detector.reset(now);
            assert_eq!(detector.tick(now), Duration::ZERO, "{story}");
        }
    }
}
