//! What makes one vector of each text of the hidden states of its positions, and what makes a score of a pair of texts.

use std::path::{Path, PathBuf};

use mlx_rs::{
    Array, Dtype,
    error::Exception,
    ops::{addmm, concatenate, indexing::TryIndexOp, maximum, sigmoid, tanh},
};
use russet_model::{
    description::{Classifier, DenseModule, Pooling, PoolingMode},
    error::FileError,
    sentence_transformers::flat_name,
};

use super::linear::Linear;
use crate::{
    model_modules::module_path,
    weights::{PlainFile, Weights, WeightsError},
};

/// Shortest vector that is made as long as one: PyTorch's.
const MIN_NORM: f32 = 1e-12;

/// What is behind the last layer of a model that does not generate.
#[derive(Debug)]
pub enum Pooler {
    /// A vector of each text.
    Embed {
        /// What makes one vector of many.
        mode: PoolingMode,
        /// What it passes then.
        dense: Vec<Dense>,
        /// Whether its length becomes one.
        normalize: bool,
    },
    /// A score of each pair.
    Score {
        /// Of the first position.
        dense: Linear,
        /// Of what that gives.
        out: Linear,
        /// Whether the score passes a sigmoid.
        sigmoid: bool,
    },
}

/// A projection of a vector, in 32 bits.
#[derive(Debug)]
pub struct Dense {
    weight: Array,
    bias: Option<Array>,
    tanh: bool,
}

impl Pooler {
    /// Loads the projections of a model's modules, each of a file in the model's folder.
    pub fn embed(folder: &Path, pooling: &Pooling) -> Result<Self, WeightsError> {
        let dense = pooling.dense.iter().map(|dense| Dense::load(folder, dense)).collect::<Result<_, _>>()?;
        Ok(Self::Embed { mode: pooling.mode, dense, normalize: pooling.normalize })
    }

    /// Loads `score.dense` and `score.out_proj`.
    pub fn score(weights: &mut Weights<'_>, classifier: Classifier) -> Result<Self, WeightsError> {
        let (dense, out) = (Linear::load(weights, "score.dense")?, Linear::load(weights, "score.out_proj")?);
        Ok(Self::Score { dense, out, sigmoid: classifier.sigmoid })
    }

    /// A vector or score of each text, `[texts, width]` in 32 bits, of the hidden states of all, `[1, positions, width]`,
    /// where each has so many positions, one text behind the other.
    pub fn forward(&self, hidden: &Array, lengths: &[i32]) -> Result<Array, Exception> {
        match self {
            Self::Embed { mode, dense, normalize } => {
                let mut pooled = pooled(*mode, &hidden.as_dtype(Dtype::Float32)?, lengths)?;
                for dense in dense {
                    pooled = dense.forward(&pooled)?;
                }
                match normalize {
                    false => Ok(pooled),
                    true => {
                        let norm = pooled.square()?.sum_axis(-1, true)?.sqrt()?;
                        pooled.divide(maximum(norm, Array::from_f32(MIN_NORM))?)
                    }
                }
            }
            Self::Score { dense, out, sigmoid: is_squeezed } => {
                let first = pooled(PoolingMode::Cls, hidden, lengths)?;
                let score = out.forward(&tanh(dense.forward(&first)?)?)?.as_dtype(Dtype::Float32)?;
                if *is_squeezed { sigmoid(score) } else { Ok(score) }
            }
        }
    }
}

/// One vector of each text.
fn pooled(mode: PoolingMode, hidden: &Array, lengths: &[i32]) -> Result<Array, Exception> {
    let mut end = 0;
    let spans: Vec<(i32, i32)> = lengths
        .iter()
        .map(|length| {
            end += length;
            (end - length, end)
        })
        .collect();
    let rows = |places: Vec<i32>| {
        let count = places.len() as i32;
        hidden.take_axis(Array::from_slice(&places, &[count]), 1)?.reshape(&[count, -1])
    };
    match mode {
        PoolingMode::Cls => rows(spans.iter().map(|(from, _)| *from).collect()),
        PoolingMode::LastToken => rows(spans.iter().map(|(_, to)| to - 1).collect()),
        PoolingMode::Mean | PoolingMode::Max => {
            let one = |(from, to): &(i32, i32)| {
                let own = hidden.try_index((.., *from..*to, ..))?;
                match mode {
                    PoolingMode::Max => own.max_axis(1, false),
                    _ => own.mean_axis(1, false),
                }
            };
            concatenate(&spans.iter().map(one).collect::<Result<Vec<_>, _>>()?, 0)
        }
    }
}

impl Dense {
    fn load(folder: &Path, dense: &DenseModule) -> Result<Self, WeightsError> {
        let DenseModule { folder: module, inputs, outputs, bias, tanh } = dense;
        let file = ModuleFile::open(folder, module)?;
        let (outputs, inputs) = (*outputs as i32, *inputs as i32);
        Ok(Self {
            weight: file.tensor("linear.weight", &[outputs, inputs])?,
            bias: bias.then(|| file.tensor("linear.bias", &[outputs])).transpose()?,
            tanh: *tanh,
        })
    }

    fn forward(&self, x: &Array) -> Result<Array, Exception> {
        let weight = self.weight.transpose()?;
        let projected = match &self.bias {
            None => x.matmul(weight)?,
            Some(bias) => addmm(bias, x, weight, None, None)?,
        };
        if self.tanh { tanh(projected) } else { Ok(projected) }
    }
}

/// The weights of a module, which are a few megabytes.
struct ModuleFile {
    folder: PathBuf,
    file: PlainFile,
}

impl ModuleFile {
    /// Most bytes of such a file: two tables of 16,384 numbers of 32 bits in each direction have less.
    const MAX_BYTES: u64 = 1 << 30;

    fn open(folder: &Path, module: &str) -> Result<Self, WeightsError> {
        let wrong = |source: FileError| WeightsError::File { folder: folder.to_owned(), source };
        let nested = format!("{module}/model.safetensors");
        let name = flat_name(&nested).ok_or_else(|| wrong(FileError::Missing { file: nested.clone() }))?;
        let path = module_path(folder, &name);
        let io = |source| WeightsError::Io { path: path.clone(), source };
        let size = std::fs::metadata(&path).map_err(io)?.len();
        if size > Self::MAX_BYTES {
            return Err(wrong(FileError::TooLarge { file: name, size, limit: Self::MAX_BYTES }));
        }
        Ok(Self { folder: folder.to_owned(), file: PlainFile::open(path, &name, wrong)? })
    }

    /// A tensor of this shape, in 32 bits.
    fn tensor(&self, name: &str, shape: &[i32]) -> Result<Array, WeightsError> {
        let wrong = |problem: String| WeightsError::File {
            folder: self.folder.clone(),
            source: FileError::Disagree { problem: format!("{}: {problem}", self.file.path().display()) },
        };
        let entry = self.file.headers().get(name);
        let entry = entry.ok_or_else(|| wrong(format!("tensor {name} is missing")))?;
        if !entry.dtype.is_float() {
            return Err(wrong(format!("tensor {name} is {}, not F32, F16 or BF16", entry.dtype)));
        }
        if !entry.shape.iter().copied().eq(shape.iter().map(|&size| size as u64)) {
            return Err(wrong(format!("tensor {name} is {:?}, not {shape:?}", entry.shape)));
        }
        let array = self.file.tensor(name)?;
        array.as_dtype(Dtype::Float32).map_err(|error| WeightsError::mlx(name, &error))
    }
}
