//! Llama, and Mistral's dense models, which call themselves llama too.

use super::{Architecture, plain};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    traditional_rope: true,
    fields: |fields| {
        fields.set_attention_bias();
        // Mistral's first models, whose layers look back over a window.
        if fields.set_window()? {
            fields.set("model_type", "mistral");
        }
        Ok(())
    },
    ..plain("llama", "llama")
};
