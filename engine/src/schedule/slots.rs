//! What the loop has to do with caches: every rank is told the same, in the same order and before the next batch.

use super::Schedule;
use super::job::Job;
use crate::kept::chain::Key;

/// A slot was filled from disk.
pub(super) struct Fetched {
    /// Whose it is.
    stay: u64,
    keys: Vec<Key>,
    /// How many of the first ones came, on every rank.
    came: u32,
}

impl Schedule {
    /// Gives a slot back, and what it holds to be kept.
    pub(super) fn vacate(&mut self, job: &Job) {
        // Of an answer that was begun the numbers are sound; of a prompt alone nobody knows.
        if job.reads_its_prompt() {
            return self.discard(job);
        }
        self.cache.leave(job.sequence.slot(), job.sequence.history().to_vec());
        self.arrange();
        self.metrics.running.dec();
    }

    pub(super) fn discard(&mut self, job: &Job) {
        self.cache.discard(job.sequence.slot());
        self.arrange();
        self.metrics.running.dec();
    }

    /// Has every rank do what is to be done with its caches, before the next batch.
    pub(super) fn arrange(&mut self) {
        for order in self.cache.orders() {
            self.followers.arrange(&order);
            self.compute.arrange(order);
        }
        self.feed.tell(self.cache.changes());
        self.metrics.kept(self.cache.sizes());
    }

    /// Has every rank fill a slot from its disk.
    pub(super) fn fetch(&self, slot: u32, keys: Vec<Key>) {
        let theirs = self.followers.fetch(slot, &keys);
        let own = self.compute.fetch(slot, keys.clone());
        let (stay, done) = (self.stays, self.fetches.0.clone());
        tokio::spawn(async move {
            let own = own.await.map_or(0, |came| came.unwrap_or(0));
            let came = own.min(theirs.await.unwrap_or(0));
            // Nobody waits when the loop is over.
            let _ = done.send(Fetched { stay, keys, came });
        });
    }

    /// A slot was filled from disk, if only as far as the blocks came; what did not is read.
    pub(super) fn fetched(&mut self, Fetched { stay, keys, came }: &Fetched) {
        let Some(job) = self.running.iter_mut().find(|job| job.stay == *stay) else { return };
        job.fetching = false;
        let slot = job.sequence.slot();
        if (*came as usize) < keys.len() {
            self.cache.fetched(slot, keys, *came);
            job.sequence.read_all();
        }
        self.arrange();
    }
}
