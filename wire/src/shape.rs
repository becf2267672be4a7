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
    /// Width of the MLP; 0 in headers that an older release read.
    #[serde(default)]
    pub intermediate_size: u32,
    /// Values that share one scale in the layers' quantised weights, the largest of all; 0 when none
    /// are quantised.
    #[serde(default)]
    pub quantization_group_size: u32,
    /// Bytes of a layer that every member of a tensor group holds whole, such as norms; the most of
    /// any layer.
    #[serde(default)]
    pub whole_layer_bytes: u64,
}

impl ModelShape {
    /// Bytes of all weights on disk.
    pub fn total_bytes(&self) -> u64 {
        // Whoever wrote the headers may have written any number.
        let ends = self.embedding_bytes.saturating_add(self.head_bytes);
        self.layer_bytes.iter().fold(ends, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// Every number of ranks that can share a layer, in order; 1 always can. Ranks share query heads,
    /// key/value heads and the width of the MLP, each in equal parts of whole heads and whole groups
    /// of quantised values.
    pub fn tensor_sizes(&self) -> Vec<u32> {
        (1..=self.key_value_heads.max(1)).filter(|&size| self.why_indivisible(size).is_none()).collect()
    }

    /// Why `size` ranks cannot share a layer; `None` when they can.
    pub fn why_indivisible(&self, size: u32) -> Option<String> {
        if size == 1 {
            return None;
        }
        if self.intermediate_size == 0 {
            return Some("its headers were read by an older release, which did not ask for the MLP's width; create the Model anew".to_owned());
        }
        let group = self.quantization_group_size.max(1);
        let attention = self.attention_heads.saturating_mul(self.head_dim);
        let counts = [
            (self.key_value_heads, "KV heads".to_owned()),
            (self.attention_heads, "attention heads".to_owned()),
            (self.intermediate_size, "columns of the MLP".to_owned()),
            (attention / group, format!("groups of {group} quantised attention columns")),
            (self.intermediate_size / group, format!("groups of {group} quantised MLP columns")),
        ];
        let (count, what) =
            counts.into_iter().find(|(count, _)| size == 0 || !count.is_multiple_of(size) || *count == 0)?;
        Some(format!("{count} {what} cannot be cut into {size}"))
    }

    /// KV-cache bytes the whole model keeps for one token.
    pub fn kv_bytes_per_token(&self) -> u64 {
        self.kv_bytes_per_token_per_layer.saturating_mul(u64::from(self.layers))
    }
}

/// The part of a model a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorRole {
    /// Token embedding, held by the highest rank (and by rank 0 when tied).
    Embedding,
    /// Final norm and head, held by rank 0.
    Head,
    /// One transformer layer.
    Layer(u32),
}

/// How a tensor of a layer is shared by the members of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardAxis {
    /// Every member holds all of it.
    Replicated,
    /// Each holds some rows: outputs of a projection, and their biases.
    Rows,
    /// Each holds some columns: inputs of a projection whose outputs are then summed.
    Columns,
}

/// How the tensor of this Hugging Face name is cut, as mlx-lm cuts it: weights, scales and biases of a
/// projection alike, and the bias of a summed projection not at all, since it is added after the sum.
pub fn shard_axis(tensor: &str) -> ShardAxis {
    let mut parts = tensor.rsplit('.');
    let (field, projection) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    match (projection, field) {
        ("q_proj" | "k_proj" | "v_proj" | "gate_proj" | "up_proj", _) => ShardAxis::Rows,
        ("o_proj" | "down_proj", "weight" | "scales" | "biases") => ShardAxis::Columns,
        _ => ShardAxis::Replicated,
    }
}

