//! A model folder that is open: what its files have of each tensor, and which bytes of them a rank reads.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
};

use russet_model::{
    Model,
    config::{CONFIG, MAX_CONFIG_BYTES},
    error::{Error, FileError},
    index::{INDEX, MAX_INDEX_BYTES, weight_files},
    load_quantization::LoadQuantization,
    partition::RankPart,
    safetensors::{Entry, Headers},
    sentence_transformers::ModuleFiles,
    tensors::{Packing, PackingMode, Recipe, ShardAxis, Stored, Tensor, beside, packed_entry},
};

use super::{
    LoadDtype, WeightsError,
    gguf::{self, GgufCheckpoint},
    plain_file::open_with_header,
    shard_read::{RowRange, ShardRead},
    source_file::SourceFile,
    weight_file::{PackedFiles, WeightFile},
};
use crate::{
    model_modules,
    partition::{TpShard, rank_holds},
    small_file,
};

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

/// A file of weights that is open.
#[derive(Debug)]
pub(super) struct OpenFile {
    pub path: PathBuf,
    pub file: WeightFile,
}

/// What is read of one stored tensor.
pub(super) struct SourceRead<'a> {
    /// Its name.
    pub name: String,
    /// What the header says of it.
    pub entry: &'a Entry,
    /// Where it lies.
    pub file: &'a OpenFile,
    /// Its first byte there.
    pub start: u64,
    /// The bytes of it.
    pub shard: ShardRead,
}

impl Checkpoint {
    /// Opens a folder with `config.json` and its safetensors files, or with a model in GGUF.
    pub fn open(dir: &Path) -> Result<Self, WeightsError> {
        Self::open_as(dir, LoadDtype::AsStored, None)
    }

    /// The same for weights that will be kept in a type, to which is converted what is converted on loading, and whose
    /// matrices are packed while they are read, if `quantization` is given.
    pub fn open_as(
        dir: &Path,
        dtype: LoadDtype,
        quantization: Option<LoadQuantization>,
    ) -> Result<Self, WeightsError> {
        match gguf::open(dir, dtype, quantization)? {
            Some(GgufCheckpoint { config, headers, files }) => {
                Self::new(dir, &config, headers, files, quantization, &ModuleFiles::new())
            }
            None => Self::open_safetensors(dir, quantization),
        }
    }

