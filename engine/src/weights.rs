<<<<<<< ours
//! Loads a rank's tensors from a Hugging Face folder: the headers of the safetensors files it needs, then
//! positioned reads of its own shard of each tensor. Files are not memory-mapped, and everything they claim
//! is checked against the file's length and the configuration.
||||||| base
//! Reads a rank's own tensors from a Hugging Face folder: the headers of the safetensors files it
//! needs, then positioned reads of its own slice of each tensor. Nothing is mapped into memory, and nothing a file says
//! is believed before it is checked against the file's length and the configuration.
=======
//! Reads a rank's own tensors from a Hugging Face folder: positioned reads of its own slice of each tensor that the
//! model's table has. Nothing is mapped into memory, and nothing a file says is believed before `model` has checked it
//! against the file's length and the configuration.
>>>>>>> theirs

<<<<<<< ours
mod safetensors;
mod shard_read;
||||||| base
mod safetensors;
mod slice;
=======
mod slice;
>>>>>>> theirs

use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, Read as _},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

<<<<<<< ours
use mlx_rs::{Array, Dtype, error::Exception, ops::dequantize};
use russet_wire::shape::{ShardAxis, shard_axis};
use serde::Deserialize;
||||||| base
use mlx_rs::{Array, Dtype, error::Exception, ops::dequantize};
use russet_wire::shape::{Cut, cut_of};
use serde::Deserialize;
=======
use mlx_rs::{
    Array, Dtype,
    error::Exception,
    ops::{dequantize, stack_axis},
};
use russet_model::{
    Model,
    config::{CONFIG, MAX_CONFIG_BYTES},
    error::{Error, FileError, Unsupported},
    index::{INDEX, MAX_INDEX_BYTES, weight_files},
    partition::RankPart,
    safetensors::{self, Entry, Headers, header_length},
    tensors::{Packing, Recipe, ShardAxis, Stored, Tensor, beside},
};
>>>>>>> theirs
use thiserror::Error;

<<<<<<< ours
pub use safetensors::{Entry, Header, HeaderError};

use crate::{layers::linear::Weight, partition::TpShard};
use shard_read::ShardRead;

/// Index file of a model with several files.
const INDEX: &str = "model.safetensors.index.json";
/// File of a model with a single file.
const SINGLE: &str = "model.safetensors";
||||||| base
pub use safetensors::{Entry, Header, HeaderError};

use crate::{layers::linear::Matrix, partition::Slice};
use slice::Piece;

/// The index of a model in several files.
const INDEX: &str = "model.safetensors.index.json";
/// The only file of a model in one.
const SINGLE: &str = "model.safetensors";
=======
use crate::{
    layers::linear::Matrix,
    partition::{Slice, holds},
};
use slice::ShardRead;
>>>>>>> theirs

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
<<<<<<< ours
    /// Invalid safetensors header.
    #[error("{path}: {source}; the file is damaged, copy the model again")]
    Header {
        /// The file.
        path: PathBuf,
||||||| base
    /// A header is not one.
    #[error("{path}: {source}; the file is damaged, copy the model again")]
    Header {
        /// The file.
        path: PathBuf,
=======
    /// The files are not those of a model.
    #[error("{folder}: {source}")]
    File {
        /// The model's folder.
        folder: PathBuf,
>>>>>>> theirs
        /// What is wrong.
<<<<<<< ours
        source: HeaderError,
    },
    /// Invalid index.
    #[error("{path} is not an index of safetensors files ({reason}); copy the model again")]
    Index {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
||||||| base
        source: HeaderError,
    },
    /// The index is not one.
    #[error("{path} is not an index of safetensors files ({reason}); copy the model again")]
    Index {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
=======
        source: FileError,
>>>>>>> theirs
    },
<<<<<<< ours
    /// A missing tensor.
    #[error(
        "tensor {tensor} is missing from {place}; the files do not belong to this config.json, or the copy is incomplete"
    )]
    Missing {
        /// Its name.
        tensor: String,
        /// The file or index.
        place: PathBuf,
    },
    /// The shape of the tensor differs from the configuration.
    #[error(
        "tensor {tensor} in {file} has shape {found:?}, but config.json calls for {wanted:?}; the files do not belong together"
    )]
    Shape {
        /// Its name.
        tensor: String,
        /// Its file.
        file: PathBuf,
        /// Shape in the file.
        found: Vec<usize>,
        /// Shape by the configuration.
        wanted: Vec<usize>,
    },
    /// An unsupported element type.
    #[error(
        "tensor {tensor} in {file} has element type {dtype}, which is not supported; supported are F32, F16 and BF16, and U32 for affine-quantised weights"
    )]
    Dtype {
        /// Its name.
        tensor: String,
        /// Its file.
        file: PathBuf,
        /// The type.
        dtype: String,
    },
    /// An unsupported quantisation.
    #[error(
        "{tensor} is quantised as {found}; supported is affine with 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128"
    )]
    Quantisation {
        /// The weight.
        tensor: String,
        /// The quantisation found.
        found: String,
    },
    /// A tensor that the tensor ranks cannot share evenly.