/// The role of a tensor by its Hugging Face name; `None` for names no known layout uses
/// (such as precomputed rotary frequencies, which are not loaded).
pub fn tensor_role(tensor: &str) -> Option<TensorRole> {
    let name = tensor.strip_prefix("model.").unwrap_or(tensor);
    if let Some(rest) = name.strip_prefix("layers.") {
        let (index, field) = rest.split_once('.')?;
        if field.ends_with("rotary_emb.inv_freq") {
            return None;
        }
        return index.parse().ok().map(TensorRole::Layer);
    }
    if name.starts_with("embed_tokens.") {
        return Some(TensorRole::Embedding);
    }
    if name.starts_with("norm.") || name.starts_with("lm_head.") {
        return Some(TensorRole::Head);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_shard_into_whole_heads_and_whole_groups() {
        let shape = |heads, kv, mlp, group| ModelShape {
            attention_heads: heads,
            key_value_heads: kv,
            head_dim: 64,
            intermediate_size: mlp,
            quantization_group_size: group,
            ..ModelShape::default()
        };
        for (heads, kv, mlp, group, sizes, size, why) in [
            (32, 8, 14336, 0, vec![1, 2, 4, 8], 3, "8 KV heads cannot be cut into 3"),
            (32, 8, 14336, 64, vec![1, 2, 4, 8], 16, "8 KV heads cannot be cut into 16"),
            (28, 4, 18944, 0, vec![1, 2, 4], 8, "4 KV heads cannot be cut into 8"),
            (30, 4, 4096, 0, vec![1, 2], 4, "30 attention heads cannot be cut into 4"),
            (8, 8, 1001, 0, vec![1], 2, "1001 columns of the MLP cannot be cut into 2"),
            (4, 2, 192, 64, vec![1], 2, "3 groups of 64 quantised MLP columns cannot be cut into 2"),
            (4, 2, 256, 0, vec![1, 2], 0, "2 KV heads cannot be cut into 0"),
            (4, 2, 0, 0, vec![1], 2, "create the Model anew"),
        ] {
            let shape = shape(heads, kv, mlp, group);
            assert_eq!(shape.tensor_sizes(), sizes, "{shape:?}");
            assert!(shape.why_indivisible(size).is_some_and(|text| text.contains(why)), "{shape:?}");
        }
    }

    #[test]
    fn projections_are_sharded_and_other_tensors_replicated() {
        for (tensor, cut) in [
            ("model.layers.0.self_attn.q_proj.weight", ShardAxis::Rows),
            ("model.layers.0.self_attn.k_proj.bias", ShardAxis::Rows),
            ("model.layers.0.mlp.up_proj.scales", ShardAxis::Rows),
            ("model.layers.0.self_attn.o_proj.weight", ShardAxis::Columns),
            ("model.layers.0.mlp.down_proj.biases", ShardAxis::Columns),
            ("model.layers.0.self_attn.o_proj.bias", ShardAxis::Replicated),
            ("model.layers.0.self_attn.q_norm.weight", ShardAxis::Replicated),
            ("model.layers.0.input_layernorm.weight", ShardAxis::Replicated),
            ("model.embed_tokens.weight", ShardAxis::Replicated),
            ("lm_head.weight", ShardAxis::Replicated),
            ("weight", ShardAxis::Replicated),
        ] {
            assert_eq!(shard_axis(tensor), cut, "{tensor}");
        }
    }

    #[test]
    fn tensors_have_the_role_their_name_says() {
        for (name, role) in [
            ("model.embed_tokens.weight", Some(TensorRole::Embedding)),
            ("model.embed_tokens.scales", Some(TensorRole::Embedding)),
            ("model.layers.17.self_attn.q_proj.weight", Some(TensorRole::Layer(17))),
            ("model.layers.0.self_attn.rotary_emb.inv_freq", None),
            ("model.layers.x.mlp.up_proj.weight", None),
            ("model.norm.weight", Some(TensorRole::Head)),
            ("lm_head.weight", Some(TensorRole::Head)),
            ("vision_tower.blocks.0.weight", None),
        ] {
            assert_eq!(tensor_role(name), role, "{name}");
        }
    }
}
