//! Progress of a copy, reported with a rate limit: a status is not telemetry.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::store::TransferProgress;

/// Between two reports of a copy.
pub(super) const REPORT_INTERVAL: Duration = Duration::from_secs(2);

/// Limits reports to one per interval, across several attempts.
#[derive(Debug)]
pub(super) struct Throttle {
    interval: Duration,
    /// Time of the last report.
    last: Mutex<Option<Instant>>,
}

impl Throttle {
    /// A limiter without an earlier report.
    pub fn new(interval: Duration) -> Self {
        Self { interval, last: Mutex::default() }
    }

    /// Earliest time of the next report.
    fn next_report(&self) -> Instant {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.map_or_else(Instant::now, |last| last + self.interval)
    }

    /// Reports progress, and bytes per second since the last report, until the future completes.
    pub async fn report_while<T>(
        &self,
        coming: impl Future<Output = T>,
        progress: &watch::Sender<TransferProgress>,
        mut tell: impl FnMut(&TransferProgress, u64),
    ) -> T {
        let mut coming = std::pin::pin!(coming);
        let (mut before, mut since) = (0, Instant::now());
        loop {
            tokio::select! {
                result = &mut coming => return result,
                () = tokio::time::sleep_until(self.next_report()) => {
                    let now = progress.borrow().clone();
                    let seconds = since.elapsed().as_secs_f64().max(0.001);
                    // Bytes present before this attempt do not count towards its rate.
                    let fresh = if before == 0 { 0 } else { now.done.saturating_sub(before) };
                    (before, since) = (now.done, Instant::now());
                    tell(&now, (fresh as f64 / seconds) as u64);
                    // Delayed reports are not made up for.
                    *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn progress_is_reported_at_most_every_two_seconds() {
        assert_eq!(REPORT_INTERVAL, Duration::from_secs(2));
        // The same, forty times as fast.
        let throttle = Throttle::new(REPORT_INTERVAL / 40);
        let progress = watch::Sender::new(TransferProgress::default());
        let mut reports = Vec::new();
        // Attempts that end after some steps, one of which lasts longer than the report interval.
        for attempt in 0..8 {
            let coming = async {
                for step in 0..50 {
                    progress.send_modify(|state| state.done += 1000);
                    match (attempt, step) {
                        (3, 20) => std::thread::sleep(5 * throttle.interval),
                        _ => tokio::time::sleep(Duration::from_millis(1)).await,
                    }
                }
            };
            throttle.report_while(coming, &progress, |now, _| reports.push((Instant::now(), now.done))).await;
        }
        assert!(reports.len() >= 3, "{reports:?}");
        for pair in reports.windows(2) {
            assert!(pair[1].0 - pair[0].0 >= throttle.interval && pair[1].1 > pair[0].1, "{pair:?}");
        }
    }
}