||||||| base
    /// The model has no such tensor.
    #[error(
        "tensor {tensor} is missing from {place}; the files do not belong to this config.json, or the copy is incomplete"
    )]
    Missing {
        /// Its name.
        tensor: String,
        /// The file or index.
        place: PathBuf,
    },
    /// The tensor has another shape than the configuration calls for.
    #[error(
        "tensor {tensor} in {file} has shape {found:?}, but config.json calls for {wanted:?}; the files do not belong together"
    )]
    Shape {
        /// Its name.
        tensor: String,
        /// Its file.
        file: PathBuf,
        /// The shape in the file.
        found: Vec<usize>,
        /// The shape called for.
        wanted: Vec<usize>,
    },
    /// The element type is not one this engine computes with.
    #[error(
        "tensor {tensor} in {file} has element type {dtype}, which is not supported; supported are F32, F16 and BF16, and U32 for affine-quantised weights"
    )]
    Dtype {
        /// Its name.
        tensor: String,
        /// Its file.
        file: PathBuf,
        /// The type.
        dtype: String,
    },
    /// Quantised in a way this engine does not know.
    #[error(
        "{tensor} is quantised as {found}; supported is affine with 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128"
    )]
    Quantisation {
        /// The weight.
        tensor: String,
        /// How.
        found: String,
    },
    /// A tensor that the members of a stage cannot share evenly.
=======
    /// The engine does not run the model.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The model has no such tensor.
    #[error("the model has no tensor {0}; its description and its layers disagree, report this as a bug")]
    NotCalledFor(String),
    /// A tensor that the members of a stage cannot share evenly.
>>>>>>> theirs
    #[error(
        "tensor {tensor} has {length} {what}, which {of} ranks cannot share evenly; use a tensor size that divides {length}"
    )]
    NotDivisible {
        /// Its name.
        tensor: String,
<<<<<<< ours
        /// Its file.
        file: PathBuf,
        /// Their number.
        length: usize,
        /// `rows`, `columns` or `groups per row`.
||||||| base
        /// Its file.
        file: PathBuf,
        /// How many there are.
        length: usize,
        /// Of what.
=======
        /// How many there are.
        length: u64,
        /// Of what.
>>>>>>> theirs
        what: &'static str,
        /// Tensor parallel size.
        of: usize,
    },
    /// MLX failed.
    #[error("cannot make an array of tensor {tensor}: {reason}")]
    Mlx {
        /// Its name.
        tensor: String,
        /// MLX's message.
        reason: String,
    },
}

/// Element type of the weights in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadDtype {
    /// As in the files.
    #[default]
    AsStored,
    /// Everything as float32, with quantised weights dequantised: much faster on a CPU, and two to eight
    /// times the memory.
    Float32,
}

<<<<<<< ours
/// A model folder whose headers are read on demand.
||||||| base
/// A model folder whose headers are read when first needed.
=======
/// A model folder: its configuration and the headers of its weight files, read and checked.
>>>>>>> theirs
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
    file: File,
}

