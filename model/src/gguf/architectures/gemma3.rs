//! Gemma 3.

use super::{Architecture, plain};

/// Layers of Gemma 3's largest model, whose queries are scaled by its width.
const GEMMA_3_27B_LAYERS: u64 = 62;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    norm_offset: 1.0,
    modules: &[
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
    ],
    fields: |fields| {
        let scalar = match fields.number("block_count")? {
            GEMMA_3_27B_LAYERS => {
                let hidden = fields.number("embedding_length")?;
                hidden.checked_div(fields.number("attention.head_count")?).unwrap_or(0)
            }
            _ => fields.head_dim()?,
        };
        fields.set("query_pre_attn_scalar", scalar);
        fields.set("hidden_activation", "gelu_pytorch_tanh");
        fields.copy("sliding_window", "attention.sliding_window")?;
        fields.copy_float("final_logit_softcapping", "final_logit_softcapping")
    },
    ..plain("gemma3", "gemma3_text")
};
