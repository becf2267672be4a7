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

pub mod blocks;
pub mod chain;
pub mod feed;
pub mod identity;

use std::collections::BTreeMap;

use blocks::{Blocks, Changes, MOST_SHELVED};
use chain::{BLOCK, Key, chain};

/// A slot's room grows by so many tokens.
pub const STEP: u32 = 256;

/// A block of a slot that is to be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Which block of the sequence.
    pub index: u32,
    /// Its name.
    pub key: Key,
    /// Whether to keep it in memory.
    pub held: bool,
    /// Whether to write it to disk, where there is room for it.
    pub shelved: bool,
}

/// What every rank does with its caches, between two batches and in the same order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Empty a slot.
    Reset {
        /// The slot.
        slot: u32,
    },
    /// Forget all but the first tokens of a slot.
    Trim {
        /// The slot.
        slot: u32,
        /// Tokens that stay.
        length: u32,
    },
    /// Copy blocks of a slot.
    Keep {
        /// The slot.
        slot: u32,
        /// The blocks.
        blocks: Vec<Kept>,
    },
    /// Fill an empty slot from blocks in memory.
    Restore {
        /// The slot.
        slot: u32,
        /// The blocks, in their order.
        keys: Vec<Key>,
    },
    /// Drop blocks.
    Forget {
        /// From memory.
        held: Vec<Key>,
        /// From disk.
        shelved: Vec<Key>,
    },
}

/// A slot for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The slot.
    pub slot: u32,
    /// Tokens of the prompt that need not be read.
    pub cached: u32,
    /// Blocks that have to come from disk first, in their order; the slot holds `cached` tokens once they did.
    pub fetch: Vec<Key>,
}

/// A slot, and the most tokens it held since it was empty, which is what it takes.
#[derive(Debug, Default)]
struct Slot {
    most: u32,
    held: Held,
}

#[derive(Debug, Default)]
enum Held {
    #[default]
    Nothing,
    /// A request that runs, with so many tokens.
    Busy(u32),
    /// What a request left, the names of its blocks, and when.
    Parked { tokens: Vec<u32>, keys: Vec<Key>, used: u64 },
}

impl Slot {
    fn is_busy(&self) -> bool {
        matches!(self.held, Held::Busy(_))
    }

    /// Tokens it has room for.
    fn room(&self) -> u64 {
        u64::from(self.most.next_multiple_of(STEP))
    }
}

/// How much may be kept.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Slots.
    pub slots: u32,
    /// Tokens that all slots and blocks in memory may take together.
    pub tokens: u64,
    /// Whether blocks are written to disk.
    pub shelf: bool,
    /// Whether anything is kept at all.
    pub enabled: bool,
}

/// All that is kept of one group.
#[derive(Debug)]
pub struct Cache {
    root: Key,
    limits: Limits,
    slots: BTreeMap<u32, Slot>,
    blocks: Blocks,
    clock: u64,
    orders: Vec<Order>,
}

impl Cache {
    /// An empty one for the model that `root` stands for, with blocks that are on the disks of all ranks, the one that
    /// was used longest ago first.
    pub fn new(root: Key, limits: Limits, shelved: &[Key]) -> Self {
        let mut blocks = Blocks::default();
        if limits.shelf && limits.enabled {
            shelved.iter().for_each(|key| blocks.shelve(*key, true));
        }
        let slots = (0..limits.slots).map(|slot| (slot, Slot::default())).collect();
        Self { root, limits, slots, blocks, clock: 0, orders: Vec::new() }
    }

    /// What the ranks have to do since this was asked last, in this order and before the next batch: also to make room
    /// for what grew.
    pub fn orders(&mut self) -> Vec<Order> {
        self.make_room_but(0, &[]);
        std::mem::take(&mut self.orders)
    }

    /// Beginnings that became known or were dropped since this was asked last.
    pub fn changes(&mut self) -> Changes {
        self.blocks.changes()
    }

    /// Every beginning that is known.
    #[cfg(test)]
    pub fn known(&self) -> Vec<Key> {
        self.blocks.all()
    }

    /// Tokens that slots and blocks in memory take.
    pub fn tokens(&self) -> u64 {
        self.slot_tokens() + self.blocks.held() as u64 * u64::from(BLOCK)
    }

