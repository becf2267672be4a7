//! Loads a rank's tensors from a Hugging Face folder: positioned reads of its own shard of each tensor in the model's
//! table, by several threads, straight into the memory of MLX's arrays. Files are not memory-mapped, and `model` checks
//! everything they claim against the file's length and the configuration.
//!
//! ```text
//! Checkpoint: headers, table ─▶ ShardRead: which bytes ─▶ WeightFile: as they are, or converted ─▶ SourceFile
//!                                        Weights: arrays ◀─┘
//! ```

mod checkpoint;
mod gguf;
mod loader;
mod plain_file;
mod shard_read;
mod source_file;
mod weight;
mod weight_file;

use std::{io, path::PathBuf};

use mlx_rs::error::Exception;
use russet_model::error::{FileError, Unsupported};
use thiserror::Error;

pub use checkpoint::Checkpoint;
pub use loader::Weights;
pub(crate) use loader::turned;
pub use plain_file::PlainFile;
pub(crate) use shard_read::shares;
pub use weight::{Weight, exception};

/// Why weights cannot be loaded. Each error names the file or tensor, the numbers and the remedy.
#[derive(Debug, Error)]
pub enum WeightsError {
    /// A file cannot be read.
    #[error("cannot read {path}: {source}; copy the model again or fix the file's permissions")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The files are not those of a model.
    #[error("{folder}: {source}")]
    File {
        /// The model's folder.
        folder: PathBuf,
        /// What is wrong.
        source: FileError,
    },
    /// The engine does not run the model.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The model has no such tensor.
    #[error("the model has no tensor {0}; its description and its layers disagree, report this as a bug")]
    NoTensor(String),
    /// A tensor that the members of a stage cannot share evenly.
    #[error(
        "tensor {tensor} has {length} {what}, which {of} ranks cannot share evenly; use a tensor size that divides {length}"
    )]
    NotDivisible {
        /// Its name.
        tensor: String,
        /// How many there are.
        length: u64,
        /// Of what.
        what: &'static str,
        /// Members of the stage.
        of: usize,
    },
    /// An adapter is damaged, of another model, or of a kind that the engine does not compute.
    #[error("adapter {adapter}: {reason}")]
    Adapter {
        /// Its name.
        adapter: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// MLX failed.
    #[error("cannot make an array of tensor {tensor}: {reason}")]
    Mlx {
        /// Its name.
        tensor: String,
        /// MLX's words.
        reason: String,
    },
}

impl WeightsError {
    /// MLX failed with this tensor.
    pub(crate) fn mlx(tensor: &str, error: &Exception) -> Self {
        Self::Mlx { tensor: tensor.to_owned(), reason: error.what().to_owned() }
    }

    /// Whether the same files are refused again whenever they are read.
    pub(crate) fn is_refusal(&self) -> bool {
        match self {
            Self::File { .. }
            | Self::Unsupported(_)
            | Self::NoTensor(_)
            | Self::NotDivisible { .. }
            | Self::Adapter { .. } => true,
            Self::Io { .. } | Self::Mlx { .. } => false,
        }
    }
}

/// The element type weights are kept in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadDtype {
    /// As in the files.
    #[default]
    AsStored,
    /// As in the files, and products with quantised weights are computed in float32: a CPU does them nine times as fast. MLX
    /// widens the scales of the matrix meanwhile. They round differently from mlx-lm's.
    AsStoredWide,
    /// Everything as float32, quantised weights unpacked: much faster on a CPU, and two to eight times
    /// the memory.
    Float32,
}

#[cfg(test)]
mod tests;
