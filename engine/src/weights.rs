//! Loads a rank's tensors from a Hugging Face folder: the headers of the safetensors files it needs, then
//! positioned reads of its own shard of each tensor. Files are not memory-mapped, and everything they claim
//! is checked against the file's length and the configuration.

mod safetensors;
mod shard_read;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::{Path, PathBuf},
    rc::Rc,
};

use mlx_rs::{Array, Dtype, error::Exception, ops::dequantize};
use russet_wire::shape::{ShardAxis, shard_axis};
use serde::Deserialize;
use thiserror::Error;

pub use safetensors::{Entry, Header, HeaderError};

use crate::{layers::linear::Weight, partition::TpShard};
use shard_read::ShardRead;

/// Index file of a model with several files.
const INDEX: &str = "model.safetensors.index.json";
/// File of a model with a single file.
const SINGLE: &str = "model.safetensors";

/// Why weights cannot be loaded. Each error names the file or tensor, the numbers and the remedy.
#[derive(Debug, Error)]
pub enum WeightsError {
    /// A file cannot be read.
    #[error("cannot read {path}: {source}; copy the model again or fix the file's permissions")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Invalid safetensors header.
    #[error("{path}: {source}; the file is damaged, copy the model again")]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: HeaderError,
    },
    /// Invalid index.
    #[error("{path} is not an index of safetensors files ({reason}); copy the model again")]
    Index {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
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
    #[error(
        "tensor {tensor} in {file} has {length} {what}, which {of} ranks cannot share evenly; use a tensor size that divides {length}"
    )]
    NotDivisible {
        /// Its name.
        tensor: String,
        /// Its file.
        file: PathBuf,
        /// Their number.
        length: usize,
        /// `rows`, `columns` or `groups per row`.
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

/// A model folder whose headers are read on demand.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    /// Tensor → file name; `None` for a model in one file.
    index: Option<BTreeMap<String, String>>,
    files: BTreeMap<String, Rc<OpenFile>>,
}

#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: File,
    header: Header,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens a folder with `model.safetensors.index.json` or `model.safetensors`.
    pub fn open(dir: &Path) -> Result<Self, WeightsError> {
        let path = dir.join(INDEX);
        let index = match fs::read(&path) {
            Ok(bytes) => Some(read_index(&path, &bytes)?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(source) => return Err(WeightsError::Io { path, source }),
        };
        Ok(Self { dir: dir.to_owned(), index, files: BTreeMap::new() })
    }

    /// Whether the model has a tensor of this name.
    pub fn contains(&mut self, tensor: &str) -> Result<bool, WeightsError> {
        match &self.index {
            Some(index) => Ok(index.contains_key(tensor)),
            None => Ok(self.file(SINGLE)?.header.entries.contains_key(tensor)),
        }
    }

    /// Names of all tensors.
    pub fn names(&mut self) -> Result<Vec<String>, WeightsError> {
        match &self.index {
            Some(index) => Ok(index.keys().cloned().collect()),
            None => Ok(self.file(SINGLE)?.header.entries.keys().cloned().collect()),
        }
    }

    /// The header entry of a tensor, and its file.
    pub fn entry(&mut self, tensor: &str) -> Result<(Entry, PathBuf), WeightsError> {
        let (file, entry) = self.find(tensor)?;
        Ok((entry, file.path.clone()))
    }

    /// Size of this shard of a tensor in bytes.
    pub fn bytes(&mut self, tensor: &str, slice: TpShard) -> Result<u64, WeightsError> {
        let (file, entry) = self.find(tensor)?;
        Ok(shard_read(tensor, &file, &entry, slice)?.bytes())
    }

    /// Shape and bytes of this shard of a tensor.
    fn read(&mut self, tensor: &str, slice: TpShard) -> Result<(Vec<usize>, Vec<u8>), WeightsError> {
        let (file, entry) = self.find(tensor)?;
        let piece = shard_read(tensor, &file, &entry, slice)?;
        let mut bytes = vec![0; piece.bytes() as usize];
        piece
            .read(&file.file, file.header.data_start + entry.begin, &mut bytes)
            .map_err(|source| WeightsError::Io { path: file.path.clone(), source })?;
        Ok((piece.shape, bytes))
    }

    fn find(&mut self, tensor: &str) -> Result<(Rc<OpenFile>, Entry), WeightsError> {
        let (name, place) = match &self.index {
            Some(index) => (index.get(tensor).cloned(), self.dir.join(INDEX)),
            None => (Some(SINGLE.to_owned()), self.dir.join(SINGLE)),
        };
        let missing = |place| WeightsError::Missing { tensor: tensor.to_owned(), place };
        let name = name.ok_or_else(|| missing(place))?;
        let file = self.file(&name)?;
        let entry = file.header.entries.get(tensor).cloned().ok_or_else(|| missing(file.path.clone()))?;
        Ok((file, entry))
    }

    fn file(&mut self, name: &str) -> Result<Rc<OpenFile>, WeightsError> {
        if let Some(file) = self.files.get(name) {
            return Ok(Rc::clone(file));
        }
        let path = self.dir.join(name);
        let io = |source| WeightsError::Io { path: path.clone(), source };
        let file = File::open(&path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let header = safetensors::read_header(&file, length)
            .map_err(|source| WeightsError::Header { path: path.clone(), source })?;
        let file = Rc::new(OpenFile { path: path.clone(), file, header });
        self.files.insert(name.to_owned(), Rc::clone(&file));
        Ok(file)
    }
}

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
}

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
}