    /// Blocks in memory, and on disk.
    pub fn sizes(&self) -> (usize, usize) {
        (self.blocks.held(), self.blocks.shelved())
    }

    /// A slot for a request with this prompt, with as much of it as is kept; `None` while all are busy. The last token
    /// is always left to be read: what comes after it is the question.
    pub fn enter(&mut self, prompt: &[u32]) -> Option<Entry> {
        let usable = if self.limits.enabled { prompt.len().saturating_sub(1) } else { 0 };
        let usable = &prompt[..usable];
        let keys = chain(self.root, usable);
        let covered = self.blocks.covered(&keys);
        if let Some((slot, length)) = self.takeable(usable, covered as u32 * BLOCK) {
            self.unpark(slot);
            self.busy(slot, length);
            self.orders.push(Order::Trim { slot, length });
            return Some(Entry { slot, cached: length, fetch: Vec::new() });
        }
        let slot = self.empty_slot()?;
        let keys = &keys[..covered];
        self.blocks.touch(keys);
        let in_memory = keys.iter().all(|key| self.blocks.is_held(*key));
        // What comes from memory is there twice while it is copied; what comes from disk is not.
        let times = if keys.iter().any(|key| self.blocks.is_held(*key)) { 2 } else { 1 };
        let busy: u64 = self.slots.values().filter(|slot| slot.is_busy()).map(Slot::room).sum();
        let fits = |count: &usize| {
            let tokens = *count as u64 * u64::from(BLOCK);
            busy + tokens.next_multiple_of(u64::from(STEP)) + (times - 1) * tokens <= self.limits.tokens
        };
        let keys = &keys[..(0..=covered).rev().find(fits).unwrap_or(0)];
        let cached = keys.len() as u32 * BLOCK;
        self.busy(slot, cached);
        self.make_room_but(0, keys);
        let fetch = if in_memory { Vec::new() } else { keys.to_vec() };
        if in_memory && cached > 0 {
            self.orders.push(Order::Restore { slot, keys: keys.to_vec() });
        }
        Some(Entry { slot, cached, fetch })
    }

    /// Only so many of the blocks that were to come from disk did. The slot is empty again, and those that did not come
    /// are on no disk any more.
    pub fn fetched(&mut self, slot: u32, keys: &[Key], came: u32) {
        self.slots.insert(slot, Slot { most: 0, held: Held::Busy(0) });
        self.orders.push(Order::Reset { slot });
        let shelved = keys.get(came as usize..).unwrap_or_default().to_vec();
        self.unshelve(&shelved);
        self.orders.push(Order::Forget { held: Vec::new(), shelved });
    }

    /// A running sequence is about to have so many tokens.
    pub fn grow(&mut self, slot: u32, tokens: u32) {
        self.busy(slot, tokens);
    }

    /// A running sequence has only so many tokens after all: the others were guessed wrong.
    pub fn shrink(&mut self, slot: u32, tokens: u32) {
        self.busy(slot, tokens);
        self.orders.push(Order::Trim { slot, length: tokens });
    }

    /// A running sequence has read these tokens, its prompt: others that begin alike can have them now.
    pub fn read(&mut self, slot: u32, tokens: &[u32]) {
        if self.limits.enabled {
            self.keep(slot, &chain(self.root, tokens));
        }
    }

    /// A sequence ended and has these tokens in its slot.
    pub fn leave(&mut self, slot: u32, mut tokens: Vec<u32>) {
        if !self.limits.enabled || tokens.is_empty() {
            return self.discard(slot);
        }
        let Some(Slot { held: Held::Busy(length), .. }) = self.slots.get(&slot) else { return };
        tokens.truncate(*length as usize);
        let keys = chain(self.root, &tokens);
        self.keep(slot, &keys);
        self.clock += 1;
        self.blocks.park(&keys, true);
        let held = Held::Parked { tokens, keys, used: self.clock };
        self.slots.entry(slot).or_default().held = held;
    }

    /// A sequence ended whose numbers nobody should see again.
    pub fn discard(&mut self, slot: u32) {
        self.slots.insert(slot, Slot::default());
        self.orders.push(Order::Reset { slot });
    }

    /// Blocks that a disk holds no more.
    pub fn unshelve(&mut self, keys: &[Key]) {
        keys.iter().for_each(|key| self.blocks.shelve(*key, false));
    }

