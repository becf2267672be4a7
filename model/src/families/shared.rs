//! What families have in common: pieces of a description by the fields that most configurations share.

use crate::{
    config::{Config, DEFAULT_ROPE_THETA, MAX_HEADS, MAX_SIZE, RopeFields, whole},
    description::{
        Activation, Attention, Dense, Description, Experts, Layer, Mixer, Mlp, NormOffset, QueryScale, Rope,
        RopeScaling, Router, SharedExpert,
    },
    error::{Error, FileError, Unsupported},
    excerpt::excerpt,
    load_quantization::MatrixQuantization,
};

const BELONGS: &str = "take the config.json that belongs to the weights";

/// The description of a Llama-shaped dense model: all layers alike, each with grouped-query attention to the whole
/// context and a gated MLP, normalised before both. A family changes what is its own.
pub(super) fn dense(config: &Config, has_head: bool) -> Result<Description, Error> {
    rotates_whole_heads(config)?;
    blocks(config, has_head)
}

/// That heads are rotated whole: the family does not rotate them in part.
pub(super) fn rotates_whole_heads(config: &Config) -> Result<(), Error> {
    let Some(share) = config.partial_rotary_factor.filter(|share| *share != 1.0) else { return Ok(()) };
    let family = &config.document.model_type;
    let reason = format!("heads of a {family} model that are rotated in part ({share}) are not supported");
    let remedy = "use a model whose heads are rotated whole";
    Err(Unsupported::field("partial_rotary_factor", reason, remedy).into())
}

/// The same, whatever share of a head is rotated.
pub(super) fn blocks(config: &Config, has_head: bool) -> Result<Description, Error> {
    if let Some(kind) = config.layer_types.iter().find(|kind| *kind != FULL) {
        let reason = format!("layer type {kind:?} is not supported; supported is {FULL}");
        let remedy = "use a model whose layers all see the whole context";
        return Err(Unsupported::field("layer_types", reason, remedy).into());
    }
    let layer = Layer::new(Mixer::Attention(attention(config)?), gated(config)?, config.rms_norm_eps);
    Ok(described(config, has_head, vec![layer; config.num_hidden_layers as usize]))
}

/// A description of these layers, as the common fields have the rest of it.
pub(super) fn described(config: &Config, has_head: bool, layers: Vec<Layer>) -> Description {
    Description {
        model_type: config.document.model_type.clone(),
        hidden_size: config.hidden_size,
        vocab_size: config.vocab_size,
        context_length: config.max_position_embeddings,
        tied: config.tied(has_head),
        norm: Some("norm"),
        norm_epsilon: config.rms_norm_eps,
        norm_offset: NormOffset::None,
        projections_back: MatrixQuantization::AsAsked,
        embedding_scale: None,
        logit_divisor: None,
        logit_cap: None,
        per_layer_inputs: None,
        encoder: None,
        pooling: None,
        layers,
        unused_layers: 0,
        notes: Vec::new(),
    }
}

/// Grouped-query attention to the whole context.
pub(super) fn attention(config: &Config) -> Result<Attention, Error> {
    let head_dim = config.head_dim.unwrap_or(config.hidden_size / config.num_attention_heads);
    let rope = rope(config, head_dim)?;
    let mut attention =
        Attention::new(config.num_attention_heads, config.num_key_value_heads, head_dim, Some(rope));
    attention.qkv_bias = config.attention_bias;
    attention.output_bias = config.attention_bias;
    Ok(attention)
}

/// The rotary embedding of heads of this width.
pub(super) fn rope(config: &Config, head_dim: u32) -> Result<Rope, Error> {
    if config.document.has_rope_by_kind() {
        let reason = "rotary embeddings by kind of layer are not supported for this model_type";
        let remedy = "use a model with one rotary embedding";
        return Err(Unsupported::field("rope_parameters", reason, remedy).into());
    }
    rope_of(config, head_dim, (&config.rope_scaling, config.rope_theta, config.partial_rotary_factor))
}

