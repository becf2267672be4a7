//! The half-open state of a circuit breaker, and of a pause that has ended: one request tries the model, and the others take
//! their next target until it is answered. Pure.

use std::sync::{Arc, Weak};

/// Whether a request tries it now.
#[derive(Clone, Debug, Default)]
pub(super) struct TrialSlot(Weak<()>);

/// The request that tries it; the next one may once this is dropped.
#[derive(Debug)]
pub(super) struct Trial {
    _running: Arc<()>,
}

impl TrialSlot {
    pub(super) fn is_taken(&self) -> bool {
        self.0.strong_count() > 0
    }

    /// Makes a request the one that tries it.
    pub(super) fn take(&mut self) -> Trial {
        let running = Arc::new(());
        self.0 = Arc::downgrade(&running);
        Trial { _running: running }
    }
}

impl PartialEq for TrialSlot {
    fn eq(&self, other: &Self) -> bool {
        self.0.ptr_eq(&other.0)
    }
}

impl Eq for TrialSlot {}
