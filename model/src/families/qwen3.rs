//! Qwen3's dense models: Llama's blocks without biases, with a norm on every head of queries and keys before it is
//! rotated, and heads whose width config.json states.

use super::{Family, bound_to_window, dense};
use crate::{
    config::{Config, whole},
    description::{Description, Mixer},
    error::{Error, Unsupported},
    tensors,
};

pub(super) const FAMILY: Family = Family { model_type: "qwen3", describe, tensors: tensors::hugging_face };

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    // Neither follows from the width, as Llama's do.
    for (field, missing) in
        [("head_dim", config.head_dim.is_none()), ("rope_theta", config.rope_theta.is_none())]
    {
        if missing {
            let remedy = "take the config.json that belongs to the weights";
            return Err(Unsupported::field(field, format!("{field} is missing"), remedy).into());
        }
    }
    for (field, set) in [("attention_bias", config.attention_bias), ("mlp_bias", config.mlp_bias)] {
        if set {
            let reason = format!("{field} of a qwen3 model is not supported");
            return Err(Unsupported::field(field, reason, "use a qwen3 model without biases").into());
        }
    }
    let mut description = dense(FAMILY.model_type, config, has_head)?;
    for layer in &mut description.layers {
        if let Mixer::Attention(attention) = &mut layer.mixer {
            attention.head_norm = Some(config.rms_norm_eps);
        }
    }
    // The layers from max_window_layers on have the window, where there is one at all.
    let full = match config.document.value("max_window_layers").map(whole) {
        None => 0,
        Some(full) => full.ok_or_else(|| config.document.unusable("max_window_layers"))?,
    };
    let windowed = config.document.flag("use_sliding_window")? && full < u64::from(config.num_hidden_layers);
    if let Some(window) = config.sliding_window.filter(|_| windowed) {
        bound_to_window(&mut description, window);
    }
    Ok(description)
}
