//! gpt-oss.

use super::{Architecture, plain};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    modules: &[
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_gate_inp", "mlp.router"),
        ("ffn_gate_exps", "mlp.experts.gate_proj"),
        ("ffn_up_exps", "mlp.experts.up_proj"),
        ("ffn_down_exps", "mlp.experts.down_proj"),
    ],
    tensors: &[("attn_sinks.weight", "self_attn.sinks")],
    fields: |fields| {
        fields.set_attention_bias();
        fields.copy("sliding_window", "attention.sliding_window")?;
        fields.experts(["num_local_experts", "num_experts_per_tok", "intermediate_size"])
    },
    ..plain("gpt-oss", "gpt_oss")
};
