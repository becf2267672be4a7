//! Loads a rank's tensors from a Hugging Face folder: positioned reads of its own shard of each tensor in the model's
//! table. Files are not memory-mapped, and `model` checks everything they claim against the file's length and the
//! configuration.

mod gguf;
mod shard_read;
mod weight;
mod weight_file;

use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, Read as _},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use mlx_rs::{
    Array, Dtype,
    error::Exception,
    ops::{indexing::TryIndexOp as _, stack},
};
use russet_mlx::quantized::{Quantization, QuantizedWeight};
use russet_model::{
    Model,
    config::{CONFIG, MAX_CONFIG_BYTES},
    error::{Error, FileError, Unsupported},
    index::{INDEX, MAX_INDEX_BYTES, weight_files},
    partition::RankPart,
    safetensors::{self, Entry, Headers},
    tensors::{Packing, PackingMode, Recipe, ShardAxis, Stored, Tensor, beside, packed_entry},
};
use thiserror::Error;

use crate::partition::{TpShard, rank_holds};
use gguf::GgufCheckpoint;
use shard_read::{RowRange, ShardRead};
pub use weight::{Weight, exception};
use weight_file::{PackedFiles, WeightFile};

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
            Self::File { .. } | Self::Unsupported(_) | Self::NoTensor(_) | Self::NotDivisible { .. } => true,
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
    /// Everything as float32, quantised weights unpacked: much faster on a CPU, and two to eight times
    /// the memory.
    Float32,
}

/// A model folder: its configuration and the headers of its weight files, read and checked.
#[derive(Debug)]
pub struct Checkpoint {
    model: Model,
    headers: Headers,
    /// As many as the headers are of.
    files: Vec<OpenFile>,
    /// Where in the model's table a tensor stands.
    places: HashMap<String, usize>,
}

#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: WeightFile,
}

impl Checkpoint {
    /// Opens a folder with `config.json` and its safetensors files, or with a model in GGUF.
    pub fn open(dir: &Path) -> Result<Self, WeightsError> {
        Self::open_as(dir, LoadDtype::AsStored)
    }

    /// The same for weights that will be kept in a type: what is converted on loading is converted to it.
    pub fn open_as(dir: &Path, dtype: LoadDtype) -> Result<Self, WeightsError> {
        match gguf::open(dir, dtype)? {
            Some(GgufCheckpoint { config, headers, files }) => Self::new(dir, &config, headers, files),
            None => Self::open_safetensors(dir),
        }
    }

    fn open_safetensors(dir: &Path) -> Result<Self, WeightsError> {
        let wrong = |source: FileError| WeightsError::File { folder: dir.to_owned(), source };
        let Some(config) = read_small(dir, CONFIG, MAX_CONFIG_BYTES)? else {
            return Err(wrong(FileError::Missing { file: CONFIG.to_owned() }));
        };
        let index = read_small(dir, INDEX, MAX_INDEX_BYTES)?;
        let names = file_names(dir)?;
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut headers = Headers::default();
        let mut files = Vec::new();
        for name in weight_files(index.as_deref(), &names).map_err(wrong)?.names {
            let path = dir.join(&name);
            let io = |source| WeightsError::Io { path: path.clone(), source };
            let file = File::open(&path).map_err(io)?;
            let size = file.metadata().map_err(io)?.len();
            let mut start = vec![0; size.min(8) as usize];
            file.read_exact_at(&mut start, 0).map_err(io)?;
            let mut header = vec![0; headers.next_length(&name, &start, size).map_err(wrong)? as usize];
            file.read_exact_at(&mut header, 8).map_err(io)?;
            headers.add(&name, &header, size).map_err(wrong)?;
            files.push(OpenFile { path, file: WeightFile::Plain(file) });
        }
        Self::new(dir, &config, headers, files)
    }

