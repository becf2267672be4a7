//! The disk of one node while copies are chosen: what may not go, what was promised, and who goes so that
//! all of it fits.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use super::Lack;
use crate::snapshot::Key;

/// The bytes of one source on a node, whichever Models name it.
#[derive(Clone, Debug)]
pub struct Unit {
    /// Bytes when it is whole.
    pub bytes: u64,
    /// Bytes that are there.
    pub done: u64,
    /// Whether all are.
    pub ready: bool,
    /// When they were last read.
    pub last_used: Option<Timestamp>,
    /// The larger, the later it goes.
    pub priority: i32,
    /// Whose they are.
    pub models: BTreeSet<Key>,
}

/// A node's disk.
#[derive(Clone, Debug)]
pub struct Room {
    limit: Option<u64>,
    units: BTreeMap<String, Unit>,
    /// Bytes of what may not go: what is there of it, or all of it once it was promised its room.
    kept: BTreeMap<String, u64>,
    /// Whose missing bytes were promised room.
    wanted: BTreeSet<Key>,
}

impl Room {
    /// An empty disk.
    pub fn new(limit: Option<u64>) -> Self {
        Self { limit, units: BTreeMap::new(), kept: BTreeMap::new(), wanted: BTreeSet::new() }
    }

    /// Puts a copy there, which may not go if it `stays`.
    pub fn add(&mut self, files: String, copy: Unit, stays: bool) {
        let unit = self.units.entry(files.clone()).or_insert_with(|| Unit { ready: false, ..copy.clone() });
        unit.bytes = unit.bytes.max(copy.bytes);
        unit.done = unit.done.max(copy.done);
        unit.ready |= copy.ready;
        unit.last_used = unit.last_used.max(copy.last_used);
        unit.priority = unit.priority.max(copy.priority);
        unit.models.extend(copy.models);
        let kept = self.kept.contains_key(&files);
        if stays || kept {
            self.keep(&files);
        }
    }

    /// Whether every byte is there.
    pub fn is_ready(&self, files: &str) -> bool {
        self.units.get(files).is_some_and(|unit| unit.ready)
    }

    /// Bytes that are there.
    pub fn done(&self, files: &str) -> u64 {
        self.units.get(files).map_or(0, Unit::there)
    }

    /// Keeps what is there.
    pub fn keep(&mut self, files: &str) {
        if let Some(unit) = self.units.get(files) {
            let kept = self.kept.entry(files.to_owned()).or_default();
            *kept = unit.there().max(*kept);
        }
    }

    /// Promises the room for all of a model's bytes, if it is there once everything goes that may.
    pub fn take(&mut self, node: &str, key: &Key, files: &str, bytes: u64) -> Result<(), Lack> {
        let unit = self.units.get(files);
        let bytes = unit.map_or(bytes, |unit| if unit.bytes > 0 { unit.bytes } else { bytes });
        let ready = unit.is_some_and(|unit| unit.ready);
        if ready && (self.wanted.is_empty() || self.kept.contains_key(files)) {
            self.keep(files);
            return Ok(());
        }
        let Some(limit) = self.limit else { return Err(Lack::Unmeasured { node: node.to_owned() }) };
        let others: u64 = self.kept.iter().filter(|(other, _)| *other != files).map(|(_, bytes)| bytes).sum();
        beside(node, limit, others, bytes, || {
            let spare = self.spare().filter(|(other, _)| *other != files).map(|(_, unit)| unit.bytes).sum();
            (bytes.saturating_sub(self.done(files)), self.free(), spare)
        })?;
        self.kept.insert(files.to_owned(), bytes);
        if !ready {
            self.wanted.insert(key.clone());
        }
        Ok(())
    }

    /// Whose missing bytes were promised room.
    pub fn wanted(&self) -> &BTreeSet<Key> {
        &self.wanted
    }

    /// Bytes free beyond the reserve, once all that is promised and all that is on its way is there.
    pub fn free(&self) -> u64 {
        self.limit.unwrap_or(0).saturating_sub(self.taken())
    }

    fn taken(&self) -> u64 {
        let spare: u64 = self.spare().map(|(_, unit)| unit.bytes).sum();
        self.kept.values().sum::<u64>().saturating_add(spare)
    }

    /// What may go.
    fn spare(&self) -> impl Iterator<Item = (&String, &Unit)> {
        self.units.iter().filter(|(files, _)| !self.kept.contains_key(*files))
    }

    /// What must go so that all that was promised fits: the lowest priority first, then what was not read
    /// for longest, and nothing that could stay after all.
    pub fn victims(&self) -> Vec<&Unit> {
        let limit = self.limit.unwrap_or(u64::MAX);
        let excess = self.taken().saturating_sub(limit);
        if self.wanted.is_empty() || excess == 0 {
            return Vec::new();
        }
        let mut order: Vec<(&String, &Unit)> = self.spare().filter(|(_, unit)| unit.bytes > 0).collect();
        order.sort_by_key(|(files, unit)| (unit.priority, unit.last_used, *files));
        let (mut victims, mut freed) = (Vec::new(), 0);
        for (_, unit) in order {
            if freed >= excess {
                break;
            }
            freed += unit.bytes;
            victims.push(unit);
        }
        let mut index = victims.len();
        while let Some(next) = index.checked_sub(1) {
            index = next;
            if freed - victims[index].bytes >= excess {
                freed -= victims.remove(index).bytes;
            }
        }
        victims
    }
}

/// Whether files of so many bytes fit beside what may not go, once everything else goes. The numbers of a refusal
/// are bytes that are still to come, bytes free, and bytes that could go.
pub fn beside(
    node: &str,
    limit: u64,
    kept: u64,
    bytes: u64,
    numbers: impl FnOnce() -> (u64, u64, u64),
) -> Result<(), Lack> {
    if kept.saturating_add(bytes) <= limit {
        return Ok(());
    }
    let (needed, free, spare) = numbers();
    Err(Lack::Room { node: node.to_owned(), needed, free, spare, limit })
}

impl Unit {
    fn there(&self) -> u64 {
        if self.ready { self.bytes } else { self.done.min(self.bytes) }
    }
}
