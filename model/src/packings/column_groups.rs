//! What AWQ and GPTQ have in common: a matrix is stored with its inputs as rows, and a group is some rows of a column.
//! MLX has it the other way round, so all of it is transposed.

use super::{
    biases::{Biases, ZeroPoints},
    conversion::Conversion,
    layout::Part,
    transposed::TransposedMatrix,
};
use crate::{
    error::{Error, FileError},
    safetensors::{Dtype, Entry},
    value_type::ValueType,
};

/// The places of integers in a word, one after the other.
const IN_ORDER: [u32; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

/// Where integers of so many bits are in a word.
pub(super) fn lanes(bits: u32) -> &'static [u32] {
    IN_ORDER.get(..(32 / bits) as usize).unwrap_or(&IN_ORDER)
}

/// How a packing differs from another one.
pub(super) struct ColumnGroups {
    /// Bits of an integer.
    pub bits: u32,
    /// Where in a word the zero points of neighbouring outputs are.
    pub lanes: &'static [u32],
    /// How much less zero points are stored as.
    pub zero_offset: u32,
    /// What a tensor's name ends with that is read with `qweight`, besides scales and zero points.
    pub beside: &'static [&'static str],
    /// The integers of a matrix.
    pub values: fn(&Conversion<'_>, &Self, &PackedMatrix<'_>) -> Result<ConvertedValues, Error>,
}

/// The packed integers of a matrix, as they are stored.
pub(super) struct PackedMatrix<'a> {
    /// The name of the matrix, without `.qweight`.
    pub path: &'a str,
    pub entry: &'a Entry,
    /// Rows and columns of it.
    pub size: (u64, u64),
    /// Groups of a column.
    pub groups: u64,
}

/// The same as MLX has them.
pub(super) struct ConvertedValues {
    pub outputs: u64,
    /// Words of an output.
    pub words: u64,
    pub part: Part,
}

impl ColumnGroups {
    /// Adds every tensor. What is not packed is converted to the type of the scales, as in mlx-lm.
    pub fn convert(&self, conversion: &mut Conversion<'_>) -> Result<(), Error> {
        let source = conversion.source;
        let is_packed = |path: &str| source.contains(&format!("{path}.qweight"));
        let mut value = None;
        for (name, entry) in source.iter() {
            if value.is_none() && name.strip_suffix(".scales").is_some_and(is_packed) {
                value = Some(conversion.value(name, entry, &entry.shape)?);
            }
        }
        for (name, entry) in source.iter() {
            let fields = [".scales", ".qzeros"].iter().chain(self.beside);
            match (name.strip_suffix(".qweight"), value) {
                (Some(path), _) => self.matrix(conversion, (name, path, entry), value)?,
                _ if fields.filter_map(|field| name.strip_suffix(field)).any(is_packed) => {}
                (None, Some(value)) => conversion.keep_in(value, name, entry)?,
                (None, None) => conversion.keep(name, entry)?,
            }
        }
        Ok(())
    }

    fn matrix(
        &self,
        conversion: &mut Conversion<'_>,
        (name, path, entry): (&str, &str, &Entry),
        value: Option<ValueType>,
    ) -> Result<(), Error> {
        let size = conversion.words(name, entry)?;
        let (scales_name, zeros_name) = (format!("{path}.scales"), format!("{path}.qzeros"));
        let scales = conversion.find(&scales_name)?;
        let groups = scales.shape.first().copied().unwrap_or(0);
        let stored = PackedMatrix { path, entry, size, groups };
        let ConvertedValues { outputs, words, part } = (self.values)(conversion, self, &stored)?;
        let own = conversion.value(&scales_name, scales, &[groups, outputs])?;
        if let Some(value) = value.filter(|value| *value != own) {
            return Err(conversion
                .wrong(&scales_name, scales, &format!("{} as others", value.dtype()))
                .into());
        }
        let zeros = match conversion.source.get(&zeros_name) {
            // In the middle of the range.
            None => ZeroPoints::All(1 << (self.bits - 1)),
            Some(zeros) => {
                let share = self.lanes.len() as u64;
                conversion.check_words(&zeros_name, zeros, &[groups, outputs.div_ceil(share)])?;
                ZeroPoints::Packed {
                    from: conversion.matrix(zeros),
                    bits: self.bits,
                    lanes: self.lanes,
                    offset: self.zero_offset,
                }
            }
        };
        let from = conversion.matrix(scales);
        let biases = Biases { scales: from, value: own, transposed: true, zeros };
        let transposed = TransposedMatrix { from, element_bytes: own.bytes() as u64 };
        let shape = vec![outputs, groups];
        conversion.add(format!("{path}.weight"), Dtype::U32, vec![outputs, words], (entry.file, part))?;
        let part = (scales.file, Part::Transposed(transposed));
        conversion.add(format!("{path}.scales"), own.dtype(), shape.clone(), part)?;
        conversion.add(format!("{path}.biases"), own.dtype(), shape, (scales.file, Part::Biases(biases)))?;
        Ok(())
    }
}

/// How many there are of what shares words, so many a word.
pub(super) fn unpacked(
    conversion: &Conversion<'_>,
    stored: &PackedMatrix<'_>,
    words: u64,
    share: u64,
) -> Result<u64, FileError> {
    let beyond = || {
        let name = format!("{}.qweight", stored.path);
        conversion.wrong(&name, stored.entry, "a matrix of as many elements as 64 bits can count")
    };
    words.checked_mul(share).ok_or_else(beyond)
}
