//! Which blocks are where: in memory, on disk, or in a slot that is parked. The one that was used longest ago is
//! dropped first.

use std::collections::{BTreeMap, HashMap};

use super::chain::Key;

/// Blocks known of at the most, so that the list of those on disk stays small.
pub const MOST_SHELVED: usize = 65_536;

/// An index of blocks; it holds none of their numbers.
#[derive(Debug, Default)]
pub struct Blocks {
    known: HashMap<Key, Known>,
    /// Those in memory and those on disk, by their last use.
    held: BTreeMap<u64, Key>,
    shelved: BTreeMap<u64, Key>,
    clock: u64,
    /// Whether a block became known, or is nowhere any more.
    changes: BTreeMap<Key, bool>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Known {
    used: u64,
    held: bool,
    shelved: bool,
    /// Parked slots it is part of.
    parked: u32,
}

impl Known {
    fn is_anywhere(&self) -> bool {
        self.held || self.shelved || self.parked > 0
    }
}

/// Blocks that became known, and that are nowhere any more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Known now.
    pub added: Vec<Key>,
    /// Nowhere now.
    pub dropped: Vec<Key>,
}

impl Blocks {
    /// Blocks in memory.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Blocks on disk.
    pub fn shelved(&self) -> usize {
        self.shelved.len()
    }

    /// Whether a block is in memory.
    pub fn is_held(&self, key: Key) -> bool {
        self.known.get(&key).is_some_and(|known| known.held)
    }

    /// Whether a block is on disk.
    pub fn is_shelved(&self, key: Key) -> bool {
        self.known.get(&key).is_some_and(|known| known.shelved)
    }

    /// How many of a chain's first blocks are in memory or on disk.
    pub fn covered(&self, chain: &[Key]) -> usize {
        chain.iter().take_while(|key| self.is_held(**key) || self.is_shelved(**key)).count()
    }

    /// Marks a chain as used just now: its last block as the one used longest ago, so that a block never leaves
    /// before those that are of no use without it.
    pub fn touch(&mut self, chain: &[Key]) {
        for key in chain.iter().rev() {
            self.change(*key, |_| ());
        }
    }

    /// Puts a block into memory, or out of it.
    pub fn hold(&mut self, key: Key, held: bool) {
        self.change(key, |known| known.held = held);
    }

    /// Puts a block on disk, or off it.
    pub fn shelve(&mut self, key: Key, shelved: bool) {
        self.change(key, |known| known.shelved = shelved);
    }

    /// Counts a parked slot that the blocks are part of, or one less.
    pub fn park(&mut self, chain: &[Key], parked: bool) {
        for key in chain.iter().rev() {
            self.change(*key, |known| {
                known.parked = if parked { known.parked + 1 } else { known.parked.saturating_sub(1) };
            });
        }
    }

    /// The block in memory that was used longest ago.
    pub fn oldest_held(&self) -> Option<Key> {
        self.held.values().next().copied()
    }

    /// The block on disk that was used longest ago.
    pub fn oldest_shelved(&self) -> Option<Key> {
        self.shelved.values().next().copied()
    }

    /// Every block that is anywhere.
    #[cfg(test)]
    pub fn all(&self) -> Vec<Key> {
        self.known.keys().copied().collect()
    }

    /// What changed since this was asked last.
    pub fn changes(&mut self) -> Changes {
        let (added, dropped): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.changes).into_iter().partition(|(_, known)| *known);
        let keys = |changes: Vec<(Key, bool)>| changes.into_iter().map(|(key, _)| key).collect();
        Changes { added: keys(added), dropped: keys(dropped) }
    }

    fn change(&mut self, key: Key, change: impl FnOnce(&mut Known)) {
        let before = self.known.get(&key).copied().unwrap_or_default();
        let mut known = before;
        change(&mut known);
        self.held.remove(&before.used);
        self.shelved.remove(&before.used);
        match (before.is_anywhere(), known.is_anywhere()) {
            (false, false) => return,
            (false, true) => self.changed(key, true),
            (true, false) => {
                self.changed(key, false);
                self.known.remove(&key);
                return;
            }
            (true, true) => {}
        }
        self.clock += 1;
        known.used = self.clock;
        if known.held {
            self.held.insert(known.used, key);
        }
        if known.shelved {
            self.shelved.insert(known.used, key);
        }
        self.known.insert(key, known);
    }

    /// Back to what was told last is no change.
    fn changed(&mut self, key: Key, known: bool) {
        if self.changes.remove(&key).is_none() {
            self.changes.insert(key, known);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u8) -> Key {
        Key([number; 16])
    }

    #[test]
    fn the_end_of_what_was_used_longest_ago_leaves_first() {
        let mut blocks = Blocks::default();
        let (old, new) = ([key(1), key(2)], [key(1), key(3)]);
        for chain in [old, new] {
            chain.iter().for_each(|key| blocks.hold(*key, true));
            blocks.touch(&chain);
        }
        let mut left = Vec::new();
        while let Some(key) = blocks.oldest_held() {
            blocks.hold(key, false);
            left.push(key);
        }
        assert_eq!(left, [key(2), key(3), key(1)]);
    }

    #[test]
    fn a_block_is_known_as_long_as_it_is_anywhere() {
        let mut blocks = Blocks::default();
        let added = |key| Changes { added: vec![key], dropped: vec![] };
        let dropped = |key| Changes { added: vec![], dropped: vec![key] };
        blocks.park(&[key(1)], true);
        assert_eq!(blocks.changes(), added(key(1)));
        assert_eq!(blocks.covered(&[key(1)]), 0, "a parked slot is no block");
        blocks.hold(key(1), true);
        blocks.shelve(key(1), true);
        blocks.park(&[key(1)], false);
        blocks.hold(key(1), false);
        assert_eq!((blocks.changes(), blocks.covered(&[key(1)])), (Changes::default(), 1));
        blocks.shelve(key(1), false);
        assert_eq!(blocks.changes(), dropped(key(1)));
        blocks.touch(&[key(1)]);
        assert_eq!(
            (blocks.changes(), blocks.all()),
            (Changes::default(), vec![]),
            "using makes nothing known"
        );
    }
}
