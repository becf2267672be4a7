//! What stays of the KV cache when a request is over, so that what prompts have in common is read once. Pure: it
//! decides, and every rank of the group carries out the same orders.
//!
//! ```text
//! running slot ── the answer ends ──▶ parked slot ── needed for another ──▶ empty slot
//!      ▲   │                              │ the conversation goes on: taken as it is, nothing is copied
//!      │   └── whole blocks are copied ───┼──▶ blocks in memory ──▶ blocks on disk
//!      └───────── copied back ────────────┴───────────┘                 │ also after a restart
//!      └──────────────────── read back ─────────────────────────────────┘
//! ```
//!
//! Nothing of this takes memory beyond what the planner reserves for running sequences: blocks and parked slots
//! have what those do not need, and make room when they do.

pub mod block_index;
pub mod block_hash;
pub mod disk;
pub mod events;
pub mod fingerprint;

use std::collections::BTreeMap;

use block_index::{BlockIndex, BlockDelta, MAX_DISK_BLOCKS};
use block_hash::{BLOCK_TOKENS, BlockHash, block_hashes};

/// A slot's room grows by so many tokens.
pub const CACHE_STEP: u32 = 256;

/// A block of a slot that is to be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Which block of the sequence.
    pub index: u32,
    /// Its name.
    pub hash: BlockHash,
    /// Whether to keep it in memory.
    pub in_memory: bool,
    /// Whether to write it to disk, where there is room for it.
    pub on_disk: bool,
}

/// What every rank does with its caches, between two batches and in the same order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheCommand {
    /// Empty a slot.
    Reset {
        /// The slot.
        slot: u32,
    },
    /// Forget all but the first tokens of a slot.
    Truncate {
        /// The slot.
        slot: u32,
        /// Tokens that stay.
        length: u32,
    },
    /// Copy blocks of a slot.
    Store {
        /// The slot.
        slot: u32,
        /// The blocks.
        blocks: Vec<BlockCopy>,
    },
    /// Fill an empty slot from blocks in memory.
    Load {
        /// The slot.
        slot: u32,
        /// The blocks, in their order.
        hashes: Vec<BlockHash>,
    },
    /// Drop blocks.
    Evict {
        /// From memory.
        in_memory: Vec<BlockHash>,
        /// From disk.
        on_disk: Vec<BlockHash>,
    },
}

/// A slot for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotAssignment {
    /// The slot.
    pub slot: u32,
    /// Tokens of the prompt that need not be read.
    pub cached: u32,
    /// Blocks that have to come from disk first, in their order; the slot holds `cached` tokens once they did.
    pub fetch_from_disk: Vec<BlockHash>,
}

/// A slot, and the most tokens it held since it was empty, which is what it takes.
#[derive(Debug, Default)]
struct CacheSlot {
    peak_tokens: u32,
    state: SlotState,
}

#[derive(Debug, Default)]
enum SlotState {
    #[default]
    Empty,
    /// A request that runs, with so many tokens.
    Busy(u32),
    /// What a request left, the names of its blocks, and when.
    Cached { tokens: Vec<u32>, hashes: Vec<BlockHash>, last_used: u64 },
}

impl CacheSlot {
    fn is_busy(&self) -> bool {
        matches!(self.state, SlotState::Busy(_))
    }

    /// Tokens it has room for.
    fn reserved_tokens(&self) -> u64 {
        u64::from(self.peak_tokens.next_multiple_of(CACHE_STEP))
    }
}

/// How much may be kept.
#[derive(Clone, Copy, Debug)]
pub struct CacheCapacity {
    /// Slots.
    pub slots: u32,
    /// Tokens that all slots and blocks in memory may take together.
    pub tokens: u64,
    /// Whether blocks are written to disk.
    pub disk: bool,
    /// Whether anything is kept at all.
    pub enabled: bool,
}

/// All that is kept of one group.
#[derive(Debug)]
pub struct PrefixCache {
    root: BlockHash,
    capacity: CacheCapacity,
    slots: BTreeMap<u32, CacheSlot>,
    index: BlockIndex,
    clock: u64,
    commands: Vec<CacheCommand>,
}

impl PrefixCache {
    /// An empty one for the model that `root` stands for, with blocks that are on the disks of all ranks, the one that
    /// was used longest ago first.
    pub fn new(root: BlockHash, capacity: CacheCapacity, shelved: &[BlockHash]) -> Self {
        let mut index = BlockIndex::default();
        if capacity.disk && capacity.enabled {
            shelved.iter().for_each(|key| index.set_on_disk(*key, true));
        }
        let slots = (0..capacity.slots).map(|slot| (slot, CacheSlot::default())).collect();
        Self { root, capacity, slots, index, clock: 0, commands: Vec::new() }
    }

    /// What the ranks have to do since this was asked last, in this order and before the next batch: also to make room
    /// for what grew.
    pub fn take_commands(&mut self) -> Vec<CacheCommand> {
        self.evict_until_fits(0, &[]);
        std::mem::take(&mut self.commands)
    }

