//! All ranks of the group: this process and its followers get the same work in the same order.

use std::sync::Arc;

use super::in_flight::PendingBatch;
use crate::executor::{Executor, SequenceStep};
use crate::group::Followers;
use crate::metrics::EngineMetrics;
use crate::prefix_cache::{CacheCommand, block_hash::BlockHash};

/// Clones reach the same ranks.
#[derive(Clone)]
pub(super) struct Ranks {
    /// This process's rank.
    pub(super) compute: Arc<dyn Executor>,
    pub(super) followers: Followers,
    pub(super) metrics: EngineMetrics,
}

impl Ranks {
    /// Runs the steps as one batch.
    pub(super) fn dispatch(&self, batch: Vec<SequenceStep>) -> PendingBatch {
        self.metrics.steps.inc_by(batch.len() as u64);
        let count = |step: &SequenceStep| (step.samples().count(), step.scored_tokens() as usize);
        let counts = batch.iter().map(count).collect();
        self.followers.run(&batch);
        PendingBatch { counts, reply: self.compute.run(batch) }
    }

    /// Applies the command to the KV caches.
    pub(super) fn apply_cache_command(&self, command: CacheCommand) {
        self.followers.apply_cache_command(&command);
        self.compute.apply_cache_command(command);
    }

    /// Loads blocks into an empty slot, some of them from disk; resolves to the number of leading blocks that
    /// all ranks loaded.
    pub(super) fn fetch(&self, slot: u32, hashes: Vec<BlockHash>) -> impl Future<Output = u32> + use<> {
        let theirs = self.followers.fetch(slot, &hashes);
        let own = self.compute.fetch(slot, hashes);
        async move {
            let own = own.await.map_or(0, |loaded| loaded.unwrap_or(0));
            own.min(theirs.await.unwrap_or(0))
        }
    }
}
