//! Adapters: low-rank changes of a model's matrices, LoRA or DoRA, as mlx-lm and PEFT write them. A folder with
//! adapter_config.json and one safetensors file; what an adapter changes is known from both, and whether it fits a model
//! from that model's table of tensors.
//!
//! ```text
//! adapter_config.json ─▶ config ─▶ what each rank is scaled by ┐
//! *.safetensors ─▶ Headers ─▶ modules ─────────────────────────┴▶ Adapter ─▶ binding: parts of the model's tensors
//! ```

mod binding;
mod config;
mod modules;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use binding::{AdaptedTensor, Binding};
pub use modules::{AdapterModule, Factor};

use crate::{
    config::MAX_LAYERS,
    error::{Error, FileError, Unsupported},
    excerpt::excerpt,
    safetensors::Headers,
    shape::{ModelShape, READER},
    tensors::{Role, tensor_role},
};

/// The file that says what an adapter is.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// Files with its weights: of mlx-lm and of PEFT.
pub const ADAPTER_WEIGHTS: [&str; 2] = ["adapters.safetensors", "adapter_model.safetensors"];
/// Longest adapter_config.json that is read; real ones have some kilobytes.
pub const MAX_ADAPTER_CONFIG_BYTES: u64 = 1 << 20;

/// What an adapter is to a matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AdapterKind {
    /// A product of two narrow matrices is added.
    #[default]
    Lora,
    /// The same, and each row of the sum has a length of its own.
    Dora,
    /// A value from a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

impl AdapterKind {
    /// The name people know it by.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lora => "LoRA",
            Self::Dora => "DoRA",
            Self::Unknown => "unknown",
        }
    }
}

/// Sizes of an adapter, as agents report them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AdapterShape {
    /// What it is.
    pub kind: AdapterKind,
    /// The widest of its products.
    pub rank: u32,
    /// Layers that its model must have at least.
    #[schemars(range(max = MAX_LAYERS))]
    pub layers: u32,
    /// Matrices that it changes.
    pub modules: u32,
    /// Rows of the longest of them.
    pub widest: u64,
    /// Bytes of its weights.
    pub bytes: u64,
}

/// An adapter, from its configuration and the header of its weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// What it is.
    pub kind: AdapterKind,
    /// The matrices that it changes, by path.
    pub modules: Vec<AdapterModule>,
    /// Bytes of its weights.
    pub bytes: u64,
}

impl Adapter {
    /// Reads one. An error names the file and the field or tensor.
    pub fn read(config: &[u8], headers: &Headers) -> Result<Self, Error> {
        let config = config::AdapterConfig::parse(config)?;
        let modules = modules::modules(&config, headers)?;
        let bytes = headers.iter().fold(0_u64, |sum, (_, entry)| sum.saturating_add(entry.bytes()));
        let kind = config.kind();
        for module in &modules {
            let Some(Role::Layer(layer)) = tensor_role(&module.path) else {
                let reason = "an adapter of what lies outside the layers is not supported";
                let remedy = "train one of the layers alone, or fuse it into the model";
                return Err(Unsupported::tensor(&excerpt(&module.path), reason, remedy).into());
            };
            if layer >= MAX_LAYERS {
                let problem = format!("layer {layer} is beyond the limit of {MAX_LAYERS} layers");
                return Err(FileError::BadAdapter { problem }.into());
            }
        }
        Ok(Self { kind, modules, bytes })
    }

    /// Its sizes.
    pub fn shape(&self) -> AdapterShape {
        let layer = |module: &AdapterModule| match tensor_role(&module.path) {
            Some(Role::Layer(layer)) => layer.saturating_add(1),
            _ => 0,
        };
        let modules = || self.modules.iter();
        AdapterShape {
            kind: self.kind,
            rank: modules().map(|module| module.rank).max().unwrap_or(0) as u32,
            layers: modules().map(layer).max().unwrap_or(0),
            modules: self.modules.len() as u32,
            widest: modules().map(|module| module.outputs).max().unwrap_or(0),
            bytes: self.bytes,
        }
    }
}

impl ModelShape {
    /// Of the files of an adapter. One that no engine loads is a shape with the reason.
    pub fn read_adapter(config: &[u8], headers: &Headers) -> Result<Self, FileError> {
        let parameters = headers.iter().fold(0_u64, |sum, (_, entry)| sum.saturating_add(entry.elements()));
        let shape = Self { reader: READER, parameters, ..Self::default() };
        Ok(match Adapter::read(config, headers) {
            Ok(adapter) => Self {
                architecture: adapter.kind.name().to_lowercase(),
                head_bytes: adapter.bytes,
                adapter: Some(adapter.shape()),
                ..shape
            },
            Err(why) => Self {
                architecture: AdapterKind::Lora.name().to_lowercase(),
                adapter: Some(AdapterShape::default()),
                unsupported: Some(why.to_string()),
                ..shape
            },
        })
    }
}

#[cfg(test)]
mod tests;
