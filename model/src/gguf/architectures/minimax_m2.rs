//! MiniMax M2 to M2.7.

use super::{Architecture, Rotated, plain};
use crate::gguf::fields::SIGMOID;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    rotated: Rotated::Width("rotary_dim"),
    modules: &[
        ("ffn_gate_inp", "block_sparse_moe.gate"),
        ("ffn_gate_exps", "block_sparse_moe.switch_mlp.gate_proj"),
        ("ffn_up_exps", "block_sparse_moe.switch_mlp.up_proj"),
        ("ffn_down_exps", "block_sparse_moe.switch_mlp.down_proj"),
    ],
    tensors: &[("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias")],
    fields: |fields| {
        fields.chosen_by(SIGMOID)?;
        fields.experts(["num_local_experts", "num_experts_per_tok", "intermediate_size"])
    },
    ..plain("minimax-m2", "minimax_m2")
};
