//! Ministral 3 and Devstral: Llama's blocks with YaRN, whose queries grow with the position, and a window where
//! config.json names one.

use super::{
    Family,
    shared::{attention, described, gated, give_windows, query_scale, rotates_whole_heads, windowed},
};
use crate::{
    config::Config,
    description::{Description, Layer, Mixer},
    error::Error,
};

pub(super) const FAMILY: Family =
    Family { model_types: &["ministral3"], fields: &[], defaults: &[], describe };

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    rotates_whole_heads(config)?;
    let mut attention = attention(config)?;
    attention.query_scale = query_scale(config);
    let layer = Layer::new(Mixer::Attention(attention), gated(config)?, config.rms_norm_eps);
    let mut description = described(config, has_head, vec![layer; config.num_hidden_layers as usize]);
    let windowed = windowed(config, |_| false)?;
    give_windows(config, &mut description, &windowed)?;
    Ok(description)
}
