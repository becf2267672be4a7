//! Mistral's dense models: Llama's blocks, and in the first ones a window over which every layer looks back.

use super::{Family, bound_to_window, dense};
use crate::{config::Config, description::Description, error::Error, tensors};

pub(super) const FAMILY: Family = Family { model_type: "mistral", describe, tensors: tensors::hugging_face };

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    let mut description = dense(FAMILY.model_type, config, has_head)?;
    if let Some(window) = config.sliding_window {
        bound_to_window(&mut description, window);
    }
    Ok(description)
}
