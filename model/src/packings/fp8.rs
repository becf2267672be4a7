//! DeepSeek's fp8: numbers of 8 bits, of which a block of 128 × 128 shares a scale, or a whole matrix does. MLX computes
//! with no such blocks, so they become BF16, as in mlx-lm.

use std::io;

use super::{
    PackingFormat,
    conversion::Conversion,
    layout::{Part, Window},
    matrix::{ReadAt, StoredMatrix},
    settings::{QuantizationSettings, short},
};
use crate::{
    error::{Error, FileError},
    float16::{from_f16, to_bf16},
    safetensors::{Dtype, Entry},
    value_type::ValueType,
};

pub(super) const FORMAT: PackingFormat = PackingFormat { method: "fp8", note: Some(NOTE), convert };

/// What a person should know of it.
const NOTE: &str = "the weights are fp8 and are converted to BF16 on loading: in memory they take twice the bytes of the files";

/// Rows and columns of a block.
const BLOCK: u64 = 128;
/// The type of the numbers: a sign, four bits of exponent and three of fraction.
const FLOAT8: Dtype = Dtype::Other("F8_E4M3", 1);
/// The largest number that 8 bits are read as.
const MAX_NUMBER: f32 = 480.0;

fn convert(settings: &QuantizationSettings<'_>, conversion: &mut Conversion<'_>) -> Result<(), Error> {
    settings.only("fmt", &["e4m3"])?;
    if let Some(block) = settings.value("weight_block_size")
        && *block != serde_json::json!([BLOCK, BLOCK])
    {
        return Err(settings
            .refuse("weight_block_size", &short(block), &format!("[{BLOCK}, {BLOCK}]"))
            .into());
    }
    let source = conversion.source;
    for (name, entry) in source.iter() {
        let is_float8 = |weight: &str| source.get(weight).is_some_and(|entry| entry.dtype == FLOAT8);
        if name.strip_suffix("_scale_inv").is_some_and(is_float8) {
            continue;
        }
        let scales_name = format!("{name}_scale_inv");
        match source.get(&scales_name).filter(|_| entry.dtype == FLOAT8) {
            Some(scales) => {
                let blocks = blocks(conversion, entry, (&scales_name, scales))?;
                let part = (entry.file, Part::Blocks(blocks));
                conversion.add(name.to_owned(), Dtype::BF16, entry.shape.clone(), part)?;
            }
            None => conversion.keep(name, entry)?,
        }
    }
    Ok(())
}

/// The blocks of a tensor, by the shape of its scales.
fn blocks(
    conversion: &Conversion<'_>,
    entry: &Entry,
    scales: (&str, &Entry),
) -> Result<ScaledBlocks, FileError> {
    let (name, scales) = scales;
    let columns = entry.shape.last().copied().unwrap_or(1);
    let size = match (&entry.shape[..], &scales.shape[..]) {
        ([rows, columns], own) if *own == [rows.div_ceil(BLOCK), columns.div_ceil(BLOCK)] => (BLOCK, BLOCK),
        (_, [] | [1]) => (u64::MAX, columns),
        ([experts, rows, columns], [each, 1, 1]) if experts == each => (*rows, *columns),
        (shape, _) => {
            let problem = format!(
                "it has shape {:?}, which is neither one for each {BLOCK} × {BLOCK} of {shape:?} nor one for all",
                scales.shape
            );
            let file = conversion.source.file_of(scales).to_owned();
            return Err(FileError::BadTensor { file, tensor: crate::safetensors::shorten(name), problem });
        }
    };
    let value = conversion.value(name, scales, &scales.shape)?;
    let per_row = columns.div_ceil(size.1.max(1));
    let scales = StoredMatrix { row_bytes: per_row * value.bytes() as u64, ..conversion.matrix(scales) };
    Ok(ScaledBlocks { numbers: conversion.matrix(entry), scales, value, rows: size.0, columns: size.1 })
}

/// Numbers of 8 bits, in blocks that share a scale.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ScaledBlocks {
    numbers: StoredMatrix,
    /// A row of scales for each row of blocks.
    scales: StoredMatrix,
    /// Type of the scales.
    value: ValueType,
    /// Rows of a block.
    rows: u64,
    /// Columns of a block.
    columns: u64,
}

impl ScaledBlocks {
    pub fn convert(
        &self,
        tensor: &str,
        window: &Window,
        out: &mut [u8],
        read: &ReadAt<'_>,
    ) -> io::Result<()> {
        let width = self.value.bytes() as u64;
        let blocks = window.columns.start / self.columns..window.columns.end.div_ceil(self.columns);
        let scale_bytes = blocks.start * width..blocks.end * width;
        let numbers: [f32; 256] = std::array::from_fn(|bits| number(bits as u8));
        let mut rows_out = out.chunks_exact_mut(window.width() as usize * 2);
        for rows in self.numbers.parts(window.rows.clone(), &window.columns, 1) {
            let tile = self.numbers.read(rows.clone(), window.columns.clone(), read)?;
            let block_rows = rows.start / self.rows..rows.end.div_ceil(self.rows);
            let scales = self.scales.read(block_rows.clone(), scale_bytes.clone(), read)?;
            for (row, out) in rows.clone().zip(rows_out.by_ref()) {
                let scales = scales.row(row / self.rows - block_rows.start);
                let (mut bytes, mut out) = (tile.row(row - rows.start), out);
                for (block, scale) in blocks.clone().zip(scales.chunks_exact(width as usize)) {
                    let scale = self.value.read(scale);
                    // Then every number has a finite value.
                    if !ValueType::Bf16.round(MAX_NUMBER * scale).is_finite() {
                        return Err(ValueType::Bf16.beyond(tensor, scale));
                    }
                    let first = window.columns.start.max(block * self.columns);
                    let end = (block + 1).saturating_mul(self.columns).min(window.columns.end);
                    let (own, others) = bytes.split_at((end - first) as usize);
                    let (own_out, others_out) = out.split_at_mut(own.len() * 2);
                    for (byte, out) in own.iter().zip(own_out.chunks_exact_mut(2)) {
                        out.copy_from_slice(&to_bf16(numbers[usize::from(*byte)] * scale).to_le_bytes());
                    }
                    (bytes, out) = (others, others_out);
                }
            }
        }
        Ok(())
    }
}

/// The number of these 8 bits: those of a half with a smaller exponent. As in MLX, what is no number is ±480.
fn number(bits: u8) -> f32 {
    let magnitude = from_f16(u16::from(bits & 127) << 7) * 256.0;
    if bits > 127 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_eight_bits_are_those_of_the_format() {
        for (bits, expected) in [
            (0x00, 0.0),
            (0x01, 0.001_953_125),
            (0x07, 0.013_671_875),
            (0x08, 0.015_625),
            (0x38, 1.0),
            (0xb9, -1.125),
            (0x7e, 448.0),
            (0xfe, -448.0),
            (0x7f, MAX_NUMBER),
        ] {
            assert_eq!(number(bits), expected, "{bits:#x}");
        }
        assert!(number(0x80).is_sign_negative());
    }
}