    /// The parked slot that a prompt goes on from, and how many tokens of it it shares. Not one that has much
    /// else, nor one that has less than the blocks do.
    fn takeable(&self, prompt: &[u32], blocks: u32) -> Option<(u32, u32)> {
        let shared = self.slots.iter().filter_map(|(slot, held)| match &held.held {
            Held::Parked { tokens, .. } => {
                let shared = tokens.iter().zip(prompt).take_while(|(one, other)| one == other).count();
                (shared * 2 >= tokens.len()).then_some((*slot, shared as u32))
            }
            _ => None,
        });
        shared.max_by_key(|(_, shared)| *shared).filter(|(_, shared)| *shared > 0 && *shared >= blocks)
    }

    /// An empty slot, if need be the one that was parked longest ago.
    fn empty_slot(&mut self) -> Option<u32> {
        let empty = self.slots.iter().find(|(_, slot)| matches!(slot.held, Held::Nothing));
        empty.map(|(slot, _)| *slot).or_else(|| self.give_up())
    }

    /// Empties the slot that was parked longest ago.
    fn give_up(&mut self) -> Option<u32> {
        let parked = self.slots.iter().filter_map(|(slot, held)| match held.held {
            Held::Parked { used, .. } => Some((used, *slot)),
            _ => None,
        });
        let (_, slot) = parked.min()?;
        self.unpark(slot);
        self.discard(slot);
        Some(slot)
    }

    fn unpark(&mut self, slot: u32) {
        let held = std::mem::take(&mut self.slots.entry(slot).or_default().held);
        if let Held::Parked { keys, .. } = held {
            self.blocks.park(&keys, false);
        }
    }

    fn busy(&mut self, slot: u32, tokens: u32) {
        let slot = self.slots.entry(slot).or_default();
        slot.most = slot.most.max(tokens);
        slot.held = Held::Busy(tokens);
    }

    /// Keeps the blocks of a slot that are not kept yet, as far as there is room beside slots.
    fn keep(&mut self, slot: u32, keys: &[Key]) {
        let room = self.limits.tokens.saturating_sub(self.slot_tokens()) / u64::from(BLOCK);
        let (fit, _) = keys.split_at(keys.len().min(room as usize));
        let new = keys.iter().enumerate().filter_map(|(index, key)| {
            let held = index < fit.len() && !self.blocks.is_held(*key);
            let shelved = self.limits.shelf && !self.blocks.is_shelved(*key);
            (held || shelved).then_some(Kept { index: index as u32, key: *key, held, shelved })
        });
        let new: Vec<Kept> = new.collect();
        self.blocks.touch(keys);
        // Before the copies are made, not after.
        let more = new.iter().filter(|kept| kept.held).count() as u64 * u64::from(BLOCK);
        self.make_room_but(more, fit);
        for Kept { key, held, shelved, .. } in &new {
            if *held {
                self.blocks.hold(*key, true);
            }
            if *shelved {
                self.blocks.shelve(*key, true);
            }
        }
        self.blocks.touch(keys);
        if !new.is_empty() {
            self.orders.push(Order::Keep { slot, blocks: new });
        }
        self.shorten_shelf();
    }

    /// Drops blocks, but not these, which were used last, and then parked slots, until so many more tokens fit.
    fn make_room_but(&mut self, more: u64, but: &[Key]) {
        let mut dropped = Vec::new();
        while self.tokens() + more > self.limits.tokens
            && let Some(key) = self.blocks.oldest_held().filter(|key| !but.contains(key))
        {
            self.blocks.hold(key, false);
            dropped.push(key);
        }
        if !dropped.is_empty() {
            self.orders.push(Order::Forget { held: dropped, shelved: Vec::new() });
        }
        while self.tokens() + more > self.limits.tokens && self.give_up().is_some() {}
    }

    fn shorten_shelf(&mut self) {
        let mut dropped = Vec::new();
        while self.blocks.shelved() > MOST_SHELVED
            && let Some(key) = self.blocks.oldest_shelved()
        {
            self.blocks.shelve(key, false);
            dropped.push(key);
        }
        if !dropped.is_empty() {
            self.orders.push(Order::Forget { held: Vec::new(), shelved: dropped });
        }
    }

    /// Tokens that slots have room for.
    fn slot_tokens(&self) -> u64 {
        self.slots.values().map(Slot::room).sum()
    }
}

#[cfg(test)]
mod tests;
