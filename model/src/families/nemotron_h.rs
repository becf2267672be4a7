//! Nemotron-H, Nemotron Nano 2 and Nemotron 3: layers that are one block each, a state space (Mamba-2), an attention
//! without positions, a dense block or experts, which a pattern of letters names. No block has a gate.

use serde_json::Value;

use super::{
    Family,
    deepseek_v3::sigmoid_experts,
    shared::{described, refuse, shared_expert},
};
use crate::{
    config::{Config, Document, MAX_HEADS, MAX_SIZE},
    description::{
        Activation, Attention, Dense, Description, Experts, Layer, Mamba2, Mixer, Mlp, NormKind, Norms,
    },
    error::{Error, FileError, Unsupported},
    excerpt::excerpt,
};

pub(super) const FAMILY: Family = Family {
    model_types: &["nemotron_h"],
    fields: &[
        "hybrid_override_pattern",
        "layers_block_type",
        "layer_norm_epsilon",
        "mamba_num_heads",
        "mamba_head_dim",
        "mamba_proj_bias",
        "mamba_hidden_act",
        "ssm_state_size",
        "n_groups",
        "conv_kernel",
        "use_conv_bias",
        "time_step_limit",
        "mlp_hidden_act",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "moe_latent_size",
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "routed_scaling_factor",
        "attention_head_dim",
        // The same as others here, under the names of a release before.
        "mamba_num_groups",
        "mamba_state_dim",
        "num_query_groups",
        "norm_eps",
        // How states, kernels and the training have it.
        "chunk_size",
        "expand",
        "is_mamba_mixer",
        "mamba_ssm_cache_dtype",
        "moe_shared_expert_overlap",
        "num_logits_to_keep",
        "rescale_prenorm_residual",
        "residual_in_fp32",
        "time_step_floor",
        "time_step_max",
        "time_step_min",
        "time_step_rank",
        "use_bias",
        "use_mamba_kernels",
        // Layers that predict further tokens have names of their own, and are not loaded.
        "num_nextn_predict_layers",
        "mtp_hybrid_override_pattern",
        "mtp_layers_block_type",
    ],
    defaults: &[("layer_norm_epsilon", 1e-5)],
    describe,
};

/// Kinds of layers in a pattern, and their names in a list.
const KINDS: &[(char, &[&str])] = &[
    ('M', &["mamba", "linear_attention", "conv"]),
    ('*', &["attention", "full_attention"]),
    ('-', &["mlp"]),
    ('E', &["moe"]),
];

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    let document = &config.document;
    for (field, only) in [("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")] {
        if let Some(other) = document.text(field)?.filter(|value| *value != only) {
            let other = excerpt(other);
            let reason = format!("activation {other:?} is not supported; supported is {only}");
            return Err(Unsupported::field(field, reason, "use a model with it").into());
        }
    }
    let epsilon = document.float("layer_norm_epsilon")?.unwrap_or(config.rms_norm_eps);
    let kinds = kinds(config)?;
    let layer = |kind: &char| {
        let (mixer, mlp) = match kind {
            'M' => (Some(Mixer::Mamba2(mamba2(document, epsilon)?)), None),
            '*' => (Some(Mixer::Attention(attention(config)?)), None),
            'E' => (None, Some(Mlp::Experts(Box::new(experts(config)?)))),
            _ => (None, Some(Mlp::Dense(dense(config)))),
        };
        let norm = Some("norm");
        let norms = Norms {
            kind: NormKind::Rms,
            of_sums: false,
            epsilon,
            before_mixer: norm.filter(|_| mixer.is_some()),
            after_mixer: None,
            before_mlp: norm.filter(|_| mlp.is_some()),
            after_mlp: None,
        };
        Ok(Layer { mixer, mlp, norms, residual_scale: None, output_scale: None })
    };
    let layers = kinds.iter().map(layer).collect::<Result<_, Error>>()?;
    Ok(Description { norm_epsilon: epsilon, ..described(config, has_head, layers) })
}