/// The rotary embedding by these fields: scaling, base and share of a head.
pub(super) fn rope_of(
    config: &Config,
    head_dim: u32,
    (scaling, theta, share): (&RopeFields, Option<f32>, Option<f32>),
) -> Result<Rope, Error> {
    let share = share.unwrap_or(1.0);
    if !(share > 0.0 && share <= 1.0) {
        let reason = format!("it is {share}, but a share of a head is above 0 and at most 1");
        return Err(Unsupported::field("partial_rotary_factor", reason, BELONGS).into());
    }
    let width = (f64::from(head_dim) * f64::from(share)) as u32;
    if scaling.rope_type.as_deref() == Some("proportional") && width <= head_dim && head_dim.is_multiple_of(2)
    {
        let scaling = RopeScaling::Proportional { rotated: width, factor: scaling.factor.unwrap_or(1.0) };
        let base = theta.unwrap_or(DEFAULT_ROPE_THETA);
        return Ok(Rope { width: head_dim, base, traditional: config.rope_traditional, scaling });
    }
    if width == 0 || !width.is_multiple_of(2) {
        let reason = format!(
            "head_dim is {head_dim}, of which {width} are rotated, but rotary positions need an even number"
        );
        return Err(Unsupported::field("head_dim", reason, "use a model with heads of an even width").into());
    }
    let scaling = RopeScaling::read(scaling, config.max_position_embeddings)?;
    if let RopeScaling::Factors { factors, .. } = &scaling
        && factors.len() != (width / 2) as usize
    {
        let reason = format!("it has {} factors for {} pairs", factors.len(), width / 2);
        return Err(Unsupported::field("rope_scaling.long_factor", reason, BELONGS).into());
    }
    let base = theta.unwrap_or(DEFAULT_ROPE_THETA);
    Ok(Rope { width, base, traditional: config.rope_traditional, scaling })
}

/// What logits are softly capped at; 0 is no cap.
pub(super) fn logit_cap(config: &Config) -> Result<Option<f32>, FileError> {
    Ok(config.document.float("final_logit_softcapping")?.filter(|cap| *cap != 0.0))
}

/// How queries grow with their position, if they do.
pub(super) fn query_scale(config: &Config) -> Option<QueryScale> {
    let fields = &config.rope_scaling;
    match (fields.llama_4_scaling_beta, fields.original_max_position_embeddings) {
        (Some(beta), Some(original)) if beta != 0.0 && original > 0.0 => Some(QueryScale { beta, original }),
        _ => None,
    }
}

/// One gated block.
pub(super) fn gated(config: &Config) -> Result<Mlp, Error> {
    let activation = activation(config)?;
    Ok(Mlp::Dense(Dense { bias: config.mlp_bias, activation, ..Dense::new(config.intermediate_size) }))
}

/// What gates pass; SiLU where the file says nothing.
pub(super) fn activation(config: &Config) -> Result<Activation, Error> {
    activation_or(config, Activation::Silu)
}

/// The same where the file means another one by saying nothing.
pub(super) fn activation_or(config: &Config, default: Activation) -> Result<Activation, Error> {
    for field in ["hidden_act", "hidden_activation"] {
        match config.document.text(field)? {
            None => {}
            Some("silu" | "swish") => return Ok(Activation::Silu),
            Some("gelu_pytorch_tanh") => return Ok(Activation::GeluTanh),
            Some(other) => {
                let other = excerpt(other);
                let reason = format!(
                    "activation {other:?} is not supported; supported are silu and gelu_pytorch_tanh"
                );
                return Err(Unsupported::field(field, reason, "use a model with one of these").into());
            }
        }
    }
    Ok(default)
}

/// That a switch is left as the family has it: the file may name it, and means nothing by it.
pub(super) fn fixed(config: &Config, field: &'static str, only: f32) -> Result<(), Error> {
    match config.document.float(field)? {
        Some(value) if value != only => {
            let reason = format!("it is {value}; supported is {only}");
            Err(Unsupported::field(field, reason, "use a model that leaves it out").into())
        }
        _ => Ok(()),
    }
}

/// That a field which the family cannot do without is there.
pub(super) fn require(field: &str, present: bool) -> Result<(), Error> {
    if present {
        return Ok(());
    }
    Err(Unsupported::field(field, format!("{field} is missing"), BELONGS).into())
}

/// That a switch which the family does not have is off.
pub(super) fn refuse(config: &Config, field: &'static str, on: bool) -> Result<(), Error> {
    if !on {
        return Ok(());
    }
    let family = &config.document.model_type;
    let reason = format!("{field} of a {family} model is not supported");
    Err(Unsupported::field(field, reason, format!("use a {family} model without it")).into())
}

/// How layers that see all of the context are called.
pub(super) const FULL: &str = "full_attention";
/// How layers with a window are called.
pub(super) const SLIDING: &str = "sliding_attention";

