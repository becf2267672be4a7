//! A file that is read by positions and counts the bytes that are read.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    sync::atomic::{AtomicU64, Ordering},
};

/// A file whose reads are counted.
#[derive(Debug)]
pub(super) struct SourceFile {
    file: File,
    bytes_read: AtomicU64,
}

impl SourceFile {
    pub fn new(file: File) -> Self {
        Self { file, bytes_read: AtomicU64::new(0) }
    }

    /// Fills `out` with the bytes from `offset` on.
    pub fn read(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        self.bytes_read.fetch_add(out.len() as u64, Ordering::Relaxed);
        self.file.read_exact_at(out, offset)
    }

    /// Bytes that were read so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }
}
