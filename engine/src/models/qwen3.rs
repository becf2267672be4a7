//! Qwen3's dense models: Llama's blocks without biases, with a norm on every head of queries and keys before
//! rotation, and an explicit head size in config.json.

use super::{Architecture, ConfigError, Configuration, llama::LlamaConfig};

/// Qwen3, dense.
pub const ARCH: Architecture = Architecture { model_type: "qwen3", configure };

fn configure(json: &serde_json::Value) -> Result<Box<dyn Configuration>, ConfigError> {
    let mut config = LlamaConfig::parse(json)?;
    config.head_norms = true;
    let missing = |field: &str| ConfigError::Json(format!("{field} is missing"));
    // Unlike in Llama, neither follows from the width.
    config.head_dim.ok_or_else(|| missing("head_dim"))?;
    config.theta().ok_or_else(|| missing("rope_theta"))?;
    if config.attention_bias || config.mlp_bias {
        return Err(ConfigError::Unsupported("attention_bias or mlp_bias of a qwen3 model".to_owned()));
    }
    config.validate()
}
