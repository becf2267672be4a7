//! The deadline of a whole response, across all engines that produce it and including the time it is held.
//! Not here: how long it is and what sets it.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::error::{ErrorKind, GatewayError};

/// Extra time for an engine to report that the deadline has passed: it knows how far it came. Far longer than
/// a network round trip between two machines, and too short for a person to notice.
const ENGINE_GRACE: Duration = Duration::from_millis(500);

/// The deadline of a whole response.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    /// The time allowed.
    pub(super) duration: Duration,
    /// The instant it ends.
    pub(super) until: Instant,
}

impl Deadline {
    /// The deadline of a request that arrived at `arrived` and may take `duration`.
    pub fn new(arrived: Instant, duration: Duration) -> Self {
        Self { duration, until: arrived + duration }
    }

    /// The time allowed.
    pub(crate) fn duration(&self) -> Duration {
        self.duration
    }

    /// The remaining time; `None` once the deadline has passed.
    pub(super) fn remaining(&self) -> Option<Duration> {
        let remaining = self.until.saturating_duration_since(Instant::now());
        (!remaining.is_zero()).then_some(remaining)
    }

    /// The same in milliseconds, as engines are told it.
    pub(super) fn remaining_milliseconds(&self) -> Option<u64> {
        self.remaining().map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX))
    }

    /// Completes when the deadline passes, if there is one.
    pub(super) async fn passed(deadline: Option<Self>) {
        match deadline {
            Some(deadline) => sleep_until(deadline.until).await,
            None => std::future::pending().await,
        }
    }

    /// The same, with the error that says what the request was waiting for.
    pub(super) async fn expired(deadline: Option<Self>, waiting_for: &str) -> GatewayError {
        match deadline {
            Some(deadline) => {
                sleep_until(deadline.until).await;
                deadline.exceeded(waiting_for)
            }
            None => std::future::pending().await,
        }
    }

    /// The deadline plus the grace in which a working engine may report that it passed.
    pub(crate) fn with_grace(&self) -> Instant {
        self.until + ENGINE_GRACE
    }

    /// The error for a request whose deadline passed, with what it was waiting for.
    pub(super) fn exceeded(&self, waiting_for: &str) -> GatewayError {
        let duration = self.duration;
        let message = format!(
            "the deadline of {duration:?} has passed: {waiting_for}; raise the timeout or request fewer tokens"
        );
        GatewayError::new(ErrorKind::DeadlineExceeded, message)
    }
}