    /// Beginnings that became known or were dropped since this was asked last.
    pub fn take_delta(&mut self) -> BlockDelta {
        self.index.take_delta()
    }

    /// Every beginning that is known.
    #[cfg(test)]
    pub fn stored_blocks(&self) -> Vec<BlockHash> {
        self.index.all()
    }

    /// Tokens that slots and blocks in memory take.
    pub fn used_tokens(&self) -> u64 {
        self.slot_tokens() + self.index.memory_blocks() as u64 * u64::from(BLOCK_TOKENS)
    }

    /// Blocks in memory, and on disk.
    pub fn block_counts(&self) -> (usize, usize) {
        (self.index.memory_blocks(), self.index.disk_blocks())
    }

    /// A slot for a request with this prompt, with as much of it as is kept; `None` while all are busy. The last token
    /// is always left to be read: what comes after it is the question.
    pub fn admit(&mut self, prompt: &[u32]) -> Option<SlotAssignment> {
        let usable = if self.capacity.enabled { prompt.len().saturating_sub(1) } else { 0 };
        let usable = &prompt[..usable];
        let keys = block_hashes(self.root, usable);
        let covered = self.index.stored_prefix(&keys);
        if let Some((slot, length)) = self.reusable_slot(usable, covered as u32 * BLOCK_TOKENS) {
            self.take_cached(slot);
            self.set_busy(slot, length);
            self.commands.push(CacheCommand::Truncate { slot, length });
            return Some(SlotAssignment { slot, cached: length, fetch_from_disk: Vec::new() });
        }
        let slot = self.take_empty_slot()?;
        let keys = &keys[..covered];
        self.index.touch(keys);
        let in_memory = keys.iter().all(|key| self.index.is_in_memory(*key));
        // What comes from memory is there twice while it is copied; what comes from disk is not.
        let times = if keys.iter().any(|key| self.index.is_in_memory(*key)) { 2 } else { 1 };
        let busy: u64 = self.slots.values().filter(|slot| slot.is_busy()).map(CacheSlot::reserved_tokens).sum();
        let fits = |count: &usize| {
            let tokens = *count as u64 * u64::from(BLOCK_TOKENS);
            busy + tokens.next_multiple_of(u64::from(CACHE_STEP)) + (times - 1) * tokens <= self.capacity.tokens
        };
        let keys = &keys[..(0..=covered).rev().find(fits).unwrap_or(0)];
        let cached = keys.len() as u32 * BLOCK_TOKENS;
        self.set_busy(slot, cached);
        self.evict_until_fits(0, keys);
        let fetch = if in_memory { Vec::new() } else { keys.to_vec() };
        if in_memory && cached > 0 {
            self.commands.push(CacheCommand::Load { slot, hashes: keys.to_vec() });
        }
        Some(SlotAssignment { slot, cached, fetch_from_disk: fetch })
    }

    /// Only so many of the blocks that were to come from disk did. The slot is empty again, and those that did not come
    /// are on no disk any more.
    pub fn finish_fetch(&mut self, slot: u32, keys: &[BlockHash], came: u32) {
        self.slots.insert(slot, CacheSlot { peak_tokens: 0, state: SlotState::Busy(0) });
        self.commands.push(CacheCommand::Reset { slot });
        let shelved = keys.get(came as usize..).unwrap_or_default().to_vec();
        self.remove_from_disk(&shelved);
        self.commands.push(CacheCommand::Evict { in_memory: Vec::new(), on_disk: shelved });
    }

    /// A running sequence is about to have so many tokens.
    pub fn grow(&mut self, slot: u32, tokens: u32) {
        self.set_busy(slot, tokens);
    }

    /// A running sequence has only so many tokens after all: the others were guessed wrong.
    pub fn shrink(&mut self, slot: u32, tokens: u32) {
        self.set_busy(slot, tokens);
        self.commands.push(CacheCommand::Truncate { slot, length: tokens });
    }

    /// A running sequence has read these tokens, its prompt: others that begin alike can have them now.
    pub fn store_prompt(&mut self, slot: u32, tokens: &[u32]) {
        if self.capacity.enabled {
            self.store_blocks(slot, &block_hashes(self.root, tokens));
        }
    }

    /// A sequence ended and has these tokens in its slot.
    pub fn release(&mut self, slot: u32, mut tokens: Vec<u32>) {
        if !self.capacity.enabled || tokens.is_empty() {
            return self.discard(slot);
        }
        let Some(CacheSlot { state: SlotState::Busy(length), .. }) = self.slots.get(&slot) else { return };
        tokens.truncate(*length as usize);
        let keys = block_hashes(self.root, &tokens);
        self.store_blocks(slot, &keys);
        self.clock += 1;
        self.index.count_cached_slot(&keys, true);
        let held = SlotState::Cached { tokens, hashes: keys, last_used: self.clock };
        self.slots.entry(slot).or_default().state = held;
    }

    /// A sequence ended whose numbers nobody should see again.
    pub fn discard(&mut self, slot: u32) {
        self.slots.insert(slot, CacheSlot::default());
        self.commands.push(CacheCommand::Reset { slot });
    }

