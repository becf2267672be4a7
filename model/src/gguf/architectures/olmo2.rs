//! OLMo 2, and OLMo 3, which has windows.

use serde_json::Value;

use super::{Architecture, plain};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    modules: &[
        ("post_attention_norm", "post_attention_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
    ],
    fields: |fields| {
        if let Some(window) = fields.optional("attention.sliding_window")?.filter(|window| *window > 0) {
            fields.set("model_type", "olmo3");
            fields.set("sliding_window", window);
            if let Some(windowed) = fields.flags("attention.sliding_window_pattern")? {
                let kind = |windowed| if windowed { "sliding_attention" } else { "full_attention" };
                fields
                    .set("layer_types", windowed.into_iter().map(kind).map(Value::from).collect::<Vec<_>>());
            }
        }
        Ok(())
    },
    ..plain("olmo2", "olmo2")
};