/// The letter of each layer's kind.
fn kinds(config: &Config) -> Result<Vec<char>, Error> {
    let document = &config.document;
    let pattern = document.letters("hybrid_override_pattern")?;
    let listed = document.texts("layers_block_type")?;
    let (field, names) = match (pattern.is_empty(), listed.is_empty()) {
        (false, _) => ("hybrid_override_pattern", pattern),
        (true, false) => ("layers_block_type", listed),
        (true, true) => ("layer_types", config.layer_types.clone()),
    };
    let kind = |name: &String| {
        let known = KINDS.iter().find(|(letter, names)| {
            names.contains(&name.as_str()) || name.chars().eq(std::iter::once(*letter))
        });
        known.map(|(letter, _)| *letter).ok_or_else(|| {
            let reason = format!(
                "layer kind {name:?} is not supported; supported are M (mamba), * (attention), - (mlp) and E (moe)"
            );
            Unsupported::field(field, reason, "use a model whose layers are of these kinds")
        })
    };
    let kinds = names.iter().map(kind).collect::<Result<Vec<_>, _>>()?;
    if kinds.len() != config.num_hidden_layers as usize {
        let found = format!("{} kinds for {} layers", kinds.len(), config.num_hidden_layers);
        return Err(FileError::Field { field, found }.into());
    }
    Ok(kinds)
}

fn mamba2(document: &Document, epsilon: f32) -> Result<Mamba2, Error> {
    let number = |field| document.number(field, MAX_HEADS);
    let mamba = Mamba2 {
        heads: number("mamba_num_heads")?,
        head_dim: number("mamba_head_dim")?,
        groups: number("n_groups")?,
        state_dim: number("ssm_state_size")?,
        conv_kernel: number("conv_kernel")?,
        conv_bias: document.flag("use_conv_bias")?,
        bias: document.flag("mamba_proj_bias")?,
        step_limits: step_limits(document)?,
        epsilon,
    };
    if !mamba.heads.is_multiple_of(mamba.groups) {
        let found = format!("{} groups of {} heads", mamba.groups, mamba.heads);
        return Err(FileError::Field { field: "n_groups", found }.into());
    }
    Ok(mamba)
}

/// The shortest and the longest time step: any where the file says nothing. Infinity is a text here.
fn step_limits(document: &Document) -> Result<[f32; 2], FileError> {
    let field = "time_step_limit";
    let Some(value) = document.value(field) else { return Ok([0.0, f32::INFINITY]) };
    let limit = |value: &Value| match value.as_str() {
        Some(text) => (text == "Infinity").then_some(f32::INFINITY),
        None => value.as_f64().map(|number| number as f32),
    };
    let limits = value.as_array().and_then(|list| list.iter().map(limit).collect::<Option<Vec<f32>>>());
    match limits.as_deref() {
        Some(&[shortest, longest]) if shortest <= longest => Ok([shortest, longest]),
        _ => Err(document.unusable(field)),
    }
}

/// Attention whose positions are not encoded.
fn attention(config: &Config) -> Result<Attention, Error> {
    let own = config.document.optional("attention_head_dim", MAX_HEADS)?;
    let head_dim = config.head_dim.or(own).unwrap_or(config.hidden_size / config.num_attention_heads);
    let bias = config.attention_bias;
    let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
    Ok(Attention { qkv_bias: bias, output_bias: bias, ..Attention::new(heads, kv_heads, head_dim, None) })
}

fn dense(config: &Config) -> Dense {
    let activation = Activation::SquaredRelu;
    Dense { bias: config.mlp_bias, activation, ..Dense::new(config.intermediate_size) }
}

fn experts(config: &Config) -> Result<Experts, Error> {
    refuse(config, "mlp_bias", config.mlp_bias)?;
    let document = &config.document;
    let width = match document.count("n_shared_experts", MAX_HEADS)? {
        0 => 0,
        _ => document
            .optional("moe_shared_expert_intermediate_size", MAX_SIZE)?
            .unwrap_or(config.intermediate_size),
    };
    Ok(Experts {
        activation: Activation::SquaredRelu,
        shared: shared_expert(width, "shared_experts", None),
        latent: document.optional("moe_latent_size", MAX_SIZE)?,
        ..sigmoid_experts(config)?
    })
}
