//! GGUF, the format of llama.cpp: one file with weights, configuration, tokenizer and template. It is read as if it were
//! an MLX repository: a `config.json` and a `tokenizer.json` are made of its metadata, and headers that describe its
//! tensors as the engine has them in memory, so that all that follows need not know the format. Nothing is trusted.
//!
//! ```text
//! *.gguf ─▶ files ─▶ header ─▶ metadata ─▶ configuration, tokenizer
//!                       └─▶ architectures ─▶ layout ─▶ Headers; bytes: blocks, k_quants ─▶ affine
//! ```

pub mod affine;
pub mod architectures;
pub mod block_type;
pub mod blocks;
mod configuration;
pub mod delta_net;
mod fields;
pub mod files;
pub mod header;
mod iq;
mod iq_grids;
mod k_quants;
pub mod layout;
pub mod metadata;
pub mod pieces;
mod pre_tokenizers;
mod rope_factors;
mod sentence_piece;
pub mod tokenizer;

use std::ops::Range;

use crate::{
    error::{Error, FileError, Unsupported},
    excerpt::excerpt,
    load_quantization::LoadQuantization,
    safetensors::Headers,
    shape::{ModelShape, READER},
    value_type::ValueType,
};
use affine::is_packed_anew;
use architectures::{ARCHITECTURES, Architecture, LONG_FACTORS, ROPE_FACTORS};
use block_type::BlockType;
use delta_net::DeltaHeads;
use fields::Fields;
use header::{GgufHeader, GgufTensor};
use layout::{Conversion, Layout};
use metadata::Metadata;

/// Longest header read of one file. A vocabulary of 260,000 tokens with its merges takes some 15 MB.
pub const MAX_HEADER_BYTES: u64 = 64 << 20;
/// Bytes of a file that are read first.
pub const FIRST_READ_BYTES: u64 = 1 << 20;

/// A model in one or several GGUF files, of which the headers were read.
#[derive(Debug)]
pub struct Gguf<'a> {
    /// Name and header of each file, in order.
    files: Vec<(String, GgufHeader<'a>)>,
    architecture: &'static Architecture,
}

/// The weights of a model as the engine has them in memory.
#[derive(Clone, Debug)]
pub struct ConvertedWeights {
    /// What they are.
    pub headers: Headers,
    /// How each file becomes them, in the order of the headers' files.
    pub layouts: Vec<Layout>,
}

