//! Prefix cache: KV blocks kept after a request ends, so that shared prefixes are not prefilled again. Pure:
//! it decides, and every rank of the group applies the same commands.
//!
//! ```text
//! running slot ── request ends ──▶ cached slot ── slot needed for another request ──▶ empty slot
//!      ▲   │                             │ the conversation continues: reused in place, no copy
//!      │   └── whole blocks are copied ──┼──▶ blocks in memory ──▶ blocks on disk
//!      └────────── copied back ──────────┴───────────┘                  │ also after a restart
//!      └─────────────────────── loaded ─────────────────────────────────┘
//! ```
//!
//! Layers with a window or a recurrent state go back a little way or not at all, and have no blocks. A slot of theirs
//! keeps a snapshot near the end of its prompt: the next request of a conversation often repeats the prompt, and not what
//! was thought after it. Where a prompt begins as an earlier one did, its slot is copied at the end of what they share: the
//! copy, a template, is a cached slot of which each further prompt that begins so gets a copy.
//!
//! The prefix cache takes no memory beyond what the planner reserves for running sequences: blocks and cached
//! slots use what those sequences do not need, and are evicted when they need it.

pub mod block_hash;
pub mod block_index;
pub mod checkpoints;
pub mod disk;
pub mod events;
pub mod fingerprint;

use std::collections::BTreeMap;

use block_hash::{BLOCK_TOKENS, BlockHash, PrefixScope, block_hashes};
use block_index::{BlockDelta, BlockIndex, MAX_DISK_BLOCKS};
use checkpoints::{Checkpoints, SeenPrefixes};

/// Allocation unit of a slot's KV cache, in tokens.
pub use russet_model::cost::CACHE_STEP;

/// A block of a slot to copy into the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Index of the block in the sequence.
    pub index: u32,
    /// Block hash.
    pub hash: BlockHash,
    /// Whether to keep it in memory.
    pub in_memory: bool,
    /// Whether to write it to disk, if there is a disk tier with space for it.
    pub on_disk: bool,
}

/// A command that every rank applies to its KV caches, between two batches and in the same order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheCommand {
    /// Empty a slot.
    Reset {
        /// The slot.
        slot: u32,
    },
    /// Truncate a slot to its first tokens.
    Truncate {
        /// The slot.
        slot: u32,
        /// Tokens to keep.
        length: u32,
    },
    /// Keep a snapshot of a slot as it is, in place of an earlier one.
    Snapshot {
        /// The slot.
        slot: u32,
    },
    /// Take a slot back to its snapshot, which stays.
    Restore {
        /// The slot.
        slot: u32,
    },
    /// Make an empty slot a copy of another as it is, without its snapshot.
    Fork {
        /// The slot.
        from: u32,
        /// The empty slot.
        to: u32,
    },
    /// Store blocks of a slot.
    Store {
        /// The slot.
        slot: u32,
        /// The blocks.
        blocks: Vec<BlockCopy>,
    },
    /// Load blocks from memory into an empty slot.
    Load {
        /// The slot.
        slot: u32,
        /// The blocks, in sequence order.
        hashes: Vec<BlockHash>,
    },
    /// Evict blocks.
    Evict {
        /// From memory.
        in_memory: Vec<BlockHash>,
        /// From disk.
        on_disk: Vec<BlockHash>,
    },
}

/// A slot admitted for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotAssignment {
    /// The slot.
    pub slot: u32,
    /// Tokens of the prompt that need no prefill.
    pub cached: u32,
    /// Blocks to load from disk first, in sequence order; afterwards the slot holds `cached` tokens.
    pub fetch_from_disk: Vec<BlockHash>,
    /// Where its prefill pauses.
    pub checkpoints: Checkpoints,
}

/// Tokens of a prompt behind its snapshot. A template ends with what begins the answer, and the next request has it
/// otherwise: a mark for thoughts is gone then. That is a few tokens; these are prefilled again.
const SNAPSHOT_MARGIN: u32 = 32;

/// Tokens that prompts share at least for a template of them: fewer are prefilled as quickly as copied.
const MIN_TEMPLATE_TOKENS: u32 = 256;

