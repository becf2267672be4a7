//! Mistral Small 4: attention to a latent, whose queries grow with the position, and experts chosen by a softmax.

use super::{
    Family, deepseek_v3,
    shared::{experts, groups, query_scale, shared_expert},
};
use crate::{
    config::{Config, MAX_HEADS},
    description::{Description, Latent, Router, Scoring},
    error::Error,
};

pub(super) const FAMILY: Family =
    Family { model_types: &["mistral4"], fields: deepseek_v3::FAMILY.fields, defaults: &[], describe };

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    let document = &config.document;
    let mut latent = Latent {
        query_scale: query_scale(config),
        ..deepseek_v3::latent(config, deepseek_v3::LATENT_EPSILON)?
    };
    latent.rope.traditional = document.choice("rope_interleave")?.unwrap_or(true);
    let router = Router {
        renormalise: document.choice("norm_topk_prob")?.unwrap_or(true),
        scale: document.float("routed_scaling_factor")?.unwrap_or(1.0),
        ..Router::new(Scoring::GroupedSoftmax)
    };
    let counts = ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"];
    let mut experts = experts(config, counts, router)?;
    groups(config, &mut experts.router, experts.count)?;
    let shared = document.count("n_shared_experts", MAX_HEADS)?;
    experts.shared = shared_expert(experts.intermediate.saturating_mul(shared), "shared_experts", None);
    deepseek_v3::sparse(config, has_head, &latent, &experts)
}
