//! Granite.

use super::{Architecture, plain};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    traditional_rope: true,
    fields: |fields| {
        for (field, key) in [
            ("attention_multiplier", "attention.scale"),
            ("embedding_multiplier", "embedding_scale"),
            ("residual_multiplier", "residual_scale"),
            ("logits_scaling", "logit_scale"),
        ] {
            fields.copy_float(field, key)?;
        }
        Ok(())
    },
    ..plain("granite", "granite")
};