/// A slot, and the most tokens it has held since it was last empty, which determines its allocation.
#[derive(Debug, Default)]
struct CacheSlot {
    peak_tokens: u32,
    /// Most tokens that its layers have seen since it was last empty or restored. A step may have run ahead of an
    /// answer's end, and what was dropped once is not there to be dropped again.
    seen_tokens: u32,
    snapshot: Option<SlotSnapshot>,
    /// Root hash of its request, with the request's salt.
    root: Option<BlockHash>,
    /// Whether prompts get copies of it.
    is_template: bool,
    state: SlotState,
}

/// A snapshot of a slot: its tokens, and how many its layers had seen.
#[derive(Clone, Copy, Debug)]
struct SlotSnapshot {
    tokens: u32,
    seen_tokens: u32,
}

/// How a cached slot becomes the beginning of a prompt.
#[derive(Clone, Copy, Debug)]
enum SlotReuse {
    /// By dropping what lies behind this many tokens.
    Truncate(u32),
    /// By going back to its snapshot.
    Restore(SlotSnapshot),
}

impl SlotReuse {
    fn tokens(self) -> u32 {
        match self {
            Self::Truncate(tokens) | Self::Restore(SlotSnapshot { tokens, .. }) => tokens,
        }
    }
}

#[derive(Debug, Default)]
enum SlotState {
    #[default]
    Empty,
    /// A running request with this many tokens.
    Busy(u32),
    /// The tokens of a finished request, its block hashes, and its last use.
    Cached { tokens: Vec<u32>, hashes: Vec<BlockHash>, last_used: u64 },
}

impl CacheSlot {
    fn is_busy(&self) -> bool {
        matches!(self.state, SlotState::Busy(_))
    }

    /// Allocated capacity in tokens.
    fn reserved_tokens(&self) -> u64 {
        u64::from(self.peak_tokens.next_multiple_of(CACHE_STEP))
    }
}

/// Capacity of the prefix cache.
#[derive(Clone, Copy, Debug)]
pub struct CacheCapacity {
    /// Number of slots.
    pub slots: u32,
    /// Maximum tokens of all slots and in-memory blocks together.
    pub tokens: u64,
    /// Whether blocks are written to disk.
    pub disk: bool,
    /// Whether the prefix cache is enabled.
    pub enabled: bool,
    /// Whether positions can be copied into blocks; without, only a slot whose sequence goes on is used again.
    pub blocks: bool,
    /// Most tokens that a slot can be truncated by, unless to the beginning of its last step; `None` is any number.
    pub max_rewind: Option<u32>,
}

/// Prefix cache of one group.
#[derive(Debug)]
pub struct PrefixCache {
    root: BlockHash,
    capacity: CacheCapacity,
    slots: BTreeMap<u32, CacheSlot>,
    index: BlockIndex,
    seen: SeenPrefixes,
    clock: u64,
    commands: Vec<CacheCommand>,
}

impl PrefixCache {
    /// An empty prefix cache for the model identified by `root`, with the blocks that are on the disks of all
    /// ranks, least recently used first.
    pub fn new(root: BlockHash, capacity: CacheCapacity, on_disk: &[BlockHash]) -> Self {
        let mut index = BlockIndex::default();
        if capacity.disk && capacity.enabled && capacity.blocks {
            on_disk.iter().for_each(|key| index.set_on_disk(*key, true));
        }
        let slots = (0..capacity.slots).map(|slot| (slot, CacheSlot::default())).collect();
        Self { root, capacity, slots, index, seen: SeenPrefixes::default(), clock: 0, commands: Vec::new() }
    }

    /// Commands since the last call, to be applied in this order and before the next batch. Includes
    /// evictions for sequences that have grown.
    pub fn take_commands(&mut self) -> Vec<CacheCommand> {
        self.evict_until_fits(0, &[]);
        std::mem::take(&mut self.commands)
    }

    /// Blocks added or evicted since the last call.
    pub fn take_delta(&mut self) -> BlockDelta {
        self.index.take_delta()
    }

    /// Hashes of all blocks.
    #[cfg(test)]
    pub fn stored_blocks(&self) -> Vec<BlockHash> {
        self.index.all()
    }

