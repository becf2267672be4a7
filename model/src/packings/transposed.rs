//! A matrix that the file has transposed: element by element, some of its rows at a time.

use std::io;

use super::{
    layout::Window,
    matrix::{ReadAt, StoredMatrix},
};

/// A matrix whose rows are the columns of one of the file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TransposedMatrix {
    pub from: StoredMatrix,
    /// Bytes of an element.
    pub element_bytes: u64,
}

impl TransposedMatrix {
    pub fn convert(&self, window: &Window, out: &mut [u8], read: &ReadAt<'_>) -> io::Result<()> {
        let element = self.element_bytes as usize;
        let bytes = window.rows.start * self.element_bytes..window.rows.end * self.element_bytes;
        for columns in self.from.parts(window.columns.clone(), &bytes, 1) {
            let tile = self.from.read(columns.clone(), bytes.clone(), read)?;
            let first = (columns.start - window.columns.start) as usize;
            for (row, out) in out.chunks_exact_mut(window.width() as usize * element).enumerate() {
                let outs = out[first * element..].chunks_exact_mut(element);
                for (column, out) in (0..columns.end - columns.start).zip(outs) {
                    out.copy_from_slice(&tile.row(column)[row * element..][..element]);
                }
            }
        }
        Ok(())
    }
}
