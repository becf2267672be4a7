//! The disk of one node while copies are chosen: what may not go, what was promised, and who goes so that
//! all of it fits.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use super::Shortage;
use crate::snapshot::ObjectKey;

/// The bytes of one source on a node, whichever Models name it.
#[derive(Clone, Debug)]
pub struct FileSet {
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
    pub models: BTreeSet<ObjectKey>,
}

/// A node's disk.
#[derive(Clone, Debug)]
pub struct DiskBudget {
    limit: Option<u64>,
    file_sets: BTreeMap<String, FileSet>,
    /// Bytes of what may not go: what is there of it, or all of it once it was promised its room.
    protected: BTreeMap<String, u64>,
    /// Whose missing bytes were promised room.
    beneficiaries: BTreeSet<ObjectKey>,
}

impl DiskBudget {
    /// An empty disk.
    pub fn new(limit: Option<u64>) -> Self {
        Self { limit, file_sets: BTreeMap::new(), protected: BTreeMap::new(), beneficiaries: BTreeSet::new() }
    }

    /// Puts a copy there, which may not go if it `stays`.
    pub fn add(&mut self, files: String, copy: FileSet, stays: bool) {
        let unit = self.file_sets.entry(files.clone()).or_insert_with(|| FileSet { ready: false, ..copy.clone() });
        unit.bytes = unit.bytes.max(copy.bytes);
        unit.done = unit.done.max(copy.done);
        unit.ready |= copy.ready;
        unit.last_used = unit.last_used.max(copy.last_used);
        unit.priority = unit.priority.max(copy.priority);
        unit.models.extend(copy.models);
        let kept = self.protected.contains_key(&files);
        if stays || kept {
            self.protect(&files);
        }
    }

    /// Whether every byte is there.
    pub fn is_ready(&self, files: &str) -> bool {
        self.file_sets.get(files).is_some_and(|unit| unit.ready)
    }

    /// Bytes that are there.
    pub fn done(&self, files: &str) -> u64 {
        self.file_sets.get(files).map_or(0, FileSet::bytes_present)
    }

    /// Keeps what is there.
    pub fn protect(&mut self, files: &str) {
        if let Some(unit) = self.file_sets.get(files) {
            let kept = self.protected.entry(files.to_owned()).or_default();
            *kept = unit.bytes_present().max(*kept);
        }
    }

    /// Promises the room for all of a model's bytes, if it is there once everything goes that may.
    pub fn reserve(&mut self, node: &str, key: &ObjectKey, files: &str, bytes: u64) -> Result<(), Shortage> {
        let unit = self.file_sets.get(files);
        let bytes = unit.map_or(bytes, |unit| if unit.bytes > 0 { unit.bytes } else { bytes });
        let ready = unit.is_some_and(|unit| unit.ready);
        if ready && (self.beneficiaries.is_empty() || self.protected.contains_key(files)) {
            self.protect(files);
            return Ok(());
        }
        let Some(limit) = self.limit else { return Err(Shortage::Unmeasured { node: node.to_owned() }) };
        let others: u64 = self.protected.iter().filter(|(other, _)| *other != files).map(|(_, bytes)| bytes).sum();
        check_space(node, limit, others, bytes, || {
            let spare = self.evictable().filter(|(other, _)| *other != files).map(|(_, unit)| unit.bytes).sum();
            (bytes.saturating_sub(self.done(files)), self.free(), spare)
        })?;
        self.protected.insert(files.to_owned(), bytes);
        if !ready {
            self.beneficiaries.insert(key.clone());
        }
        Ok(())
    }

    /// Whose missing bytes were promised room.
    pub fn beneficiaries(&self) -> &BTreeSet<ObjectKey> {
        &self.beneficiaries
    }

    /// Bytes free beyond the reserve, once all that is promised and all that is on its way is there.
    pub fn free(&self) -> u64 {
        self.limit.unwrap_or(0).saturating_sub(self.reserved())
    }

    fn reserved(&self) -> u64 {
        let spare: u64 = self.evictable().map(|(_, unit)| unit.bytes).sum();
        self.protected.values().sum::<u64>().saturating_add(spare)
    }

    /// What may go.
    fn evictable(&self) -> impl Iterator<Item = (&String, &FileSet)> {
        self.file_sets.iter().filter(|(files, _)| !self.protected.contains_key(*files))
    }

    /// What must go so that all that was promised fits: the lowest priority first, then what was not read
    /// for longest, and nothing that could stay after all.
    pub fn victims(&self) -> Vec<&FileSet> {
        let limit = self.limit.unwrap_or(u64::MAX);
        let excess = self.reserved().saturating_sub(limit);
        if self.beneficiaries.is_empty() || excess == 0 {
            return Vec::new();
        }
        let mut order: Vec<(&String, &FileSet)> = self.evictable().filter(|(_, unit)| unit.bytes > 0).collect();
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
pub fn check_space(
    node: &str,
    limit: u64,
    kept: u64,
    bytes: u64,
    numbers: impl FnOnce() -> (u64, u64, u64),
) -> Result<(), Shortage> {
    if kept.saturating_add(bytes) <= limit {
        return Ok(());
    }
    let (needed, free, spare) = numbers();
    Err(Shortage::Space { node: node.to_owned(), needed, free, evictable: spare, limit })
}

impl FileSet {
    fn bytes_present(&self) -> u64 {
        if self.ready { self.bytes } else { self.done.min(self.bytes) }
    }
}