    /// Tokens held by slots and in-memory blocks.
    pub fn used_tokens(&self) -> u64 {
        self.slot_tokens() + self.index.memory_blocks() as u64 * u64::from(BLOCK_TOKENS)
    }

    /// Number of blocks in memory and on disk.
    pub fn block_counts(&self) -> (usize, usize) {
        (self.index.memory_blocks(), self.index.disk_blocks())
    }

    /// Admits a request: a slot with as much of the prompt as is cached for its scope; `None` while all slots are
    /// busy. At least the last token is always prefilled, because its logits give the next token.
    pub fn admit(&mut self, prompt: &[u32], scope: PrefixScope<'_>) -> Option<SlotAssignment> {
        let root = self.root.scoped(scope);
        let assignment = self.assign(prompt, root)?;
        self.slots.entry(assignment.slot).or_default().root = Some(root);
        Some(assignment)
    }

    /// Admits a request to an empty slot, whatever is cached of its prompt; `None` while all slots are busy. What it leaves
    /// in the slot is shared like that of any other request of its scope.
    pub fn admit_empty(&mut self, prompt: &[u32], scope: PrefixScope<'_>) -> Option<SlotAssignment> {
        let root = self.root.scoped(scope);
        let slot = self.take_empty_slot(None)?;
        let checkpoints = match self.capacity.enabled {
            true => {
                let common = self.seen.note(&block_hashes(root, &prompt[..prompt.len().saturating_sub(1)]));
                self.checkpoints(prompt, 0, common)
            }
            false => Checkpoints::default(),
        };
        self.set_busy(slot, 0);
        self.slots.entry(slot).or_default().root = Some(root);
        Some(SlotAssignment { slot, cached: 0, fetch_from_disk: Vec::new(), checkpoints })
    }

    /// Where the prefill of a prompt pauses behind its first `cached` tokens; `common` of them are those of an earlier one.
    fn checkpoints(&self, prompt: &[u32], cached: u32, common: u32) -> Checkpoints {
        if !self.capacity.enabled || self.capacity.max_rewind.is_none() {
            return Checkpoints::default();
        }
        let at = (prompt.len() as u32).saturating_sub(SNAPSHOT_MARGIN);
        Checkpoints {
            fork_at: (common >= cached + MIN_TEMPLATE_TOKENS).then_some(common),
            snapshot_at: (at > cached).then_some(at),
        }
    }

    fn assign(&mut self, prompt: &[u32], root: BlockHash) -> Option<SlotAssignment> {
        let usable = if self.capacity.enabled { prompt.len().saturating_sub(1) } else { 0 };
        let usable = &prompt[..usable];
        let keys = block_hashes(root, usable);
        let covered = self.index.stored_prefix(&keys);
        let common = if self.capacity.enabled { self.seen.note(&keys) } else { 0 };
        if let Some((slot, reuse)) = self.reusable_slot(usable, root, covered as u32 * BLOCK_TOKENS) {
            let cached = reuse.tokens();
            let checkpoints = self.checkpoints(prompt, cached, common);
            if let Some(slot) = self.copy_of_template(slot, cached) {
                return Some(SlotAssignment { slot, cached, fetch_from_disk: Vec::new(), checkpoints });
            }
            self.take_cached(slot);
            self.commands.push(match reuse {
                SlotReuse::Truncate(length) => CacheCommand::Truncate { slot, length },
                SlotReuse::Restore(SlotSnapshot { seen_tokens, .. }) => {
                    self.slots.entry(slot).or_default().seen_tokens = seen_tokens;
                    CacheCommand::Restore { slot }
                }
            });
            self.set_busy(slot, cached);
            return Some(SlotAssignment { slot, cached, fetch_from_disk: Vec::new(), checkpoints });
        }
        let checkpoints = self.checkpoints(prompt, 0, common);
        let slot = self.take_empty_slot(None)?;
        let keys = &keys[..covered];
        self.index.touch(keys);
        let in_memory = keys.iter().all(|key| self.index.is_in_memory(*key));
        // A block in memory exists twice while it is copied; a block from disk does not.
        let times = if keys.iter().any(|key| self.index.is_in_memory(*key)) { 2 } else { 1 };
        let busy = self.busy_tokens();
        let fits = |count: &usize| {
            let tokens = *count as u64 * u64::from(BLOCK_TOKENS);
            busy + tokens.next_multiple_of(u64::from(CACHE_STEP)) + (times - 1) * tokens
                <= self.capacity.tokens
        };
        let keys = &keys[..(0..=covered).rev().find(fits).unwrap_or(0)];
        let cached = keys.len() as u32 * BLOCK_TOKENS;
        self.set_busy(slot, cached);
        self.evict_until_fits(0, keys);
        let fetch = if in_memory { Vec::new() } else { keys.to_vec() };
        if in_memory && cached > 0 {
            self.commands.push(CacheCommand::Load { slot, hashes: keys.to_vec() });
        }
        Some(SlotAssignment { slot, cached, fetch_from_disk: fetch, checkpoints })
    }

