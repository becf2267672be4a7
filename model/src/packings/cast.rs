//! Plain numbers in another type: those beside weights whose scales are in it.

use std::io;

use super::{
    layout::Window,
    matrix::{ReadAt, StoredMatrix},
};
use crate::value_type::ValueType;

/// Plain numbers in another type than the file's.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Cast {
    pub from: StoredMatrix,
    /// Type in the file.
    pub stored: ValueType,
    /// Type that they are converted to.
    pub value: ValueType,
}

impl Cast {
    pub fn convert(
        &self,
        tensor: &str,
        window: &Window,
        out: &mut [u8],
        read: &ReadAt<'_>,
    ) -> io::Result<()> {
        let stored = self.stored.bytes() as u64;
        let bytes = window.columns.start * stored..window.columns.end * stored;
        let mut rows_out = out.chunks_exact_mut(window.width() as usize * self.value.bytes());
        for rows in self.from.parts(window.rows.clone(), &bytes, 1) {
            let tile = self.from.read(rows.clone(), bytes.clone(), read)?;
            for (row, out) in (0..rows.end - rows.start).zip(rows_out.by_ref()) {
                let numbers = tile.row(row).chunks_exact(self.stored.bytes());
                for (number, out) in numbers.zip(out.chunks_exact_mut(self.value.bytes())) {
                    let put = self.value.put(self.stored.read(number), out);
                    put.map_err(|number| self.value.beyond(tensor, number))?;
                }
            }
        }
        Ok(())
    }
}