/// Loads tensors for a model under construction, counting bytes as it goes.
pub struct Weights<'a> {
    checkpoint: &'a mut Checkpoint,
    dtype: LoadDtype,
    shard: TpShard,
    on_bytes: &'a mut dyn FnMut(u64),
}

impl<'a> Weights<'a> {
    /// A loader of one shard of all sharded tensors; calls `on_bytes` with the size of every read.
    pub fn new(
        checkpoint: &'a mut Checkpoint,
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

    /// Whether the model has a tensor of this name.
    pub fn contains(&mut self, tensor: &str) -> Result<bool, WeightsError> {
        self.checkpoint.contains(tensor)
    }

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
        match self.dtype {
            LoadDtype::AsStored => Ok(array),
            LoadDtype::Float32 => evaluate(tensor, array.as_dtype(Dtype::Float32)),
        }
    }

    /// This rank's shard of the matrix `path.weight` of `[rows, columns]`, quantised if `path.scales` exists.
    pub fn weight(&mut self, path: &str, rows: usize, columns: usize) -> Result<Weight, WeightsError> {
        let weight = format!("{path}.weight");
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
        match self.dtype {
            LoadDtype::AsStored => Ok(Weight::Quantised { packed, scales, biases, group_size, bits }),
            LoadDtype::Float32 => {
                evaluate(&weight, dequantize(packed, scales, &biases, group_size, bits)).map(Weight::Plain)
            }
        }
    }

    fn array(&mut self, tensor: &str, dtype: Dtype) -> Result<Array, WeightsError> {
        let (shape, bytes) = self.checkpoint.read(tensor, self.shard)?;
        (self.on_bytes)(bytes.len() as u64);
        let failed = |reason: String| WeightsError::Mlx { tensor: tensor.to_owned(), reason };
        let shape = shape
            .iter()
            .map(|&dim| i32::try_from(dim))
            .collect::<Result<Vec<i32>, _>>()
            .map_err(|_| failed(format!("shape {shape:?} is beyond 32 bits")))?;
        russet_mlx::array::from_bytes(&bytes, &shape, dtype).map_err(|error| failed(error.to_string()))
    }
}

/// Evaluates now, so that the stored form can be freed before the next tensor is read.
fn evaluate(tensor: &str, array: Result<Array, Exception>) -> Result<Array, WeightsError> {
    array
        .and_then(|array| array.eval().map(|()| array))
        .map_err(|error| WeightsError::Mlx { tensor: tensor.to_owned(), reason: error.what().to_owned() })
}

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

#[cfg(test)]
mod tests;
