//! What it costs to have a model's files on a node: nothing, a fetch, or the eviction of others. Not the plan of copies,
//! which frees space the same way.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};

use russet_model::shape::ModelShape;

use super::disk_budget::check_space;
use crate::disk_state::{DiskEntry, DiskState};
use crate::group_info::ObjectKey;
use crate::shortage::Shortage;
use crate::snapshot::Snapshot;

/// Cost of fetching one model's files, for each node of a view.
pub struct DiskOutlook<'v, W> {
    view: &'v Snapshot,
    disks: &'v DiskState,
    files: usize,
    bytes: u64,
    without: W,
    /// Files that are fetched to the same node together with these.
    companions: BTreeSet<usize>,
    /// Files that ranks wait for, by node.
    pending: BTreeMap<&'v str, BTreeSet<usize>>,
    /// Files that ranks read or wait for, by node; computed only if a disk is full.
    used: OnceCell<BTreeMap<&'v str, BTreeSet<usize>>>,
}

impl<'v, W: Fn(&ObjectKey) -> bool> DiskOutlook<'v, W> {
    /// For a model, as if the groups for which `without` is true were gone, except ready ones. Ready groups
    /// run until the files are present: no group stops for a model without files. `None` if the disks or this
    /// model's size are unknown.
    pub fn for_model(view: &'v Snapshot, namespace: &str, model: &str, without: W) -> Option<Self> {
        let disks: &DiskState = view.disks.as_ref()?;
        let known =
            view.models.get(&(namespace.to_owned(), model.to_owned())).map_or(0, ModelShape::total_bytes);
        // A model unknown to the disks has no copies.
        let files = disks.files_index(namespace, model).unwrap_or(usize::MAX);
        let bytes = disks.bytes.get(files).copied().unwrap_or(0).max(known);
        let mut coming: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
        for (key, group) in view.groups.iter().filter(|(_, group)| !group.ready && !group.deleting) {
            if !without(key) {
                disks.collect_read_files(key, group, &mut coming);
            }
        }
        let (together, used) = (BTreeSet::new(), OnceCell::new());
        (bytes > 0).then(|| Self {
            view,
            disks,
            files,
            bytes,
            without,
            companions: together,
            pending: coming,
            used,
        })
    }

    /// The same, with files of other Models required on the same node.
    pub fn with_companions<'a>(self, namespace: &str, models: impl Iterator<Item = &'a str>) -> Self {
        let indexes = models.filter_map(|model| self.disks.files_index(namespace, model));
        // Another Model of the same files needs no room beside these.
        let companions = indexes.filter(|files| *files != self.files).collect();
        Self { companions, ..self }
    }

    /// Cost of having the files on a node: 0 if present, up to ½ if there is free space, up to 1 if other
    /// files have to be evicted; or why they do not fit.
    pub fn fetch_cost(&self, node: &str) -> Result<f64, Shortage> {
        let Some(contents) = self.disks.nodes.get(node) else { return Ok(0.0) };
        let own = contents.entries.iter().find(|held| held.files == self.files);
        let mut coming = self.pending.get(node).cloned().unwrap_or_default();
        coming.extend(&self.companions);
        // Present files may be evicted for files that others wait for, if no rank reads them.
        let there = |files: &usize| contents.entries.iter().any(|held| held.files == *files && held.ready);
        let present = own.is_some_and(|held| held.ready) && coming.iter().all(there);
        if present || coming.contains(&self.files) {
            return Ok(0.0);
        }
        let bytes = own.map_or(self.bytes, |held| held.bytes);
        let done = own.map_or(0, DiskEntry::bytes_present);
        let missing = bytes.saturating_sub(done) as f64 / bytes.max(1) as f64;
        let others = || contents.entries.iter().filter(|held| held.files != self.files);
        let sum = |all: &mut dyn Iterator<Item = u64>| all.fold(0, u64::saturating_add);
        let new = |files: &usize| !contents.entries.iter().any(|held| held.files == *files);
        let bytes_of = |files: &usize| self.disks.bytes.get(*files).copied().unwrap_or(0);
        let expected = sum(&mut coming.iter().filter(|files| new(files)).map(bytes_of));
        let all = sum(&mut others().map(|held| held.bytes)).saturating_add(expected);
        let Some(limit) = contents.limit.filter(|limit| all.saturating_add(bytes) > *limit) else {
            return Ok(missing / 2.0);
        };
        let used = self.used.get_or_init(|| self.used()).get(node);
        let read =
            |files: usize| self.companions.contains(&files) || used.is_some_and(|used| used.contains(&files));
        let (mut protected, mut spare) = (expected, 0_u64);
        for held in others() {
            match held.protected {
                _ if read(held.files) => protected = protected.saturating_add(held.bytes),
                true => protected = protected.saturating_add(held.bytes_present()),
                false => spare = spare.saturating_add(held.bytes),
            }
        }
        let own = own.map_or(0, |held| if held.protected { held.bytes_present() } else { held.bytes });
        let free = limit.saturating_sub(protected.saturating_add(spare).saturating_add(own));
        check_space(node, limit, protected, bytes, || (bytes.saturating_sub(done), free, spare))?;
        let goes = protected.saturating_add(spare).saturating_add(bytes) > limit;
        Ok(if goes { missing } else { missing / 2.0 })
    }

    fn used(&self) -> BTreeMap<&'v str, BTreeSet<usize>> {
        let mut used = BTreeMap::new();
        for (key, group) in self.view.groups.iter().filter(|(_, group)| !group.deleting) {
            if group.ready || !(self.without)(key) {
                self.disks.collect_read_files(key, group, &mut used);
            }
        }
        used
    }
}

