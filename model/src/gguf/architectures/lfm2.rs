//! LFM2 and LFM2.5, dense and with experts.

use super::{Architecture, plain};
use crate::{
    error::Error,
    gguf::fields::{Fields, SIGMOID},
};

pub(super) const DENSE: Architecture = Architecture {
    modules: MODULES,
    tensors: TENSORS,
    fields: |fields| {
        fields.copy("block_ff_dim", "feed_forward_length")?;
        // The file has what it was adjusted to.
        fields.set("block_auto_adjust_ff_dim", false);
        mixers(fields)
    },
    ..plain("lfm2", "lfm2")
};
pub(super) const SPARSE: Architecture = Architecture {
    modules: MODULES,
    tensors: TENSORS,
    fields: |fields| {
        fields.chosen_by(SIGMOID)?;
        fields.experts(["num_experts", "num_experts_per_tok", "moe_intermediate_size"])?;
        let dense = fields.optional("leading_dense_block_count")?.unwrap_or(0);
        fields.set("num_dense_layers", dense);
        mixers(fields)
    },
    ..plain("lfm2moe", "lfm2_moe")
};

const MODULES: &[(&str, &str)] = &[
    ("attn_norm", "operator_norm"),
    ("ffn_norm", "ffn_norm"),
    ("attn_output", "self_attn.out_proj"),
    ("attn_q_norm", "self_attn.q_layernorm"),
    ("attn_k_norm", "self_attn.k_layernorm"),
    ("shortconv.conv", "conv.conv"),
    ("shortconv.in_proj", "conv.in_proj"),
    ("shortconv.out_proj", "conv.out_proj"),
    ("ffn_gate", "feed_forward.gate_proj"),
    ("ffn_up", "feed_forward.up_proj"),
    ("ffn_down", "feed_forward.down_proj"),
    ("ffn_gate_inp", "feed_forward.gate"),
    ("ffn_gate_exps", "feed_forward.switch_mlp.gate_proj"),
    ("ffn_up_exps", "feed_forward.switch_mlp.up_proj"),
    ("ffn_down_exps", "feed_forward.switch_mlp.down_proj"),
];

const TENSORS: &[(&str, &str)] = &[("exp_probs_b.bias", "feed_forward.expert_bias")];

/// Layers without KV heads are short convolutions.
fn mixers(fields: &mut Fields<'_, '_>) -> Result<(), Error> {
    fields.copy_float("norm_eps", "attention.layer_norm_rms_epsilon")?;
    let heads = fields.by_layer("attention.head_count_kv")?;
    fields.set_layer_types(heads.into_iter().map(|heads| heads == 0), ["full_attention", "conv"]);
    fields.copy("conv_L_cache", "shortconv.l_cache")
}
