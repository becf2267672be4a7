//! Disk state for placements: whether a model's files are on a node, can be fetched there, or never fit. Not
//! here: which files are evicted for them (`copies`); this only tells whether that could be enough. A disk
//! without measurement counts as free.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use russet_crds::conditions::{Type, is_true};
use russet_crds::{CopyMode, InferenceNode, Model, ModelCopy, ModelCopySpec, NodeDisk, PreloadPolicy};

use crate::group_info::{GroupInfo, ObjectKey};
use crate::note::Note;
use crate::pool::EligibleNodes;

/// Reserve of agents of an older release; newer ones report theirs.
const LEGACY_RESERVE_BYTES: u64 = 1 << 30;

/// Identity of a Model's bytes: two Models of one source share them.
pub fn files_id(model: &Model) -> String {
    let source = &model.spec.source;
    let commit = model.status.as_ref().and_then(|status| status.commit.as_deref()).unwrap_or_default();
    format!("{} {commit} {}", source.uri, source.sha256.as_deref().unwrap_or_default())
}

/// Bytes that all models together may take on a disk on which they use `held`.
pub fn limit(disk: &NodeDisk, held: u64) -> u64 {
    let old = || disk.free_bytes.saturating_add(held).saturating_sub(LEGACY_RESERVE_BYTES);
    disk.models_limit_bytes.unwrap_or_else(old)
}

/// Every disk, and the files present or being fetched.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DiskState {
    /// Which files each model has, in the order of the models.
    models: Vec<(ObjectKey, usize)>,
    /// Their bytes; 0 while unknown.
    pub(crate) bytes: Vec<u64>,
    pub(crate) nodes: BTreeMap<String, DiskContents>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct DiskContents {
    pub(crate) limit: Option<u64>,
    pub(crate) entries: Vec<DiskEntry>,
}

/// Files on a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DiskEntry {
    pub(crate) files: usize,
    pub(crate) bytes: u64,
    pub(crate) done: u64,
    pub(crate) ready: bool,
    /// Whether they are never evicted.
    pub(crate) protected: bool,
}

impl DiskEntry {
    pub(crate) fn bytes_present(&self) -> u64 {
        if self.ready { self.bytes } else { self.done.min(self.bytes) }
    }
}

impl DiskContents {
    fn insert(&mut self, new: DiskEntry) {
        // A disk has few entries, and mostly of one Model each.
        match self.entries.iter_mut().find(|held| held.files == new.files) {
            None => self.entries.push(new),
            Some(held) => {
                held.bytes = held.bytes.max(new.bytes);
                held.done = held.done.max(new.done);
                held.ready |= new.ready;
                held.protected |= new.protected;
            }
        }
    }
}

