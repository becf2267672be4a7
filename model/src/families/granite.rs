//! Granite: Llama's blocks with factors of embeddings, scores, residuals and logits.

use super::{Family, shared::dense};
use crate::{config::Config, description::Description, error::Error, load_quantization::MatrixQuantization};

pub(super) const FAMILY: Family = Family {
    model_types: &["granite"],
    fields: &["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"],
    defaults: &[],
    describe,
};

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    let factor = |field| config.document.float(field).map(|factor| factor.filter(|factor| *factor != 1.0));
    let mut description = dense(config, has_head)?;
    description.embedding_scale = factor("embedding_multiplier")?;
    description.logit_divisor = factor("logits_scaling")?;
    let scale = config.document.float("attention_multiplier")?.unwrap_or(1.0);
    description.attentions_mut().for_each(|attention| attention.scale = scale);
    description.projections_back = MatrixQuantization::EightBits;
    let residual = factor("residual_multiplier")?;
    description.layers.iter_mut().for_each(|layer| layer.residual_scale = residual);
    Ok(description)
}
