//! Packings of Hugging Face's exports that MLX does not compute with: fp8 in blocks, compressed-tensors, AWQ and GPTQ. They
//! are read as if mlx-lm had converted them: headers describe the tensors as the engine has them in memory, so that all
//! that follows need not know the packing, and a layout makes their bytes as they are read. Nothing is trusted.
//!
//! ```text
//! config.json's quant_method ─▶ FORMATS ─▶ conversion ─▶ Headers; bytes: layout ─▶ windows of matrices
//! ```

mod awq;
mod biases;
mod cast;
mod column_groups;
mod compressed_tensors;
mod conversion;
mod fp8;
mod gptq;
pub mod layout;
mod matrix;
mod settings;
mod transposed;

use crate::{config::Document, error::Error, safetensors::Headers};
use conversion::Conversion;
use layout::Layout;
use settings::QuantizationSettings;

/// A packing and how it is converted.
struct PackingFormat {
    /// `quant_method` of config.json.
    method: &'static str,
    /// What a person should know of it.
    note: Option<&'static str>,
    /// Adds every tensor of the files, as it is or converted.
    convert: fn(&QuantizationSettings<'_>, &mut Conversion<'_>) -> Result<(), Error>,
}

/// Every packing that is converted.
const FORMATS: &[PackingFormat] = &[fp8::FORMAT, compressed_tensors::FORMAT, awq::FORMAT, gptq::FORMAT];

/// The weights of a model as the engine has them in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvertedWeights {
    /// What they are. Offsets are counted from the start of a file, and what is converted lies behind its end.
    pub headers: Headers,
    /// How the files become them.
    pub layout: Layout,
    /// What a person should know of the conversion.
    pub note: Option<&'static str>,
}

/// Whether tensors of this `quant_method` are converted.
pub(crate) fn is_converted(method: &str) -> bool {
    FORMATS.iter().any(|format| format.method == method)
}

/// The names of these methods.
pub(crate) fn list() -> String {
    FORMATS.iter().map(|format| format.method).collect::<Vec<_>>().join(", ")
}

/// The weights as the engine has them; `None` where the files have them so.
pub(crate) fn convert(document: &Document, headers: &Headers) -> Result<Option<ConvertedWeights>, Error> {
    let Some((method, fields)) = document.other_quantisation() else { return Ok(None) };
    let Some(format) = FORMATS.iter().find(|format| format.method == method) else { return Ok(None) };
    let mut conversion = Conversion::new(headers);
    (format.convert)(&QuantizationSettings::new("quantization_config", fields), &mut conversion)?;
    let (headers, layout) = conversion.finish();
    Ok(Some(ConvertedWeights { headers, layout, note: format.note }))
}

#[cfg(test)]
mod tests;
