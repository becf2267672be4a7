//! Model architectures of this engine: one file each, and one line in [`ARCHITECTURES`]. A model here is the
//! shard of one rank; it knows its layers, not its neighbours.

pub mod llama;
pub mod qwen3;

use std::path::{Path, PathBuf};

use mlx_rs::{Array, error::Exception};
use russet_model::{kv_quantization::KV_GROUPS, partition::RankPart};
use thiserror::Error;

use crate::{
    args::KvCacheType,
    cache::{KvCache, format::KvFormat},
    layers::{packed_batch::PackedBatch, rope::RopeError, tensor_parallel::TpGroup},
    partition::TpShard,
    weights::{Checkpoint, LoadDtype, Weights, WeightsError},
};

/// Every architecture, by the `model_type` of config.json; `wire` lists the same names for the planner.
pub const ARCHITECTURES: &[Architecture] = &[llama::ARCH, llama::MISTRAL, qwen3::ARCH];

/// How to read one architecture's configuration.
#[derive(Debug)]
pub struct Architecture {
    /// `model_type` of config.json.
    pub model_type: &'static str,
    /// Reads the configuration, without touching weights.
    pub configure: fn(&serde_json::Value) -> Result<Box<dyn Configuration>, ConfigError>,
}

/// A validated configuration.
pub trait Configuration: Send + std::fmt::Debug {
    /// Layers of the whole model.
    fn layers(&self) -> u32;
    /// Width of the hidden state, which is sent between ranks.
    fn width(&self) -> usize;
    /// Size of the vocabulary.
    fn vocabulary(&self) -> usize;
    /// Longest context, tokens.
    fn context(&self) -> u32;
    /// Checks that this many tensor ranks can share every layer.
    fn check_tensor_size(&self, members: u32) -> Result<(), ConfigError>;
    /// Format of the KV cache for a requested type.
    fn kv_format(&self, asked: KvCacheType) -> Result<KvFormat, ConfigError>;
    /// Whether the head is the embedding.
    fn tied(&self, checkpoint: &mut Checkpoint) -> Result<bool, WeightsError>;
    /// Loads one rank's shard.
    fn load(
        &self,
        part: &RankPart,
        tied: bool,
        weights: &mut Weights<'_>,
    ) -> Result<Box<dyn Model>, ModelError>;
}

/// One rank's shard of a model.
pub trait Model {
    /// An empty KV cache for each layer of this rank, in the format of [`Configuration::kv_format`].
    fn new_cache(&self, form: KvFormat) -> Vec<KvCache>;
    /// Hidden states of `tokens` (`[batch, length]`); only on the rank with the embedding.
    fn embed(&self, tokens: &Array) -> Result<Array, ModelError>;
    /// Runs this rank's layers over the positions of `batch`, together with the other tensor ranks.
    fn forward(
        &self,
        hidden: Array,
        batch: &mut PackedBatch<'_>,
        stage: &TpGroup,
    ) -> Result<Array, Exception>;
    /// Logits of hidden states; only on the rank with the head.
    fn logits(&self, hidden: &Array) -> Result<Array, ModelError>;
}

/// Why a config.json is not supported.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("cannot read {path}: {source}; a model folder needs config.json")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Invalid JSON, or fields of other types.
    #[error("config.json: {0}; copy the model again")]
    Json(String),
    /// An unsupported architecture.
    #[error(
        "config.json: model_type \"{found}\" is not supported; supported are {}",
        supported_model_types()
    )]
    ModelType {
        /// The `model_type` found.
        found: String,
    },
    /// An invalid field.
    #[error("config.json: {field} is {value}, but {needed}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// Required value.
        needed: String,
    },
    /// A size that the tensor ranks cannot share evenly.
    #[error(
        "config.json: {field} is {value}, which {members} ranks cannot share evenly; use a tensor size that divides {value}"
    )]
    Members {
        /// The field.
        field: &'static str,
        /// Its value.
        value: usize,
        /// Tensor parallel size.
        members: u32,
    },
    /// A head size for which keys and values cannot be quantised.
    #[error(
        "config.json: head_dim is {head_dim}, which groups of {} do not divide, so its keys and values cannot be quantised; use --kv-cache as-computed (spec.engine.kvCache: AsComputed)",
        KV_GROUPS.map(|group| group.to_string()).join(" or ")
    )]
    Cache {
        /// Head size.
        head_dim: usize,
    },
    /// A feature this engine does not have.
    #[error("config.json: {0} is not supported")]
    Unsupported(String),
    /// Invalid settings of the rotary embedding.
    #[error("config.json: {0}")]
    Rope(String),
}

