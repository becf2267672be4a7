//! Moments that come one by one: the timers of tokio are a millisecond coarse, so what is due in one of them would come at once.

use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Sends each moment when it has come, from a thread of its own, until they end or nobody listens: the moment, or the later
/// one at which the thread ran.
pub fn moments(due: impl Iterator<Item = Instant> + Send + 'static) -> UnboundedReceiver<Instant> {
    let (sender, receiver) = unbounded_channel();
    std::thread::spawn(move || {
        for due in due {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            if sender.send(Instant::now()).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Every `interval`, beginning now.
pub fn every(interval: Duration) -> impl Iterator<Item = Instant> + Send + 'static {
    let start = Instant::now();
    (0..).map(move |number| start + interval * number)
}
