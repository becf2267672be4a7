//! What this machine has of a model, whole or on its way, for engines of other machines: files in a folder, and which
//! of their chunks are known to be right.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::{Arc, RwLock};

use super::StoreError;
use super::chunks::{self, Chunk};
use super::publish::Manifest;

/// A model here.
#[derive(Debug)]
pub struct Held {
    manifest: Arc<Manifest>,
    chunks: Vec<Chunk>,
    folder: PathBuf,
    whole: RwLock<Vec<bool>>,
}

impl Held {
    /// The files of `manifest` in `folder`, all of them `whole` or none yet.
    pub fn new(manifest: Arc<Manifest>, folder: PathBuf, whole: bool) -> Self {
        let chunks = chunks::of(&manifest);
        let whole = RwLock::new(vec![whole; chunks.len()]);
        Self { manifest, chunks, folder, whole }
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
    pub fn whole(&self) -> Vec<bool> {
        self.read_whole().clone()
    }

    /// `length` bytes from `offset` on in a chunk; nothing where the chunk is not here or is shorter. Blocks.
    pub fn read(&self, number: usize, offset: u64, length: u64) -> Result<Option<Vec<u8>>, StoreError> {
        let Some(chunk) = self.chunks.get(number) else { return Ok(None) };
        let inside = offset.checked_add(length).is_some_and(|end| end <= chunk.length);
        if !inside || !self.read_whole().get(number).is_some_and(|whole| *whole) {
            return Ok(None);
        }
        self.bytes(chunk, offset, length).map(Some)
    }

    pub(super) fn bytes(&self, chunk: &Chunk, offset: u64, length: u64) -> Result<Vec<u8>, StoreError> {
        let path = self.path(chunk);
        let mut bytes = vec![0; length as usize];
        let read = File::open(&path).and_then(|file| file.read_exact_at(&mut bytes, chunk.offset + offset));
        read.map_err(StoreError::io(path))?;
        Ok(bytes)
    }

    /// Whether a chunk's bytes on the disk are those of the manifest. Blocks.
    pub(super) fn is_right(&self, number: usize) -> Result<bool, StoreError> {
        let Some(chunk) = self.chunks.get(number) else { return Ok(false) };
        let bytes = self.bytes(chunk, 0, chunk.length)?;
        let file = &self.manifest.files[chunk.file];
        Ok(chunks::value(file.size, chunk, &bytes) == file.chunks[chunk.index].0)
    }

    pub(super) fn mark(&self, number: usize) {
        let mut whole = self.whole.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        whole[number] = true;
    }

    pub(crate) fn folder(&self) -> &std::path::Path {
        &self.folder
    }

    pub(super) fn path(&self, chunk: &Chunk) -> PathBuf {
        self.folder.join(&self.manifest.files[chunk.file].name)
    }

    fn read_whole(&self) -> std::sync::RwLockReadGuard<'_, Vec<bool>> {
        self.whole.read().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
