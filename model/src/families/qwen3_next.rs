//! Qwen3-Next, Qwen3.5 and 3.6: three gated delta nets to one attention with a gated output, a quarter of whose heads is
//! rotated; dense or with experts, of which every token passes one by a gate.

use super::{
    Family,
    qwen3_moe::sparse_layers,
    shared::{FULL, attention, described, experts, gated, kinds, refuse, rope_of, shared_expert},
};
use crate::{
    config::{Config, MAX_HEADS, MAX_LAYERS, MAX_SIZE},
    description::{DeltaNet, Description, Layer, Mixer, Mlp, NormOffset, QkNorm, Router, Scoring},
    error::{Error, FileError, Unsupported},
    excerpt::excerpt,
};

pub(super) const FAMILY: Family = Family {
    model_types: &["qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"],
    fields: &[
        "linear_num_value_heads",
        "linear_num_key_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "full_attention_interval",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "decoder_sparse_step",
        "mlp_only_layers",
        "norm_topk_prob",
        "attn_output_gate",
        "output_gate_type",
        "mamba_ssm_dtype",
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
    ],
    // Experts leave it out.
    defaults: &[("intermediate_size", 1.0), ("linear_conv_kernel_dim", 4.0)],
    describe,
};

/// How layers of delta nets are called.
const LINEAR: &str = "linear_attention";
/// Share of a head that is rotated where config.json says nothing.
const ROTATED: f32 = 0.25;

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    let document = &config.document;
    if let Some(other) = document.text("output_gate_type")?.filter(|kind| !matches!(*kind, "swish" | "silu"))
    {
        let other = excerpt(other);
        let reason = format!("gate {other:?} is not supported; supported is swish");
        return Err(Unsupported::field("output_gate_type", reason, "use a model with it").into());
    }
    let without_gate = document.choice("attn_output_gate")? == Some(false);
    refuse(config, "attn_output_gate", without_gate)?;
    let mut attention = attention(config)?;
    let share = config.partial_rotary_factor.or(Some(ROTATED));
    attention.rope =
        Some(rope_of(config, attention.key_dim, (&config.rope_scaling, config.rope_theta, share))?);
    attention.qk_norm = Some(QkNorm::Head { epsilon: config.rms_norm_eps });
    attention.output_gate = true;
    let delta = delta_net(config)?;
    let interval = document.optional("full_attention_interval", MAX_LAYERS)?.unwrap_or(4);
    let linear = kinds(config, [FULL, LINEAR], |layer| !(layer + 1).is_multiple_of(interval))?;
    let sparse = match document.count("num_experts", MAX_HEADS)? {
        0 => vec![false; linear.len()],
        _ => sparse_layers(config)?,
    };
    let experts = sparse.contains(&true).then(|| gated_experts(config)).transpose()?;
    let layers = linear.into_iter().zip(sparse).map(|(linear, sparse)| {
        let mixer = match linear {
            true => Mixer::DeltaNet(delta.clone()),
            false => Mixer::Attention(attention.clone()),
        };
        let mlp = match &experts {
            Some(experts) if sparse => experts.clone(),
            _ => gated(config)?,
        };
        Ok(Layer::new(mixer, mlp, config.rms_norm_eps))
    });
    let mut description = described(config, has_head, layers.collect::<Result<_, Error>>()?);
    description.norm_offset = NormOffset::OneInOriginals;
    Ok(description)
}

fn delta_net(config: &Config) -> Result<DeltaNet, Error> {
    let number = |field| config.document.number(field, MAX_HEADS);
    let delta = DeltaNet {
        key_heads: number("linear_num_key_heads")?,
        value_heads: number("linear_num_value_heads")?,
        key_dim: number("linear_key_head_dim")?,
        value_dim: number("linear_value_head_dim")?,
        conv_kernel: number("linear_conv_kernel_dim")?,
        epsilon: config.rms_norm_eps,
        merged_projections: config.document.text_type == "qwen3_next",
    };
    if !delta.value_heads.is_multiple_of(delta.key_heads) {
        let found = format!("{} value heads for {} key heads", delta.value_heads, delta.key_heads);
        return Err(FileError::Field { field: "linear_num_value_heads", found }.into());
    }
    Ok(delta)
}

fn gated_experts(config: &Config) -> Result<Mlp, Error> {
    let document = &config.document;
    // Qwen3.5 leaves it out and means yes.
    let renormalise = document.choice("norm_topk_prob")?.unwrap_or(document.text_type != "qwen3_next");
    let router = Router { renormalise, ..Router::new(Scoring::Softmax) };
    let mut experts =
        experts(config, ["num_experts", "num_experts_per_tok", "moe_intermediate_size"], router)?;
    let width = document.count("shared_expert_intermediate_size", MAX_SIZE)?;
    experts.shared = shared_expert(width, "shared_expert", Some("shared_expert_gate"));
    Ok(Mlp::Experts(Box::new(experts)))
}
