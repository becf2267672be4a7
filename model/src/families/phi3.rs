//! Phi-3, 3.5 and 4: Llama's blocks, whose projections of queries, keys and values are stored in one matrix, and those of
//! gate and input in another.

use super::{
    Family,
    shared::{blocks, give_windows},
};
use crate::{
    config::Config,
    description::{Description, Mlp},
    error::Error,
};

pub(super) const FAMILY: Family =
    Family { model_types: &["phi3"], fields: &["original_max_position_embeddings"], defaults: &[], describe };

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    let mut config = config.clone();
    let own = config.document.float("original_max_position_embeddings")?;
    let scaling = &mut config.rope_scaling;
    scaling.original_max_position_embeddings = scaling.original_max_position_embeddings.or(own);
    if scaling.rope_type.as_deref() == Some("su") {
        scaling.rope_type = Some("longrope".to_owned());
    }
    let mut description = blocks(&config, has_head)?;
    for layer in &mut description.layers {
        if let Mlp::Dense(dense) = &mut layer.mlp {
            dense.merged = true;
        }
    }
    if config.sliding_window.is_some() {
        give_windows(&config, &mut description, &vec![true; config.num_hidden_layers as usize])?;
    }
    Ok(description)
}
