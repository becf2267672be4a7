//! OLMo 2 and 3: norms of what mixer and MLP add instead of what they read, and norms over all heads of queries and keys
//! together; OLMo 3 has a window in three of four layers.

use super::{
    Family,
    shared::{attention, described, gated, give_windows, rotates_whole_heads, windowed},
};
use crate::{
    config::Config,
    description::{Description, Layer, Mixer, Norms, QkNorm, RopeScaling},
    error::Error,
};

pub(super) const FAMILY: Family =
    Family { model_types: &["olmo2", "olmo3"], fields: &[], defaults: &[], describe };

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    rotates_whole_heads(config)?;
    let mut attention = attention(config)?;
    attention.qk_norm = Some(QkNorm::Full { epsilon: config.rms_norm_eps });
    let norms = Norms::after(config.rms_norm_eps);
    let layer =
        Layer { norms, ..Layer::new(Mixer::Attention(attention), gated(config)?, config.rms_norm_eps) };
    let mut description = described(config, has_head, vec![layer; config.num_hidden_layers as usize]);
    if config.document.text_type == "olmo3" {
        let windowed = windowed(config, |layer| !(layer + 1).is_multiple_of(4))?;
        give_windows(config, &mut description, &windowed)?;
        // Layers with a window are not stretched.
        for (attention, _) in description.attentions_mut().zip(windowed).filter(|(_, windowed)| *windowed) {
            if let Some(rope) = &mut attention.rope {
                rope.scaling = RopeScaling::None;
            }
        }
    }
    Ok(description)
}
