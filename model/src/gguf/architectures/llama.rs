//! Llama, and Mistral's dense models, which call themselves llama too.

use super::{Architecture, plain};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    traditional_rope: true,
    fields: |fields| {
        fields.set_attention_bias();
        // Mistral's first models, whose layers look back over a window.
        if let Some(window) = fields.optional("attention.sliding_window")?.filter(|window| *window > 0) {
            fields.set("model_type", "mistral");
            fields.set("sliding_window", window);
        }
        Ok(())
    },
    ..plain("llama", "llama")
};