impl DiskState {
    /// Built from these objects. Copies of a Model that is not among them may be evicted, unless their own
    /// retention says otherwise.
    pub fn from_objects<'a>(
        copies: &'a [Arc<ModelCopy>],
        nodes: &'a [Arc<InferenceNode>],
        models: &'a [Arc<Model>],
        pools: &BTreeMap<String, Result<EligibleNodes, Note>>,
    ) -> Self {
        let mut ids: BTreeMap<(&'a str, &'a str), usize> = BTreeMap::new();
        let mut bytes = Vec::new();
        let mut sources: BTreeMap<String, usize> = BTreeMap::new();
        let mut preloads = Vec::new();
        for model in models {
            let Some(name) = model.metadata.name.as_deref() else { continue };
            let id = *sources.entry(files_id(model)).or_insert(bytes.len());
            if id == bytes.len() {
                bytes.push(0);
            }
            ids.insert((model.metadata.namespace.as_deref().unwrap_or_default(), name), id);
            let shape = model.status.as_ref().and_then(|status| status.shape.as_ref());
            bytes[id] = shape.map_or(0, |shape| shape.total_bytes()).max(bytes[id]);
            if let Some(preload) =
                model.spec.preload.as_ref().filter(|_| model.metadata.deletion_timestamp.is_none())
            {
                preloads.push((id, preload));
            }
        }
        let named =
            nodes.iter().filter_map(|node| Some((node.metadata.name.as_deref()?, DiskContents::default())));
        let mut disks: BTreeMap<&str, DiskContents> = named.collect();
        for copy in copies {
            let ModelCopySpec { model_ref, node_name, want: CopyMode::Files, retention, .. } = &copy.spec
            else {
                continue;
            };
            let Some(contents) = disks.get_mut(node_name.as_str()) else { continue };
            if copy.metadata.deletion_timestamp.is_some() {
                continue;
            }
            let id = *ids.entry((&model_ref.namespace, &model_ref.name)).or_insert(bytes.len());
            if id == bytes.len() {
                bytes.push(0);
            }
            let status = copy.status.as_ref();
            let held = DiskEntry {
                files: id,
                bytes: status.map_or(0, |status| status.bytes_total),
                done: status.map_or(0, |status| status.bytes_done),
                ready: status.is_some_and(|status| is_true(&status.conditions, Type::Ready)),
                protected: retention.is_some_and(|retention| retention.pinned),
            };
            bytes[id] = held.bytes.max(bytes[id]);
            contents.insert(held);
        }
        for node in nodes {
            let disk = node.status.as_ref().and_then(|status| status.disk.as_ref());
            let name = node.metadata.name.as_deref().unwrap_or_default();
            if let (Some(disk), Some(contents)) = (disk, disks.get_mut(name)) {
                let held = contents.entries.iter().fold(0, |sum: u64, held| sum.saturating_add(held.done));
                contents.limit = Some(limit(disk, held));
            }
        }
        // Until an agent has contacted its source, a copy is as large as the headers say.
        for held in
            disks.values_mut().flat_map(|contents| &mut contents.entries).filter(|held| held.bytes == 0)
        {
            held.bytes = bytes[held.files];
        }
        let owned =
            |((namespace, name), id): ((&str, &str), usize)| ((namespace.to_owned(), name.to_owned()), id);
        let nodes = disks.into_iter().map(|(name, contents)| (name.to_owned(), contents)).collect();
        let mut disks = Self { models: ids.into_iter().map(owned).collect(), bytes, nodes };
        for (id, preload) in preloads {
            disks.protect_preloaded(id, preload, pools);
        }
        disks
    }

    /// Protects the copies of a pinned model, and those of an `Always` model while there are no more copies
    /// than it asks for. Of a surplus some may be evicted; which ones is not decided here.
    fn protect_preloaded(
        &mut self,
        files: usize,
        preload: &russet_crds::Preload,
        pools: &BTreeMap<String, Result<EligibleNodes, Note>>,
    ) {
        let area = preload.pool_ref.as_ref().and_then(|pool| pools.get(&pool.name)?.as_ref().ok());
        let inside = |node: &str| match &preload.pool_ref {
            None => true,
            Some(_) => area.is_some_and(|area| area.contains(node)),
        };
        let least = preload.copies.map_or(usize::MAX, |copies| copies as usize);
        let held =
            |contents: &DiskContents| contents.entries.iter().any(|held| held.files == files && held.ready);
        let there = self.nodes.iter().filter(|(node, contents)| inside(node) && held(contents)).count();
        for (node, contents) in &mut self.nodes {
            let protected = match preload.policy {
                PreloadPolicy::Pinned => true,
                PreloadPolicy::Always => there <= least && inside(node),
                PreloadPolicy::OnDemand | PreloadPolicy::Unknown => false,
            };
            let own = contents.entries.iter_mut().filter(|held| held.files == files);
            own.for_each(|held| {
                held.protected |= protected && (held.ready || preload.policy == PreloadPolicy::Pinned)
            });
        }
    }

    pub(crate) fn files_index(&self, namespace: &str, model: &str) -> Option<usize> {
        let at = self
            .models
            .binary_search_by(|((space, name), _)| (space.as_str(), name.as_str()).cmp(&(namespace, model)));
        self.models.get(at.ok()?).map(|(_, files)| *files)
    }

    /// Whether every byte of a model is on a node, and verified.
    pub fn holds(&self, namespace: &str, model: &str, node: &str) -> bool {
        let Some(files) = self.files_index(namespace, model) else { return false };
        let contents = self.nodes.get(node);
        contents.is_some_and(|contents| contents.entries.iter().any(|held| held.files == files && held.ready))
    }
}

