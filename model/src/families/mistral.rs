//! Mistral's dense models: Llama's blocks, and in the first ones a window over which every layer looks back.

use super::{
    Family,
    shared::{dense, give_windows},
};
use crate::{config::Config, description::Description, error::Error};

pub(super) const FAMILY: Family = Family { model_types: &["mistral"], fields: &[], defaults: &[], describe };

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    let mut description = dense(config, has_head)?;
    if config.sliding_window.is_some() {
        give_windows(config, &mut description, &vec![true; config.num_hidden_layers as usize])?;
    }
    Ok(description)
}