/// Why a model cannot be built or run.
#[derive(Debug, Error)]
pub enum ModelError {
    /// Loading weights failed.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// Building the rotary embedding failed.
    #[error(transparent)]
    Rope(#[from] RopeError),
    /// MLX failed.
    #[error("MLX failed: {0}")]
    Mlx(#[from] Exception),
    /// The operation needs a part that is on another rank.
    #[error("this rank holds no {0}; the step belongs to another rank")]
    NotOnThisRank(&'static str),
}

fn supported_model_types() -> String {
    ARCHITECTURES.iter().map(|architecture| architecture.model_type).collect::<Vec<_>>().join(", ")
}

/// Reads `config.json` of a model folder.
pub fn configure(dir: &Path) -> Result<Box<dyn Configuration>, ConfigError> {
    let path = dir.join("config.json");
    let text = std::fs::read(&path).map_err(|source| ConfigError::Io { path, source })?;
    let json: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| ConfigError::Json(error.to_string()))?;
    let found = json["model_type"].as_str().unwrap_or_default();
    let architecture = ARCHITECTURES
        .iter()
        .find(|architecture| architecture.model_type == found)
        .ok_or_else(|| ConfigError::ModelType { found: found.to_owned() })?;
    check_quantisation(&json)?;
    (architecture.configure)(&json)
}

/// Affine quantisation is detected from the tensors; any other kind is refused here, because it would be
/// misread there.
fn check_quantisation(json: &serde_json::Value) -> Result<(), ConfigError> {
    let quantisation = &json["quantization"];
    if let Some(mode) = quantisation["mode"].as_str().filter(|mode| *mode != "affine") {
        return Err(ConfigError::Unsupported(format!("quantization mode \"{mode}\" (only \"affine\")")));
    }
    match json["quantization_config"]["quant_method"].as_str() {
        Some(method) if quantisation.is_null() => Err(ConfigError::Unsupported(format!(
            "quantization method \"{method}\" (only MLX's affine weights)"
        ))),
        _ => Ok(()),
    }
}

/// Loads one rank's shard; calls `on_bytes` for every read.
pub fn load(
    configuration: &dyn Configuration,
    checkpoint: &mut Checkpoint,
    part: &RankPart,
    dtype: LoadDtype,
    on_bytes: &mut dyn FnMut(u64),
) -> Result<Box<dyn Model>, ModelError> {
    let tied = configuration.tied(checkpoint)?;
    configuration.load(part, tied, &mut Weights::new(checkpoint, dtype, TpShard::for_part(part), on_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(config: &str) -> String {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        configure(dir.path()).unwrap_err().to_string()
    }

    #[test]
    fn the_planner_knows_the_same_architectures() {
        let names: Vec<&str> = ARCHITECTURES.iter().map(|architecture| architecture.model_type).collect();
        assert_eq!(names, russet_wire::architecture::ARCHITECTURES);
    }

    #[test]
    fn indivisible_tensor_sizes_are_rejected_with_the_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let config = r#"{"model_type":"qwen3","hidden_size":64,"num_hidden_layers":2,"intermediate_size":132,
            "num_attention_heads":12,"num_key_value_heads":4,"head_dim":32,"rms_norm_eps":1e-6,
            "vocab_size":100,"rope_theta":1e6}"#;
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let config = configure(dir.path()).unwrap();
        for (members, said) in [
            (1, None),
            (2, None),
            (4, None),
            (
                3,
                Some(
                    "num_key_value_heads is 4, which 3 ranks cannot share evenly; use a tensor size that divides 4",
                ),
            ),
            (5, Some("num_attention_heads is 12, which 5")),
            (12, Some("num_key_value_heads is 4, which 12")),
        ] {
            let error = config.check_tensor_size(members).err().map(|error| error.to_string());
            assert_eq!(error.is_some(), said.is_some(), "{members}: {error:?}");
            assert!(error.unwrap_or_default().contains(said.unwrap_or_default()), "{members}");
        }
    }

    #[test]
    fn heads_that_cannot_be_quantised_are_named_with_the_numbers() {
        let dir = tempfile::tempdir().unwrap();
        for (head_dim, asked, said) in [
            (80, KvCacheType::AsComputed, None),
            (80, KvCacheType::Int8, Some("head_dim is 80, which groups of 64 or 32 do not divide")),
            (96, KvCacheType::Int4, None),
            (128, KvCacheType::Int8, None),
        ] {
            let config = format!(
                r#"{{"model_type":"llama","hidden_size":64,"num_hidden_layers":2,"intermediate_size":128,
                "num_attention_heads":4,"head_dim":{head_dim},"rms_norm_eps":1e-5,"vocab_size":100}}"#
            );
            std::fs::write(dir.path().join("config.json"), config).unwrap();
            let error = configure(dir.path()).unwrap().kv_format(asked).err().map(|error| error.to_string());
            assert_eq!(error.is_some(), said.is_some(), "{head_dim}, {asked:?}: {error:?}");
            assert!(error.unwrap_or_default().contains(said.unwrap_or_default()), "{head_dim}, {asked:?}");
        }
    }