    fn new(dir: &Path, config: &[u8], headers: Headers, files: Vec<OpenFile>) -> Result<Self, WeightsError> {
        let mut model = russet_model::read(config, &headers).map_err(|error| match error {
            Error::File(source) => WeightsError::File { folder: dir.to_owned(), source },
            Error::Unsupported(why) => why.into(),
        })?;
        let (headers, files) = match model.converted.take() {
            None => (headers, files),
            Some(converted) => (converted.headers, PackedFiles::open(files, converted.layout)),
        };
        let names = model.tensors.iter().enumerate();
        let places = names.map(|(place, (tensor, _))| (tensor.name.clone(), place)).collect();
        Ok(Self { model, headers, files, places })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// What the header says of a stored tensor.
    pub fn entry(&self, tensor: &str) -> Option<&Entry> {
        self.headers.get(tensor)
    }

    /// Bytes that the rank of `part` reads.
    pub fn bytes(&self, part: &RankPart) -> Result<u64, WeightsError> {
        let (tied, shard) = (self.model.description.tied, TpShard::for_part(part));
        let held = self.model.tensors.iter().filter(|(tensor, _)| rank_holds(part, tied, tensor.role));
        let mut bytes = 0;
        for (tensor, stored) in held {
            for field in fields(stored) {
                for read in self.reads(tensor, *field, shard)? {
                    bytes += read.2.bytes();
                }
            }
        }
        Ok(bytes)
    }

    fn tensor(&self, name: &str) -> Option<&(Tensor, Stored)> {
        self.places.get(name).and_then(|&place| self.model.tensors.get(place))
    }

    /// The reads that one field of a tensor takes: one of each of its sources.
    fn reads(
        &self,
        tensor: &Tensor,
        field: Field,
        shard: TpShard,
    ) -> Result<Vec<(String, &Entry, ShardRead)>, WeightsError> {
        let stacked = tensor.recipe == Recipe::Stack;
        let axis = match &tensor.axis {
            // Of what is stacked, each source lacks the first dimension.
            ShardAxis::Axis { dim, segments } if stacked => {
                ShardAxis::Axis { dim: dim.saturating_sub(1), segments: segments.clone() }
            }
            ShardAxis::Parts { dim, parts } if stacked => {
                ShardAxis::Parts { dim: dim.saturating_sub(1), parts: *parts }
            }
            // Heads of a matrix are its rows.
            ShardAxis::Axis { .. } if matches!(tensor.recipe, Recipe::HeadRows { .. }) => {
                ShardAxis::Axis { dim: 0, segments: tensor.source_shape().into_iter().take(1).collect() }
            }
            axis => axis.clone(),
        };
        let rows = match tensor.recipe {
            Recipe::Rows(rows) => {
                let count = tensor.shape.get(rows.dim).copied().unwrap_or(0);
                Some(RowRange { dim: rows.dim, from: rows.from, step: rows.step, count })
            }
            _ => None,
        };
        let dimensions = tensor.source_shape().len();
        let read = |source: &String| {
            let name = field.name(source);
            let entry = self.headers.get(&name).ok_or_else(|| WeightsError::NoTensor(name.clone()))?;
            let view = packed_entry(entry, dimensions);
            let read = ShardRead::new(&view, rows, &axis, shard).map_err(|length| {
                let last = axis.dim().is_some_and(|dim| dim + 1 == view.shape.len());
                let what = match (field, last) {
                    (Field::Weight, false) => "rows",
                    (Field::Weight, true) => "columns",
                    _ => "groups per row",
                };
                WeightsError::NotDivisible { tensor: name.clone(), length, what, of: shard.count }
            })?;
            Ok((name, entry, read))
        };
        tensor.sources.iter().map(read).collect()
    }
}

/// What a tensor is stored as.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Field {
    Weight,
    Scales,
    Biases,
}

impl Field {
    fn name(self, weight: &str) -> String {
        match self {
            Self::Weight => weight.to_owned(),
            Self::Scales => beside(weight, "scales"),
            Self::Biases => beside(weight, "biases"),
        }
    }
}

fn fields(stored: &Stored) -> &'static [Field] {
    match stored.packing {
        // The scales first: their number is what a person can act on.
        Some(Packing { mode: PackingMode::Affine, .. }) => &[Field::Scales, Field::Weight, Field::Biases],
        Some(_) => &[Field::Scales, Field::Weight],
        None => &[Field::Weight],
    }
}

/// A whole small file; `None` when there is none.
fn read_small(dir: &Path, name: &str, limit: u64) -> Result<Option<Vec<u8>>, WeightsError> {
    let path = dir.join(name);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(WeightsError::Io { path, source }),
    };
    let mut bytes = Vec::new();
    // One byte beyond the limit tells that it is too large.
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|source| WeightsError::Io { path, source })?;
    Ok(Some(bytes))
}

