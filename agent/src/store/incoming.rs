//! A model being received from other machines: sparse files whose chunks arrive in any order, and a journal
//! of the verified ones. On resume, the journal's records are verified against the disk.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::StoreError;
use super::disk_space::DiskReservation;
use super::local_chunks::LocalChunks;
use super::model_dirs::{Manifest, RECEIVED};

/// Name of the journal in a partial directory; no file of a model may have it.
const JOURNAL: &str = "JOURNAL";
/// Bytes of a record: the chunk's number, and the beginning of its hash.
const RECORD_BYTES: usize = 16;

/// A model that is being received.
#[derive(Debug)]
pub struct IncomingModel {
    local_chunks: Arc<LocalChunks>,
    journal: Mutex<File>,
    writing: Mutex<()>,
    path: PathBuf,
    _reservation: DiskReservation,
}

impl IncomingModel {
    /// Creates the files, or opens those of an earlier attempt. Reads all existing data again: blocks for as
    /// long.
    pub(super) fn open(
        folder: PathBuf,
        manifest: Arc<Manifest>,
        room: DiskReservation,
    ) -> Result<Self, StoreError> {
        for file in &manifest.files {
            let path = folder.join(&file.name);
            let made = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
            made.and_then(|it| it.set_len(file.size)).map_err(StoreError::io(path))?;
        }
        // It lets the source complete what arrives.
        let path = folder.join(RECEIVED);
        let text = serde_json::to_vec(&*manifest).map_err(|error| StoreError::io(&path)(error.into()))?;
        std::fs::write(&path, text).map_err(StoreError::io(path))?;
        let path = folder.join(JOURNAL);
        let journal = OpenOptions::new().create(true).append(true).read(true).open(&path);
        let mut journal = journal.map_err(StoreError::io(&path))?;
        // Records of an earlier attempt must not be written after the scan.
        crate::lock_file(&journal).map_err(|error| StoreError::io(&path)(error.into()))?;
        let held = Arc::new(LocalChunks::new(manifest, folder, false));
        let before = std::fs::read(&path).map_err(StoreError::io(&path))?;
        for number in recorded_chunks(&before, &held) {
            if held.verify_chunk(number)? {
                held.mark_complete(number);
            }
        }
        // A truncated record would shift all following ones.
        if before.len() % RECORD_BYTES != 0 {
            let padding = vec![0xff; RECORD_BYTES - before.len() % RECORD_BYTES];
            journal.write_all(&padding).map_err(StoreError::io(&path))?;
        }
        Ok(Self {
            local_chunks: held,
            journal: Mutex::new(journal),
            writing: Mutex::default(),
            path,
            _reservation: room,
        })
    }

    /// The chunks on this machine, to serve them to others.
    pub fn local_chunks(&self) -> &Arc<LocalChunks> {
        &self.local_chunks
    }

    /// Verified bytes.
    pub fn bytes_done(&self) -> u64 {
        let whole = self.local_chunks.complete();
        self.local_chunks
            .chunks()
            .iter()
            .zip(whole)
            .filter(|(_, whole)| *whole)
            .map(|(chunk, _)| chunk.length)
            .sum()
    }

    /// Writes received bytes of a chunk, unverified. Blocks.
    pub fn write<B: AsRef<[u8]>>(&self, number: usize, offset: u64, parts: &[B]) -> Result<(), StoreError> {
        let Some(chunk) = self.local_chunks.chunks().get(number) else { return Ok(()) };
        let path = self.local_chunks.path(chunk);
        self.local_chunks.mark_started(number);
        fail::fail_point!("data-write", |_| Err(StoreError::io(&path)(
            std::io::ErrorKind::StorageFull.into()
        )));
        // File systems serialise writes to a file, and waiting writers would burn a core.
        let _alone = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let write = || -> std::io::Result<()> {
            let file = OpenOptions::new().write(true).open(&path)?;
            let mut at = chunk.offset + offset;
            parts.iter().map(AsRef::as_ref).try_for_each(|part| {
                file.write_all_at(part, at)?;
                at += part.len() as u64;
                Ok(())
            })
        };
        write().map_err(StoreError::io(&path))
    }

    /// Verifies a received chunk, and records it in the journal if valid. Blocks.
    pub fn check_chunk(&self, number: usize) -> Result<bool, StoreError> {
        if !self.local_chunks.verify_chunk(number)? {
            return Ok(false);
        }
        fail::fail_point!("chunk-checked");
        let mut journal = self.journal.lock().unwrap_or_else(PoisonError::into_inner);
        journal.write_all(&record(number, &self.local_chunks)).map_err(StoreError::io(&self.path))?;
        drop(journal);
        fail::fail_point!("journal-appended");
        self.local_chunks.mark_complete(number);
        Ok(true)
    }
}

fn record(number: usize, held: &LocalChunks) -> [u8; RECORD_BYTES] {
    let chunk = held.chunks()[number];
    let mut record = [0; RECORD_BYTES];
    record[..8].copy_from_slice(&(number as u64).to_le_bytes());
    record[8..].copy_from_slice(&held.manifest().files[chunk.file].chunks[chunk.index].0[..8]);
    record
}

/// The chunks that a journal of this manifest names.
fn recorded_chunks(journal: &[u8], held: &LocalChunks) -> std::collections::BTreeSet<usize> {
    let (records, _) = journal.as_chunks::<RECORD_BYTES>();
    let numbers = records.iter().filter_map(|found| {
        let number = usize::try_from(u64::from_le_bytes(found[..8].try_into().ok()?)).ok()?;
        (number < held.chunks().len() && record(number, held) == *found).then_some(number)
    });
    numbers.collect()
}
