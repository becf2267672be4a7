//! Mistral Small 4: the text part.

use super::{Architecture, deepseek2};
use crate::gguf::fields::SOFTMAX;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "mistral4",
    model_type: "mistral4",
    fields: |fields| {
        deepseek2::latent(fields)?;
        // Queries grow with their position where the file says so.
        if let Some(scale) = fields.float("attention.temperature_scale")?.filter(|scale| *scale != 0.0) {
            fields.rope.insert("llama_4_scaling_beta".to_owned(), scale.into());
        }
        fields.grouped_experts_after_dense(SOFTMAX)
    },
    ..deepseek2::ARCHITECTURE
};
