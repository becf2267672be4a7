//! How far a copy has come, told seldom: a status is no telemetry.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use crate::store::Progress;

/// Between two reports of a copy.
pub(super) const REPORT: Duration = Duration::from_secs(2);

/// Tells how far something has come, and bytes a second since it was told last, once in `every` until it is there.
pub(super) async fn told<T>(
    every: Duration,
    coming: impl Future<Output = T>,
    progress: &watch::Sender<Progress>,
    mut tell: impl FnMut(&Progress, u64),
) -> T {
    let mut coming = std::pin::pin!(coming);
    let mut ticks = tokio::time::interval(every);
    // Who was kept from telling does not make up for it.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut last, mut since) = (0, Instant::now());
    loop {
        tokio::select! {
            result = &mut coming => return result,
            _ = ticks.tick() => {
                let now = progress.borrow().clone();
                let seconds = since.elapsed().as_secs_f64().max(0.001);
                // What was there before this try is not this second's work.
                let fresh = if last == 0 { 0 } else { now.done.saturating_sub(last) };
                (last, since) = (now.done, Instant::now());
                tell(&now, (fresh as f64 / seconds) as u64);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn progress_is_told_once_in_two_seconds_at_most() {
        assert_eq!(REPORT, Duration::from_secs(2));
        // The same, forty times as quick.
        let every = REPORT / 40;
        let progress = watch::Sender::new(Progress::default());
        let coming = async {
            for step in 0..400 {
                progress.send_modify(|state| state.done += 1000);
                // Once everything stands still for longer than between two reports.
                match step {
                    200 => std::thread::sleep(5 * every),
                    _ => tokio::time::sleep(Duration::from_millis(1)).await,
                }
            }
        };
        let (mut said, began) = (Vec::new(), Instant::now());
        told(every, coming, &progress, |now, _| said.push((Instant::now(), now.done))).await;
        let most = 1 + began.elapsed().as_millis() / every.as_millis();
        assert!(said.len() >= 3 && said.len() as u128 <= most, "{} of {most}", said.len());
        for pair in said.windows(2) {
            // What comes up to five milliseconds late is on time for a timer, which has one itself.
            let apart = pair[1].0 - pair[0].0 + Duration::from_millis(6);
            assert!(apart >= every && pair[1].1 > pair[0].1, "{apart:?} of {every:?}");
        }
    }
}
