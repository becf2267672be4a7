//! Block index of the prefix cache: which block is in memory, on disk or in a cached slot. It keeps the
//! order, least recently used first. Not here: the eviction (`prefix_cache`).

use std::collections::{BTreeMap, HashMap};

use super::block_hash::BlockHash;

/// Maximum blocks on disk, so that the index stays small.
pub const MAX_DISK_BLOCKS: usize = 65_536;

/// Index of blocks; it holds no KV data.
#[derive(Debug, Default)]
pub struct BlockIndex {
    blocks: HashMap<BlockHash, BlockState>,
    /// In-memory and on-disk blocks, by last use.
    in_memory: BTreeMap<u64, BlockHash>,
    on_disk: BTreeMap<u64, BlockHash>,
    clock: u64,
    /// Blocks added (`true`) or evicted everywhere (`false`).
    delta: BTreeMap<BlockHash, bool>,
}

#[derive(Clone, Copy, Debug, Default)]
struct BlockState {
    last_used: u64,
    in_memory: bool,
    on_disk: bool,
    /// Number of cached slots that contain it.
    cached_slots: u32,
}

impl BlockState {
    fn is_stored(&self) -> bool {
        self.in_memory || self.on_disk || self.cached_slots > 0
    }
}

/// Blocks added to the prefix cache, and blocks evicted everywhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockDelta {
    /// Added.
    pub added: Vec<BlockHash>,
    /// Evicted.
    pub removed: Vec<BlockHash>,
}

impl BlockIndex {
    /// Number of blocks in memory.
    pub fn memory_blocks(&self) -> usize {
        self.in_memory.len()
    }

    /// Number of blocks on disk.
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

    /// Number of leading blocks of a chain that are in memory or on disk.
    pub fn stored_prefix(&self, chain: &[BlockHash]) -> usize {
        chain.iter().take_while(|key| self.is_in_memory(**key) || self.is_on_disk(**key)).count()
    }

    /// Marks the blocks of a chain as just used, the last block as the oldest of them: a block is never
    /// evicted before the blocks that depend on it.
    pub fn touch(&mut self, chain: &[BlockHash]) {
        for key in chain.iter().rev() {
            self.update(*key, |_| ());
        }
    }

    /// Marks a block as in memory or not.
    pub fn set_in_memory(&mut self, key: BlockHash, held: bool) {
        self.update(key, |known| known.in_memory = held);
    }

    /// Marks a block as on disk or not.
    pub fn set_on_disk(&mut self, key: BlockHash, on_disk: bool) {
        self.update(key, |known| known.on_disk = on_disk);
    }

    /// Adds or removes a reference by a cached slot to each of the blocks.
    pub fn count_cached_slot(&mut self, chain: &[BlockHash], parked: bool) {
        for key in chain.iter().rev() {
            self.update(*key, |known| {
                known.cached_slots =
                    if parked { known.cached_slots + 1 } else { known.cached_slots.saturating_sub(1) };
            });
        }
    }

    /// The least recently used block in memory.
    pub fn oldest_in_memory(&self) -> Option<BlockHash> {
        self.in_memory.values().next().copied()
    }

    /// The least recently used block on disk.
    pub fn oldest_on_disk(&self) -> Option<BlockHash> {
        self.on_disk.values().next().copied()
    }

    /// Hashes of all blocks.
    #[cfg(test)]
    pub fn all(&self) -> Vec<BlockHash> {
        self.blocks.keys().copied().collect()
    }

    /// Changes since the last call.
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

    /// A change back to the last reported state is dropped.
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
