//! Mistral Small 3.1 and later, Ministral 3, Devstral 2: the text part.

use super::{Architecture, plain};
use crate::gguf::metadata::MetaValue;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    traditional_rope: true,
    fields: |fields| {
        // Of the later ones, whose queries grow with their position.
        if let Some(scale) = fields.float("attention.temperature_scale")?.filter(|scale| *scale != 0.0) {
            let is_yarn = matches!(fields.get("rope.scaling.type"), Some(MetaValue::Text("yarn")));
            if !is_yarn {
                let reason = "it counts from the original context of YaRN, which the file has not".to_owned();
                return Err(fields.refuse("attention.temperature_scale", reason).into());
            }
            fields.set("model_type", "ministral3");
            fields.rope.insert("llama_4_scaling_beta".to_owned(), scale.into());
        }
        fields.set_yarn_growth(1.0)
    },
    ..plain("mistral3", "mistral")
};
