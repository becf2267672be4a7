//! How long nothing has come from somebody who says something several times a second, counted in a way that
//! does not take this process's own sleep for the other's. Pure: time is told.
//!
//! Whoever listens looks at regular times, and looks are what counts. So a machine without free cores, whose looks
//! come late, is patient by as much; and whoever was suspended (SIGSTOP, a laptop's lid, a paused
//! virtual machine) wakes up and begins anew, before what was said meanwhile has even been read.

use std::time::{Duration, Instant};

/// Between two beats, and between two looks. Four a second cost nothing that can be measured, and seven of them fit
/// into the two seconds in which a lost rank is to be noticed: one that comes late, or a few, are no loss.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(250);

/// Somebody from whom nothing came in so many looks in a row (seven) is lost, while others wait for him. Looks fall
/// between beats, so the first counts for less, and that it is enough may be seen a look later: 1.85 s at the latest,
/// which leaves a busy machine some of the two seconds.
pub const BUSY_TIMEOUT: Duration = Duration::from_millis(1600);

/// The same while nobody waits for him: a machine may page, or its Wi-Fi look for another channel, and a group that
/// answers nobody loses less by waiting than by reading all its weights again. Sooner than an unanswered ping closes
/// the connection (10 s), which would give no reason.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(8);

/// A look that comes so late says that this process did not run.
const SUSPEND_THRESHOLD: Duration = Duration::from_secs(1);

/// Time in which nothing came.
#[derive(Clone, Copy, Debug)]
pub struct SilenceDetector {
    silent_for: Duration,
    last_tick: Instant,
}

impl SilenceDetector {
    /// Begins now.
    pub fn new(now: Instant) -> Self {
        Self { silent_for: Duration::ZERO, last_tick: now }
    }

    /// Something came.
    pub fn reset(&mut self, now: Instant) {
        *self = Self::new(now);
    }

    /// How long nothing has come. A look stands for one beat at most, however late it is.
    pub fn tick(&mut self, now: Instant) -> Duration {
        let since = now.saturating_duration_since(self.last_tick);
        self.last_tick = now;
        self.silent_for = if since > SUSPEND_THRESHOLD { Duration::ZERO } else { self.silent_for + since.min(HEARTBEAT_INTERVAL) };
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
            let mut lull = SilenceDetector::new(now);
            let mut last = Duration::ZERO;
            for milliseconds in looks {
                now += Duration::from_millis(milliseconds);
                last = lull.tick(now);
            }
            assert_eq!(last, Duration::from_millis(passed), "{story}");
            lull.reset(now);
            assert_eq!(lull.tick(now), Duration::ZERO, "{story}");
        }
    }
}
