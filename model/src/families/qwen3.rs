//! Qwen3's dense models: Llama's blocks without biases, with a norm on every head of queries and keys before it is
//! rotated, and heads whose width config.json states.

use super::{
    Family,
    shared::{dense, give_late_windows, refuse, require},
};
use crate::{
    config::Config,
    description::{Description, QkNorm},
    error::Error,
};

pub(super) const FAMILY: Family = Family { model_types: &["qwen3"], fields: &[], defaults: &[], describe };

pub(super) fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    // Neither follows from the width, as Llama's do.
    require("head_dim", config.head_dim.is_some())?;
    require("rope_theta", config.rope_theta.is_some())?;
    refuse(config, "attention_bias", config.attention_bias)?;
    refuse(config, "mlp_bias", config.mlp_bias)?;
    let mut description = dense(config, has_head)?;
    for attention in description.attentions_mut() {
        attention.qk_norm = Some(QkNorm::Head { epsilon: config.rms_norm_eps });
    }
    give_late_windows(config, &mut description)?;
    Ok(description)
}
