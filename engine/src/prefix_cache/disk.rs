//! Disk tier of the prefix cache: KV blocks that survive restarts. One file per block, with a checksum, in a
//! folder of bounded size that may be deleted at any time. An unreadable file counts as a missing block.
//!
//! ```text
//! <folder>/<n>/lock              its owner: each of two processes takes another number
//! <folder>/<n>/<fingerprint>/<block hash>.kv  "russetkv", header length, header (JSON), data, SHA-256 of all
//! ```

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, TryLockError};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::SystemTime;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use thiserror::Error;

use crate::prefix_cache::block_hash::BlockHash;

const MAGIC: &[u8; 8] = b"russetkv";
const CHECKSUM_BYTES: usize = 32;
/// Processes that can share a folder.
const MAX_PROCESSES: usize = 8;
/// Maximum blocks queued for writing; on a slower disk, further blocks are dropped.
const MAX_PENDING_WRITES: usize = 1024;

/// The data of a block: its keys and values, in as many tensors as the KV format has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockFile {
    /// The tensors.
    pub tensors: Vec<BlockTensor>,
}

/// One tensor of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockTensor {
    /// Element type, in MLX's notation.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<i32>,
    /// Elements, little-endian, in row order.
    pub bytes: Vec<u8>,
}

#[derive(Debug, Serialize, Deserialize)]
struct BlockHeader {
    key: String,
    parts: Vec<TensorHeader>,
}

/// Header entry of a tensor.
#[derive(Debug, Serialize, Deserialize)]
struct TensorHeader {
    dtype: String,
    shape: Vec<i32>,
    bytes: usize,
}

/// Why a block cannot be loaded from disk.
#[derive(Debug, Error)]
pub enum DiskCacheError {
    /// It was evicted after it was requested.
    #[error("block {key} is on this disk no more")]
    Evicted {
        /// The block.
        key: BlockHash,
    },
    /// An I/O error.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A damaged file.
    #[error("{path} is damaged: {what}; it is removed")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is damaged.
        what: &'static str,
    },
}

type WriteJob = (BlockHash, Box<dyn FnOnce() -> Option<BlockFile> + Send>);

/// The disk cache of one rank.
#[derive(Debug)]
pub struct DiskCache {
    /// Locked as long as the folder is in use.
    _lock: File,
    folder: PathBuf,
    max_bytes: u64,
    files: Mutex<FileIndex>,
    writes: mpsc::SyncSender<WriteJob>,
}

#[derive(Debug, Default)]
struct FileIndex {
    entries: HashMap<BlockHash, (u64, u64)>,
    /// Blocks by last use.
    by_last_use: BTreeMap<u64, BlockHash>,
    bytes: u64,
    clock: u64,
    /// Blocks that were lost without an evict command.
    lost_blocks: Vec<BlockHash>,
}

impl FileIndex {
    fn insert(&mut self, key: BlockHash, bytes: u64) {
        self.remove(key);
        self.clock += 1;
        self.entries.insert(key, (bytes, self.clock));
        self.by_last_use.insert(self.clock, key);
        self.bytes += bytes;
    }

    fn remove(&mut self, key: BlockHash) {
        if let Some((bytes, used)) = self.entries.remove(&key) {
            self.by_last_use.remove(&used);
            self.bytes -= bytes;
        }
    }
}

