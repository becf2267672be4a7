//! Mistral Small 3.1 and later, Ministral 3, Devstral 2: the text part.

use super::{Architecture, plain};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    traditional_rope: true,
    fields: |fields| {
        // Of the later ones, whose queries grow with their position.
        if fields.float("attention.temperature_scale")?.is_some_and(|scale| scale != 0.0) {
            fields.set("model_type", "ministral3");
        }
        Ok(())
    },
    ..plain("mistral3", "mistral")
};
