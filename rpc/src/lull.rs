//! How long nothing has come from somebody who says something several times a second, counted in a way that
//! does not take this process's own sleep for the other's. Pure: time is told.
//!
//! Whoever listens looks at regular times, and looks are what counts. So a machine without free cores, whose looks
//! come late, is patient by as much; and whoever was suspended (SIGSTOP, a laptop's lid, a paused
//! virtual machine) wakes up and begins anew, before what was said meanwhile has even been read.

use std::time::{Duration, Instant};

/// Between two beats, and between two looks. Four a second cost nothing that can be measured, and seven of them fit
/// into the two seconds in which a lost rank is to be noticed: one that comes late, or a few, are no loss.
pub const BEAT: Duration = Duration::from_millis(250);

/// Somebody from whom nothing came in so many looks in a row (seven) is lost, while others wait for him. Looks fall
/// between beats, so the first counts for less, and that it is enough may be seen a look later: 1.85 s at the latest,
/// which leaves a busy machine some of the two seconds.
pub const LOST: Duration = Duration::from_millis(1600);

/// The same while nobody waits for him: a machine may page, or its Wi-Fi look for another channel, and a group that
/// answers nobody loses less by waiting than by reading all its weights again. Sooner than an unanswered ping closes
/// the connection (10 s), which would give no reason.
pub const LOST_AT_REST: Duration = Duration::from_secs(8);

/// A look that comes so late says that this process did not run.
const SUSPENDED: Duration = Duration::from_secs(1);

/// Time in which nothing came.
#[derive(Clone, Copy, Debug)]
pub struct Lull {
    passed: Duration,
    looked: Instant,
}

impl Lull {
    /// Begins now.
    pub fn new(now: Instant) -> Self {
        Self { passed: Duration::ZERO, looked: now }
    }

    /// Something came.
    pub fn end(&mut self, now: Instant) {
        *self = Self::new(now);
    }

    /// How long nothing has come. A look stands for one beat at most, however late it is.
    pub fn look(&mut self, now: Instant) -> Duration {
        let since = now.saturating_duration_since(self.looked);
        self.looked = now;
        self.passed = if since > SUSPENDED { Duration::ZERO } else { self.passed + since.min(BEAT) };
        self.passed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_count_and_not_the_clock() {
        for (story, looks, passed) in [
            ("looks in time add up", vec![250; 7], 1750),
            ("a look that comes late counts as one", vec![250, 300, 260], 750),
            ("a machine without a free core is patient", vec![900; 4], 1000),
            ("who was suspended begins anew", vec![250, 250, 250, 30_000, 250], 250),
            ("and again", vec![250, 1001], 0),
            ("looks that pile up count no time", vec![250, 0, 0, 0], 250),
        ] {
            let mut now = Instant::now();
            let mut lull = Lull::new(now);
            let mut last = Duration::ZERO;
            for milliseconds in looks {
                now += Duration::from_millis(milliseconds);
                last = lull.look(now);
            }
            assert_eq!(last, Duration::from_millis(passed), "{story}");
            lull.end(now);
            assert_eq!(lull.look(now), Duration::ZERO, "{story}");
        }
    }
}
