//! compressed-tensors, of which integers of 4 and 8 bits are read (`pack-quantized`): packed as MLX has them, with zero
//! points in place of biases.

use super::{
    Format,
    biases::{Biases, Zeros},
    column_groups::lanes,
    conversion::Conversion,
    layout::Part,
    settings::{REMEDY, Settings, refuse, short},
};
use crate::{
    error::{Error, Unsupported},
    safetensors::{Dtype, shorten},
};
use serde_json::Value;

pub(super) const FORMAT: Format = Format { method: "compressed-tensors", convert };

/// What it has beside packed values.
const FIELDS: &[&str] = &[".weight_scale", ".weight_zero_point", ".weight_shape"];

fn convert(settings: &Settings<'_>, conversion: &mut Conversion<'_>) -> Result<(), Error> {
    settings.only("format", &["pack-quantized"])?;
    let bits = bits(settings)?;
    let (source, share) = (conversion.source, u64::from(32 / bits));
    for (name, entry) in source.iter() {
        let is_packed = |path: &str| source.contains(&format!("{path}.weight_packed"));
        if FIELDS.iter().filter_map(|field| name.strip_suffix(field)).any(is_packed) {
            continue;
        }
        let Some(path) = name.strip_suffix(".weight_packed") else {
            conversion.keep(name, entry);
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
            None => Zeros::All(1 << (bits - 1)),
            Some(zeros) => {
                conversion.check_words(&zeros_name, zeros, &[outputs.div_ceil(share), groups])?;
                Zeros::Packed { from: conversion.matrix(zeros), bits, lanes: lanes(bits), offset: 0 }
            }
        };
        let biases = Biases { scales: conversion.matrix(scales), value, transposed: false, zeros };
        conversion.keep_as(format!("{path}.weight"), Dtype::U32, entry);
        conversion.keep_as(format!("{path}.scales"), scales.dtype.clone(), scales);
        let part = (scales.file, Part::Biases(biases));
        conversion.add(format!("{path}.biases"), value.dtype(), vec![outputs, groups], part);
    }
    Ok(())
}

/// Bits of an integer, the same in all groups of modules.
fn bits(settings: &Settings<'_>) -> Result<u32, Unsupported> {
    let groups = settings.value("config_groups").and_then(Value::as_object);
    let mut all = groups.into_iter().flatten().filter_map(|(_, group)| group.get("weights")?.as_object());
    let Some(first) = all.next() else {
        let field = "config_groups";
        return Err(refuse(field, "without weights", "a group whose weights have num_bits"));
    };
    let found = |field: &str| first.get(field).unwrap_or(&Value::Null);
    if let Some(other) = all.find(|other| other.get("num_bits") != first.get("num_bits")) {
        let bits = [first, other].map(|group| short(group.get("num_bits").unwrap_or(&Value::Null)));
        return Err(refuse(
            "config_groups",
            &format!("of {} bits", bits.join(" and of ")),
            "one number of bits",
        ));
    }
    let first = Settings::new(first);
    first
        .only("type", &["int"])
        .map_err(|_| refuse("config_groups", &format!("of type {}", short(found("type"))), "int"))?;
    first
        .bits("num_bits", &[4, 8])
        .map_err(|_| refuse("config_groups", &format!("of {} bits", short(found("num_bits"))), "4 or 8 bits"))
}
