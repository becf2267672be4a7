//! A matrix as it lies in a file, and windows of it: some rows, and of each the same bytes.

use std::{io, ops::Range};

/// Reads bytes of a file, by its number, from an offset on.
pub(super) type ReadAt<'a> = dyn Fn(usize, u64, &mut [u8]) -> io::Result<()> + 'a;

/// Bytes that are read of a file at once: what is kept beside the converted tensor, unless a row has more.
const READ_BYTES: u64 = 1 << 20;
/// Bytes between two rows of a window that are read over: a disk reads as much in any case.
const MAX_GAP_BYTES: u64 = 16 << 10;

/// A matrix in a file, its rows one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StoredMatrix {
    /// The file, by its number.
    pub file: usize,
    /// Its first byte.
    pub begin: u64,
    /// Bytes of a row.
    pub row_bytes: u64,
}

/// A window of a matrix.
#[derive(Debug)]
pub(super) struct Tile {
    bytes: Vec<u8>,
    stride: usize,
    length: usize,
}

impl StoredMatrix {
    /// From one row of a window of these bytes to the next, as they are read.
    fn stride(&self, bytes: &Range<u64>) -> u64 {
        let length = bytes.end - bytes.start;
        if self.row_bytes - length <= MAX_GAP_BYTES { self.row_bytes } else { length }
    }

    /// The rows in parts, of each of which these bytes are read at once. Each but the last is a multiple of `step` rows.
    pub fn parts(&self, rows: Range<u64>, bytes: &Range<u64>, step: u64) -> impl Iterator<Item = Range<u64>> {
        let most = (READ_BYTES / self.stride(bytes).max(1) / step).max(1) * step;
        rows.clone().step_by(most as usize).map(move |first| first..(first + most).min(rows.end))
    }

    /// These bytes of each of the rows.
    pub fn read(&self, rows: Range<u64>, bytes: Range<u64>, read: &ReadAt<'_>) -> io::Result<Tile> {
        let (stride, length) = (self.stride(&bytes), bytes.end - bytes.start);
        let between = (rows.end - rows.start).saturating_sub(1) * stride;
        let mut tile = Tile {
            bytes: vec![0; (between + length) as usize],
            stride: stride as usize,
            length: length as usize,
        };
        let first = self.begin + rows.start * self.row_bytes + bytes.start;
        if stride == self.row_bytes {
            read(self.file, first, &mut tile.bytes)?;
        } else {
            for (row, out) in tile.bytes.chunks_mut(tile.stride).enumerate() {
                read(self.file, first + row as u64 * self.row_bytes, out)?;
            }
        }
        Ok(tile)
    }
}

impl Tile {
    /// The bytes of a row, counted from the first that was read.
    pub fn row(&self, index: u64) -> &[u8] {
        let begin = index as usize * self.stride;
        self.bytes.get(begin..begin + self.length).unwrap_or_default()
    }

    /// A number of 32 bits of a row, both counted from the first that was read.
    pub fn word(&self, row: u64, index: u64) -> u32 {
        match self.row(row).get(index as usize * 4..) {
            Some(&[first, second, third, fourth, ..]) => u32::from_le_bytes([first, second, third, fourth]),
            _ => 0,
        }
    }
}