    /// Blocks that a disk holds no more.
    pub fn remove_from_disk(&mut self, keys: &[BlockHash]) {
        keys.iter().for_each(|key| self.index.set_on_disk(*key, false));
    }

    /// The parked slot that a prompt goes on from, and how many tokens of it it shares. Not one that has much
    /// else, nor one that has less than the blocks do.
    fn reusable_slot(&self, prompt: &[u32], blocks: u32) -> Option<(u32, u32)> {
        let shared = self.slots.iter().filter_map(|(slot, held)| match &held.state {
            SlotState::Cached { tokens, .. } => {
                let shared = tokens.iter().zip(prompt).take_while(|(one, other)| one == other).count();
                (shared * 2 >= tokens.len()).then_some((*slot, shared as u32))
            }
            _ => None,
        });
        shared.max_by_key(|(_, shared)| *shared).filter(|(_, shared)| *shared > 0 && *shared >= blocks)
    }

    /// An empty slot, if need be the one that was parked longest ago.
    fn take_empty_slot(&mut self) -> Option<u32> {
        let empty = self.slots.iter().find(|(_, slot)| matches!(slot.state, SlotState::Empty));
        empty.map(|(slot, _)| *slot).or_else(|| self.evict_oldest_slot())
    }

    /// Empties the slot that was parked longest ago.
    fn evict_oldest_slot(&mut self) -> Option<u32> {
        let parked = self.slots.iter().filter_map(|(slot, held)| match held.state {
            SlotState::Cached { last_used: used, .. } => Some((used, *slot)),
            _ => None,
        });
        let (_, slot) = parked.min()?;
        self.take_cached(slot);
        self.discard(slot);
        Some(slot)
    }

    fn take_cached(&mut self, slot: u32) {
        let held = std::mem::take(&mut self.slots.entry(slot).or_default().state);
        if let SlotState::Cached { hashes: keys, .. } = held {
            self.index.count_cached_slot(&keys, false);
        }
    }

    fn set_busy(&mut self, slot: u32, tokens: u32) {
        let slot = self.slots.entry(slot).or_default();
        slot.peak_tokens = slot.peak_tokens.max(tokens);
        slot.state = SlotState::Busy(tokens);
    }

    /// Keeps the blocks of a slot that are not kept yet, as far as there is room beside slots.
    fn store_blocks(&mut self, slot: u32, keys: &[BlockHash]) {
        let room = self.capacity.tokens.saturating_sub(self.slot_tokens()) / u64::from(BLOCK_TOKENS);
        let (fit, _) = keys.split_at(keys.len().min(room as usize));
        let new = keys.iter().enumerate().filter_map(|(index, key)| {
            let held = index < fit.len() && !self.index.is_in_memory(*key);
            let shelved = self.capacity.disk && !self.index.is_on_disk(*key);
            (held || shelved).then_some(BlockCopy { index: index as u32, hash: *key, in_memory: held, on_disk: shelved })
        });
        let new: Vec<BlockCopy> = new.collect();
        self.index.touch(keys);
        // Before the copies are made, not after.
        let more = new.iter().filter(|kept| kept.in_memory).count() as u64 * u64::from(BLOCK_TOKENS);
        self.evict_until_fits(more, fit);
        for BlockCopy { hash: key, in_memory: held, on_disk: shelved, .. } in &new {
            if *held {
                self.index.set_in_memory(*key, true);
            }
            if *shelved {
                self.index.set_on_disk(*key, true);
            }
        }
        self.index.touch(keys);
        if !new.is_empty() {
            self.commands.push(CacheCommand::Store { slot, blocks: new });
        }
        self.evict_from_disk();
    }

    /// Drops blocks, but not these, which were used last, and then parked slots, until so many more tokens fit.
    fn evict_until_fits(&mut self, more: u64, but: &[BlockHash]) {
        let mut dropped = Vec::new();
        while self.used_tokens() + more > self.capacity.tokens
            && let Some(key) = self.index.oldest_in_memory().filter(|key| !but.contains(key))
        {
            self.index.set_in_memory(key, false);
            dropped.push(key);
        }
        if !dropped.is_empty() {
            self.commands.push(CacheCommand::Evict { in_memory: dropped, on_disk: Vec::new() });
        }
        while self.used_tokens() + more > self.capacity.tokens && self.evict_oldest_slot().is_some() {}
    }

    fn evict_from_disk(&mut self) {
        let mut dropped = Vec::new();
        while self.index.disk_blocks() > MAX_DISK_BLOCKS
            && let Some(key) = self.index.oldest_on_disk()
        {
            self.index.set_on_disk(key, false);
            dropped.push(key);
        }
        if !dropped.is_empty() {
            self.commands.push(CacheCommand::Evict { in_memory: Vec::new(), on_disk: dropped });
        }
    }

    /// Tokens that slots have room for.
    fn slot_tokens(&self) -> u64 {
        self.slots.values().map(CacheSlot::reserved_tokens).sum()
    }
}

#[cfg(test)]
mod tests;
