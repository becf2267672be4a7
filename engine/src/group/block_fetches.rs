//! Block loads from followers' disks: a slot is filled up to the first block that is missing on any rank.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// Slots with pending replies; clones share them.
#[derive(Clone, Debug, Default)]
pub struct BlockFetches(Arc<Mutex<HashMap<u32, PendingFetch>>>);

#[derive(Debug)]
struct PendingFetch {
    /// Followers that have not replied yet.
    followers_left: usize,
    /// Leading blocks loaded on every rank so far.
    count: u32,
    done: oneshot::Sender<u32>,
}

impl BlockFetches {
    /// Expects a reply of `followers` followers for a slot; resolves to the smallest number of blocks.
    pub fn expect(&self, slot: u32, followers: usize) -> oneshot::Receiver<u32> {
        let (done, answer) = oneshot::channel();
        if followers == 0 {
            let _ = done.send(u32::MAX);
        } else {
            self.0.lock().insert(slot, PendingFetch { followers_left: followers, count: u32::MAX, done });
        }
        answer
    }

    /// A follower's reply.
    pub fn record_reply(&self, slot: u32, count: u32) {
        let mut all = self.0.lock();
        let Some(waiting) = all.get_mut(&slot) else { return };
        waiting.count = waiting.count.min(count);
        waiting.followers_left -= 1;
        if waiting.followers_left == 0
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
    fn block_fetch_counts_blocks_present_on_every_rank() {
        let fetches = BlockFetches::default();
        assert_eq!(fetches.expect(0, 0).try_recv(), Ok(u32::MAX));
        let mut answer = fetches.expect(1, 2);
        fetches.record_reply(7, 1);
        fetches.record_reply(1, 9);
        assert!(answer.try_recv().is_err());
        fetches.record_reply(1, 4);
        assert_eq!(answer.try_recv(), Ok(4));
    }
}