    /// Fewer of the blocks were loaded from disk than requested. The slot is empty again, and the missing
    /// blocks count as lost from disk.
    pub fn finish_fetch(&mut self, slot: u32, keys: &[BlockHash], loaded: u32) {
        let root = self.slots.get(&slot).and_then(|slot| slot.root);
        self.slots.insert(slot, CacheSlot { root, state: SlotState::Busy(0), ..CacheSlot::default() });
        self.commands.push(CacheCommand::Reset { slot });
        let on_disk = keys.get(loaded as usize..).unwrap_or_default().to_vec();
        self.remove_from_disk(&on_disk);
        self.commands.push(CacheCommand::Evict { in_memory: Vec::new(), on_disk });
    }

    /// A running sequence is about to have this many tokens.
    pub fn grow(&mut self, slot: u32, tokens: u32) {
        self.set_busy(slot, tokens);
    }

    /// A running sequence is truncated to this many tokens: the rest were rejected draft tokens, or all of their step
    /// where the layers go back no less than to its beginning.
    pub fn shrink(&mut self, slot: u32, tokens: u32) {
        self.set_busy(slot, tokens);
        if self.capacity.max_rewind == Some(0) {
            // They have again what they had then.
            self.slots.entry(slot).or_default().seen_tokens = tokens;
        }
        self.commands.push(CacheCommand::Truncate { slot, length: tokens });
    }

    /// A running sequence holds the tokens at which its assignment wants a snapshot, and runs no further before this
    /// command.
    pub fn snapshot(&mut self, slot: u32) {
        if let Some(CacheSlot { state: SlotState::Busy(tokens), seen_tokens, snapshot, .. }) =
            self.slots.get_mut(&slot)
        {
            *snapshot = Some(SlotSnapshot { tokens: *tokens, seen_tokens: *seen_tokens });
            self.commands.push(CacheCommand::Snapshot { slot });
        }
    }

    /// A running sequence holds `tokens` of its prompt, at which its assignment wants a copy for prompts that begin so,
    /// and runs no further before this command.
    pub fn fork(&mut self, slot: u32, tokens: &[u32]) {
        let Some(CacheSlot { peak_tokens, seen_tokens, root, .. }) = self.slots.get(&slot) else { return };
        let copy = CacheSlot {
            peak_tokens: *peak_tokens,
            seen_tokens: *seen_tokens,
            root: *root,
            is_template: true,
            ..CacheSlot::default()
        };
        // Half of the slots are for conversations.
        let is_there = |slot: &CacheSlot| match &slot.state {
            SlotState::Cached { tokens: cached, .. } => slot.is_template && cached == tokens,
            SlotState::Empty | SlotState::Busy(_) => false,
        };
        let templates = self.slots.values().filter(|slot| slot.is_template).count();
        if self.slots.values().any(is_there)
            || self.busy_tokens() + copy.reserved_tokens() > self.capacity.tokens
            || 2 * (templates + 1) > self.slots.len()
        {
            return;
        }
        let Some(to) = self.take_empty_slot(None) else { return };
        let hashes = block_hashes(self.root_of(slot), tokens);
        self.clock += 1;
        self.index.count_cached_slot(&hashes, true);
        let state = SlotState::Cached { tokens: tokens.to_vec(), hashes, last_used: self.clock };
        self.slots.insert(to, CacheSlot { state, ..copy });
        self.commands.push(CacheCommand::Fork { from: slot, to });
    }

