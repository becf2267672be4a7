//! GLM-4.5 to 4.7. The small GLM-4.7-Flash is a `deepseek2`.

use super::{Architecture, Rotated, plain};
use crate::gguf::fields::SIGMOID;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    rotated: Rotated::Share,
    modules: &[("post_attention_norm", "post_attention_layernorm")],
    fields: |fields| {
        fields.set_attention_bias();
        let normalises = fields.has_tensor("blk.0.attn_q_norm.weight");
        fields.set("use_qk_norm", normalises);
        fields.grouped_experts_after_dense(SIGMOID)
    },
    ..plain("glm4moe", "glm4_moe")
};
