//! What the loop has to do with caches: every rank is told the same, in the same order and before the next batch.

use super::Scheduler;
use super::request::ScheduledRequest;
use crate::prefix_cache::block_hash::BlockHash;

/// A slot was filled from disk.
pub(super) struct FetchedBlocks {
    /// Whose it is.
    admission_id: u64,
    hashes: Vec<BlockHash>,
    /// How many of the first ones came, on every rank.
    count: u32,
}

impl Scheduler {
    /// Gives a slot back, and what it holds to be kept.
    pub(super) fn release_slot(&mut self, job: &ScheduledRequest) {
        // Of an answer that was begun the numbers are sound; of a prompt alone nobody knows.
        if job.is_prefilling() {
            return self.discard_slot(job);
        }
        self.prefix_cache.release(job.sequence.slot(), job.sequence.history().to_vec());
        self.apply_cache_commands();
        self.metrics.running.dec();
    }

    pub(super) fn discard_slot(&mut self, job: &ScheduledRequest) {
        self.prefix_cache.discard(job.sequence.slot());
        self.apply_cache_commands();
        self.metrics.running.dec();
    }

    /// Has every rank do what is to be done with its caches, before the next batch.
    pub(super) fn apply_cache_commands(&mut self) {
        for order in self.prefix_cache.take_commands() {
            self.followers.apply_cache_command(&order);
            self.compute.apply_cache_command(order);
        }
        self.block_events.publish(self.prefix_cache.take_delta());
        self.metrics.set_prefix_blocks(self.prefix_cache.block_counts());
    }

    /// Has every rank fill a slot from its disk.
    pub(super) fn fetch(&self, slot: u32, keys: Vec<BlockHash>) {
        let theirs = self.followers.fetch(slot, &keys);
        let own = self.compute.fetch(slot, keys.clone());
        let (stay, done) = (self.admissions, self.fetches.0.clone());
        tokio::spawn(async move {
            let own = own.await.map_or(0, |came| came.unwrap_or(0));
            let came = own.min(theirs.await.unwrap_or(0));
            // Nobody waits when the loop is over.
            let _ = done.send(FetchedBlocks { admission_id: stay, hashes: keys, count: came });
        });
    }

    /// A slot was filled from disk, if only as far as the blocks came; what did not is read.
    pub(super) fn finish_fetch(&mut self, FetchedBlocks { admission_id: stay, hashes: keys, count: came }: &FetchedBlocks) {
        let Some(job) = self.running.iter_mut().find(|job| job.admission_id == *stay) else { return };
        job.fetching = false;
        let slot = job.sequence.slot();
        if (*came as usize) < keys.len() {
            self.prefix_cache.finish_fetch(slot, keys, *came);
            job.sequence.discard_cached();
        }
        self.apply_cache_commands();
    }
}
