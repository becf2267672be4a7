//! Which blocks are where: in memory, on disk, or in a slot that is parked. The one that was used longest ago is
//! dropped first.

use std::collections::{BTreeMap, HashMap};

use super::block_hash::BlockHash;

/// Blocks known of at the most, so that the list of those on disk stays small.
pub const MAX_DISK_BLOCKS: usize = 65_536;

/// An index of blocks; it holds none of their numbers.
#[derive(Debug, Default)]
pub struct BlockIndex {
    blocks: HashMap<BlockHash, BlockState>,
    /// Those in memory and those on disk, by their last use.
    in_memory: BTreeMap<u64, BlockHash>,
    on_disk: BTreeMap<u64, BlockHash>,
    clock: u64,
    /// Whether a block became known, or is nowhere any more.
    delta: BTreeMap<BlockHash, bool>,
}

#[derive(Clone, Copy, Debug, Default)]
struct BlockState {
    last_used: u64,
    in_memory: bool,
    on_disk: bool,
    /// Parked slots it is part of.
    cached_slots: u32,
}

impl BlockState {
    fn is_stored(&self) -> bool {
        self.in_memory || self.on_disk || self.cached_slots > 0
    }
}

/// Blocks that became known, and that are nowhere any more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockDelta {
    /// Known now.
    pub added: Vec<BlockHash>,
    /// Nowhere now.
    pub removed: Vec<BlockHash>,
}

impl BlockIndex {
    /// Blocks in memory.
    pub fn memory_blocks(&self) -> usize {
        self.in_memory.len()
    }

    /// Blocks on disk.
    pub fn disk_blocks(&self) -> usize {
        self.on_disk.len()
    }

    /// Whether a block is in memory.
    pub fn is_in_memory(&self, key: BlockHash) -> bool {
        self.blocks.get(&key).is_some_and(|known| known.in_memory)
    }

    /// Whether a block is on disk.
    pub fn is_on_disk(&self, key: BlockHash) -> bool {
        self.blocks.get(&key).is_some_and(|known| known.on_disk)
    }

    /// How many of a chain's first blocks are in memory or on disk.
    pub fn stored_prefix(&self, chain: &[BlockHash]) -> usize {
        chain.iter().take_while(|key| self.is_in_memory(**key) || self.is_on_disk(**key)).count()
    }

    /// Marks a chain as used just now: its last block as the one used longest ago, so that a block never leaves
    /// before those that are of no use without it.
    pub fn touch(&mut self, chain: &[BlockHash]) {
        for key in chain.iter().rev() {
            self.update(*key, |_| ());
        }
    }

    /// Puts a block into memory, or out of it.
    pub fn set_in_memory(&mut self, key: BlockHash, held: bool) {
        self.update(key, |known| known.in_memory = held);
    }

    /// Puts a block on disk, or off it.
    pub fn set_on_disk(&mut self, key: BlockHash, shelved: bool) {
        self.update(key, |known| known.on_disk = shelved);
    }

    /// Counts a parked slot that the blocks are part of, or one less.
    pub fn count_cached_slot(&mut self, chain: &[BlockHash], parked: bool) {
        for key in chain.iter().rev() {
            self.update(*key, |known| {
                known.cached_slots = if parked { known.cached_slots + 1 } else { known.cached_slots.saturating_sub(1) };
            });
        }
    }

    /// The block in memory that was used longest ago.
    pub fn oldest_in_memory(&self) -> Option<BlockHash> {
        self.in_memory.values().next().copied()
    }

    /// The block on disk that was used longest ago.
    pub fn oldest_on_disk(&self) -> Option<BlockHash> {
        self.on_disk.values().next().copied()
    }

    /// Every block that is anywhere.
    #[cfg(test)]
    pub fn all(&self) -> Vec<BlockHash> {
        self.blocks.keys().copied().collect()
    }

    /// What changed since this was asked last.
    pub fn take_delta(&mut self) -> BlockDelta {
        let (added, dropped): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.delta).into_iter().partition(|(_, known)| *known);
        let keys = |changes: Vec<(BlockHash, bool)>| changes.into_iter().map(|(key, _)| key).collect();
        BlockDelta { added: keys(added), removed: keys(dropped) }
    }

    fn update(&mut self, key: BlockHash, change: impl FnOnce(&mut BlockState)) {
        let before = self.blocks.get(&key).copied().unwrap_or_default();
        let mut known = before;
        change(&mut known);
        self.in_memory.remove(&before.last_used);
        self.on_disk.remove(&before.last_used);
        match (before.is_stored(), known.is_stored()) {
            (false, false) => return,
            (false, true) => self.record_change(key, true),
            (true, false) => {
                self.record_change(key, false);
                self.blocks.remove(&key);
                return;
            }
            (true, true) => {}
        }
        self.clock += 1;
        known.last_used = self.clock;
        if known.in_memory {
            self.in_memory.insert(known.last_used, key);
        }
        if known.on_disk {
            self.on_disk.insert(known.last_used, key);
        }
        self.blocks.insert(key, known);
    }

    /// Back to what was told last is no change.
    fn record_change(&mut self, key: BlockHash, known: bool) {
        if self.delta.remove(&key).is_none() {
            self.delta.insert(key, known);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u8) -> BlockHash {
        BlockHash([number; 16])
    }

    #[test]
    fn eviction_takes_the_tail_of_the_least_recent_chain() {
        let mut blocks = BlockIndex::default();
        let (old, new) = ([key(1), key(2)], [key(1), key(3)]);
        for chain in [old, new] {
            chain.iter().for_each(|key| blocks.set_in_memory(*key, true));
            blocks.touch(&chain);
        }
        let mut left = Vec::new();
        while let Some(key) = blocks.oldest_in_memory() {
            blocks.set_in_memory(key, false);
            left.push(key);
        }
        assert_eq!(left, [key(2), key(3), key(1)]);
    }

    #[test]
    fn block_is_indexed_while_it_is_stored_anywhere() {
        let mut blocks = BlockIndex::default();
        let added = |key| BlockDelta { added: vec![key], removed: vec![] };
        let dropped = |key| BlockDelta { added: vec![], removed: vec![key] };
        blocks.count_cached_slot(&[key(1)], true);
        assert_eq!(blocks.take_delta(), added(key(1)));
        assert_eq!(blocks.stored_prefix(&[key(1)]), 0, "a parked slot is no block");
        blocks.set_in_memory(key(1), true);
        blocks.set_on_disk(key(1), true);
        blocks.count_cached_slot(&[key(1)], false);
        blocks.set_in_memory(key(1), false);
        assert_eq!((blocks.take_delta(), blocks.stored_prefix(&[key(1)])), (BlockDelta::default(), 1));
        blocks.set_on_disk(key(1), false);
        assert_eq!(blocks.take_delta(), dropped(key(1)));
        blocks.touch(&[key(1)]);
        assert_eq!(
            (blocks.take_delta(), blocks.all()),
            (BlockDelta::default(), vec![]),
            "using makes nothing known"
        );
    }
}
