//! gpt-oss: attention with sinks, a window in every other layer, YaRN, and in every layer experts with biases behind a
//! clipped gate.

use super::{
    Family,
    shared::{attention, described, experts, give_windows, rotates_whole_heads, windowed},
};
use crate::{
    config::Config,
    description::{Activation, Description, Experts, Layer, Mixer, Mlp, Router, Scoring},
    error::Error,
};

pub(super) const FAMILY: Family = Family {
    model_types: &["gpt_oss"],
    fields: &["num_local_experts", "num_experts_per_tok", "experts_per_token", "swiglu_limit"],
    defaults: &[("rope_theta", 150_000.0), ("head_dim", 64.0), ("swiglu_limit", 7.0)],
    describe,
};

/// What the gate is multiplied by within its sigmoid.
const ALPHA: f32 = 1.702;

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    rotates_whole_heads(config)?;
    let mut attention = attention(config)?;
    (attention.sinks, attention.qkv_bias, attention.output_bias) = (true, true, true);
    let counts = ["num_local_experts", "num_experts_per_tok", "intermediate_size"];
    let limit = config.document.float("swiglu_limit")?.unwrap_or(7.0);
    let experts = Experts {
        bias: true,
        activation: Activation::ClippedSwiGlu { alpha: ALPHA, limit },
        experts: "experts",
        gate: "router",
        ..experts(config, counts, Router::new(Scoring::SoftmaxOfChosen))?
    };
    let layer = Layer::new(Mixer::Attention(attention), Mlp::Experts(Box::new(experts)), config.rms_norm_eps);
    let mut description = described(config, has_head, vec![layer; config.num_hidden_layers as usize]);
    let windowed = windowed(config, |layer| layer.is_multiple_of(2))?;
    give_windows(config, &mut description, &windowed)?;
    Ok(description)
}