    /// A running sequence has prefilled its prompt `tokens`: other requests can now share them.
    pub fn store_prompt(&mut self, slot: u32, tokens: &[u32]) {
        if self.capacity.enabled {
            self.store_blocks(slot, &block_hashes(self.root_of(slot), tokens));
        }
    }

    /// A sequence has ended with these tokens in its slot.
    pub fn release(&mut self, slot: u32, mut tokens: Vec<u32>) {
        if !self.capacity.enabled || tokens.is_empty() {
            return self.discard(slot);
        }
        let Some(CacheSlot { state: SlotState::Busy(length), .. }) = self.slots.get(&slot) else { return };
        tokens.truncate(*length as usize);
        let keys = block_hashes(self.root_of(slot), &tokens);
        self.store_blocks(slot, &keys);
        self.clock += 1;
        self.index.count_cached_slot(&keys, true);
        let held = SlotState::Cached { tokens, hashes: keys, last_used: self.clock };
        self.slots.entry(slot).or_default().state = held;
    }

    /// A sequence has ended and its KV cache must not be reused.
    pub fn discard(&mut self, slot: u32) {
        self.slots.insert(slot, CacheSlot::default());
        self.commands.push(CacheCommand::Reset { slot });
    }

    /// Blocks that are lost from disk.
    pub fn remove_from_disk(&mut self, keys: &[BlockHash]) {
        keys.iter().for_each(|key| self.index.set_on_disk(*key, false));
    }

    /// Root hash of the request in a slot.
    fn root_of(&self, slot: u32) -> BlockHash {
        self.slots.get(&slot).and_then(|slot| slot.root).unwrap_or(self.root)
    }

    /// The cached slot from which a prompt continues, and how. Excludes slots of another salt, slots of which more than
    /// half would be dropped, unless they are half of the prompt and there are no blocks of them, and slots that share
    /// less than the blocks do.
    fn reusable_slot(&self, prompt: &[u32], root: BlockHash, blocks: u32) -> Option<(u32, SlotReuse)> {
        let reuses = self.slots.iter().filter_map(|(slot, held)| match &held.state {
            SlotState::Cached { tokens, .. } if held.root == Some(root) => {
                let shared = tokens.iter().zip(prompt).take_while(|(one, other)| one == other).count() as u32;
                let dropped = held.seen_tokens.saturating_sub(shared);
                let can_drop = self.capacity.max_rewind.is_none_or(|most| dropped <= most);
                let snapshot = held.snapshot.filter(|snapshot| snapshot.tokens <= shared);
                let reuse = match (can_drop, snapshot) {
                    (true, _) => SlotReuse::Truncate(shared),
                    (false, snapshot) => SlotReuse::Restore(snapshot?),
                };
                let twice = 2 * reuse.tokens() as usize;
                let is_worth_it = twice >= tokens.len() || (!self.capacity.blocks && twice >= prompt.len());
                is_worth_it.then_some((*slot, reuse))
            }
            _ => None,
        });
        let longest = reuses.max_by_key(|(_, reuse)| reuse.tokens());
        longest.filter(|(_, reuse)| reuse.tokens() > 0 && reuse.tokens() >= blocks)
    }

    /// A busy slot with a copy of the first `cached` tokens of a template, if `from` is one and there are a slot and room
    /// for both.
    fn copy_of_template(&mut self, from: u32, cached: u32) -> Option<u32> {
        let busy = self.busy_tokens();
        let held = self.slots.get_mut(&from).filter(|held| held.is_template)?;
        let (reserved, peak, seen, root) =
            (held.reserved_tokens(), held.peak_tokens, held.seen_tokens, held.root);
        if busy + 2 * reserved > self.capacity.tokens {
            return None;
        }
        self.clock += 1;
        if let SlotState::Cached { last_used, .. } = &mut held.state {
            *last_used = self.clock;
        }
        let to = self.take_empty_slot(Some(from))?;
        self.commands.push(CacheCommand::Fork { from, to });
        self.commands.push(CacheCommand::Truncate { slot: to, length: cached });
        let copy = CacheSlot { peak_tokens: peak, seen_tokens: seen, root, ..CacheSlot::default() };
        self.slots.insert(to, copy);
        self.set_busy(to, cached);
        Some(to)
    }

