//! OLMo 2, and OLMo 3, which has windows.

use super::{Architecture, plain};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    modules: &[
        ("post_attention_norm", "post_attention_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
    ],
    fields: |fields| {
        if fields.set_window()? {
            fields.set("model_type", "olmo3");
            if let Some(windowed) = fields.flags("attention.sliding_window_pattern")? {
                fields.set_layer_types(windowed, ["full_attention", "sliding_attention"]);
            }
        }
        Ok(())
    },
    ..plain("olmo2", "olmo2")
};