impl DiskCache {
    /// Opens the folder for blocks with this model fingerprint and removes all others, which belong to
    /// another model or another split. Evicts blocks down to the size limit.
    pub fn open(folder: &Path, identity: &str, most_bytes: u64) -> io::Result<Arc<Self>> {
        let (lock, folder) = lock_folder(folder)?;
        let own = folder.join(identity);
        std::fs::create_dir_all(&own)?;
        for other in std::fs::read_dir(&folder)?.flatten().filter(|entry| entry.path() != own) {
            if other.path().is_dir() {
                std::fs::remove_dir_all(other.path())?;
            }
        }
        let mut found: Vec<(SystemTime, BlockHash, u64)> = Vec::new();
        for entry in std::fs::read_dir(&own)?.flatten() {
            let (path, data) = (entry.path(), entry.metadata()?);
            let key = path
                .file_name()
                .and_then(|name| name.to_str()?.strip_suffix(".kv"))
                .and_then(BlockHash::parse);
            match key {
                Some(key) => found.push((data.modified()?, key, data.len())),
                None => std::fs::remove_file(path)?,
            }
        }
        found.sort_unstable();
        let mut files = FileIndex::default();
        found.iter().for_each(|(_, key, bytes)| files.insert(*key, *bytes));
        let (jobs, inbox) = mpsc::sync_channel::<WriteJob>(MAX_PENDING_WRITES);
        let cache = Arc::new(Self {
            _lock: lock,
            folder: own,
            max_bytes: most_bytes,
            files: Mutex::new(files),
            writes: jobs,
        });
        cache.evict_until_fits(0);
        cache.files.lock().lost_blocks.clear();
        let weak = Arc::downgrade(&cache);
        std::thread::Builder::new().name("disk-cache".into()).spawn(move || {
            // A full disk is logged once, not for every block.
            let mut failing = false;
            while let Ok((key, record)) = inbox.recv() {
                let Some(cache) = weak.upgrade() else { return };
                let Some(record) = record() else {
                    cache.mark_lost(key);
                    continue;
                };
                let (put, folder) = (cache.write_file(key, &record), cache.folder.display());
                match &put {
                    Ok(()) if failing => {
                        tracing::info!(%folder, "blocks of the prefix cache are kept on disk again");
                    }
                    Err(error) if !failing => {
                        tracing::warn!(%folder, %error, "blocks of the prefix cache are not kept on disk");
                    }
                    _ => {}
                }
                failing = put.is_err();
                if failing {
                    cache.mark_lost(key);
                }
            }
        })?;
        Ok(cache)
    }

    /// Blocks on disk, least recently used first.
    pub fn hashes(&self) -> Vec<BlockHash> {
        self.files.lock().by_last_use.values().copied().collect()
    }

    /// Total size in bytes.
    pub fn bytes(&self) -> u64 {
        self.files.lock().bytes
    }

    /// Blocks lost since the last call: evicted for others, or not written.
    pub fn take_lost(&self) -> Vec<BlockHash> {
        std::mem::take(&mut self.files.lock().lost_blocks)
    }

    /// Queues a block for writing; `record` is called when its turn comes.
    pub fn write(&self, key: BlockHash, record: impl FnOnce() -> Option<BlockFile> + Send + 'static) {
        if self.writes.try_send((key, Box::new(record))).is_err() {
            self.mark_lost(key);
        }
    }

    /// Records a block as lost because it is not written after all.
    pub fn mark_lost(&self, key: BlockHash) {
        self.files.lock().lost_blocks.push(key);
    }

    /// Reads and verifies a block. A damaged one is removed.
    pub fn read(&self, key: BlockHash) -> Result<BlockFile, DiskCacheError> {
        let path = self.path(key);
        let bytes = std::fs::read(&path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound if !self.files.lock().entries.contains_key(&key) => {
                DiskCacheError::Evicted { key }
            }
            _ => DiskCacheError::Io { path: path.clone(), source },
        });
        let record = bytes
            .and_then(|bytes| decode(key, &bytes).map_err(|what| DiskCacheError::Damaged { path, what }));
        match &record {
            Ok(_) => self.touch(key),
            Err(_) => self.remove(&[key]),
        }
        record
    }

    /// Removes blocks.
    pub fn remove(&self, keys: &[BlockHash]) {
        for key in keys {
            self.files.lock().remove(*key);
            // A missing file counts as removed.
            let _ = std::fs::remove_file(self.path(*key));
        }
    }

    fn path(&self, key: BlockHash) -> PathBuf {
        self.folder.join(format!("{key}.kv"))
    }

    /// The modification time keeps the last use over restarts.
    fn touch(&self, key: BlockHash) {
        let mut files = self.files.lock();
        if let Some((bytes, _)) = files.entries.get(&key).copied() {
            files.insert(key, bytes);
        }
        let touched = File::options().append(true).open(self.path(key));
        let _ = touched.and_then(|file| file.set_modified(SystemTime::now()));
    }

    fn write_file(&self, key: BlockHash, record: &BlockFile) -> io::Result<()> {
        let bytes = encode(key, record);
        self.evict_until_fits(bytes.len() as u64);
        // Unnamed until complete; an interrupted write leaves no named file, or one that the next start
        // removes.
        let mut file = tempfile::NamedTempFile::new_in(&self.folder)?;
        file.write_all(&bytes)?;
        file.persist(self.path(key)).map_err(|error| error.error)?;
        self.files.lock().insert(key, bytes.len() as u64);
        Ok(())
    }

    /// Evicts least recently used blocks until `more` bytes fit.
    fn evict_until_fits(&self, more: u64) {
        loop {
            let key = {
                let mut files = self.files.lock();
                if files.bytes + more <= self.max_bytes {
                    return;
                }
                let Some(key) = files.by_last_use.values().next().copied() else { return };
                files.lost_blocks.push(key);
                key
            };
            self.remove(&[key]);
        }
    }
}