fn file_names(dir: &Path) -> Result<Vec<String>, WeightsError> {
    let io = |source| WeightsError::Io { path: dir.to_owned(), source };
    let entries = fs::read_dir(dir).map_err(io)?;
    let names = entries.map(|entry| entry.map(|entry| entry.file_name().into_string().unwrap_or_default()));
    names.collect::<Result<_, _>>().map_err(io)
}

/// Loads tensors for a model under construction, counting bytes as it goes.
pub struct Weights<'a> {
    checkpoint: &'a Checkpoint,
    dtype: LoadDtype,
    shard: TpShard,
    on_bytes: &'a mut dyn FnMut(u64),
}

impl<'a> Weights<'a> {
    /// A loader of one slice of everything that is shared, which calls `on_bytes` with the size of every
    /// piece read.
    pub fn new(
        checkpoint: &'a Checkpoint,
        dtype: LoadDtype,
        shard: TpShard,
        on_bytes: &'a mut dyn FnMut(u64),
    ) -> Self {
        Self { checkpoint, dtype, shard, on_bytes }
    }

    /// The shard it loads.
    pub fn shard(&self) -> TpShard {
        self.shard
    }

    /// Whether the model calls for a tensor of this name.
    pub fn has(&self, tensor: &str) -> bool {
        self.checkpoint.tensor(tensor).is_some()
    }

    /// This rank's shard of a tensor of plain numbers.
    pub fn tensor(&mut self, name: &str) -> Result<Array, WeightsError> {
        let (tensor, _) = self.require(name)?;
        let array = self.build(tensor, Field::Weight)?;
        match self.dtype {
            LoadDtype::AsStored => Ok(array),
            LoadDtype::Float32 => evaluate(name, array.as_dtype(Dtype::Float32)),
        }
    }

    /// This rank's shard of the matrix `path.weight`, or of the matrices, packed if the files have it so.
    pub fn weight(&mut self, path: &str) -> Result<Weight, WeightsError> {
        let weight = format!("{path}.weight");
        let (tensor, stored) = self.require(&weight)?;
        let Some(Packing { mode, group_size, bits }) = stored.packing else {
            return Ok(Weight::Plain(self.tensor(&weight)?));
        };
        let quantization =
            Quantization { mode: mode.name(), group_size: group_size as i32, bits: bits as i32 };
        // The scales first: where their number cannot be shared, nothing is read.
        let scales = self.build(tensor, Field::Scales)?;
        let packed = self.build(tensor, Field::Weight)?;
        let affine = mode == PackingMode::Affine;
        let biases = affine.then(|| self.build(tensor, Field::Biases)).transpose()?;
        let quantised = QuantizedWeight { packed, scales, biases, quantization };
        // Heads that are transposed, packed along what becomes another dimension, are packed anew.
        let heads = match tensor.recipe {
            Recipe::HeadRows { of, from, transposed } => {
                let unpacked = evaluate_with(&weight, quantised.dequantize(None))?;
                let heads = self.heads(tensor, &unpacked, (of, from, transposed))?;
                let packed = quantization.quantize(&heads);
                packed.map_err(|error| mlx_failed(&weight, &error.to_string()))?
            }
            _ => quantised,
        };
        match self.dtype {
            LoadDtype::AsStored => Ok(Weight::Quantised(heads)),
            LoadDtype::Float32 if affine => {
                let wide = |array: Array| evaluate(&weight, array.as_dtype(Dtype::Float32));
                let QuantizedWeight { packed, scales, biases, .. } = heads;
                let biases = biases.map(wide).transpose()?;
                let wide = QuantizedWeight { packed, scales: wide(scales)?, biases, quantization };
                evaluate_with(&weight, wide.dequantize(None)).map(Weight::Plain)
            }
            LoadDtype::Float32 => {
                evaluate_with(&weight, heads.dequantize(Some(Dtype::Float32))).map(Weight::Plain)
            }
        }
    }

    /// Some rows of each head of `matrix`, `[heads × of, columns]`.
    fn heads(
        &self,
        tensor: &Tensor,
        matrix: &Array,
        (of, from, transposed): (u64, u64, bool),
    ) -> Result<Array, WeightsError> {
        let rows = tensor.shape.get(if transposed { 2 } else { 1 }).copied().unwrap_or(0);
        let [of, from, to] = [of, from, from + rows].map(|rows| rows as i32);
        let each = || {
            let heads = matrix.reshape(&[-1, of, matrix.dim(-1)])?.try_index((.., from..to, ..))?;
            if transposed { heads.swap_axes(-1, -2)?.contiguous() } else { heads.contiguous() }
        };
        evaluate(&tensor.name, each())
    }

