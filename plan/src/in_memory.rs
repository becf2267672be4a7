//! What an engine makes of a model's files: the sizes that count in memory, where `spec.engine.quantization` packs the
//! weights while they are read. What lies on disk is as the files have it.

use std::borrow::Cow;

use russet_crds::{EngineOptions, WeightQuantization};
use russet_model::load_quantization::LoadQuantization;
use russet_model::shape::ModelShape;

use crate::note::Note;

/// The sizes of a model as these options keep it in memory; an error says why the engine would not load it so.
pub fn shape<'a>(engine: &EngineOptions, stored: &'a ModelShape) -> Result<Cow<'a, ModelShape>, Note> {
    let field = "spec.engine.quantization".to_owned();
    let quantization = match engine.quantization {
        WeightQuantization::AsStored => return Ok(Cow::Borrowed(stored)),
        WeightQuantization::Int8 => LoadQuantization::Int8,
        WeightQuantization::Int4 => LoadQuantization::Int4,
        WeightQuantization::Unknown => return Err(Note::Newer { field }),
    };
    let refused = |why| {
        let why = format!("the model's weights cannot be packed as {quantization:?}: {why}");
        Note::Invalid { field, why }
    };
    stored.quantised(quantization).map(Cow::Owned).map_err(refused)
}
