//! Biases of MLX's affine packing, made of the zero points that others have: an integer less its zero point, times the
//! scale, is the integer times the scale, plus a bias that is the negative zero point times the scale.

use std::{io, ops::Range};

use super::{
    layout::Window,
    matrix::{ReadAt, StoredMatrix},
};
use crate::value_type::ValueType;

/// A bias for each group.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Biases {
    pub scales: StoredMatrix,
    /// Type of the scales, and of the biases.
    pub value: ValueType,
    /// Whether the file has a row of scales for each group, not for each output.
    pub transposed: bool,
    pub zeros: ZeroPoints,
}

/// Integers that stand for zero.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ZeroPoints {
    /// The same in each group.
    All(u32),
    /// One for each group; those of neighbouring outputs share a word.
    Packed {
        from: StoredMatrix,
        bits: u32,
        /// Where in a word each of them is, as many as there are.
        lanes: &'static [u32],
        /// How much less they are stored as.
        offset: u32,
    },
}

impl Biases {
    pub fn convert(
        &self,
        tensor: &str,
        window: &Window,
        out: &mut [u8],
        read: &ReadAt<'_>,
    ) -> io::Result<()> {
        let (rows, groups, width) = (&window.rows, &window.columns, self.value.bytes());
        let (outer, inner) = if self.transposed { (groups, rows) } else { (rows, groups) };
        let bytes = inner.start * width as u64..inner.end * width as u64;
        for part in self.scales.parts(outer.clone(), &bytes, 1) {
            let scales = self.scales.read(part.clone(), bytes.clone(), read)?;
            let zero = match self.transposed {
                true => self.zeros(rows, &part, read)?,
                false => self.zeros(&part, groups, read)?,
            };
            for x in part.clone() {
                let scales = scales.row(x - part.start).chunks_exact(width);
                for (y, scale) in inner.clone().zip(scales) {
                    let (row, group) = if self.transposed { (y, x) } else { (x, y) };
                    let bias = -(zero(row, group) as f32) * self.value.read(scale);
                    let place = (row - rows.start) * window.width() + group - groups.start;
                    let put = self.value.put(bias, &mut out[place as usize * width..][..width]);
                    put.map_err(|number| self.value.beyond(tensor, number))?;
                }
            }
        }
        Ok(())
    }

    /// The zero point of a row and a group of these.
    fn zeros(
        &self,
        rows: &Range<u64>,
        groups: &Range<u64>,
        read: &ReadAt<'_>,
    ) -> io::Result<Box<dyn Fn(u64, u64) -> u32>> {
        let (from, bits, lanes, offset) = match self.zeros {
            ZeroPoints::All(zero) => return Ok(Box::new(move |_, _| zero)),
            ZeroPoints::Packed { from, bits, lanes, offset } => (from, bits, lanes, offset),
        };
        let share = lanes.len() as u64;
        let words = rows.start / share..rows.end.div_ceil(share);
        let (first_word, first_group, transposed) = (words.start, groups.start, self.transposed);
        let (outer, inner) = if transposed { (groups.clone(), words) } else { (words, groups.clone()) };
        let tile = from.read(outer, inner.start * 4..inner.end * 4, read)?;
        Ok(Box::new(move |row, group| {
            let (word, group) = (row / share - first_word, group - first_group);
            let word = if transposed { tile.word(group, word) } else { tile.word(word, group) };
            (word >> (lanes[(row % share) as usize] * bits) & ((1 << bits) - 1)) + offset
        }))
    }
}
