//! The half-open state of a circuit breaker, and of a pause that has ended: one request tries the model, and the others take
//! their next target until it is answered. Pure.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

/// The longest that the others wait for one: a provider may keep a request in its queue, and say so, for as long as it likes.
const MAX_TRIAL: Duration = Duration::from_secs(60);

/// Whether a request tries it now.
#[derive(Clone, Debug, Default)]
pub(super) struct TrialSlot {
    running: Weak<()>,
    since: Option<Instant>,
}

/// The request that tries it; the next one may once this is dropped.
#[derive(Debug)]
pub(super) struct Trial {
    _running: Arc<()>,
}

impl TrialSlot {
    pub(super) fn is_taken(&self, now: Instant) -> bool {
        let is_late = self.since.is_none_or(|since| now.duration_since(since) >= MAX_TRIAL);
        self.running.strong_count() > 0 && !is_late
    }

    /// Makes a request the one that tries it.
    pub(super) fn take(&mut self, now: Instant) -> Trial {
        let running = Arc::new(());
        *self = Self { running: Arc::downgrade(&running), since: Some(now) };
        Trial { _running: running }
    }
}

impl PartialEq for TrialSlot {
    fn eq(&self, other: &Self) -> bool {
        self.running.ptr_eq(&other.running)
    }
}

impl Eq for TrialSlot {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_ends_with_its_request_and_after_a_minute() {
        let (mut slot, begin) = (TrialSlot::default(), Instant::now());
        assert!(!slot.is_taken(begin));
        let first = slot.take(begin);
        assert!(slot.is_taken(begin));
        assert!(!slot.is_taken(begin + MAX_TRIAL), "it takes too long");
        let second = slot.take(begin + MAX_TRIAL);
        drop(first);
        assert!(slot.is_taken(begin + MAX_TRIAL));
        drop(second);
        assert!(!slot.is_taken(begin + MAX_TRIAL));
    }
}