impl<'a> Gguf<'a> {
    /// A model of these files.
    pub fn new(files: Vec<(String, GgufHeader<'a>)>) -> Result<Self, Error> {
        let Some((name, first)) = files.first() else {
            return Err(FileError::Missing { file: "a file in GGUF".to_owned() }.into());
        };
        let bad = |problem: String| FileError::BadGguf { file: name.clone(), problem };
        let parts = first.metadata.whole("split.count").unwrap_or(1).max(1);
        if parts != files.len() as u64 {
            return Err(bad(format!("it is one of {parts} parts, and {} are there", files.len())).into());
        }
        let Some(found) = first.metadata.text("general.architecture") else {
            return Err(bad("its metadata has no general.architecture".to_owned()).into());
        };
        let Some(architecture) = ARCHITECTURES.iter().find(|own| own.name == found) else {
            let known = ARCHITECTURES.iter().map(|own| own.name).collect::<Vec<_>>().join(", ");
            let found = excerpt(found);
            return Err(refuse(
                "general.architecture",
                format!("{found:?} is not supported as GGUF; supported are {known}"),
            )
            .into());
        };
        Ok(Self { files, architecture })
    }

    /// What a person can be shown of files that are sound and that the engine does not run.
    pub fn shape_by_names(files: &[(String, GgufHeader<'_>)]) -> ModelShape {
        let tensors = files.iter().flat_map(|(_, header)| &header.tensors);
        let head_bytes = tensors.fold(0_u64, |sum, tensor| sum.saturating_add(tensor.bytes));
        let architecture = files.first().and_then(|(_, header)| header.metadata.text("general.architecture"));
        let architecture = excerpt(architecture.unwrap_or_default());
        ModelShape { architecture, head_bytes, reader: READER, ..ModelShape::default() }
    }

    fn metadata(&self) -> &Metadata<'a> {
        // Never without a file, by construction.
        &self.files[0].1.metadata
    }

    fn tensors(&self) -> impl Iterator<Item = &GgufTensor> {
        self.files.iter().flat_map(|(_, header)| &header.tensors)
    }

    fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.tensors().find(|tensor| tensor.name == name)
    }

    /// The file, by its number, and the bytes of it that the configuration needs beside the metadata.
    pub fn rope_factors(&self) -> Option<(usize, Range<u64>)> {
        let own = |tensors: &[GgufTensor]| {
            let tensor =
                tensors.iter().find(|tensor| [ROPE_FACTORS, LONG_FACTORS].contains(&tensor.name.as_str()))?;
            let length = tensor.bytes.min(rope_factors::MAX_BYTES);
            Some(tensor.begin..tensor.begin + length)
        };
        self.files.iter().enumerate().find_map(|(at, (_, header))| Some((at, own(&header.tensors)?)))
    }

    /// The `config.json` that belongs to the weights; `rope_factors` are the bytes of [`Self::rope_factors`].
    pub fn configuration(&self, rope_factors: Option<&[u8]>) -> Result<Vec<u8>, Error> {
        configuration::of(self, rope_factors).map(|config| config.to_string().into_bytes())
    }

    /// The weights as the engine has them where it computes in `value`; [`Self::value_type`] is what agents report. What is
    /// packed anew has 8 bits, or as many as `quantization` says.
    pub fn weights(
        &self,
        value: ValueType,
        quantization: Option<LoadQuantization>,
    ) -> Result<ConvertedWeights, Error> {
        let conversion = Conversion {
            architecture: self.architecture,
            layers: Fields::new(self).layers()?,
            heads: DeltaHeads::read(self)?,
            value,
            anew: quantization,
        };
        let (mut headers, mut layouts) = (Headers::default(), Vec::new());
        for (name, header) in &self.files {
            let (layout, entries) = Layout::new(&conversion, &header.tensors)?;
            headers.add_converted(name, entries)?;
            layouts.push(layout);
        }
        Ok(ConvertedWeights { headers, layouts })
    }

    /// What the engine computes in. Of a file without packed weights, the type of most of its bytes; else BF16, as in most
    /// MLX repositories, though scales of GGUF are F16: activations of some models outgrow F16, and on a CPU MLX sums
    /// products of packed weights in the type itself, of which nothing is left in F16. A scale is then off by up to 0.2 %,
    /// which adds 2 % to the error that eight bits have already.
    pub fn value_type(&self) -> ValueType {
        let bytes = |kind: BlockType| {
            let own = self.tensors().filter(|tensor| tensor.element.block_type() == Some(kind));
            own.fold(0_u64, |sum, tensor| sum.saturating_add(tensor.bytes))
        };
        let [f32, f16, bf16] = [BlockType::F32, BlockType::F16, BlockType::Bf16].map(bytes);
        match self.tensors().all(|tensor| tensor.element.block_type().is_some_and(BlockType::is_plain)) {
            true if f32 > f16.max(bf16) => ValueType::F32,
            true if f16 > bf16 => ValueType::F16,
            _ => ValueType::Bf16,
        }
    }

    /// What a person should know of the format.
    pub fn note(&self) -> String {
        let (mut all, mut anew) = (0_u64, 0_u64);
        for tensor in self.tensors() {
            all = all.saturating_add(tensor.bytes);
            if tensor.element.block_type().is_some_and(is_packed_anew) && tensor.shape.len() > 1 {
                anew = anew.saturating_add(tensor.bytes);
            }
        }
        let share = (anew.saturating_mul(100)).div_ceil(all.max(1));
        let anew = match share {
            0 => String::new(),
            share => format!(", and {share} % of it is packed anew in 8 bits"),
        };
        format!(
            "the weights are GGUF and are converted on loading{anew}: speed and memory differ from an MLX repository's"
        )
    }
}

/// A refusal of what the metadata says.
fn refuse(key: &str, reason: String) -> Unsupported {
    let remedy = "use the model as an MLX repository".to_owned();
    Unsupported { place: format!("GGUF metadata {key}"), reason, remedy }
}

#[cfg(test)]
mod tests;
