//! How far a copy has come, told seldom: a status is no telemetry.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::store::TransferProgress;

/// Between two reports of a copy.
pub(super) const REPORT_INTERVAL: Duration = Duration::from_secs(2);

/// Tells at most once in so long, also over several tries.
#[derive(Debug)]
pub(super) struct Throttle {
    interval: Duration,
    /// When it was told last.
    last: Mutex<Option<Instant>>,
}

impl Throttle {
    /// Told nothing yet.
    pub fn new(interval: Duration) -> Self {
        Self { interval, last: Mutex::default() }
    }

    /// When it may be told next.
    fn next_report(&self) -> Instant {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.map_or_else(Instant::now, |last| last + self.interval)
    }

    /// Tells how far something has come, and bytes a second since it was told last, until it is there.
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
                    // What was there before this try is not this second's work.
                    let fresh = if before == 0 { 0 } else { now.done.saturating_sub(before) };
                    (before, since) = (now.done, Instant::now());
                    tell(&now, (fresh as f64 / seconds) as u64);
                    // Whoever was kept from telling does not make up for it.
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
        // The same, forty times as quick.
        let seldom = Throttle::new(REPORT_INTERVAL / 40);
        let progress = watch::Sender::new(TransferProgress::default());
        let mut told = Vec::new();
        // Tries that end after some steps, one of which stands still for longer than between two reports.
        for attempt in 0..8 {
            let coming = async {
                for step in 0..50 {
                    progress.send_modify(|state| state.done += 1000);
                    match (attempt, step) {
                        (3, 20) => std::thread::sleep(5 * seldom.interval),
                        _ => tokio::time::sleep(Duration::from_millis(1)).await,
                    }
                }
            };
            seldom.report_while(coming, &progress, |now, _| told.push((Instant::now(), now.done))).await;
        }
        assert!(told.len() >= 3, "{told:?}");
        for pair in told.windows(2) {
            assert!(pair[1].0 - pair[0].0 >= seldom.interval && pair[1].1 > pair[0].1, "{pair:?}");
        }
    }
}
