//! Gemma 3: norms before and after mixer and MLP, whose weights are stored as differences from one, a window in five of
//! six layers, which have a rotary embedding of their own, and scaled embeddings.

use super::{
    Family,
    shared::{FULL, SLIDING, activation_or, described, give_windows, logit_cap, refuse, rope_of, windowed},
};
use crate::{
    config::{Config, MAX_LAYERS, RopeFields},
    description::{
        Activation, Attention, Dense, Description, Layer, Mixer, Mlp, NormOffset, Norms, Pooling, QkNorm,
    },
    error::Error,
};

pub(super) const FAMILY: Family = Family {
    model_types: &["gemma3_text"],
    fields: &[
        "hidden_activation",
        "query_pre_attn_scalar",
        "sliding_window_pattern",
        "rope_local_base_freq",
        "cache_implementation",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
    ],
    defaults: &[
        ("vocab_size", 262_208.0),
        ("num_attention_heads", 8.0),
        ("num_key_value_heads", 4.0),
        ("head_dim", 256.0),
        ("max_position_embeddings", 131_072.0),
        ("query_pre_attn_scalar", 256.0),
        ("sliding_window", 4096.0),
    ],
    describe,
};

/// Layers of a run that ends with one that sees the whole context.
const PATTERN: u32 = 6;

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    let document = &config.document;
    let capped = document.float("attn_logit_softcapping")?.is_some();
    refuse(config, "attn_logit_softcapping", capped)?;
    let sees_ahead = document.flag("use_bidirectional_attention")?;
    let head_dim = config.head_dim.unwrap_or(256);
    let pattern = match document.optional("sliding_window_pattern", MAX_LAYERS)? {
        Some(pattern) => pattern,
        None => document.optional("_sliding_window_pattern", MAX_LAYERS)?.unwrap_or(PATTERN),
    };
    let windowed = windowed(config, |layer| !(layer + 1).is_multiple_of(pattern))?;
    let plain = RopeFields::default();
    let [full, local] = if document.has_rope_by_kind() {
        let of = |kind, base| -> Result<_, Error> {
            let rope = document.rope_of(kind)?.unwrap_or_default();
            rope_of(config, head_dim, (&rope.fields, rope.theta.or(Some(base)), rope.share))
        };
        [of(FULL, 1e6)?, of(SLIDING, 1e4)?]
    } else {
        let local = document.float("rope_local_base_freq")?.unwrap_or(1e4);
        let theta = config.rope_theta.or(Some(1e6));
        [
            rope_of(config, head_dim, (&config.rope_scaling, theta, None))?,
            rope_of(config, head_dim, (&plain, Some(local), None))?,
        ]
    };
    refuse(config, "attention_bias", config.attention_bias)?;
    let mut attention =
        Attention::new(config.num_attention_heads, config.num_key_value_heads, head_dim, None);
    attention.causal = !sees_ahead;
    attention.qk_norm = Some(QkNorm::Head { epsilon: config.rms_norm_eps });
    let width = document.float("query_pre_attn_scalar")?.unwrap_or(256.0);
    attention.scale = f64::from(width).powf(-0.5) as f32;
    // What a file means that says nothing of it, as the first ones do.
    let activation = activation_or(config, Activation::GeluTanh)?;
    let layers = windowed.iter().map(|windowed| {
        let mut attention = attention.clone();
        attention.rope = Some(if *windowed { local.clone() } else { full.clone() });
        let norms = Norms::around(config.rms_norm_eps);
        let mlp = Mlp::Dense(Dense { activation, ..Dense::new(config.intermediate_size) });
        Ok(Layer { norms, ..Layer::new(Mixer::Attention(attention), mlp, config.rms_norm_eps) })
    });
    let mut description = described(config, has_head, layers.collect::<Result<_, Error>>()?);
    description.tied = !has_head;
    description.norm_offset = NormOffset::One;
    description.logit_cap = logit_cap(config)?;
    description.embedding_scale = Some(in_bfloat16((config.hidden_size as f32).sqrt()));
    give_windows(config, &mut description, &windowed)?;
    if sees_ahead {
        // As Transformers scales what it computes in 32 bits, in which such a model is published.
        description.embedding_scale = Some((config.hidden_size as f32).sqrt());
        // The window is all that a position sees, of which half lies behind it and half ahead.
        for attention in description.attentions_mut() {
            attention.window = attention.window.map(|window| window / 2 + 1);
        }
        description.pooling = Some(Pooling::mean());
    }
    Ok(description)
}

/// The nearest number that has a bfloat16: the model was trained with the scale in that type.
fn in_bfloat16(value: f32) -> f32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    f32::from_bits(rounded & 0xffff_0000)
}
