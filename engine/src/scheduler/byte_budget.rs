//! Byte budget: memory that requests take in common, at most so much of it. What was taken is given back when it is dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The budget.
#[derive(Clone)]
pub(crate) struct ByteBudget {
    used: Arc<AtomicUsize>,
    max: usize,
}

/// Room for some bytes; given back when dropped.
pub(crate) struct ByteReservation {
    bytes: usize,
    used: Arc<AtomicUsize>,
}

impl Drop for ByteReservation {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

impl ByteReservation {
    /// How many.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl ByteBudget {
    /// A budget of so many bytes.
    pub(crate) fn new(max: usize) -> Self {
        Self { used: Arc::default(), max }
    }

    /// Room for so many bytes; the error is how many are taken.
    pub(crate) fn reserve(&self, bytes: usize) -> Result<ByteReservation, usize> {
        let add = |used: usize| used.checked_add(bytes).filter(|all| *all <= self.max);
        self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, add)?;
        Ok(ByteReservation { bytes, used: self.used.clone() })
    }

    /// How many bytes are taken.
    #[cfg(test)]
    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Acquire)
    }
}
