//! Disk budget of one node during planning: protected files, reservations, and the evictions that make all of
//! it fit.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use crate::group_info::ObjectKey;
use crate::shortage::Shortage;

/// The bytes of one source on a node, for all Models that name it.
#[derive(Clone, Debug)]
pub struct FileSet {
    /// Bytes of the complete files.
    pub bytes: u64,
    /// Bytes present.
    pub done: u64,
    /// Whether all bytes are present.
    pub ready: bool,
    /// When the files were last read.
    pub last_used: Option<Timestamp>,
    /// Eviction priority: higher ones are evicted later.
    pub priority: i32,
    /// The Models.
    pub models: BTreeSet<ObjectKey>,
}

/// A node's disk.
#[derive(Clone, Debug)]
pub struct DiskBudget {
    limit: Option<u64>,
    file_sets: BTreeMap<String, FileSet>,
    /// Protected bytes: those present, or all of the files once space is reserved for them.
    protected: BTreeMap<String, u64>,
    /// Models with reserved space for missing bytes.
    beneficiaries: BTreeSet<ObjectKey>,
}

impl DiskBudget {
    /// An empty disk.
    pub fn new(limit: Option<u64>) -> Self {
        Self { limit, file_sets: BTreeMap::new(), protected: BTreeMap::new(), beneficiaries: BTreeSet::new() }
    }

    /// Adds a copy; it is protected if it `stays`.
    pub fn add(&mut self, files: String, copy: FileSet, stays: bool) {
        let unit =
            self.file_sets.entry(files.clone()).or_insert_with(|| FileSet { ready: false, ..copy.clone() });
        unit.bytes = unit.bytes.max(copy.bytes);
        unit.done = unit.done.max(copy.done);
        unit.ready |= copy.ready;
        unit.last_used = unit.last_used.max(copy.last_used);
        unit.priority = unit.priority.max(copy.priority);
        unit.models.extend(copy.models);
        let protected = self.protected.contains_key(&files);
        if stays || protected {
            self.protect(&files);
        }
    }

    /// Whether every byte is present.
    pub fn is_ready(&self, files: &str) -> bool {
        self.file_sets.get(files).is_some_and(|unit| unit.ready)
    }

    /// Bytes present.
    pub fn done(&self, files: &str) -> u64 {
        self.file_sets.get(files).map_or(0, FileSet::bytes_present)
    }

    /// Protects the bytes that are present.
    pub fn protect(&mut self, files: &str) {
        if let Some(unit) = self.file_sets.get(files) {
            let bytes = self.protected.entry(files.to_owned()).or_default();
            *bytes = unit.bytes_present().max(*bytes);
        }
    }

    /// Reserves space for all of a model's bytes, if they fit once all evictable files are gone.
    pub fn reserve(&mut self, node: &str, key: &ObjectKey, files: &str, bytes: u64) -> Result<(), Shortage> {
        let unit = self.file_sets.get(files);
        let bytes = unit.map_or(bytes, |unit| if unit.bytes > 0 { unit.bytes } else { bytes });
        let ready = unit.is_some_and(|unit| unit.ready);
        if ready && (self.beneficiaries.is_empty() || self.protected.contains_key(files)) {
            self.protect(files);
            return Ok(());
        }
        let Some(limit) = self.limit else { return Err(Shortage::Unmeasured { node: node.to_owned() }) };
        let others: u64 =
            self.protected.iter().filter(|(other, _)| *other != files).map(|(_, bytes)| bytes).sum();
        check_space(node, limit, others, bytes, || {
            let spare =
                self.evictable().filter(|(other, _)| *other != files).map(|(_, unit)| unit.bytes).sum();
            (bytes.saturating_sub(self.done(files)), self.free(), spare)
        })?;
        self.protected.insert(files.to_owned(), bytes);
        if !ready {
            self.beneficiaries.insert(key.clone());
        }
        Ok(())
    }

    /// Models with reserved space for missing bytes.
    pub fn beneficiaries(&self) -> &BTreeSet<ObjectKey> {
        &self.beneficiaries
    }

    /// Bytes free beyond the reserve, once all reserved and pending files are present.
    pub fn free(&self) -> u64 {
        self.limit.unwrap_or(0).saturating_sub(self.reserved())
    }

    fn reserved(&self) -> u64 {
        let spare: u64 = self.evictable().map(|(_, unit)| unit.bytes).sum();
        self.protected.values().sum::<u64>().saturating_add(spare)
    }

    /// Evictable files.
    fn evictable(&self) -> impl Iterator<Item = (&String, &FileSet)> {
        self.file_sets.iter().filter(|(files, _)| !self.protected.contains_key(*files))
    }

    /// The evictions that make all reservations fit: the lowest priority first, then the least recently used,
    /// and none that turns out to be unnecessary.
    pub fn victims(&self) -> Vec<&FileSet> {
        let limit = self.limit.unwrap_or(u64::MAX);
        let excess = self.reserved().saturating_sub(limit);
        if self.beneficiaries.is_empty() || excess == 0 {
            return Vec::new();
        }
        let mut order: Vec<(&String, &FileSet)> =
            self.evictable().filter(|(_, unit)| unit.bytes > 0).collect();
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

/// Whether files of this size fit beside protected files, once all others are evicted. The numbers of an
/// error are the bytes to fetch, the bytes free, and the evictable bytes.
pub fn check_space(
    node: &str,
    limit: u64,
    protected: u64,
    bytes: u64,
    numbers: impl FnOnce() -> (u64, u64, u64),
) -> Result<(), Shortage> {
    if protected.saturating_add(bytes) <= limit {
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
