//! GLM-4.5 to 4.7: attention of which half of each head is rotated, experts chosen by sigmoids with a correction, and one
//! that every token passes.

use super::{
    Family,
    deepseek_v3::sigmoid_experts,
    shared::{attention, described, gated},
};
use crate::{
    config::{Config, MAX_LAYERS},
    description::{Description, Layer, Mixer, Mlp, QkNorm},
    error::Error,
};

pub(super) const FAMILY: Family = Family {
    model_types: &["glm4_moe"],
    fields: &[
        "use_qk_norm",
        "moe_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "routed_scaling_factor",
        "first_k_dense_replace",
        "scoring_func",
        "topk_method",
        "num_nextn_predict_layers",
    ],
    defaults: &[],
    describe,
};

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    let document = &config.document;
    let mut attention = attention(config)?;
    attention.output_bias = false;
    if document.flag("use_qk_norm")? {
        attention.qk_norm = Some(QkNorm::Head { epsilon: config.rms_norm_eps });
    }
    let experts = sigmoid_experts(config)?;
    let dense = document.count("first_k_dense_replace", MAX_LAYERS)?;
    let layers = (0..config.num_hidden_layers).map(|layer| {
        let mlp = if layer < dense { gated(config)? } else { Mlp::Experts(Box::new(experts.clone())) };
        Ok(Layer::new(Mixer::Attention(attention.clone()), mlp, config.rms_norm_eps))
    });
    let mut description = described(config, has_head, layers.collect::<Result<_, Error>>()?);
    description.unused_layers = document.count("num_nextn_predict_layers", MAX_LAYERS)?;
    Ok(description)
}
