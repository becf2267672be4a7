//! Until when somebody waits for an answer, over all engines that give it and all the time it is held for one. How
//! much that is, and who says so, is decided elsewhere.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::{ErrorKind, GatewayError};

/// For the word of an engine at whose end a request's time ran out: it knows how far it came. Far more than the way
/// between two machines takes, and less than a person notices.
const ENGINE_GRACE: Duration = Duration::from_millis(500);

/// Until when somebody waits for a whole answer.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    /// For how long.
    pub(super) duration: Duration,
    /// And so until when.
    pub(super) until: Instant,
}

impl Deadline {
    /// The deadline of a request that came then and is waited for so long.
    pub fn new(arrived: Instant, duration: Duration) -> Self {
        Self { duration, until: arrived + duration }
    }

    /// How much of it is left; nothing once it passed.
    pub(super) fn remaining(&self) -> Option<Duration> {
        let left = self.until.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    /// Until when an engine that works on the request may say that it passed.
    pub(super) fn with_grace(&self) -> Instant {
        self.until + ENGINE_GRACE
    }

    /// The refusal of a request whose deadline passed, and what it was waiting for.
    pub(super) fn exceeded(&self, waiting_for: &str) -> GatewayError {
        let given = self.duration;
        let message =
            format!("the deadline of {given:?} has passed: {waiting_for}; ask with more time or for less");
        GatewayError::new(ErrorKind::DeadlineExceeded, message)
    }
}
