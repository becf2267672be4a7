//! Qwen3's mixtures of experts: Qwen3's blocks, in which most layers have experts chosen by a softmax over all.

use super::{
    Family, qwen3,
    shared::{experts, refuse},
};
use crate::{
    config::{Config, MAX_LAYERS},
    description::{Description, Mlp, Router, Scoring},
    error::Error,
};

pub(super) const FAMILY: Family = Family {
    model_types: &["qwen3_moe"],
    fields: &[
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "decoder_sparse_step",
        "mlp_only_layers",
        "norm_topk_prob",
        "use_qk_norm",
    ],
    defaults: &[],
    describe,
};

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    let without_norms = config.document.choice("use_qk_norm")? == Some(false);
    refuse(config, "use_qk_norm", without_norms)?;
    let mut description = qwen3::describe(config, has_head)?;
    let router =
        Router { renormalise: config.document.flag("norm_topk_prob")?, ..Router::new(Scoring::Softmax) };
    let experts = experts(config, ["num_experts", "num_experts_per_tok", "moe_intermediate_size"], router)?;
    let sparse = sparse_layers(config)?;
    for (layer, _) in description.layers.iter_mut().zip(sparse).filter(|(_, sparse)| *sparse) {
        layer.mlp = Some(Mlp::Experts(Box::new(experts.clone())));
    }
    Ok(description)
}

/// Which layers have experts: every `decoder_sparse_step`-th, but none of `mlp_only_layers`.
pub(super) fn sparse_layers(config: &Config) -> Result<Vec<bool>, Error> {
    let step = config.document.optional("decoder_sparse_step", MAX_LAYERS)?.unwrap_or(1);
    let dense = config.document.numbers("mlp_only_layers", MAX_LAYERS)?;
    let sparse = |layer: u32| (layer + 1).is_multiple_of(step) && !dense.contains(&layer);
    Ok((0..config.num_hidden_layers).map(sparse).collect())
}
