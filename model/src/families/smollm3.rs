//! SmolLM3: Llama's blocks, of which every fourth encodes no positions.

use super::{Family, shared::dense};
use crate::{
    config::{Config, MAX_LAYERS},
    description::Description,
    error::{Error, FileError},
};

pub(super) const FAMILY: Family = Family {
    model_types: &["smollm3"],
    fields: &["no_rope_layers", "no_rope_layer_interval"],
    defaults: &[],
    describe,
};

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    let mut description = dense(config, has_head)?;
    let interval = config.document.optional("no_rope_layer_interval", MAX_LAYERS)?.unwrap_or(4);
    // One for a layer that encodes positions, 0 for one that does not.
    let mut encodes = config.document.numbers("no_rope_layers", 1)?;
    if encodes.is_empty() {
        encodes =
            (1..=config.num_hidden_layers).map(|layer| u32::from(!layer.is_multiple_of(interval))).collect();
    }
    if encodes.len() != description.layers.len() {
        let found = format!("{} numbers for {} layers", encodes.len(), description.layers.len());
        return Err(FileError::Field { field: "no_rope_layers", found }.into());
    }
    for (attention, _) in description.attentions_mut().zip(encodes).filter(|(_, encodes)| *encodes == 0) {
        attention.rope = None;
    }
    super::shared::give_late_windows(config, &mut description)?;
    Ok(description)
}
