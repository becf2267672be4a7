//! Cache commands of the scheduler: every rank receives them in the same order and before the next batch.

use super::Scheduler;
use super::request::ScheduledRequest;
use crate::prefix_cache::block_hash::BlockHash;

/// A slot was loaded from disk.
pub(super) struct FetchedBlocks {
    /// Admission id of its request.
    admission_id: u64,
    hashes: Vec<BlockHash>,
    /// Number of leading blocks loaded on every rank.
    count: u32,
}

impl Scheduler {
    /// Frees a slot; its KV blocks go to the prefix cache.
    pub(super) fn release_slot(&mut self, job: &ScheduledRequest) {
        // A request with output has sound KV data; with a prompt alone that is unknown.
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

    /// Applies pending cache commands on every rank, before the next batch.
    pub(super) fn apply_cache_commands(&mut self) {
        for order in self.prefix_cache.take_commands() {
            self.followers.apply_cache_command(&order);
            self.compute.apply_cache_command(order);
        }
        self.block_events.publish(self.prefix_cache.take_delta());
        self.metrics.set_prefix_blocks(self.prefix_cache.block_counts());
    }

    /// Loads blocks from disk into a slot, on every rank.
    pub(super) fn fetch(&self, slot: u32, keys: Vec<BlockHash>) {
        let theirs = self.followers.fetch(slot, &keys);
        let own = self.compute.fetch(slot, keys.clone());
        let (stay, done) = (self.admissions, self.fetches.0.clone());
        tokio::spawn(async move {
            let own = own.await.map_or(0, |came| came.unwrap_or(0));
            let came = own.min(theirs.await.unwrap_or(0));
            // No receiver is left once the loop has ended.
            let _ = done.send(FetchedBlocks { admission_id: stay, hashes: keys, count: came });
        });
    }

    /// A slot was loaded from disk up to the first missing block; the rest is prefilled.
    pub(super) fn finish_fetch(
        &mut self,
        FetchedBlocks { admission_id: stay, hashes: keys, count: came }: &FetchedBlocks,
    ) {
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
