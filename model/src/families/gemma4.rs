//! Gemma 4: Gemma 3's norms and windows, heads of another width where a layer sees the whole context, and values that are
//! keys there; in the sparse one experts beside the dense block; in the E models per-layer inputs, and last layers that
//! read the keys and values of earlier ones and have an MLP twice as wide. Not here: pictures and sound.

use super::{
    Family,
    shared::{
        FULL, SLIDING, activation_or, described, experts, give_windows, logit_cap, refuse, rope_of,
        shared_expert, windowed,
    },
};
use crate::{
    config::{Config, MAX_HEADS, MAX_LAYERS, MAX_SIZE, RopeFields},
    description::{
        Activation, Attention, Dense, Description, ExpertNorms, Experts, Layer, Mixer, Mlp, Norms,
        PerLayerInputs, QkNorm, Rope, Router, RouterNorm, Scoring,
    },
    error::{Error, FileError},
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
        ("vocab_size_per_layer_input", 262_144.0),
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
    let owners = cache_owners(config, &windowed)?;
    let doubles = document.choice("use_double_wide_mlp")?.unwrap_or(true);
    let layers = windowed.iter().zip(owners).map(|(windowed, shares_cache_of)| {
        let attention = if *windowed { &local } else { &full };
        let attention = Attention { shares_cache_of, ..attention.clone() };
        let wide = if doubles && shares_cache_of.is_some() { 2 } else { 1 };
        let mut norms = Norms::around(epsilon);
        let mlp = match &sparse {
            Some(experts) => {
                norms.before_mlp = None;
                Mlp::Experts(Box::new(experts.clone()))
            }
            None => Mlp::Dense(Dense { activation, ..Dense::new(config.intermediate_size * wide) }),
        };
        let layer = Layer::new(Mixer::Attention(attention), mlp, epsilon);
        Layer { norms, output_scale: Some("layer_scalar"), ..layer }
    });
    let mut description = described(config, has_head, layers.collect());
    description.tied = !has_head;
    description.logit_cap = logit_cap(config)?;
    description.embedding_scale = Some((config.hidden_size as f32).sqrt());
    description.per_layer_inputs = per_layer_inputs(config, activation)?;
    give_windows(config, &mut description, &windowed)?;
    Ok(description)
}

/// The layer whose keys and values each layer reads: the last ones those of the last of their kind before them.
fn cache_owners(config: &Config, windowed: &[bool]) -> Result<Vec<Option<u32>>, Error> {
    const FIELD: &str = "num_kv_shared_layers";
    let shared = config.document.count(FIELD, MAX_LAYERS)? as usize;
    let own = windowed.len().saturating_sub(shared);
    let owner = |layer: usize| windowed[..own].iter().rposition(|kind| *kind == windowed[layer]);
    let owners: Vec<Option<u32>> =
        (0..windowed.len()).map(|layer| owner(layer).filter(|_| layer >= own).map(|at| at as u32)).collect();
    if owners.iter().skip(own).any(Option::is_none) {
        let found = format!(
            "{shared} of {} layers, before which there is none of the same kind whose keys and values they read",
            windowed.len()
        );
        return Err(FileError::Field { field: FIELD, found }.into());
    }
    Ok(owners)
}

/// Per-layer inputs; none where their width is 0.
fn per_layer_inputs(config: &Config, activation: Activation) -> Result<Option<PerLayerInputs>, Error> {
    const TOKENS: &str = "vocab_size_per_layer_input";
    let document = &config.document;
    let width = document.count("hidden_size_per_layer_input", MAX_SIZE / MAX_LAYERS)?;
    if width == 0 {
        return Ok(None);
    }
    let vocab_size = document.number(TOKENS, MAX_SIZE)?;
    if vocab_size < config.vocab_size {
        let found = format!("{vocab_size}, fewer than the {} tokens of vocab_size", config.vocab_size);
        return Err(FileError::Field { field: TOKENS, found }.into());
    }
    Ok(Some(PerLayerInputs {
        width,
        vocab_size,
        embedding_scale: (width as f32).sqrt(),
        projection_scale: f64::from(config.hidden_size).powf(-0.5) as f32,
        scale: std::f32::consts::FRAC_1_SQRT_2,
        epsilon: config.rms_norm_eps,
        activation,
    }))
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
