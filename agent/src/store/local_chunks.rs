//! Chunks of a model on this machine, complete or being received, to serve them to other machines: files in a
//! directory, and which of their chunks are verified.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use super::StoreError;
use super::chunks::{self, Chunk};
use super::model_dirs::Manifest;

/// Bytes read and hashed at once.
const BLOCK_BYTES: usize = 256 << 10;

/// A model on this machine.
#[derive(Debug)]
pub struct LocalChunks {
    manifest: Arc<Manifest>,
    chunks: Vec<Chunk>,
    folder: PathBuf,
    complete: RwLock<Vec<bool>>,
    /// Chunks that are being received: other nodes need not fetch these first where they are rare.
    started: RwLock<Vec<bool>>,
}

impl LocalChunks {
    /// The files of `manifest` in `folder`, with all chunks complete (`whole`) or none yet.
    pub fn new(manifest: Arc<Manifest>, folder: PathBuf, whole: bool) -> Self {
        let chunks = chunks::split(&manifest);
        let (whole, started) = (vec![whole; chunks.len()], vec![false; chunks.len()]);
        Self { manifest, chunks, folder, complete: RwLock::new(whole), started: RwLock::new(started) }
    }

    /// The manifest.
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// All chunks, in the order of [`LocalChunks::complete`].
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Which chunks are complete and verified.
    pub fn complete(&self) -> Vec<bool> {
        self.read_complete().clone()
    }

    /// `length` bytes from `offset` on in a chunk; `None` where the chunk is missing or shorter. Blocks.
    pub fn read(&self, number: usize, offset: u64, length: u64) -> Result<Option<Vec<u8>>, StoreError> {
        let Some(chunk) = self.chunks.get(number) else { return Ok(None) };
        let inside = offset.checked_add(length).is_some_and(|end| end <= chunk.length);
        if !inside || !self.read_complete().get(number).is_some_and(|whole| *whole) {
            return Ok(None);
        }
        let path = self.path(chunk);
        let mut bytes = Vec::with_capacity(length as usize);
        let read = File::open(&path).and_then(|mut file| {
            file.seek(SeekFrom::Start(chunk.offset + offset))?;
            file.take(length).read_to_end(&mut bytes)
        });
        let read = read.map_err(StoreError::io(path))?;
        Ok((read as u64 == length).then_some(bytes))
    }

    /// Whether a chunk's bytes on disk match the manifest. Blocks.
    pub(super) fn verify_chunk(&self, number: usize) -> Result<bool, StoreError> {
        let Some(chunk) = self.chunks.get(number) else { return Ok(false) };
        let file = &self.manifest.files[chunk.file];
        let mut value = chunks::ChunkHasher::new(file.size, chunk.offset);
        // A block fits into a core's own cache between reading and hashing.
        let (mut block, mut at) = (vec![0; BLOCK_BYTES.min(chunk.length as usize)], chunk.offset);
        let (path, end) = (self.path(chunk), chunk.offset + chunk.length);
        let mut read = || -> std::io::Result<()> {
            let open = File::open(&path)?;
            while at < end {
                let now = block.len().min((end - at) as usize);
                open.read_exact_at(&mut block[..now], at)?;
                value.update(&block[..now]);
                at += now as u64;
            }
            Ok(())
        };
        match read() {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(false),
            other => other.map_err(StoreError::io(&path))?,
        }
        Ok(value.finish() == file.chunks[chunk.index].0)
    }

    /// Which chunks are complete or being received.
    pub fn started(&self) -> Vec<bool> {
        let started = self.started.read().unwrap_or_else(PoisonError::into_inner);
        started.iter().zip(self.read_complete().iter()).map(|(started, whole)| *started || *whole).collect()
    }

    pub(super) fn mark_started(&self, number: usize) {
        self.started.write().unwrap_or_else(PoisonError::into_inner)[number] = true;
    }

    pub(super) fn mark_complete(&self, number: usize) {
        self.complete.write().unwrap_or_else(PoisonError::into_inner)[number] = true;
    }

    pub(crate) fn folder(&self) -> &std::path::Path {
        &self.folder
    }

    pub(super) fn path(&self, chunk: &Chunk) -> PathBuf {
        self.folder.join(&self.manifest.files[chunk.file].name)
    }

    fn read_complete(&self) -> RwLockReadGuard<'_, Vec<bool>> {
        self.complete.read().unwrap_or_else(PoisonError::into_inner)
    }
}