/// The first numbered folder that no other process has locked.
fn lock_folder(folder: &Path) -> io::Result<(File, PathBuf)> {
    for number in 0..MAX_PROCESSES {
        let folder = folder.join(number.to_string());
        std::fs::create_dir_all(&folder)?;
        let lock = File::create(folder.join("lock"))?;
        match lock.try_lock() {
            Ok(()) => return Ok((lock, folder)),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Err(io::Error::other(format!("{MAX_PROCESSES} processes keep their blocks there already")))
}

fn encode(key: BlockHash, record: &BlockFile) -> Vec<u8> {
    let about = |part: &BlockTensor| {
        let BlockTensor { dtype, shape, bytes } = part;
        TensorHeader { dtype: dtype.clone(), shape: shape.clone(), bytes: bytes.len() }
    };
    let header = BlockHeader { key: key.to_string(), parts: record.tensors.iter().map(about).collect() };
    let header = serde_json::json!(header).to_string();
    let mut bytes = MAGIC.to_vec();
    bytes.extend((header.len() as u32).to_le_bytes());
    bytes.extend(header.as_bytes());
    record.tensors.iter().for_each(|part| bytes.extend(&part.bytes));
    let checksum = Sha256::digest(&bytes);
    bytes.extend(checksum);
    bytes
}

/// The contents of a file, or why it is damaged.
fn decode(key: BlockHash, bytes: &[u8]) -> Result<BlockFile, &'static str> {
    let (bytes, checksum) =
        bytes.len().checked_sub(CHECKSUM_BYTES).map(|end| bytes.split_at(end)).ok_or("it is too short")?;
    if Sha256::digest(bytes)[..] != *checksum {
        return Err("its checksum is another");
    }
    let rest = bytes.strip_prefix(MAGIC).ok_or("it is no block")?;
    let (length, rest) = rest.split_first_chunk::<4>().ok_or("it has no header")?;
    let (header, mut rest) =
        rest.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or("its header is cut")?;
    let header: BlockHeader = serde_json::from_slice(header).map_err(|_| "its header is of another build")?;
    if header.key != key.to_string() {
        return Err("it is another block");
    }
    let mut parts = Vec::new();
    for TensorHeader { dtype, shape, bytes } in header.parts {
        let (bytes, after) = rest.split_at_checked(bytes).ok_or("it is cut")?;
        parts.push(BlockTensor { dtype, shape, bytes: bytes.to_vec() });
        rest = after;
    }
    Ok(BlockFile { tensors: parts })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(fill: u8, bytes: usize) -> BlockFile {
        let part = |dtype: &str, shape: Vec<i32>, bytes| BlockTensor { dtype: dtype.into(), shape, bytes };
        let parts = vec![part("float32", vec![1, 2], vec![fill; bytes]), part("uint32", vec![2], vec![1; 8])];
        BlockFile { tensors: parts }
    }

    fn key(number: u8) -> BlockHash {
        BlockHash([number; 16])
    }

    /// Waits until every queued block is written or lost.
    fn settled(cache: &DiskCache) {
        let (done, wait) = mpsc::channel();
        cache.write(key(255), move || {
            done.send(()).unwrap();
            None
        });
        wait.recv().unwrap();
        // The marker block itself is lost, a moment later.
        while !cache.files.lock().lost_blocks.contains(&key(255)) {
            std::thread::yield_now();
        }
        cache.files.lock().lost_blocks.retain(|lost| *lost != key(255));
    }

    /// Closes a disk cache like the end of its process.
    fn closed(cache: Arc<DiskCache>) {
        let lock = cache.folder.with_file_name("lock");
        drop(cache);
        // Its thread may still hold a reference for a moment.
        while File::open(&lock).unwrap().try_lock().is_err() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn disk_blocks_survive_a_restart_in_order_of_use() {
        let dir = tempfile::tempdir().unwrap();
        let cache = DiskCache::open(dir.path(), "a", 1 << 20).unwrap();
        (1..4).for_each(|number| cache.write(key(number), move || Some(record(number, 100))));
        settled(&cache);
        assert_eq!(cache.read(key(1)).unwrap(), record(1, 100));
        assert_eq!(cache.hashes(), [key(2), key(3), key(1)]);
        closed(cache);
        let own = dir.path().join("0/a");
        std::fs::write(own.join("left.tmp"), "half").unwrap();
        let again = DiskCache::open(dir.path(), "a", 1 << 20).unwrap();
        assert_eq!(again.hashes(), [key(2), key(3), key(1)]);
        assert_eq!(again.read(key(3)).unwrap(), record(3, 100));
        assert_eq!(std::fs::read_dir(&own).unwrap().count(), 3, "the half file is gone");
        let beside = DiskCache::open(dir.path(), "a", 1 << 20).unwrap();
        assert!(beside.hashes().is_empty(), "another process has a folder of its own");
        closed(again);
        closed(beside);
        assert!(DiskCache::open(dir.path(), "b", 1 << 20).unwrap().hashes().is_empty());
        assert!(!own.exists(), "what another model computed is of no use");
    }

    #[test]
    fn disk_cache_treats_a_damaged_file_as_a_miss() {
        let dir = tempfile::tempdir().unwrap();
        let cache = DiskCache::open(dir.path(), "a", 1 << 20).unwrap();
        let path = dir.path().join("0/a").join(format!("{}.kv", key(1)));
        let whole = encode(key(1), &record(1, 100));
        let mut other = encode(key(2), &record(1, 100));
        for (story, bytes) in [
            ("empty", Vec::new()),
            ("cut", whole[..whole.len() - 1].to_vec()),
            ("one bit", {
                let mut bytes = whole.clone();
                bytes[60] ^= 1;
                bytes
            }),
            ("another block", std::mem::take(&mut other)),
        ] {
            std::fs::write(&path, &bytes).unwrap();
            assert!(matches!(cache.read(key(1)), Err(DiskCacheError::Damaged { .. })), "{story}");
            assert!(!path.exists(), "{story} is removed");
        }
        assert!(matches!(cache.read(key(1)), Err(DiskCacheError::Evicted { .. })));
        std::fs::write(&path, whole).unwrap();
        assert_eq!(cache.read(key(1)).unwrap(), record(1, 100));
    }

    #[test]
    fn disk_cache_evicts_and_reports_lost_blocks_at_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let size = encode(key(1), &record(1, 100)).len() as u64;
        let cache = DiskCache::open(dir.path(), "a", 2 * size).unwrap();
        (1..4).for_each(|number| cache.write(key(number), move || Some(record(number, 100))));
        settled(&cache);
        assert_eq!((cache.hashes(), cache.take_lost()), (vec![key(2), key(3)], vec![key(1)]));
        assert!(cache.bytes() <= 2 * size);
        closed(cache);
        assert_eq!(DiskCache::open(dir.path(), "a", size).unwrap().hashes(), [key(3)]);
    }

    #[test]
    fn disk_cache_loses_only_blocks_when_its_folder_vanishes() {
        let dir = tempfile::tempdir().unwrap();
        let cache = DiskCache::open(dir.path(), "a", 1 << 20).unwrap();
        cache.write(key(1), || Some(record(1, 100)));
        settled(&cache);
        std::fs::remove_dir_all(dir.path()).unwrap();
        assert!(matches!(cache.read(key(1)), Err(DiskCacheError::Io { .. })), "nobody here removed it");
        cache.write(key(2), || Some(record(2, 100)));
        settled(&cache);
        assert_eq!((cache.hashes(), cache.take_lost()), (vec![], vec![key(2)]));
    }
}
