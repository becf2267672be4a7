//! compressed-tensors, of which integers of 4 and 8 bits are read (`pack-quantized`): packed as MLX has them, with zero
//! points in place of biases.

use super::{
    PackingFormat,
    biases::{Biases, ZeroPoints},
    column_groups::lanes,
    conversion::Conversion,
    layout::Part,
    settings::{QuantizationSettings, REMEDY},
};
use crate::{
    error::{Error, Unsupported},
    excerpt::excerpt,
    safetensors::{Dtype, shorten},
};
use serde_json::Value;

pub(super) const FORMAT: PackingFormat = PackingFormat { method: "compressed-tensors", note: None, convert };

/// What it has beside packed values.
const FIELDS: &[&str] = &[".weight_scale", ".weight_zero_point", ".weight_shape"];

fn convert(settings: &QuantizationSettings<'_>, conversion: &mut Conversion<'_>) -> Result<(), Error> {
    settings.only("format", &["pack-quantized"])?;
    let bits = bits(settings)?;
    let (source, share) = (conversion.source, u64::from(32 / bits));
    for (name, entry) in source.iter() {
        let is_packed = |path: &str| source.contains(&format!("{path}.weight_packed"));
        if FIELDS.iter().filter_map(|field| name.strip_suffix(field)).any(is_packed) {
            continue;
        }
        let Some(path) = name.strip_suffix(".weight_packed") else {
            conversion.keep(name, entry)?;
            continue;
        };
        if source.contains(&format!("{path}.weight_g_idx")) {
            let reason = "its columns are in the order of activations (actorder), which is not supported";
            return Err(Unsupported::tensor(&shorten(&format!("{path}.weight_g_idx")), reason, REMEDY).into());
        }
        let (outputs, _) = conversion.words(name, entry)?;
        let scales_name = format!("{path}.weight_scale");
        let scales = conversion.find(&scales_name)?;
        let groups = scales.shape.last().copied().unwrap_or(0);
        let value = conversion.value(&scales_name, scales, &[outputs, groups])?;
        let zeros_name = format!("{path}.weight_zero_point");
        let zeros = match source.get(&zeros_name) {
            None => ZeroPoints::All(1 << (bits - 1)),
            Some(zeros) => {
                conversion.check_words(&zeros_name, zeros, &[outputs.div_ceil(share), groups])?;
                ZeroPoints::Packed { from: conversion.matrix(zeros), bits, lanes: lanes(bits), offset: 0 }
            }
        };
        let biases = Biases { scales: conversion.matrix(scales), value, transposed: false, zeros };
        conversion.keep_as(format!("{path}.weight"), Dtype::U32, entry)?;
        conversion.keep_as(format!("{path}.scales"), scales.dtype.clone(), scales)?;
        let part = (scales.file, Part::Biases(biases));
        conversion.add(format!("{path}.biases"), value.dtype(), vec![outputs, groups], part)?;
    }
    Ok(())
}

/// Bits of an integer, the same in all groups of modules.
fn bits(settings: &QuantizationSettings<'_>) -> Result<u32, Unsupported> {
    let groups = settings.value("config_groups").and_then(Value::as_object);
    let mut all = None;
    for (name, group) in groups.into_iter().flatten() {
        let Some(weights) = group.get("weights").and_then(Value::as_object) else { continue };
        let name = excerpt(name);
        let weights =
            QuantizationSettings::new(&format!("{}.config_groups.{name}.weights", settings.path()), weights);
        weights.only("type", &["int"])?;
        let bits = weights.bits("num_bits", &[4, 8])?;
        if let Some(other) = all.replace(bits).filter(|other| *other != bits) {
            let found = format!("of {other} and of {bits} bits");
            return Err(settings.refuse("config_groups", &found, "one number of bits"));
        }
    }
    all.ok_or_else(|| {
        settings.refuse("config_groups", "without weights", "a group whose weights have num_bits")
    })
}