    fn require(&self, name: &str) -> Result<&'a (Tensor, Stored), WeightsError> {
        self.checkpoint.tensor(name).ok_or_else(|| WeightsError::NoTensor(name.to_owned()))
    }

    /// What the recipe makes of one field of the stored tensors.
    fn build(&mut self, tensor: &Tensor, field: Field) -> Result<Array, WeightsError> {
        let failed = |error: Exception| WeightsError::mlx(&tensor.name, &error);
        let packed = self.checkpoint.tensor(&tensor.name).is_some_and(|(_, stored)| stored.packing.is_some());
        let mut sources = Vec::new();
        for (name, entry, read) in self.checkpoint.reads(tensor, field, self.shard)? {
            sources.push(self.array(&name, entry, &read)?);
        }
        match (&tensor.recipe, sources.pop()) {
            (Recipe::Stack, Some(last)) => {
                sources.push(last);
                evaluate(&tensor.name, stack(&sources, 0))
            }
            (&Recipe::HeadRows { of, from, transposed }, Some(array))
                if field == Field::Weight && !packed =>
            {
                self.heads(tensor, &array, (of, from, transposed))
            }
            (Recipe::AsIs | Recipe::Rows(_) | Recipe::HeadRows { .. }, Some(array)) => Ok(array),
            (Recipe::AddOne, Some(array)) => {
                let one = Array::from_f32(1.0).as_dtype(array.dtype()).map_err(failed)?;
                evaluate(&tensor.name, array.add(one))
            }
            (_, None) => Err(WeightsError::NoTensor(tensor.name.clone())),
        }
    }

    fn array(&mut self, tensor: &str, entry: &Entry, read: &ShardRead) -> Result<Array, WeightsError> {
        let failed = |reason: String| WeightsError::Mlx { tensor: tensor.to_owned(), reason };
        let dtype = match entry.dtype {
            safetensors::Dtype::F32 => Dtype::Float32,
            safetensors::Dtype::F16 => Dtype::Float16,
            safetensors::Dtype::BF16 => Dtype::Bfloat16,
            safetensors::Dtype::U32 => Dtype::Uint32,
            // The scales of a packing, or packed values as bytes.
            safetensors::Dtype::Other("U8", _) if read.is_viewed => Dtype::Uint32,
            safetensors::Dtype::Other("U8", _) => Dtype::Uint8,
            safetensors::Dtype::Other(..) | safetensors::Dtype::Unknown(_) => {
                return Err(failed(format!("its element type {} is not supported", entry.dtype)));
            }
        };
        let (Some(OpenFile { path, file }), Some(header)) =
            (self.checkpoint.files.get(entry.file), self.checkpoint.headers.files().get(entry.file))
        else {
            return Err(WeightsError::NoTensor(tensor.to_owned()));
        };
        let mut bytes = vec![0; read.bytes() as usize];
        read.read(&|bytes, runs| file.read(bytes, runs), header.data_start + entry.begin, &mut bytes)
            .map_err(|source| WeightsError::Io { path: path.clone(), source })?;
        (self.on_bytes)(bytes.len() as u64);
        let shape = read
            .shape
            .iter()
            .map(|&dim| i32::try_from(dim))
            .collect::<Result<Vec<i32>, _>>()
            .map_err(|_| failed(format!("shape {:?} is beyond 32 bits", read.shape)))?;
        russet_mlx::array::from_bytes(&bytes, &shape, dtype).map_err(|error| failed(error.to_string()))
    }
}

/// The same of a call of the bindings.
fn evaluate_with(tensor: &str, array: Result<Array, russet_mlx::Error>) -> Result<Array, WeightsError> {
    let array = array.map_err(|error| mlx_failed(tensor, &error.to_string()))?;
    evaluate(tensor, Ok(array))
}

fn mlx_failed(tensor: &str, reason: &str) -> WeightsError {
    WeightsError::Mlx { tensor: tensor.to_owned(), reason: reason.to_owned() }
}

/// Evaluates at once, so that the stored form can be freed before the next tensor is read.
fn evaluate(tensor: &str, array: Result<Array, Exception>) -> Result<Array, WeightsError> {
    array.and_then(|array| array.eval().map(|()| array)).map_err(|error| WeightsError::mlx(tensor, &error))
}

#[cfg(test)]
mod tests;
