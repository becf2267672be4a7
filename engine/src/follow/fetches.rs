//! What followers say of blocks that come from their disks: a slot is filled as far as it is on every rank.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// Slots that wait for followers; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Fetches(Arc<Mutex<HashMap<u32, Waiting>>>);

#[derive(Debug)]
struct Waiting {
    /// Followers that did not answer yet.
    left: usize,
    /// Blocks that came everywhere so far.
    count: u32,
    done: oneshot::Sender<u32>,
}

impl Fetches {
    /// So many followers will say how many blocks of a slot came; the answer is the least of it.
    pub fn expect(&self, slot: u32, followers: usize) -> oneshot::Receiver<u32> {
        let (done, answer) = oneshot::channel();
        if followers == 0 {
            let _ = done.send(u32::MAX);
        } else {
            self.0.lock().insert(slot, Waiting { left: followers, count: u32::MAX, done });
        }
        answer
    }

    /// One of them says it.
    pub fn came(&self, slot: u32, count: u32) {
        let mut all = self.0.lock();
        let Some(waiting) = all.get_mut(&slot) else { return };
        waiting.count = waiting.count.min(count);
        waiting.left -= 1;
        if waiting.left == 0
            && let Some(waiting) = all.remove(&slot)
        {
            let _ = waiting.done.send(waiting.count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_filled_as_far_as_it_is_everywhere() {
        let fetches = Fetches::default();
        assert_eq!(fetches.expect(0, 0).try_recv(), Ok(u32::MAX));
        let mut answer = fetches.expect(1, 2);
        fetches.came(7, 1);
        fetches.came(1, 9);
        assert!(answer.try_recv().is_err());
        fetches.came(1, 4);
        assert_eq!(answer.try_recv(), Ok(4));
    }
}
