//! AWQ of 4 bits, as AutoAWQ writes it for matrix products (`gemm`): a word has eight neighbouring outputs of an input, the
//! even ones before the odd ones.

use std::io;

use super::{
    PackingFormat,
    column_groups::{ColumnGroups, ConvertedValues, PackedMatrix, unpacked},
    conversion::Conversion,
    layout::{Part, Window},
    matrix::{ReadAt, StoredMatrix},
    settings::QuantizationSettings,
};
use crate::error::Error;

pub(super) const FORMAT: PackingFormat = PackingFormat { method: "awq", note: None, convert };

/// Bits of an integer.
const BITS: u32 = 4;
/// Integers of a word.
const SHARE: u64 = 8;
/// Where in a word each output is.
const LANES: &[u32] = &[0, 4, 1, 5, 2, 6, 3, 7];

fn convert(settings: &QuantizationSettings<'_>, conversion: &mut Conversion<'_>) -> Result<(), Error> {
    if settings.value("bits").is_some() {
        settings.bits("bits", &[BITS])?;
    }
    settings.only("version", &["gemm"])?;
    ColumnGroups { bits: BITS, lanes: LANES, zero_offset: 0, beside: &[], values }.convert(conversion)
}

fn values(
    conversion: &Conversion<'_>,
    _: &ColumnGroups,
    stored: &PackedMatrix<'_>,
) -> Result<ConvertedValues, Error> {
    let (inputs, packed) = stored.size;
    if !inputs.is_multiple_of(SHARE) {
        let name = format!("{}.qweight", stored.path);
        let expected = format!("of rows that are a multiple of {SHARE}");
        return Err(conversion.wrong(&name, stored.entry, &expected).into());
    }
    let outputs = unpacked(conversion, stored, packed, SHARE)?;
    let part = Part::Interleaved(InterleavedWords { from: conversion.matrix(stored.entry) });
    Ok(ConvertedValues { outputs, words: inputs / SHARE, part })
}

/// Integers whose words are of eight outputs; MLX has words of eight inputs.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct InterleavedWords {
    from: StoredMatrix,
}

impl InterleavedWords {
    pub fn convert(&self, window: &Window, out: &mut [u8], read: &ReadAt<'_>) -> io::Result<()> {
        let first_packed = window.rows.start / SHARE;
        let bytes = first_packed * 4..window.rows.end.div_ceil(SHARE) * 4;
        let inputs = window.columns.start * SHARE..window.columns.end * SHARE;
        for inputs in self.from.parts(inputs, &bytes, SHARE) {
            let tile = self.from.read(inputs.clone(), bytes.clone(), read)?;
            let first = (inputs.start / SHARE - window.columns.start) as usize;
            let rows_out = out.chunks_exact_mut(window.width() as usize * 4);
            for (row, out) in window.rows.clone().zip(rows_out) {
                let (packed, lane) = (row / SHARE - first_packed, LANES[(row % SHARE) as usize]);
                let words = (0..inputs.end - inputs.start).step_by(SHARE as usize);
                for (input, out) in words.zip(out[first * 4..].chunks_exact_mut(4)) {
                    let word = (0..SHARE).fold(0, |word, own| {
                        let integer = tile.word(input + own, packed) >> (lane * BITS) & 15;
                        word | integer << (own as u32 * BITS)
                    });
                    out.copy_from_slice(&word.to_le_bytes());
                }
            }
        }
        Ok(())
    }
}
