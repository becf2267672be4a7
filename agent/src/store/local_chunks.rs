//! What this machine has of a model, whole or on its way, for engines of other machines: files in a folder, and which
//! of their chunks are known to be right.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use super::StoreError;
use super::chunks::{self, Chunk};
use super::model_dirs::Manifest;

/// Bytes that are read and hashed at once.
const BLOCK_BYTES: usize = 256 << 10;

/// A model here.
#[derive(Debug)]
pub struct LocalChunks {
    manifest: Arc<Manifest>,
    chunks: Vec<Chunk>,
    folder: PathBuf,
    complete: RwLock<Vec<bool>>,
    /// Chunks of which something came: nobody else needs to fetch them from where they are rare.
    started: RwLock<Vec<bool>>,
}

impl LocalChunks {
    /// The files of `manifest` in `folder`, all of them `whole` or none yet.
    pub fn new(manifest: Arc<Manifest>, folder: PathBuf, whole: bool) -> Self {
        let chunks = chunks::split(&manifest);
        let (whole, begun) = (vec![whole; chunks.len()], vec![false; chunks.len()]);
        Self { manifest, chunks, folder, complete: RwLock::new(whole), started: RwLock::new(begun) }
    }

    /// What the files are.
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// All chunks, in the order of [`Held::whole`].
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Which chunks are here and right.
    pub fn complete(&self) -> Vec<bool> {
        self.read_complete().clone()
    }

    /// `length` bytes from `offset` on in a chunk; nothing where the chunk is not here or is shorter. Blocks.
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

    /// Whether a chunk's bytes on the disk are those of the manifest. Blocks.
    pub(super) fn verify_chunk(&self, number: usize) -> Result<bool, StoreError> {
        let Some(chunk) = self.chunks.get(number) else { return Ok(false) };
        let file = &self.manifest.files[chunk.file];
        let mut value = chunks::ChunkHasher::new(file.size, chunk.offset);
        // As much as stays in a core's own cache between reading and hashing.
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

    /// Which chunks are here, or on their way.
    pub fn started(&self) -> Vec<bool> {
        let begun = self.started.read().unwrap_or_else(PoisonError::into_inner);
        begun.iter().zip(self.read_complete().iter()).map(|(begun, whole)| *begun || *whole).collect()
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