impl Checkpoint {
    /// Opens a folder with `config.json` and its safetensors files.
    pub fn open(dir: &Path) -> Result<Self, WeightsError> {
        let wrong = |source: FileError| WeightsError::File { folder: dir.to_owned(), source };
        let Some(config) = small(dir, CONFIG, MAX_CONFIG_BYTES)? else {
            return Err(wrong(FileError::Missing { file: CONFIG.to_owned() }));
        };
        let index = small(dir, INDEX, MAX_INDEX_BYTES)?;
        let names = file_names(dir)?;
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut headers = Headers::default();
        let mut files = Vec::new();
        for name in weight_files(index.as_deref(), &names).map_err(wrong)? {
            let path = dir.join(&name);
            let io = |source| WeightsError::Io { path: path.clone(), source };
            let file = File::open(&path).map_err(io)?;
            let size = file.metadata().map_err(io)?.len();
            let mut start = vec![0; size.min(8) as usize];
            file.read_exact_at(&mut start, 0).map_err(io)?;
            let mut header = vec![0; header_length(&name, &start, size).map_err(wrong)? as usize];
            file.read_exact_at(&mut header, 8).map_err(io)?;
            headers.add(&name, &header, size).map_err(wrong)?;
            files.push(OpenFile { path, file });
        }
        let model = russet_model::read(&config, &headers).map_err(|error| match error {
            Error::File(source) => wrong(source),
            Error::Unsupported(why) => why.into(),
        })?;
        let names = model.tensors.iter().enumerate();
        let places = names.map(|(place, (tensor, _))| (tensor.name.clone(), place)).collect();
        Ok(Self { model, headers, files, places })
    }

<<<<<<< ours
    /// Names of all tensors.
    pub fn names(&mut self) -> Result<Vec<String>, WeightsError> {
        match &self.index {
            Some(index) => Ok(index.keys().cloned().collect()),
            None => Ok(self.file(SINGLE)?.header.entries.keys().cloned().collect()),
        }
||||||| base
    /// Every tensor's name.
    pub fn names(&mut self) -> Result<Vec<String>, WeightsError> {
        match &self.index {
            Some(index) => Ok(index.keys().cloned().collect()),
            None => Ok(self.file(SINGLE)?.header.entries.keys().cloned().collect()),
        }
=======
    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
>>>>>>> theirs
    }

<<<<<<< ours
    /// The header entry of a tensor, and its file.
    pub fn entry(&mut self, tensor: &str) -> Result<(Entry, PathBuf), WeightsError> {
        let (file, entry) = self.find(tensor)?;
        Ok((entry, file.path.clone()))
||||||| base
    /// What the header says of a tensor, and the file it lies in.
    pub fn entry(&mut self, tensor: &str) -> Result<(Entry, PathBuf), WeightsError> {
        let (file, entry) = self.find(tensor)?;
        Ok((entry, file.path.clone()))
=======
    /// What the header says of a stored tensor.
    pub fn entry(&self, tensor: &str) -> Option<&Entry> {
        self.headers.get(tensor)
>>>>>>> theirs
    }

<<<<<<< ours
    /// Size of this shard of a tensor in bytes.
    pub fn bytes(&mut self, tensor: &str, slice: TpShard) -> Result<u64, WeightsError> {
        let (file, entry) = self.find(tensor)?;
        Ok(shard_read(tensor, &file, &entry, slice)?.bytes())
||||||| base
    /// Bytes of this slice of a tensor.
    pub fn bytes(&mut self, tensor: &str, slice: Slice) -> Result<u64, WeightsError> {
        let (file, entry) = self.find(tensor)?;
        Ok(piece(tensor, &file, &entry, slice)?.bytes())
=======
    /// Bytes that the rank of `part` reads.
    pub fn bytes(&self, part: &RankPart) -> Result<u64, WeightsError> {
        let (tied, shard) = (self.model.description.tied, Slice::of_part(part));
        let held = self.model.tensors.iter().filter(|(tensor, _)| holds(part, tied, tensor.role));
        let mut bytes = 0;
        for (tensor, stored) in held {
            for field in fields(stored) {
                for read in self.reads(tensor, field, shard)? {
                    bytes += read.2.bytes();
                }
            }
        }
        Ok(bytes)
>>>>>>> theirs
    }

<<<<<<< ours
    /// Shape and bytes of this shard of a tensor.
    fn read(&mut self, tensor: &str, slice: TpShard) -> Result<(Vec<usize>, Vec<u8>), WeightsError> {
        let (file, entry) = self.find(tensor)?;
        let piece = shard_read(tensor, &file, &entry, slice)?;
        let mut bytes = vec![0; piece.bytes() as usize];
        piece
            .read(&file.file, file.header.data_start + entry.begin, &mut bytes)
            .map_err(|source| WeightsError::Io { path: file.path.clone(), source })?;
        Ok((piece.shape, bytes))
||||||| base
    /// The bytes and the shape of this slice of a tensor.
    fn read(&mut self, tensor: &str, slice: Slice) -> Result<(Vec<usize>, Vec<u8>), WeightsError> {
        let (file, entry) = self.find(tensor)?;
        let piece = piece(tensor, &file, &entry, slice)?;
        let mut bytes = vec![0; piece.bytes() as usize];
        piece
            .read(&file.file, file.header.data_start + entry.begin, &mut bytes)
            .map_err(|source| WeightsError::Io { path: file.path.clone(), source })?;
        Ok((piece.shape, bytes))
=======
    fn tensor(&self, name: &str) -> Option<&(Tensor, Stored)> {
        self.places.get(name).and_then(|&place| self.model.tensors.get(place))
>>>>>>> theirs
    }

    /// The reads that one field of a tensor takes: one of each of its sources.
    fn reads(
        &self,
        tensor: &Tensor,
        field: Field,
        shard: Slice,
    ) -> Result<Vec<(String, &Entry, ShardRead)>, WeightsError> {
        let stacked = matches!(tensor.recipe, Recipe::Stack { .. });
        let axis = match &tensor.axis {
            // Of what is stacked, each source lacks the first dimension.
            ShardAxis::Axis { dim, segments } if stacked => {
                ShardAxis::Axis { dim: dim.saturating_sub(1), segments: segments.clone() }
            }
            axis => axis.clone(),
        };
        let rows = match tensor.recipe {
            Recipe::Split { from, .. } => Some(from..from + tensor.shape.first().copied().unwrap_or(0)),
            _ => None,
        };
        let sources = tensor.sources().into_iter();
        sources
            .map(|(source, _)| {
                let name = field.name(source);
                let entry = self.headers.get(&name).ok_or_else(|| WeightsError::NotCalledFor(name.clone()))?;
                let read = ShardRead::of(entry, rows.clone(), &axis, shard).map_err(|length| {
                    let last = matches!(&axis, ShardAxis::Axis { dim, .. } if dim + 1 == entry.shape.len());
                    let what = match (field, last) {
                        (Field::Weight, false) => "rows",
                        (Field::Weight, true) => "columns",
                        _ => "groups per row",
                    };
                    WeightsError::Cut { tensor: name.clone(), length, what, of: shard.of }
                })?;
                Ok((name, entry, read))
            })
            .collect()
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

<<<<<<< ours
/// Location of a tensor's shard in its file.
fn shard_read(
    tensor: &str,
    file: &OpenFile,
    entry: &Entry,
    slice: TpShard,
) -> Result<ShardRead, WeightsError> {
    let cut = shard_axis(tensor);
    ShardRead::new(entry, cut, slice).map_err(|length| WeightsError::NotDivisible {
        tensor: tensor.to_owned(),
        file: file.path.clone(),
        length,
        what: if cut == ShardAxis::Columns { "columns" } else { "rows" },
        of: slice.count,
    })
||||||| base
/// Where the slice of a tensor lies.
fn piece(tensor: &str, file: &OpenFile, entry: &Entry, slice: Slice) -> Result<Piece, WeightsError> {
    let cut = cut_of(tensor);
    Piece::of(entry, cut, slice).map_err(|length| WeightsError::Cut {
        tensor: tensor.to_owned(),
        file: file.path.clone(),
        length,
        what: if cut == Cut::Columns { "columns" } else { "rows" },
        of: slice.of,
    })
=======
fn fields(stored: &Stored) -> &'static [Field] {
    match stored.packing {
        // The scales first: their number is what a person can act on.
        Some(_) => &[Field::Scales, Field::Weight, Field::Biases],
        None => &[Field::Weight],
    }
>>>>>>> theirs
}

<<<<<<< ours
fn read_index(path: &Path, bytes: &[u8]) -> Result<BTreeMap<String, String>, WeightsError> {
    let wrong = |reason: String| WeightsError::Index { path: path.to_owned(), reason };
    let index: Index = serde_json::from_slice(bytes).map_err(|error| wrong(error.to_string()))?;
    // A name with a path in it could point outside the model folder.
    if let Some(name) = index
        .weight_map
        .values()
        .find(|name| name.is_empty() || name.contains(['/', '\\', '\0']) || name.starts_with('.'))
    {
        return Err(wrong(format!("{name:?} is not a plain file name")));
    }
    Ok(index.weight_map)
||||||| base
fn read_index(path: &Path, bytes: &[u8]) -> Result<BTreeMap<String, String>, WeightsError> {
    let wrong = |reason: String| WeightsError::Index { path: path.to_owned(), reason };
    let index: Index = serde_json::from_slice(bytes).map_err(|error| wrong(error.to_string()))?;
    // A name with a path in it could lead out of the model's folder.
    if let Some(name) = index
        .weight_map
        .values()
        .find(|name| name.is_empty() || name.contains(['/', '\\', '\0']) || name.starts_with('.'))
    {
        return Err(wrong(format!("{name:?} is not a plain file name")));
    }
    Ok(index.weight_map)
=======
/// A whole small file; `None` when there is none.
fn small(dir: &Path, name: &str, limit: u64) -> Result<Option<Vec<u8>>, WeightsError> {
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
>>>>>>> theirs
}

/// Loads tensors for a model under construction, counting bytes as it goes.
pub struct Weights<'a> {
    checkpoint: &'a Checkpoint,
    dtype: LoadDtype,
    shard: TpShard,
    on_bytes: &'a mut dyn FnMut(u64),
}

impl<'a> Weights<'a> {
<<<<<<< ours
    /// A loader of one shard of all sharded tensors; calls `on_bytes` with the size of every read.
||||||| base
    /// A loader of one slice of everything that is cut, which calls `on_bytes` with the size of every
    /// piece read.
=======
    /// A loader of one slice of everything that is shared, which calls `on_bytes` with the size of every
    /// piece read.
>>>>>>> theirs
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
    pub fn calls_for(&self, tensor: &str) -> bool {
        self.checkpoint.tensor(tensor).is_some()
    }

<<<<<<< ours
    /// This rank's shard of a floating-point tensor of exactly this shape.
    pub fn tensor(&mut self, tensor: &str, shape: &[usize]) -> Result<Array, WeightsError> {
        let (entry, file) = self.checkpoint.entry(tensor)?;
        if entry.shape != shape {
            return Err(WeightsError::Shape {
                tensor: tensor.to_owned(),
                file,
                found: entry.shape,
                wanted: shape.to_vec(),
            });
        }
        let dtype = match entry.dtype.as_str() {
            "F32" => Dtype::Float32,
            "F16" => Dtype::Float16,
            "BF16" => Dtype::Bfloat16,
            other => {
                return Err(WeightsError::Dtype { tensor: tensor.to_owned(), file, dtype: other.to_owned() });
            }
        };
        let array = self.array(tensor, dtype)?;
||||||| base
    /// This rank's slice of a floating-point tensor of exactly this shape.
    pub fn tensor(&mut self, tensor: &str, shape: &[usize]) -> Result<Array, WeightsError> {
        let (entry, file) = self.checkpoint.entry(tensor)?;
        if entry.shape != shape {
            return Err(WeightsError::Shape {
                tensor: tensor.to_owned(),
                file,
                found: entry.shape,
                wanted: shape.to_vec(),
            });
        }
        let dtype = match entry.dtype.as_str() {
            "F32" => Dtype::Float32,
            "F16" => Dtype::Float16,
            "BF16" => Dtype::Bfloat16,
            other => {
                return Err(WeightsError::Dtype { tensor: tensor.to_owned(), file, dtype: other.to_owned() });
            }
        };
        let array = self.array(tensor, dtype)?;
=======
    /// This rank's slice of a tensor of plain numbers.
    pub fn tensor(&mut self, name: &str) -> Result<Array, WeightsError> {
        let (tensor, _) = self.wanted(name)?;
        let array = self.made(tensor, Field::Weight)?;
>>>>>>> theirs
        match self.dtype {
            LoadDtype::AsStored => Ok(array),
<<<<<<< ours
            LoadDtype::Float32 => evaluate(tensor, array.as_dtype(Dtype::Float32)),
||||||| base
            LoadDtype::Float32 => evaluated(tensor, array.as_dtype(Dtype::Float32)),
=======
            LoadDtype::Float32 => evaluated(name, array.as_dtype(Dtype::Float32)),
>>>>>>> theirs
        }
    }

<<<<<<< ours
    /// This rank's shard of the matrix `path.weight` of `[rows, columns]`, quantised if `path.scales` exists.
    pub fn weight(&mut self, path: &str, rows: usize, columns: usize) -> Result<Weight, WeightsError> {
||||||| base
    /// This rank's slice of the matrix `path.weight` of `[rows, columns]`, packed if `path.scales` is
    /// there.
    pub fn matrix(&mut self, path: &str, rows: usize, columns: usize) -> Result<Matrix, WeightsError> {
=======
    /// This rank's slice of the matrix `path.weight`, packed if the files have it so.
    pub fn matrix(&mut self, path: &str) -> Result<Matrix, WeightsError> {
>>>>>>> theirs
        let weight = format!("{path}.weight");
<<<<<<< ours
        let scales_name = format!("{path}.scales");
        if !self.checkpoint.contains(&scales_name)? {
            return Ok(Weight::Plain(self.tensor(&weight, &[rows, columns])?));
        }
        let (packed, file) = self.checkpoint.entry(&weight)?;
        let (scales, _) = self.checkpoint.entry(&scales_name)?;
        let (group_size, bits) = packing(&weight, &packed, &scales, rows, columns)?;
        if packed.dtype != "U32" {
            return Err(WeightsError::Dtype { tensor: weight, file, dtype: packed.dtype });
        }
        // Groups are checked first: their number is what a user can act on.
        let groups = columns / group_size as usize;
        if shard_axis(&weight) == ShardAxis::Columns && !groups.is_multiple_of(self.shard.count) {
            let (tensor, of) = (scales_name, self.shard.count);
            return Err(WeightsError::NotDivisible {
                tensor,
                file,
                length: groups,
                what: "groups per row",
                of,
            });
        }
        let packed = self.array(&weight, Dtype::Uint32)?;
        let scales = self.tensor(&scales_name, &[rows, columns / group_size as usize])?;
        let biases = self.tensor(&format!("{path}.biases"), &[rows, columns / group_size as usize])?;
||||||| base
        let scales_name = format!("{path}.scales");
        if !self.checkpoint.contains(&scales_name)? {
            return Ok(Matrix::Plain(self.tensor(&weight, &[rows, columns])?));
        }
        let (packed, file) = self.checkpoint.entry(&weight)?;
        let (scales, _) = self.checkpoint.entry(&scales_name)?;
        let (group_size, bits) = packing(&weight, &packed, &scales, rows, columns)?;
        if packed.dtype != "U32" {
            return Err(WeightsError::Dtype { tensor: weight, file, dtype: packed.dtype });
        }
        // Checked on the groups first: their number is what a person can act on.
        let groups = columns / group_size as usize;
        if cut_of(&weight) == Cut::Columns && !groups.is_multiple_of(self.slice.of) {
            let (tensor, of) = (scales_name, self.slice.of);
            return Err(WeightsError::Cut { tensor, file, length: groups, what: "groups per row", of });
        }
        let packed = self.array(&weight, Dtype::Uint32)?;
        let scales = self.tensor(&scales_name, &[rows, columns / group_size as usize])?;
        let biases = self.tensor(&format!("{path}.biases"), &[rows, columns / group_size as usize])?;
=======
        let (tensor, stored) = self.wanted(&weight)?;
        let Some(Packing { group_size, bits }) = stored.packing else {
            return Ok(Matrix::Plain(self.tensor(&weight)?));
        };
        let (group_size, bits) = (group_size as i32, bits as i32);
        let packed = self.made(tensor, Field::Weight)?;
        let [scales, biases] = [self.made(tensor, Field::Scales)?, self.made(tensor, Field::Biases)?];
>>>>>>> theirs
        match self.dtype {
            LoadDtype::AsStored => Ok(Weight::Quantised { packed, scales, biases, group_size, bits }),
            LoadDtype::Float32 => {
<<<<<<< ours
                evaluate(&weight, dequantize(packed, scales, &biases, group_size, bits)).map(Weight::Plain)
||||||| base
                evaluated(&weight, dequantize(packed, scales, &biases, group_size, bits)).map(Matrix::Plain)
=======
                let wide = |array: Array| evaluated(&weight, array.as_dtype(Dtype::Float32));
                let (scales, biases) = (wide(scales)?, wide(biases)?);
                evaluated(&weight, dequantize(packed, scales, &biases, group_size, bits)).map(Matrix::Plain)
>>>>>>> theirs
            }
        }
    }

<<<<<<< ours
    fn array(&mut self, tensor: &str, dtype: Dtype) -> Result<Array, WeightsError> {
        let (shape, bytes) = self.checkpoint.read(tensor, self.shard)?;
        (self.on_bytes)(bytes.len() as u64);
||||||| base
    fn array(&mut self, tensor: &str, dtype: Dtype) -> Result<Array, WeightsError> {
        let (shape, bytes) = self.checkpoint.read(tensor, self.slice)?;
        (self.on_bytes)(bytes.len() as u64);
=======
    fn wanted(&self, name: &str) -> Result<&'a (Tensor, Stored), WeightsError> {
        self.checkpoint.tensor(name).ok_or_else(|| WeightsError::NotCalledFor(name.to_owned()))
    }

    /// What the recipe makes of one field of the stored tensors.
    fn made(&mut self, tensor: &Tensor, field: Field) -> Result<Array, WeightsError> {
        let failed = |error: Exception| WeightsError::Mlx {
            tensor: tensor.name.clone(),
            reason: error.what().to_owned(),
        };
        let mut sources = Vec::new();
        for (name, entry, read) in self.checkpoint.reads(tensor, field, self.slice)? {
            sources.push(self.array(&name, entry, &read)?);
        }
        match (&tensor.recipe, sources.pop()) {
            (Recipe::Stack { .. }, Some(last)) => {
                sources.push(last);
                evaluated(&tensor.name, stack_axis(&sources, 0))
            }
            (Recipe::AsIs | Recipe::Split { .. }, Some(array)) => Ok(array),
            (Recipe::AddOne, Some(array)) => {
                let one = Array::from_f32(1.0).as_dtype(array.dtype()).map_err(failed)?;
                evaluated(&tensor.name, array.add(one))
            }
            (_, None) => Err(WeightsError::NotCalledFor(tensor.name.clone())),
        }
    }

    fn array(&mut self, tensor: &str, entry: &Entry, read: &ShardRead) -> Result<Array, WeightsError> {
>>>>>>> theirs
        let failed = |reason: String| WeightsError::Mlx { tensor: tensor.to_owned(), reason };
        let dtype = match entry.dtype {
            safetensors::Dtype::F32 => Dtype::Float32,
            safetensors::Dtype::F16 => Dtype::Float16,
            safetensors::Dtype::BF16 => Dtype::Bfloat16,
            safetensors::Dtype::U32 => Dtype::Uint32,
            safetensors::Dtype::Other(..) | safetensors::Dtype::Unknown(_) => {
                return Err(failed(format!("its element type {} is not supported", entry.dtype)));
            }
        };
        let (Some(OpenFile { path, file }), Some(header)) =
            (self.checkpoint.files.get(entry.file), self.checkpoint.headers.files().get(entry.file))
        else {
            return Err(WeightsError::NotCalledFor(tensor.to_owned()));
        };
        let mut bytes = vec![0; read.bytes() as usize];
        read.read(file, header.data_start + entry.begin, &mut bytes)
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

/// Evaluates now, so that the stored form can be freed before the next tensor is read.
fn evaluate(tensor: &str, array: Result<Array, Exception>) -> Result<Array, WeightsError> {
    array
        .and_then(|array| array.eval().map(|()| array))
        .map_err(|error| WeightsError::Mlx { tensor: tensor.to_owned(), reason: error.what().to_owned() })
}

<<<<<<< ours
/// Group size and bits, derived from the shapes alone: overrides per layer need no lookup.
fn packing(
    tensor: &str,
    packed: &Entry,
    scales: &Entry,
    rows: usize,
    columns: usize,
) -> Result<(i32, i32), WeightsError> {
    let unknown = || WeightsError::Quantisation {
        tensor: tensor.to_owned(),
        found: format!(
            "{} {:?} with scales {} {:?} for a matrix of {:?}",
            packed.dtype,
            packed.shape,
            scales.dtype,
            scales.shape,
            [rows, columns]
        ),
    };
    let (&[packed_rows, packed_columns], &[scale_rows, groups]) = (&packed.shape[..], &scales.shape[..])
    else {
        return Err(unknown());
    };
    let whole = packed_rows == rows && scale_rows == rows && groups > 0 && columns > 0;
    if !whole
        || !columns.is_multiple_of(groups)
        || !(packed_columns * 32).is_multiple_of(columns)
        || scales.dtype == "U8"
    {
        return Err(unknown());
    }
    let (group_size, bits) = (columns / groups, packed_columns * 32 / columns);
    if !matches!(group_size, 32 | 64 | 128) || !matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) {
        return Err(unknown());
    }
    Ok((group_size as i32, bits as i32))
}

||||||| base
/// Group size and bits, which follow from the shapes alone: overrides per layer need no lookup.
fn packing(
    tensor: &str,
    packed: &Entry,
    scales: &Entry,
    rows: usize,
    columns: usize,
) -> Result<(i32, i32), WeightsError> {
    let unknown = || WeightsError::Quantisation {
        tensor: tensor.to_owned(),
        found: format!(
            "{} {:?} with scales {} {:?} for a matrix of {:?}",
            packed.dtype,
            packed.shape,
            scales.dtype,
            scales.shape,
            [rows, columns]
        ),
    };
    let (&[packed_rows, packed_columns], &[scale_rows, groups]) = (&packed.shape[..], &scales.shape[..])
    else {
        return Err(unknown());
    };
    let whole = packed_rows == rows && scale_rows == rows && groups > 0 && columns > 0;
    if !whole
        || !columns.is_multiple_of(groups)
        || !(packed_columns * 32).is_multiple_of(columns)
        || scales.dtype == "U8"
    {
        return Err(unknown());
    }
    let (group_size, bits) = (columns / groups, packed_columns * 32 / columns);
    if !matches!(group_size, 32 | 64 | 128) || !matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) {
        return Err(unknown());
    }
    Ok((group_size as i32, bits as i32))
}

=======
>>>>>>> theirs
#[cfg(test)]
mod tests;
