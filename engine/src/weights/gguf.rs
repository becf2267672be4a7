//! Weights in GGUF, read as if they were those of an MLX repository: `model` says where each byte of the converted
//! tensors would lie and what blocks it is made of.

use std::path::Path;

use russet_model::{
    error::Error, load_quantization::LoadQuantization, safetensors::Headers, value_type::ValueType,
};

use super::{
    LoadDtype, WeightsError, checkpoint::OpenFile, source_file::SourceFile, weight_file::WeightFile,
};
use crate::gguf_folder::{GgufFolder, GgufFolderError};

/// A model in GGUF that is open.
pub(super) struct GgufCheckpoint {
    /// `config.json`.
    pub config: Vec<u8>,
    /// Of the converted weights.
    pub headers: Headers,
    /// As many as the headers are of.
    pub files: Vec<OpenFile>,
}

/// Opens the model in GGUF of a folder; `None` where there is none. What is packed anew has the bits of `quantization`. What is computed in 32 bits is converted to 32 bits,
/// without the rounding of scales.
pub(super) fn open(
    dir: &Path,
    dtype: LoadDtype,
    quantization: Option<LoadQuantization>,
) -> Result<Option<GgufCheckpoint>, WeightsError> {
    let failed = |error: GgufFolderError| match error {
        GgufFolderError::Io { path, source } => WeightsError::Io { path, source },
        GgufFolderError::Model(Error::File(source)) => WeightsError::File { folder: dir.to_owned(), source },
        GgufFolderError::Model(Error::Unsupported(why)) => why.into(),
    };
    // What is missing is named by the reader of folders without GGUF.
    if !dir.is_dir() {
        return Ok(None);
    }
    let Some(folder) = GgufFolder::open(dir).map_err(failed)? else { return Ok(None) };
    let (config, weights) = {
        let model = folder.model().map_err(failed)?;
        let value = match dtype {
            LoadDtype::AsStored | LoadDtype::AsStoredWide => model.value_type(),
            LoadDtype::Float32 => ValueType::F32,
        };
        let weights = model.weights(value, quantization).map_err(|error| failed(error.into()))?;
        (folder.configuration(&model).map_err(failed)?, weights)
    };
    let files = folder.into_files().zip(weights.layouts);
    let files = files.map(|((path, file), layout)| {
        let file = WeightFile::Gguf(SourceFile::new(file), layout);
        OpenFile { path, file }
    });
    Ok(Some(GgufCheckpoint { config, headers: weights.headers, files: files.collect() }))
}

#[cfg(test)]
mod tests;