#[cfg(test)]
mod tests {
    use super::super::disk_budget::{DiskBudget, FileSet};
    use super::*;
    use crate::disk_state::tests::disks;
    use crate::test_rng::TestRng;

    #[test]
    fn disk_state_frees_space_as_the_copy_plan_does() {
        let mut seeded = TestRng(7);
        let names = ["m", "n", "o", "p"];
        let mut refused = 0;
        for round in 0..2000 {
            let limit = seeded.below(100);
            let mut copies = Vec::new();
            for model in &names[1..] {
                let size = 1 + seeded.below(40);
                let done = [0, size / 2, size][seeded.below(3) as usize];
                if seeded.below(3) > 0 {
                    copies.push((*model, "a", size, done, seeded.below(3) == 0));
                }
            }
            let bytes = 1 + seeded.below(60);
            if seeded.below(3) == 0 {
                copies.push(("m", "a", bytes, bytes / 2, seeded.below(4) == 0));
            }
            let mut view = Snapshot::default();
            let shape = ModelShape { layers: 1, layer_bytes: vec![bytes], ..ModelShape::default() };
            view.models.insert(("ns".to_owned(), "m".to_owned()), shape);
            view.disks = Some(disks(&[("a", Some(limit))], &copies).into());
            let fetch =
                DiskOutlook::for_model(&view, "ns", "m", |_: &ObjectKey| false).unwrap().fetch_cost("a");
            let mut room = DiskBudget::new(Some(limit));
            for (model, _, size, done, protected) in &copies {
                let unit = FileSet {
                    bytes: *size,
                    done: *done,
                    ready: done == size,
                    last_used: None,
                    priority: 0,
                    models: BTreeSet::new(),
                };
                room.add((*model).to_owned(), unit, *protected);
            }
            let free = room.free();
            let key = ("ns".to_owned(), "m".to_owned());
            let taken = room.reserve("a", &key, "m", bytes);
            refused += u32::from(taken.is_err());
            assert_eq!(fetch.clone().map(|_| ()), taken, "round {round}: {limit} {bytes} {copies:?}");
            let goes = fetch.is_ok_and(|cost| cost > 0.5);
            assert!(!goes || free < bytes, "round {round}: {free} are free, and something goes for {bytes}");
        }
        assert!((200..1800).contains(&refused), "{refused} of 2000 were refused");
    }
}
