//! Phi-3, 3.5 and 4: Llama's blocks, whose projections of queries, keys and values are stored in one matrix, and those of
//! gate and input in another.

use super::{
    Family,
    shared::{blocks, fixed, give_windows},
};
use crate::{config::Config, description::Description, error::Error};

pub(super) const FAMILY: Family = Family {
    model_types: &["phi3"],
    fields: &["original_max_position_embeddings", "full_attn_mod", "interpolate_factor"],
    defaults: &[],
    describe,
};

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    fixed(config, "full_attn_mod", 1.0)?;
    fixed(config, "interpolate_factor", 1.0)?;
    let mut config = config.clone();
    let own = config.document.float("original_max_position_embeddings")?;
    let scaling = &mut config.rope_scaling;
    scaling.original_max_position_embeddings = scaling.original_max_position_embeddings.or(own);
    if scaling.rope_type.as_deref() == Some("su") {
        scaling.rope_type = Some("longrope".to_owned());
    }
    let mut description = blocks(&config, has_head)?;
    if config.sliding_window.is_some() {
        give_windows(&config, &mut description, &vec![true; config.num_hidden_layers as usize])?;
    }
    Ok(description)
}
