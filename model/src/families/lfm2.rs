//! LFM2 and LFM2.5: short convolutions, with an attention after every few of them; dense, or with experts chosen by
//! sigmoids after the first layers.

use super::{
    Family,
    shared::{FULL, attention, described, experts, kinds, refuse, require, rope_of, rotates_whole_heads},
};
use crate::{
    config::{Config, MAX_HEADS, MAX_LAYERS, MAX_SIZE},
    description::{
        Attention, Dense, Description, Experts, Layer, Mixer, Mlp, Norms, QkNorm, Router, Scoring, ShortConv,
    },
    error::{Error, FileError},
};

pub(super) const FAMILY: Family = Family {
    model_types: &["lfm2", "lfm2_moe"],
    fields: &[
        "norm_eps",
        "conv_bias",
        "conv_L_cache",
        "full_attn_idxs",
        "tie_embedding",
        "block_dim",
        "block_ff_dim",
        "block_auto_adjust_ff_dim",
        "block_ffn_dim_multiplier",
        "block_multiple_of",
        "block_use_swiglu",
        "use_pos_enc",
        "num_dense_layers",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "routed_scaling_factor",
        "use_expert_bias",
        // Other fields say the same, or it is about training.
        "block_norm_eps",
        "block_mlp_init_scale",
        "block_out_init_scale",
        "block_use_xavier_init",
        "conv_dim",
        "conv_dim_out",
        "conv_use_xavier_init",
        "num_heads",
        "theta",
    ],
    // Dense ones may have it under another name.
    defaults: &[("intermediate_size", 1.0)],
    describe,
};

/// How layers of short convolutions are called.
const CONV: &str = "conv";
/// Names of gate, up and down.
const PROJECTIONS: [&str; 3] = ["w1", "w3", "w2"];
/// The module that holds the MLP.
const FEED_FORWARD: &str = "feed_forward";
/// Epsilon of the norms where config.json says nothing.
const NORM_EPSILON: f32 = 1e-5;
/// Base of the rotary embedding where config.json says nothing.
const ROPE_THETA: f32 = 1e6;
/// Columns of the MLP are a multiple of this where config.json says nothing.
const MULTIPLE: u32 = 256;

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    let document = &config.document;
    for field in ["block_use_swiglu", "use_pos_enc"] {
        refuse(config, field, document.choice(field)? == Some(false))?;
    }
    let epsilon = document.float("norm_eps")?.unwrap_or(NORM_EPSILON);
    let full = document.numbers("full_attn_idxs", MAX_LAYERS)?;
    require("full_attn_idxs", !full.is_empty() || !config.layer_types.is_empty())?;
    let convolved = kinds(config, [FULL, CONV], |layer| !full.contains(&layer))?;
    let attention = attention_of(config, epsilon)?;
    let conv = ShortConv {
        channels: config.hidden_size,
        kernel: document.number("conv_L_cache", MAX_HEADS)?,
        bias: document.flag("conv_bias")?,
    };
    let sparse = document.text_type == "lfm2_moe";
    let experts = sparse.then(|| chosen_experts(config)).transpose()?;
    let first = document.count("num_dense_layers", MAX_LAYERS)?;
    let width = if sparse { config.intermediate_size } else { adjusted_width(config)? };
    let dense = Dense { module: FEED_FORWARD, originals: PROJECTIONS, ..Dense::new(width) };
    let names =
        Norms { before_mixer: Some("operator_norm"), before_mlp: Some("ffn_norm"), ..Norms::before(epsilon) };
    let layers = (0..).zip(convolved).map(|(layer, convolved)| {
        let mixer = if convolved { Mixer::ShortConv(conv) } else { Mixer::Attention(attention.clone()) };
        let mlp = match &experts {
            Some(experts) if layer >= first => Mlp::Experts(Box::new(experts.clone())),
            _ => Mlp::Dense(dense),
        };
        Layer { norms: names, ..Layer::new(mixer, mlp, epsilon) }
    });
    let mut description = described(config, has_head, layers.collect());
    (description.norm, description.norm_epsilon) = (Some("embedding_norm"), epsilon);
    let tied = document.choice("tie_embedding")?.or(config.tie_word_embeddings);
    description.tied = tied.unwrap_or(true);
    Ok(description)
}

fn attention_of(config: &Config, epsilon: f32) -> Result<Attention, Error> {
    refuse(config, "attention_bias", config.attention_bias)?;
    rotates_whole_heads(config)?;
    let mut attention = attention(config)?;
    let theta = config.rope_theta.or(Some(ROPE_THETA));
    attention.rope = Some(rope_of(config, attention.key_dim, (&config.rope_scaling, theta, None))?);
    attention.qk_norm = Some(QkNorm::Head { epsilon });
    attention.qk_norm_names = ["q_layernorm", "k_layernorm"];
    attention.output = "out_proj";
    Ok(attention)
}

/// Columns of a dense model's MLP: two thirds of what config.json says, times a factor, up to a round number.
fn adjusted_width(config: &Config) -> Result<u32, Error> {
    let document = &config.document;
    let width = document.optional("block_ff_dim", MAX_SIZE)?.unwrap_or(config.intermediate_size);
    let inputs = document.optional("block_dim", MAX_SIZE)?.unwrap_or(config.hidden_size);
    if inputs != config.hidden_size {
        let found = format!("{inputs}, but hidden_size is {}", config.hidden_size);
        return Err(FileError::Field { field: "block_dim", found }.into());
    }
    if document.choice("block_auto_adjust_ff_dim")? == Some(false) {
        return Ok(width);
    }
    // In 64 bits, as it was computed for the weights.
    let factor = match document.value("block_ffn_dim_multiplier") {
        None => 1.0,
        Some(factor) => factor.as_f64().ok_or_else(|| document.unusable("block_ffn_dim_multiplier"))?,
    };
    let scaled = factor * f64::from(width * 2 / 3);
    let multiple = document.optional("block_multiple_of", MAX_SIZE)?.unwrap_or(MULTIPLE);
    let rounded = (scaled as u32).checked_next_multiple_of(multiple);
    let usable = rounded.filter(|&rounded| (1..=MAX_SIZE).contains(&rounded));
    usable.ok_or_else(|| {
        let found = format!("{factor}, which makes an MLP of {scaled} columns of {width}");
        FileError::Field { field: "block_ffn_dim_multiplier", found }.into()
    })
}

fn chosen_experts(config: &Config) -> Result<Experts, Error> {
    let document = &config.document;
    let router = Router {
        correction: document.choice("use_expert_bias")?.unwrap_or(true).then_some("expert_bias"),
        renormalise: document.choice("norm_topk_prob")?.unwrap_or(true),
        epsilon: 1e-6,
        scale: document.float("routed_scaling_factor")?.unwrap_or(1.0),
        ..Router::new(Scoring::NarrowSigmoid)
    };
    let counts = ["num_experts", "num_experts_per_tok", "moe_intermediate_size"];
    Ok(Experts { module: FEED_FORWARD, originals: PROJECTIONS, ..experts(config, counts, router)? })
}

#[cfg(test)]
mod tests;
