//! Gemma 4 of one input: Gemma 3's norms and windows, heads of another width where a layer sees the whole context, values
//! that are keys there, and, in the sparse one, experts beside the dense block. Not here: embeddings by layer and layers
//! that share keys and values, as the E models have.

use super::{
    Family,
    shared::{
        FULL, SLIDING, activation_or, described, experts, give_windows, refuse, rope_of, shared_expert,
        windowed,
    },
};
use crate::{
    config::{Config, MAX_HEADS, MAX_LAYERS, MAX_SIZE, RopeFields},
    description::{
        Activation, Attention, Dense, Description, ExpertNorms, Experts, Layer, Mixer, Mlp, Norms, QkNorm,
        Rope, Router, RouterNorm, Scoring,
    },
    error::{Error, Unsupported},
};

pub(super) const FAMILY: Family = Family {
    model_types: &["gemma4_text"],
    fields: &[
        "hidden_activation",
        "global_head_dim",
        "num_global_key_value_heads",
        "attention_k_eq_v",
        "num_kv_shared_layers",
        "hidden_size_per_layer_input",
        "vocab_size_per_layer_input",
        "use_double_wide_mlp",
        "enable_moe_block",
        "num_experts",
        "top_k_experts",
        "moe_intermediate_size",
        "sliding_window_pattern",
        "final_logit_softcapping",
        "use_bidirectional_attention",
    ],
    // As mlx-lm has them: the smallest model.
    defaults: &[
        ("vocab_size", 262_144.0),
        ("num_attention_heads", 8.0),
        ("num_key_value_heads", 1.0),
        ("head_dim", 256.0),
        ("global_head_dim", 512.0),
        ("max_position_embeddings", 131_072.0),
        ("num_kv_shared_layers", 20.0),
        ("hidden_size_per_layer_input", 256.0),
        ("final_logit_softcapping", 30.0),
        ("sliding_window", 512.0),
    ],
    describe,
};

/// Layers of a run that ends with one that sees the whole context.
const PATTERN: u32 = 5;
/// Share of a head that is rotated where a layer sees the whole context, if the file says nothing.
const ROTATED: f32 = 0.25;

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    let document = &config.document;
    for field in ["num_kv_shared_layers", "hidden_size_per_layer_input"] {
        if document.count(field, MAX_SIZE)? > 0 {
            let reason =
                format!("{field} is not supported: embeddings by layer, and layers that share their keys");
            let remedy = "use a Gemma 4 without them: 12B, 26B-A4B or 31B";
            return Err(Unsupported::field(field, reason, remedy).into());
        }
    }
    // Pictures alone are seen ahead in: their tokens are none of a text.
    let sees_ahead = document.value("use_bidirectional_attention");
    let sees_ahead = sees_ahead.is_some_and(|value| *value != false && *value != "vision");
    refuse(config, "use_bidirectional_attention", sees_ahead)?;
    refuse(config, "attention_bias", config.attention_bias)?;
    let pattern = document.optional("sliding_window_pattern", MAX_LAYERS)?.unwrap_or(PATTERN);
    let windowed = windowed(config, |layer| !(layer + 1).is_multiple_of(pattern))?;
    let [full, local] = attentions(config)?;
    let activation = activation_or(config, Activation::GeluTanh)?;
    let epsilon = config.rms_norm_eps;
    let sparse = document.flag("enable_moe_block")?.then(|| beside(config, activation)).transpose()?;
    let layers = windowed.iter().map(|windowed| {
        let attention = if *windowed { &local } else { &full };
        let mut norms = Norms::around(epsilon);
        let mlp = match &sparse {
            Some(experts) => {
                norms.before_mlp = None;
                Mlp::Experts(Box::new(experts.clone()))
            }
            None => Mlp::Dense(Dense { activation, ..Dense::new(config.intermediate_size) }),
        };
        let layer = Layer::new(Mixer::Attention(attention.clone()), mlp, epsilon);
        Layer { norms, output_scale: Some("layer_scalar"), ..layer }
    });
    let mut description = described(config, has_head, layers.collect());
    description.tied = !has_head;
    description.logit_cap = document.float("final_logit_softcapping")?;
    description.embedding_scale = Some((config.hidden_size as f32).sqrt());
    give_windows(config, &mut description, &windowed)?;
    Ok(description)
}

/// Attention to the whole context, and with a window.
fn attentions(config: &Config) -> Result<[Attention; 2], Error> {
    let document = &config.document;
    let head_dim = config.head_dim.unwrap_or(256);
    let wide = match document.count("global_head_dim", MAX_HEADS)? {
        0 => head_dim,
        wide => wide,
    };
    let values_are_keys = document.flag("attention_k_eq_v")?;
    let kv_heads = match document.optional("num_global_key_value_heads", MAX_HEADS)? {
        Some(heads) if values_are_keys => heads,
        _ => config.num_key_value_heads,
    };
    let of = |kv_heads, width, rope: Rope| {
        let mut attention = Attention::new(config.num_attention_heads, kv_heads, width, Some(rope));
        attention.qk_norm = Some(QkNorm::Head { epsilon: config.rms_norm_eps });
        attention.value_norm = Some(config.rms_norm_eps);
        attention.scale = 1.0;
        attention
    };
    let rope = |kind, width, default: (&RopeFields, f32, f32)| {
        let own = document.rope_of(kind)?;
        let (fields, theta, share) = default;
        match own {
            Some(own) => rope_of(config, width, (&own.fields, own.theta.or(Some(theta)), own.share)),
            None => rope_of(config, width, (fields, Some(theta), Some(share))),
        }
    };
    let proportional = RopeFields { rope_type: Some("proportional".to_owned()), ..RopeFields::default() };
    let full = of(kv_heads, wide, rope(FULL, wide, (&proportional, 1e6, ROTATED))?);
    let local = rope(SLIDING, head_dim, (&RopeFields::default(), 1e4, 1.0))?;
    Ok([Attention { values_are_keys, ..full }, of(config.num_key_value_heads, head_dim, local)])
}

/// Experts beside the dense block, each with norms of its own.
fn beside(config: &Config, activation: Activation) -> Result<Experts, Error> {
    let epsilon = config.rms_norm_eps;
    let norm = RouterNorm { epsilon, scale: "router.scale", expert_scale: "router.per_expert_scale" };
    let router = Router { norm: Some(norm), ..Router::new(Scoring::SoftmaxOfChosen) };
    let experts = experts(config, ["num_experts", "top_k_experts", "moe_intermediate_size"], router)?;
    Ok(Experts {
        activation,
        shared: shared_expert(config.intermediate_size, "mlp", None),
        norms: Some(ExpertNorms {
            epsilon,
            before_shared: "pre_feedforward_layernorm",
            after_shared: "post_feedforward_layernorm_1",
            before: "pre_feedforward_layernorm_2",
            after: "post_feedforward_layernorm_2",
        }),
        module: "",
        gate: "router.proj",
        experts: "experts.switch_glu",
        ..experts
    })
}
