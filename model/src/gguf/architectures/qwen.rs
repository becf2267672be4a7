//! Qwen 2 and 3, dense and with experts.

use serde_json::json;

use super::{Architecture, plain};

pub(super) const QWEN2: Architecture = plain("qwen2", "qwen2");
pub(super) const QWEN3: Architecture = plain("qwen3", "qwen3");
pub(super) const QWEN3_MOE: Architecture = Architecture {
    fields: |fields| {
        fields.experts(["num_experts", "num_experts_per_tok", "moe_intermediate_size"])?;
        // Its graph in llama.cpp always does, and every layer has experts.
        fields.set("norm_topk_prob", true);
        fields.set("decoder_sparse_step", 1);
        fields.set("mlp_only_layers", json!([]));
        Ok(())
    },
    ..plain("qwen3moe", "qwen3_moe")
};
