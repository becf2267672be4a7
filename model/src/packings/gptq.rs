//! GPTQ of 4 and 8 bits: a word has neighbouring inputs of an output, as MLX's have. Inputs that are grouped in the order
//! of activations (`desc_act`) have no groups of neighbours, and are refused.

use std::io;

use super::{
    PackingFormat,
    column_groups::{ColumnGroups, ConvertedValues, PackedMatrix, lanes, unpacked},
    conversion::Conversion,
    layout::{Part, Window},
    matrix::{ReadAt, StoredMatrix},
    settings::{QuantizationSettings, REMEDY, short},
    transposed::TransposedMatrix,
};
use crate::error::{Error, Unsupported};
use serde_json::Value;

pub(super) const FORMAT: PackingFormat = PackingFormat { method: "gptq", note: None, convert };

fn convert(settings: &QuantizationSettings<'_>, conversion: &mut Conversion<'_>) -> Result<(), Error> {
    let bits = settings.bits("bits", &[4, 8])?;
    if settings.value("desc_act").is_some_and(|value| *value != Value::Bool(false)) {
        let reason = "columns in the order of activations are not supported";
        return Err(Unsupported::field("quantization_config.desc_act", reason, REMEDY).into());
    }
    settings.only("checkpoint_format", &["gptq", "gptq_v2"])?;
    // The first version stores zero points less one.
    let is_second = settings.value("checkpoint_format").is_some_and(|format| short(format).contains("v2"));
    let zero_offset = u32::from(!is_second);
    ColumnGroups { bits, lanes: lanes(bits), zero_offset, beside: &[".g_idx"], values }.convert(conversion)
}

fn values(
    conversion: &Conversion<'_>,
    packing: &ColumnGroups,
    stored: &PackedMatrix<'_>,
) -> Result<ConvertedValues, Error> {
    let (words, outputs) = stored.size;
    let inputs = unpacked(conversion, stored, words, packing.lanes.len() as u64)?;
    let name = format!("{}.g_idx", stored.path);
    let order = match conversion.source.get(&name) {
        None => None,
        Some(entry) => {
            conversion.check_words(&name, entry, &[inputs])?;
            if stored.groups == 0 || !inputs.is_multiple_of(stored.groups) {
                let expected = format!("of inputs that {} groups share evenly", stored.groups);
                return Err(conversion.wrong(&name, entry, &expected).into());
            }
            let from = StoredMatrix { row_bytes: 4, ..conversion.matrix(entry) };
            Some(GroupOrder { from, inputs, group_size: inputs / stored.groups })
        }
    };
    let values = TransposedMatrix { from: conversion.matrix(stored.entry), element_bytes: 4 };
    Ok(ConvertedValues { outputs, words, part: Part::Words(GroupedWords { values, order }) })
}

/// Words that are as MLX has them, where neighbours are grouped.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct GroupedWords {
    values: TransposedMatrix,
    order: Option<GroupOrder>,
}

/// The group of each input, as the file has it.
#[derive(Clone, Debug, PartialEq)]
struct GroupOrder {
    from: StoredMatrix,
    inputs: u64,
    /// Inputs of a group.
    group_size: u64,
}

impl GroupedWords {
    pub fn convert(
        &self,
        tensor: &str,
        window: &Window,
        out: &mut [u8],
        read: &ReadAt<'_>,
    ) -> io::Result<()> {
        if let Some(order) = &self.order {
            order.check(tensor, read)?;
        }
        self.values.convert(window, out, read)
    }
}

impl GroupOrder {
    /// That every group is of neighbours.
    fn check(&self, tensor: &str, read: &ReadAt<'_>) -> io::Result<()> {
        for inputs in self.from.parts(0..self.inputs, &(0..4), 1) {
            let tile = self.from.read(inputs.clone(), 0..4, read)?;
            for input in inputs.clone() {
                let group = tile.word(input - inputs.start, 0);
                if u64::from(group) != input / self.group_size {
                    let problem = format!(
                        "tensor {tensor} has input {input} in group {group} (g_idx), not in group {}: columns in the order of activations are not supported; {REMEDY}",
                        input / self.group_size
                    );
                    return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
                }
            }
        }
        Ok(())
    }
}