impl DiskState {
    /// Marks every byte of a model as present on these nodes.
    pub fn mark_present(&mut self, namespace: &str, model: &str, nodes: &[String]) {
        let files = self.files_index(namespace, model).unwrap_or_else(|| {
            let key = (namespace.to_owned(), model.to_owned());
            let at = self.models.partition_point(|(known, _)| *known < key);
            self.models.insert(at, (key, self.bytes.len()));
            self.bytes.push(0);
            self.bytes.len() - 1
        });
        let bytes = self.bytes.get(files).copied().unwrap_or(0);
        for node in nodes {
            let held = DiskEntry { files, bytes, done: bytes, ready: true, protected: false };
            self.nodes.entry(node.clone()).or_default().insert(held);
        }
    }
}

impl DiskState {
    /// The limit of a node's disk, and the bytes that are never evicted while ranks read these models: their
    /// files and protected ones. `None` if the disk is not measured.
    pub fn limit_and_pinned<'m>(
        &self,
        node: &str,
        read: impl Iterator<Item = (&'m str, &'m str)>,
    ) -> Option<(u64, u64)> {
        let contents = self.nodes.get(node)?;
        let mut pinned: BTreeMap<usize, u64> = BTreeMap::new();
        for held in contents.entries.iter().filter(|held| held.protected) {
            pinned.insert(held.files, held.bytes_present());
        }
        for files in read.filter_map(|(namespace, model)| self.files_index(namespace, model)) {
            pinned.insert(files, self.bytes.get(files).copied().unwrap_or(0));
        }
        Some((contents.limit?, pinned.into_values().fold(0, u64::saturating_add)))
    }
}

impl DiskState {
    /// Adds the files that the ranks of a group read, by node.
    pub(crate) fn collect_read_files<'v>(
        &self,
        key: &ObjectKey,
        group: &'v GroupInfo,
        by_node: &mut BTreeMap<&'v str, BTreeSet<usize>>,
    ) {
        for (model, node) in group.files() {
            let Some(files) = self.files_index(&key.0, model) else { continue };
            by_node.entry(node).or_default().insert(files);
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Disks for a test: `(node, limit)`, and `(model, node, bytes, done, protected)` of models in namespace
    /// `ns`.
    pub fn disks(limits: &[(&str, Option<u64>)], copies: &[(&str, &str, u64, u64, bool)]) -> DiskState {
        let mut models: Vec<&str> = copies.iter().map(|(model, ..)| *model).collect();
        models.sort_unstable();
        models.dedup();
        let id = |model: &str| models.iter().position(|known| *known == model).unwrap();
        let mut bytes = vec![0; models.len()];
        let contents = |limit: &Option<u64>| DiskContents { limit: *limit, entries: Vec::new() };
        let mut nodes: BTreeMap<String, DiskContents> =
            limits.iter().map(|(node, limit)| ((*node).to_owned(), contents(limit))).collect();
        for (model, node, size, done, protected) in copies {
            bytes[id(model)] = *size;
            let held = DiskEntry {
                files: id(model),
                bytes: *size,
                done: *done,
                ready: done == size,
                protected: *protected,
            };
            nodes.entry((*node).to_owned()).or_default().insert(held);
        }
        let key = |model: &&str| (("ns".to_owned(), (*model).to_owned()), id(model));
        DiskState { models: models.iter().map(key).collect(), bytes, nodes }
    }
}
