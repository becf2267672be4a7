//! How much a search may cost: steps of comparing splits, counted and not timed, so that the same question has the
//! same answer on every machine. A model and a cluster are written by others; no numbers in them may make placing hang.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Steps of a search that compares everything it knows to compare. A step is one estimate of a stage's time or
/// memory, 10 to 50 ns, so these take seconds at most. Placing a model of 130 layers over 12 machines of which no two
/// are alike takes 30 million.
pub const FULL_SEARCH_STEPS: u64 = 100_000_000;
/// Steps until a search ends. Between the two each set of machines is tried in one order only, which takes a
/// hundredth.
pub const MAX_SEARCH_STEPS: u64 = 200_000_000;

/// Steps that the search for one deployment has taken. Clones count together.
#[derive(Clone, Debug, Default)]
pub struct SearchBudget {
    steps: Arc<AtomicU64>,
}

impl SearchBudget {
    /// Counts `steps`.
    pub fn add(&self, steps: u64) {
        self.steps.fetch_add(steps, Ordering::Relaxed);
    }

    /// Steps so far.
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// Whether everything may be compared.
    pub fn is_full(&self) -> bool {
        self.steps() < FULL_SEARCH_STEPS
    }

    /// Whether the search has to end.
    pub fn is_spent(&self) -> bool {
        self.steps() >= MAX_SEARCH_STEPS
    }
}
