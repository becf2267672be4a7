//! DeepSeek V3, V3.1 and R1, Kimi K2, and GLM-4.7-Flash: attention to a latent, experts chosen by sigmoids with a
//! correction and in groups, and one that every token passes.

use super::{
    Family,
    shared::{described, experts, gated, groups, rope_of, shared_expert},
};
use crate::{
    config::{Config, MAX_HEADS, MAX_LAYERS, MAX_SIZE},
    description::{Description, Experts, Latent, Layer, Mixer, Mlp, Router, Scoring, yarn_scale},
    error::{Error, Unsupported},
    excerpt::excerpt,
    load_quantization::MatrixQuantization,
};

pub(super) const FAMILY: Family = Family {
    model_types: &["deepseek_v3", "glm4_moe_lite", "kimi_k2"],
    fields: &[
        "kv_lora_rank",
        "q_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "qk_head_dim",
        "v_head_dim",
        "moe_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "n_group",
        "topk_group",
        "topk_method",
        "scoring_func",
        "norm_topk_prob",
        "routed_scaling_factor",
        "first_k_dense_replace",
        "moe_layer_freq",
        "num_nextn_predict_layers",
        "ep_size",
        "rope_interleave",
    ],
    defaults: &[],
    describe,
};

/// Epsilon of the norms of latents, whatever that of the others is; GLM has one for all.
pub(super) const LATENT_EPSILON: f32 = 1e-6;

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    let epsilon = match config.document.text_type.as_str() {
        "glm4_moe_lite" => config.rms_norm_eps,
        _ => LATENT_EPSILON,
    };
    sparse(config, has_head, &latent(config, epsilon)?, &sigmoid_experts(config)?)
}

/// Attention to a latent, whose norms have this epsilon.
pub(super) fn latent(config: &Config, epsilon: f32) -> Result<Latent, Error> {
    let document = &config.document;
    let number = |field| document.number(field, MAX_HEADS);
    let [rope_dim, nope_dim] = [number("qk_rope_head_dim")?, number("qk_nope_head_dim")?];
    let mut scale = f64::from(rope_dim + nope_dim).powf(-0.5);
    let fields = &config.rope_scaling;
    if let (Some(all), Some(factor)) = (fields.mscale_all_dim.filter(|all| *all != 0.0), fields.factor) {
        scale *= yarn_scale(factor, all).powi(2);
    }
    let mut rope = rope_of(config, rope_dim, (fields, config.rope_theta, None))?;
    rope.traditional = true;
    Ok(Latent {
        heads: config.num_attention_heads,
        rank: document.number("kv_lora_rank", MAX_SIZE)?,
        query_rank: document.optional("q_lora_rank", MAX_SIZE)?,
        rope_dim,
        nope_dim,
        value_dim: number("v_head_dim")?,
        scale: scale as f32,
        rope,
        epsilon,
        bias: config.attention_bias,
        query_scale: None,
    })
}

/// Layers of this attention: the first ones with a dense block, the others with experts.
pub(super) fn sparse(
    config: &Config,
    has_head: bool,
    latent: &Latent,
    experts: &Experts,
) -> Result<Description, Error> {
    let document = &config.document;
    let dense = document.count("first_k_dense_replace", MAX_LAYERS)?;
    let step = document.optional("moe_layer_freq", MAX_LAYERS)?.unwrap_or(1);
    let layers = (0..config.num_hidden_layers).map(|layer| {
        let sparse = layer >= dense && layer.is_multiple_of(step);
        let mlp = if sparse { Mlp::Experts(Box::new(experts.clone())) } else { gated(config)? };
        Ok(Layer::new(Mixer::Latent(latent.clone()), mlp, config.rms_norm_eps))
    });
    let mut description = described(config, has_head, layers.collect::<Result<_, Error>>()?);
    description.unused_layers = document.count("num_nextn_predict_layers", MAX_LAYERS)?;
    Ok(description)
}

/// Experts chosen by sigmoids with a correction.
pub(super) fn sigmoid_experts(config: &Config) -> Result<Experts, Error> {
    let document = &config.document;
    for (field, only) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        if let Some(other) = document.text(field)?.filter(|value| *value != only) {
            let other = excerpt(other);
            let reason = format!("{field} {other:?} is not supported; supported is {only}");
            return Err(Unsupported::field(field, reason, "use a model of a later version").into());
        }
    }
    let correction = Some("gate.e_score_correction_bias");
    let router =
        Router { correction, quantization: MatrixQuantization::Never, ..Router::new(Scoring::Sigmoid) };
    let mut experts = grouped_experts(config, router)?;
    // One expert alone weighs what its score is.
    experts.router.renormalise &= experts.used > 1;
    Ok(experts)
}

/// Experts that this router chooses in groups, and one that every token passes.
pub(super) fn grouped_experts(config: &Config, router: Router) -> Result<Experts, Error> {
    let document = &config.document;
    let router = Router {
        renormalise: document.choice("norm_topk_prob")?.unwrap_or(true),
        scale: document.float("routed_scaling_factor")?.unwrap_or(1.0),
        ..router
    };
    let counts = ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"];
    let mut experts = experts(config, counts, router)?;
    groups(config, &mut experts.router, experts.count)?;
    let shared = document.count("n_shared_experts", MAX_HEADS)?;
    experts.shared = shared_expert(experts.intermediate.saturating_mul(shared), "shared_experts", None);
    Ok(experts)
}