    fn open_safetensors(dir: &Path, quantization: Option<LoadQuantization>) -> Result<Self, WeightsError> {
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
            let file = open_with_header(&path, &name, &mut headers, wrong)?;
            files.push(OpenFile { path, file: WeightFile::Plain(SourceFile::new(file)) });
        }
        let modules = module_files(dir)?;
        Self::new(dir, &config, headers, files, quantization, &modules)
    }

    fn new(
        dir: &Path,
        config: &[u8],
        headers: Headers,
        files: Vec<OpenFile>,
        quantization: Option<LoadQuantization>,
        modules: &ModuleFiles,
    ) -> Result<Self, WeightsError> {
        let mut model = russet_model::read_pooled(config, &headers, quantization, modules).map_err(
            |error| match error {
                Error::File(source) => WeightsError::File { folder: dir.to_owned(), source },
                Error::Unsupported(why) => why.into(),
            },
        )?;
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

    /// Bytes that were read of the files' tensors so far.
    pub fn bytes_read(&self) -> u64 {
        // Files whose tensors are converted share their source files.
        self.files.iter().map(|OpenFile { file, .. }| file.bytes_read()).sum()
    }

    /// Bytes of the shards that the rank of `part` holds.
    pub fn bytes(&self, part: &RankPart) -> Result<u64, WeightsError> {
        let (tied, shard) = (self.model.description.tied, TpShard::for_part(part));
        let held = self.model.tensors.iter().filter(|(tensor, _)| rank_holds(part, tied, tensor.role));
        let mut bytes = 0;
        for (tensor, stored) in held {
            for field in fields(stored) {
                let reads = self.reads(tensor, *field, shard)?;
                bytes += reads.iter().map(|read| read.shard.bytes()).sum::<u64>();
            }
        }
        Ok(bytes)
    }

    pub(super) fn tensor(&self, name: &str) -> Option<&(Tensor, Stored)> {
        self.places.get(name).and_then(|&place| self.model.tensors.get(place))
    }

    /// The reads that one field of a tensor takes: one of each of its sources.
    pub(super) fn reads(
        &self,
        tensor: &Tensor,
        field: Field,
        shard: TpShard,
    ) -> Result<Vec<SourceRead<'_>>, WeightsError> {
        let stacked = tensor.recipe == Recipe::Stack;
        let axis = match &tensor.axis {
            // Of what is stacked, each source lacks the first dimension.
            ShardAxis::Axis { dim, segments } if stacked => {
                ShardAxis::Axis { dim: dim.saturating_sub(1), segments: segments.clone() }
            }
            ShardAxis::Parts { dim, parts } if stacked => {
                ShardAxis::Parts { dim: dim.saturating_sub(1), parts: *parts }
            }
            axis => axis.clone(),
        };
        let count = |dim: usize| tensor.shape.get(dim).copied().unwrap_or(0);
        let rows = match tensor.recipe {
            Recipe::Rows(rows) => {
                Some(RowRange { dim: rows.dim, from: rows.from, step: rows.step, count: count(rows.dim) })
            }
            Recipe::HeadRows { from, transposed, .. } => {
                Some(RowRange { dim: 1, from, step: 1, count: count(if transposed { 2 } else { 1 }) })
            }
            Recipe::AsIs | Recipe::Stack | Recipe::AddOne => None,
        };
        let dimensions = tensor.source_shape().len();
        let read = |source: &String| {
            let name = field.name(source);
            let missing = || WeightsError::NoTensor(name.clone());
            let entry = self.headers.get(&name).ok_or_else(missing)?;
            let mut view = packed_entry(entry, dimensions);
            if let Recipe::HeadRows { of, .. } = tensor.recipe {
                // Its rows are those of heads.
                view.shape.splice(..1, [count(0), of]);
            }
            let last = axis.dim().is_some_and(|dim| dim + 1 == view.shape.len());
            let cut = |view: &Entry, field| {
                ShardRead::new(view, rows, &axis, shard).map_err(|length| {
                    let what = match (field, last) {
                        (Field::Weight, false) => "rows",
                        (Field::Weight, true) => "columns",
                        _ => "groups per row",
                    };
                    WeightsError::NotDivisible { tensor: name.clone(), length, what, of: shard.count }
                })
            };
            // What is packed while it is read is cut between groups only, as if its scales were cut.
            if let (Some(packing), true) = (tensor.packs_to, last) {
                let mut scales = view.clone();
                let groups = scales.shape.last_mut();
                groups.into_iter().for_each(|columns| *columns /= u64::from(packing.group_size));
                cut(&scales, Field::Scales)?;
            }
            let shard = cut(&view, field)?;
            let file = self.files.get(entry.file).zip(self.headers.files().get(entry.file));
            let (file, header) = file.ok_or_else(missing)?;
            Ok(SourceRead { entry, file, start: header.data_start + entry.begin, shard, name })
        };
        tensor.sources.iter().map(read).collect()
    }
}

/// What a tensor is stored as.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Field {
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
    match stored.packing.filter(|_| !stored.packs) {
        // The scales first: their number is what a person can act on.
        Some(Packing { mode: PackingMode::Affine, .. }) => &[Field::Scales, Field::Weight, Field::Biases],
        Some(_) => &[Field::Scales, Field::Weight],
        None => &[Field::Weight],
    }
}

/// The files that say how a model embeds.
fn module_files(dir: &Path) -> Result<ModuleFiles, WeightsError> {
    model_modules::read(dir).map_err(|(path, source)| WeightsError::Io { path, source })
}

/// A whole small file; `None` when there is none.
fn read_small(dir: &Path, name: &str, limit: u64) -> Result<Option<Vec<u8>>, WeightsError> {
    let path = dir.join(name);
    small_file::read(&path, limit).map_err(|source| WeightsError::Io { path, source })
}

fn file_names(dir: &Path) -> Result<Vec<String>, WeightsError> {
    let io = |source| WeightsError::Io { path: dir.to_owned(), source };
    let entries = fs::read_dir(dir).map_err(io)?;
    let names = entries.map(|entry| entry.map(|entry| entry.file_name().into_string().unwrap_or_default()));
    names.collect::<Result<_, _>>().map_err(io)
}