    #[test]
    fn configurations_that_cannot_be_served_say_why() {
        let llama = |extra: &str| {
            format!(
                r#"{{"model_type":"llama","hidden_size":64,"num_hidden_layers":2,"intermediate_size":128,
                "num_attention_heads":4,"rms_norm_eps":1e-5,"vocab_size":100 {extra}}}"#
            )
        };
        for (config, said) in [
            ("{".to_owned(), "EOF"),
            ("{}".to_owned(), "model_type \"\" is not supported; supported are llama, mistral, qwen3"),
            (r#"{"model_type":"gpt_oss"}"#.to_owned(), "\"gpt_oss\" is not supported"),
            (r#"{"model_type":"llama"}"#.to_owned(), "missing field `hidden_size`"),
            (llama(r#","num_key_value_heads":3"#), "num_key_value_heads is 3"),
            (llama(r#","num_key_value_heads":0"#), "num_key_value_heads is 0"),
            (llama(r#","head_dim":33"#), "head_dim is 33"),
            (
                llama(r#","quantization":{"group_size":32,"bits":4,"mode":"mxfp4"}"#),
                "quantization mode \"mxfp4\"",
            ),
            (llama(r#","quantization_config":{"quant_method":"gptq"}"#), "quantization method \"gptq\""),
            (llama(r#","layer_types":["sliding_attention","full_attention"]"#), "sliding_attention"),
            (llama(r#","rope_scaling":{"rope_type":"yarn","factor":2.0}"#), "rope scaling \"yarn\""),
            (llama("").replace("llama", "qwen3"), "head_dim is missing"),
            (llama(r#","head_dim":16"#).replace("llama", "qwen3"), "rope_theta is missing"),
            (
                llama(r#","head_dim":16,"rope_theta":1e6,"attention_bias":true"#).replace("llama", "qwen3"),
                "attention_bias",
            ),
        ] {
            let error = error_of(&config);
            assert!(error.contains(said), "{config}: {error}");
        }
    }
}