/// Which layers have a window: as `layer_types` says, else by their index.
pub(super) fn windowed(config: &Config, by_index: impl Fn(u32) -> bool) -> Result<Vec<bool>, Error> {
    kinds(config, [FULL, SLIDING], by_index)
}

/// Which layers are of the second kind: as `layer_types` says, else by their index.
pub(super) fn kinds(
    config: &Config,
    [first, second]: [&str; 2],
    by_index: impl Fn(u32) -> bool,
) -> Result<Vec<bool>, Error> {
    let layers = config.num_hidden_layers;
    if config.layer_types.is_empty() {
        return Ok((0..layers).map(by_index).collect());
    }
    if config.layer_types.len() != layers as usize {
        let found = format!("{} kinds for {layers} layers", config.layer_types.len());
        return Err(FileError::Field { field: "layer_types", found }.into());
    }
    let kind = |kind: &String| match kind.as_str() {
        kind if kind == first => Ok(false),
        kind if kind == second => Ok(true),
        other => {
            let reason = format!("layer type {other:?} is not supported; supported are {first} and {second}");
            let remedy = "use a model whose layers are of these kinds";
            Err(Unsupported::field("layer_types", reason, remedy).into())
        }
    };
    config.layer_types.iter().map(kind).collect()
}

/// Gives these layers the window of the configuration, unless it is as long as the context.
pub(super) fn give_windows(
    config: &Config,
    description: &mut Description,
    windowed: &[bool],
) -> Result<(), Error> {
    let window = match config.sliding_window {
        None if windowed.contains(&true) => return Err(config.document.unusable("sliding_window").into()),
        None => return Ok(()),
        Some(window) if window >= config.max_position_embeddings => return Ok(()),
        Some(window) => window,
    };
    for (attention, _) in description.attentions_mut().zip(windowed).filter(|(_, windowed)| **windowed) {
        attention.window = Some(window);
    }
    Ok(())
}

/// The layers that Qwen gives a window: those from `max_window_layers` on, where `use_sliding_window` says so.
pub(super) fn give_late_windows(config: &Config, description: &mut Description) -> Result<(), Error> {
    let full = match config.document.value("max_window_layers").map(whole) {
        None => 0,
        Some(full) => full.ok_or_else(|| config.document.unusable("max_window_layers"))?,
    };
    if !config.document.flag("use_sliding_window")? || config.sliding_window.is_none() {
        return Ok(());
    }
    let windowed: Vec<bool> = (0..config.num_hidden_layers).map(|layer| u64::from(layer) >= full).collect();
    give_windows(config, description, &windowed)
}

/// Experts by the names of fields that most families have.
pub(super) fn experts(
    config: &Config,
    [count, used, intermediate]: [&'static str; 3],
    router: Router,
) -> Result<Experts, Error> {
    let number = |field, limit| config.document.number(field, limit);
    let [all, chosen] = [number(count, MAX_HEADS)?, number(used, MAX_HEADS)?];
    if chosen > all {
        let found = format!("{chosen} of {all} experts a token");
        return Err(FileError::Field { field: used, found }.into());
    }
    let mut experts = Experts::new(all, chosen, number(intermediate, MAX_SIZE)?, router);
    experts.activation = activation(config)?;
    Ok(experts)
}

/// The expert that every token passes, of this width; none where that is 0.
pub(super) fn shared_expert(
    intermediate: u32,
    module: &'static str,
    gate: Option<&'static str>,
) -> Option<SharedExpert> {
    (intermediate > 0).then_some(SharedExpert { intermediate, module, gate })
}

/// A router's groups of experts, of which some are chosen from.
pub(super) fn groups(config: &Config, router: &mut Router, count: u32) -> Result<(), Error> {
    let number = |field| config.document.optional(field, MAX_HEADS).map(|number| number.unwrap_or(1));
    (router.groups, router.used_groups) = (number("n_group")?, number("topk_group")?);
    if !count.is_multiple_of(router.groups) || router.used_groups > router.groups {
        let Router { groups, used_groups, .. } = router;
        let found = format!("{used_groups} of {groups} groups of {count} experts");
        return Err(FileError::Field { field: "n_group", found }.into());
    }
    // The best two of a group are its score.
    if router.groups > 1 && count / router.groups < 2 {
        let found = format!("{} groups of {count} experts, which is fewer than two each", router.groups);
        return Err(FileError::Field { field: "n_group", found }.into());
    }
    Ok(())
}
