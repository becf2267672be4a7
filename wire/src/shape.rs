//! What a model weighs and how it is cut, read from its headers alone: `config.json` and the
//! headers of its safetensors files. Agents read it, the planner adds it up, the engine checks it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Sizes of a model, in bytes unless said otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelShape {
    /// `model_type` of config.json, such as `llama`.
    pub architecture: String,
    /// Parameters held in the weight files; quantised values counted unpacked.
    pub parameters: u64,
    /// Transformer layers.
    pub layers: u32,
    /// Width of the hidden state.
    pub hidden_size: u32,
    /// Query heads.
    pub attention_heads: u32,
    /// Key/value heads.
    pub key_value_heads: u32,
    /// Width of one head.
    pub head_dim: u32,
    /// Tokens of the vocabulary.
    pub vocabulary: u32,
    /// Longest context the model was made for, tokens.
    pub context_length: u32,
    /// Bytes of the token embedding.
    pub embedding_bytes: u64,
    /// Bytes of final norm and head; a tied head costs the embedding again on the rank that samples.
    pub head_bytes: u64,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// Bytes of each layer, in order.
    pub layer_bytes: Vec<u64>,
    /// KV-cache bytes one layer keeps for one token, in the dtype the engine computes in.
    pub kv_bytes_per_token_per_layer: u64,
}

impl ModelShape {
    /// Bytes of all weights on disk.
    pub fn total_bytes(&self) -> u64 {
        // Whoever wrote the headers may have written any number.
        let ends = self.embedding_bytes.saturating_add(self.head_bytes);
        self.layer_bytes.iter().fold(ends, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// KV-cache bytes the whole model keeps for one token.
    pub fn kv_bytes_per_token(&self) -> u64 {
        self.kv_bytes_per_token_per_layer.saturating_mul(u64::from(self.layers))
    }
}

/// The part of a model a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Token embedding, held by the highest rank (and by rank 0 when tied).
    Embedding,
    /// Final norm and head, held by rank 0.
    Head,
    /// One transformer layer.
    Layer(u32),
}

/// The role of a tensor by its Hugging Face name; `None` for names no known layout uses
/// (such as precomputed rotary frequencies, which are not loaded).
pub fn role_of(tensor: &str) -> Option<Role> {
    let name = tensor.strip_prefix("model.").unwrap_or(tensor);
    if let Some(rest) = name.strip_prefix("layers.") {
        let (index, field) = rest.split_once('.')?;
        if field.ends_with("rotary_emb.inv_freq") {
            return None;
        }
        return index.parse().ok().map(Role::Layer);
    }
    if name.starts_with("embed_tokens.") {
        return Some(Role::Embedding);
    }
    if name.starts_with("norm.") || name.starts_with("lm_head.") {
        return Some(Role::Head);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_have_the_role_their_name_says() {
        for (name, role) in [
            ("model.embed_tokens.weight", Some(Role::Embedding)),
            ("model.embed_tokens.scales", Some(Role::Embedding)),
            ("model.layers.17.self_attn.q_proj.weight", Some(Role::Layer(17))),
            ("model.layers.0.self_attn.rotary_emb.inv_freq", None),
            ("model.layers.x.mlp.up_proj.weight", None),
            ("model.norm.weight", Some(Role::Head)),
            ("lm_head.weight", Some(Role::Head)),
            ("vision_tower.blocks.0.weight", None),
        ] {
            assert_eq!(role_of(name), role, "{name}");
        }
    }
}
