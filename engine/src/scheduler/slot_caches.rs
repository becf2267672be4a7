//! The KV caches of the slots, on every rank: the prefix cache decides, and its commands reach every rank in the same
//! order and before the next batch.

use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use super::ranks::Ranks;
use super::request::ScheduledRequest;
use crate::prefix_cache::block_hash::BlockHash;
use crate::prefix_cache::events::BlockEvents;
use crate::prefix_cache::{PrefixCache, SlotAssignment};
use crate::sequence::Sequence;

/// A slot was loaded from disk.
pub(super) struct FetchedBlocks {
    /// Admission id of its request.
    pub(super) admission_id: u64,
    hashes: Vec<BlockHash>,
    /// Number of leading blocks loaded on every rank.
    count: u32,
}

/// The prefix cache, and whom its changes are reported to.
pub(super) struct SlotCaches {
    prefix_cache: PrefixCache,
    ranks: Ranks,
    block_events: BlockEvents,
    fetched: UnboundedSender<FetchedBlocks>,
}

impl SlotCaches {
    /// Empty slots before `prefix_cache`; slots that were loaded from disk arrive on the receiver.
    pub(super) fn new(
        prefix_cache: PrefixCache,
        ranks: Ranks,
        block_events: BlockEvents,
    ) -> (Self, UnboundedReceiver<FetchedBlocks>) {
        let (fetched, receiver) = mpsc::unbounded_channel();
        (Self { prefix_cache, ranks, block_events, fetched }, receiver)
    }

    /// Drops blocks that this rank's disk has lost.
    pub(super) fn drop_lost_blocks(&mut self) {
        self.prefix_cache.remove_from_disk(&self.ranks.compute.take_lost_blocks());
    }

    /// Assigns a slot to a sequence; `None` if all are taken.
    pub(super) fn admit(&mut self, sequence: &Sequence) -> Option<SlotAssignment> {
        let scope = sequence.prefix_scope();
        let assignment = match sequence.scores_prompt() {
            // What is cached has no logits.
            true => self.prefix_cache.admit_empty(sequence.history(), scope),
            false => self.prefix_cache.admit(sequence.history(), scope),
        }?;
        self.ranks.metrics.running.inc();
        Some(assignment)
    }

    /// The slot will hold this many tokens.
    pub(super) fn grow(&mut self, slot: u32, tokens: u32) {
        self.prefix_cache.grow(slot, tokens);
    }

    /// The slot holds only this many tokens: drafts were rejected.
    pub(super) fn shrink(&mut self, slot: u32, tokens: u32) {
        self.prefix_cache.shrink(slot, tokens);
    }

    /// Keeps a snapshot of the slot as it is before the next batch.
    pub(super) fn snapshot(&mut self, slot: u32) {
        self.prefix_cache.snapshot(slot);
    }

    /// Copies the slot as it is before the next batch, with these tokens of its prompt, for prompts that begin so.
    pub(super) fn fork(&mut self, slot: u32, tokens: &[u32]) {
        self.prefix_cache.fork(slot, tokens);
    }

    /// Caches the prompt that the slot holds.
    pub(super) fn store_prompt(&mut self, slot: u32, prompt: &[u32]) {
        self.prefix_cache.store_prompt(slot, prompt);
    }

    /// Frees a slot; its KV blocks go to the prefix cache.
    pub(super) fn release(&mut self, request: &ScheduledRequest) {
        // A request with output has sound KV data; with a prompt alone that is unknown.
        if request.is_prefilling() {
            return self.discard(request);
        }
        self.prefix_cache.release(request.sequence.slot(), request.sequence.history().to_vec());
        self.apply_commands();
        self.ranks.metrics.running.dec();
    }

    /// Frees a slot and what it holds.
    pub(super) fn discard(&mut self, request: &ScheduledRequest) {
        self.prefix_cache.discard(request.sequence.slot());
        self.apply_commands();
        self.ranks.metrics.running.dec();
    }

    /// Applies pending cache commands on every rank, before the next batch.
    pub(super) fn apply_commands(&mut self) {
        for command in self.prefix_cache.take_commands() {
            self.ranks.apply_cache_command(command);
        }
        self.block_events.publish(self.prefix_cache.take_delta());
        self.ranks.metrics.set_prefix_blocks(self.prefix_cache.block_counts());
    }

    /// Loads blocks from disk into the slot of this admission, on every rank.
    pub(super) fn fetch(&self, slot: u32, admission_id: u64, hashes: Vec<BlockHash>) {
        let loaded = self.ranks.fetch(slot, hashes.clone());
        let fetched = self.fetched.clone();
        tokio::spawn(async move {
            // No receiver is left once the loop has ended.
            let _ = fetched.send(FetchedBlocks { admission_id, hashes, count: loaded.await });
        });
    }

    /// The request's slot was loaded from disk up to the first missing block; the rest is prefilled.
    pub(super) fn finish_fetch(&mut self, request: &mut ScheduledRequest, fetched: &FetchedBlocks) {
        request.fetching = false;
        if (fetched.count as usize) < fetched.hashes.len() {
            self.prefix_cache.finish_fetch(request.sequence.slot(), &fetched.hashes, fetched.count);
            request.sequence.discard_cached();
        }
        self.apply_commands();
    }
}
