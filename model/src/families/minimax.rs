//! MiniMax M2: norms over all heads of queries and keys together, half of each head rotated, experts chosen by sigmoids
//! that are computed in 32 bits.

use super::{
    Family,
    shared::{attention, described, experts, fixed, rope_of, rotates_whole_heads},
};
use crate::{
    config::{Config, MAX_HEADS},
    description::{Description, Experts, Layer, Mixer, Mlp, QkNorm, Router, Scoring},
    error::{Error, Unsupported},
    excerpt::excerpt,
};

pub(super) const FAMILY: Family = Family {
    model_types: &["minimax", "minimax_m2"],
    fields: &[
        "rotary_dim",
        "num_local_experts",
        "num_experts_per_tok",
        "shared_intermediate_size",
        "scoring_func",
        "use_qk_norm",
        "qk_norm_type",
        "use_routing_bias",
        "use_mtp",
        "num_mtp_modules",
        "mtp_transformer_layers",
        "attn_type_list",
        "layernorm_full_attention_beta",
        "layernorm_linear_attention_beta",
        "layernorm_mlp_beta",
        // Of the shared expert, which there is none of.
        "mlp_intermediate_size",
        "shared_moe_mode",
    ],
    defaults: &[],
    describe,
};

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    let document = &config.document;
    if let Some(other) = document.text("scoring_func")?.filter(|value| *value != "sigmoid") {
        let other = excerpt(other);
        let reason = format!("scoring_func {other:?} is not supported; supported is sigmoid");
        return Err(Unsupported::field("scoring_func", reason, "use a MiniMax M2").into());
    }
    if document.count("shared_intermediate_size", u32::MAX)? > 0 {
        let reason = "a shared expert of a MiniMax model is not supported";
        return Err(Unsupported::field("shared_intermediate_size", reason, "use a MiniMax M2").into());
    }
    // Each of the list says whether a layer attends, as all of an M2 do.
    if document.numbers("attn_type_list", 1)?.contains(&0) {
        let reason = "layers of linear attention of a MiniMax model are not supported";
        return Err(Unsupported::field("attn_type_list", reason, "use a MiniMax M2").into());
    }
    rotates_whole_heads(config)?;
    for field in ["layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"] {
        fixed(config, field, 1.0)?;
    }
    let mut attention = attention(config)?;
    (attention.qkv_bias, attention.output_bias) = (false, false);
    if let Some(width) = document.optional("rotary_dim", MAX_HEADS)? {
        let share = width as f32 / attention.key_dim as f32;
        let fields = (&config.rope_scaling, config.rope_theta, Some(share));
        attention.rope = Some(rope_of(config, attention.key_dim, fields)?);
    }
    if document.choice("use_qk_norm")?.unwrap_or(true) {
        attention.qk_norm = Some(QkNorm::Full { epsilon: config.rms_norm_eps });
    }
    let router = Router {
        correction: Some("e_score_correction_bias"),
        renormalise: true,
        epsilon: 1e-20,
        wide: true,
        ..Router::new(Scoring::Sigmoid)
    };
    let counts = ["num_local_experts", "num_experts_per_tok", "intermediate_size"];
    let experts = Experts {
        module: "block_sparse_moe",
        originals: ["w1", "w3", "w2"],
        ..experts(config, counts, router)?
    };
    let layer = Layer::new(Mixer::Attention(attention), Mlp::Experts(Box::new(experts)), config.rms_norm_eps);
    Ok(described(config, has_head, vec![layer; config.num_hidden_layers as usize]))
}
