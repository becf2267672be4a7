//! Architectures by their GGUF names: what their tensors are called in an MLX repository, and which fields of config.json
//! their metadata makes. An architecture is a file beside this one and a line in [`ARCHITECTURES`]; names and keys are
//! llama.cpp's.

mod deepseek2;
mod gemma3;
mod gemma4;
mod glm4moe;
mod gpt_oss;
mod granite;
mod lfm2;
mod llama;
mod minimax_m2;
mod mistral3;
mod mistral4;
mod nemotron_h;
mod olmo2;
mod phi3;
mod qwen;
mod qwen3next;
mod seed_oss;
mod smollm3;

use super::{delta_net::HeadOrder, fields::Fields};
use crate::error::Error;

/// A kind of model by its name in GGUF.
#[derive(Debug)]
pub struct Architecture {
    /// `general.architecture`.
    pub name: &'static str,
    /// `model_type` of config.json; that of a relative is set by `fields`.
    pub model_type: &'static str,
    /// How much of a head is rotated.
    pub rotated: Rotated,
    /// Whether the rows of queries and keys are stored so that neighbours are rotated, not halves.
    pub traditional_rope: bool,
    /// What the file adds to the weights of norms: MLX adds it when it computes.
    pub norm_offset: f32,
    /// Modules of a layer that are not in [`MODULES`], or mean something else.
    modules: Names,
    /// Tensors of a layer whose names are no module's, beside [`TENSORS`].
    tensors: Names,
    /// In which order it has the heads of gated delta nets, if it has such.
    pub(super) delta_net: Option<HeadOrder>,
    /// Its own fields of config.json.
    pub(super) fields: fn(&mut Fields<'_, '_>) -> Result<(), Error>,
}

/// How much of a head is rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotated {
    /// All of it.
    Whole,
    /// The first elements, of which config.json has the share.
    Share,
    /// The first elements, of which config.json has the number in this field.
    Width(&'static str),
    /// Heads are made of a latent: the architecture says what of them.
    OfLatent,
    /// Kinds of layers differ in it, in their heads and in the width of their MLP: the architecture says how.
    ByLayer,
}

/// Every architecture whose names are known. Whether its family is supported, `families` decides.
pub const ARCHITECTURES: &[Architecture] = &[
    llama::ARCHITECTURE,
    qwen::QWEN2,
    qwen::QWEN3,
    qwen::QWEN3_MOE,
    qwen3next::QWEN3_NEXT,
    qwen3next::QWEN3_5,
    qwen3next::QWEN3_5_MOE,
    mistral3::ARCHITECTURE,
    mistral4::ARCHITECTURE,
    gemma3::ARCHITECTURE,
    gemma4::ARCHITECTURE,
    gpt_oss::ARCHITECTURE,
    glm4moe::ARCHITECTURE,
    deepseek2::ARCHITECTURE,
    minimax_m2::ARCHITECTURE,
    phi3::ARCHITECTURE,
    smollm3::ARCHITECTURE,
    granite::ARCHITECTURE,
    olmo2::ARCHITECTURE,
    seed_oss::ARCHITECTURE,
    lfm2::DENSE,
    lfm2::SPARSE,
    nemotron_h::DENSE,
    nemotron_h::SPARSE,
];

/// An architecture without anything special.
const fn plain(name: &'static str, model_type: &'static str) -> Architecture {
    Architecture {
        name,
        model_type,
        rotated: Rotated::Whole,
        traditional_rope: false,
        norm_offset: 0.0,
        modules: &[],
        tensors: &[],
        delta_net: None,
        fields: |_| Ok(()),
    }
}

/// Tensors with the factors of a stretched rotary embedding: of the configuration rather than of the weights.
pub const ROPE_FACTORS: &str = "rope_freqs.weight";
/// The same of longer contexts than the original one, and of others.
pub const LONG_FACTORS: &str = "rope_factors_long.weight";
const SHORT_FACTORS: &str = "rope_factors_short.weight";

/// Whether a tensor is of the configuration.
pub fn is_of_configuration(name: &str) -> bool {
    [ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS].contains(&name)
}

/// Names of llama.cpp, and what they are in an MLX repository.
type Names = &'static [(&'static str, &'static str)];

/// Modules outside the layers.
const MODEL: Names = &[
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    // An LFM2's last norm, which has the name of one that others have before their first layer.
    ("token_embd_norm", "model.embedding_norm"),
    ("output", "lm_head"),
    // A Gemma 4's inputs of its layers.
    ("per_layer_token_embd", "model.embed_tokens_per_layer"),
    ("per_layer_model_proj", "model.per_layer_model_projection"),
    ("per_layer_proj_norm", "model.per_layer_projection_norm"),
];
/// Modules of a layer.
const MODULES: Names = &[
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.switch_mlp.gate_proj"),
    ("ffn_up_exps", "mlp.switch_mlp.up_proj"),
    ("ffn_down_exps", "mlp.switch_mlp.down_proj"),
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
];
/// Tensors of a layer whose names are no module's.
const TENSORS: Names = &[("exp_probs_b.bias", "mlp.gate.e_score_correction_bias")];
/// Where a file's 32 bits are kept: what is added to scores decides which experts are chosen, and what states decay by
/// counts many times.
const WIDE: &[&str] = &["e_score_correction_bias", "expert_bias", "A_log", "dt_bias"];

/// Whether a tensor of this MLX name stays in 32 bits where the file has them.
pub fn stays_wide(name: &str) -> bool {
    WIDE.iter().any(|field| name.ends_with(field))
}

/// What a tensor of an architecture is called in an MLX repository.
pub fn mlx_name(architecture: &Architecture, name: &str) -> Option<String> {
    let find = |tables: &[Names], name: &str| {
        tables.iter().flat_map(|table| *table).find(|(own, _)| *own == name).map(|(_, theirs)| *theirs)
    };
    let of_module = |tables: &[Names], name: &str| {
        let (module, field) =
            name.rsplit_once('.').filter(|(_, field)| matches!(*field, "weight" | "bias"))?;
        Some(format!("{}.{field}", find(tables, module)?))
    };
    let Some((layer, own)) = name.strip_prefix("blk.").and_then(|layer| layer.split_once('.')) else {
        return of_module(&[MODEL], name);
    };
    // One spelling of a number, so that no two tensors have one name.
    let index: u32 = layer.parse().ok().filter(|index: &u32| index.to_string() == layer)?;
    let tensor = find(&[architecture.tensors, TENSORS], own).map(str::to_owned);
    let own = tensor.or_else(|| of_module(&[architecture.modules, MODULES], own))?;
    Some(format!("model.layers.{index}.{own}"))
}

#[cfg(test)]
mod tests;