    /// An empty slot; if there is none, evicts the least recently used cached slot, but not `but`.
    fn take_empty_slot(&mut self, but: Option<u32>) -> Option<u32> {
        let empty = self.slots.iter().find(|(_, slot)| matches!(slot.state, SlotState::Empty));
        empty.map(|(slot, _)| *slot).or_else(|| self.evict_oldest_slot(but))
    }

    /// Evicts the least recently used cached slot, but not `but`.
    fn evict_oldest_slot(&mut self, but: Option<u32>) -> Option<u32> {
        let parked = self.slots.iter().filter_map(|(slot, held)| match held.state {
            SlotState::Cached { last_used: used, .. } if Some(*slot) != but => Some((used, *slot)),
            _ => None,
        });
        let (_, slot) = parked.min()?;
        self.take_cached(slot);
        self.discard(slot);
        Some(slot)
    }

    fn take_cached(&mut self, slot: u32) {
        let slot = self.slots.entry(slot).or_default();
        slot.is_template = false;
        let held = std::mem::take(&mut slot.state);
        if let SlotState::Cached { hashes: keys, .. } = held {
            self.index.count_cached_slot(&keys, false);
        }
    }

    fn set_busy(&mut self, slot: u32, tokens: u32) {
        let slot = self.slots.entry(slot).or_default();
        slot.peak_tokens = slot.peak_tokens.max(tokens);
        slot.seen_tokens = slot.seen_tokens.max(tokens);
        slot.snapshot = slot.snapshot.filter(|snapshot| snapshot.tokens <= tokens);
        slot.state = SlotState::Busy(tokens);
    }

    /// Stores the blocks of a slot that are not stored yet, as far as the slots leave capacity.
    fn store_blocks(&mut self, slot: u32, keys: &[BlockHash]) {
        if !self.capacity.blocks {
            return;
        }
        let free_blocks = self.capacity.tokens.saturating_sub(self.slot_tokens()) / u64::from(BLOCK_TOKENS);
        let (fit, _) = keys.split_at(keys.len().min(free_blocks as usize));
        let new = keys.iter().enumerate().filter_map(|(index, key)| {
            let in_memory = index < fit.len() && !self.index.is_in_memory(*key);
            let on_disk = self.capacity.disk && !self.index.is_on_disk(*key);
            (in_memory || on_disk).then_some(BlockCopy {
                index: index as u32,
                hash: *key,
                in_memory,
                on_disk,
            })
        });
        let new: Vec<BlockCopy> = new.collect();
        self.index.touch(keys);
        // Evict before the copies are made, not after.
        let more = new.iter().filter(|copy| copy.in_memory).count() as u64 * u64::from(BLOCK_TOKENS);
        self.evict_until_fits(more, fit);
        for BlockCopy { hash: key, in_memory, on_disk, .. } in &new {
            if *in_memory {
                self.index.set_in_memory(*key, true);
            }
            if *on_disk {
                self.index.set_on_disk(*key, true);
            }
        }
        self.index.touch(keys);
        if !new.is_empty() {
            self.commands.push(CacheCommand::Store { slot, blocks: new });
        }
        self.evict_from_disk();
    }

    /// Evicts blocks, except the recently used `but`, and then cached slots, until `more` tokens fit.
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
        while self.used_tokens() + more > self.capacity.tokens && self.evict_oldest_slot(None).is_some() {}
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

    /// Tokens allocated to busy slots.
    fn busy_tokens(&self) -> u64 {
        self.slots.values().filter(|slot| slot.is_busy()).map(CacheSlot::reserved_tokens).sum()
    }

    /// Tokens allocated to slots.
    fn slot_tokens(&self) -> u64 {
        self.slots.values().map(CacheSlot::reserved_tokens).sum()
    }
}

#[cfg(test)]
mod tests;
