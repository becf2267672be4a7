//! Mistral Small 4: attention to a latent, whose queries grow with the position, and experts chosen by a softmax.

use super::{Family, deepseek_v3, shared::query_scale};
use crate::{
    config::Config,
    description::{Description, Latent, Router, Scoring},
    error::Error,
    load_quantization::MatrixQuantization,
};

pub(super) const FAMILY: Family =
    Family { model_types: &["mistral4"], fields: deepseek_v3::FAMILY.fields, defaults: &[], describe };

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    let mut latent = Latent {
        query_scale: query_scale(config),
        ..deepseek_v3::latent(config, deepseek_v3::LATENT_EPSILON)?
    };
    latent.rope.traditional = config.document.choice("rope_interleave")?.unwrap_or(true);
    let quantization = MatrixQuantization::AsAsked;
    let router = Router { quantization, ..Router::new(Scoring::GroupedSoftmax) };
    let experts = deepseek_v3::grouped_experts(config, router)?;
    deepseek_v3::sparse(config, has_head, &latent, &experts)
}
