//! The files of adapters: opened and checked against the model, then read matrix by matrix, each rank its part.

use std::{cell::RefCell, collections::HashSet, rc::Rc};

use mlx_rs::{
    Array, Dtype,
    error::Exception,
    ops::{concatenate, indexing::TryIndexOp as _},
};
use russet_model::{
    adapter::{
        ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdaptedTensor, Adapter, Binding, Factor, MAX_ADAPTER_CONFIG_BYTES,
    },
    error::{Error, FileError},
    partition::RankPart,
    tensors::{Role, Rows, Stored, Tensor},
};
use russet_wire::engine_config::AdapterDir;

use super::{ActiveAdapters, Adapted, LowRank};
use crate::{
    partition::TpShard,
    small_file,
    weights::{LoadDtype, PlainFile, Weight, WeightsError, shares, turned},
};

/// Rows of a matrix whose lengths are computed at once: few enough that they need no memory of note.
const ROWS_AT_ONCE: i32 = 1024;

/// Adapters of one model, open and bound to its tensors. Numbers of adapters count from 1 on.
#[derive(Debug, Default)]
pub struct AdapterFiles {
    open: Vec<OpenAdapter>,
    active: Rc<ActiveAdapters>,
    /// Names of tensors whose changes were read, by number.
    read: RefCell<HashSet<(u32, String)>>,
}

#[derive(Debug)]
struct OpenAdapter {
    name: String,
    number: u32,
    adapter: Adapter,
    binding: Binding,
    weights: PlainFile,
}

impl AdapterFiles {
    /// Opens adapters of a model with these tensors. One that is of another model is refused.
    pub fn open(dirs: &[AdapterDir], tensors: &[(Tensor, Stored)]) -> Result<Self, WeightsError> {
        let opened =
            dirs.iter().zip(1..).map(|(adapter, number)| OpenAdapter::open(adapter, number, tensors));
        Ok(Self { open: opened.collect::<Result<_, _>>()?, ..Self::default() })
    }

    /// What the decoder selects adapters by.
    pub fn active(&self) -> Rc<ActiveAdapters> {
        self.active.clone()
    }

    /// What all adapters make of a tensor, of which this rank has `weight`; `whole` reads the matrix of all ranks.
    pub(crate) fn of_tensor(
        &self,
        tensor: &Tensor,
        (weight, shard, dtype): (&Weight, TpShard, LoadDtype),
        mut whole: impl FnMut() -> Result<Weight, WeightsError>,
    ) -> Result<Adapted, WeightsError> {
        let mut changes = Vec::new();
        for open in &self.open {
            let Some(adapted) = open.binding.get(&tensor.name) else { continue };
            changes.push(open.change(tensor, *adapted, (weight, shard, dtype), &mut whole)?);
            self.read.borrow_mut().insert((open.number, tensor.name.clone()));
        }
        Ok(Adapted::new(self.active.clone(), changes))
    }

    /// That every change of the layers of `part` was read: of what is computed in another form there is none.
    pub(crate) fn check_read(
        &self,
        part: &RankPart,
        tensors: &[(Tensor, Stored)],
    ) -> Result<(), WeightsError> {
        let read = self.read.borrow();
        let held =
            |tensor: &&Tensor| matches!(tensor.role, Role::Layer(layer) if part.layers.contains(&layer));
        for tensor in tensors.iter().map(|(tensor, _)| tensor).filter(held) {
            let missed = |open: &&OpenAdapter| {
                open.binding.contains_key(&tensor.name) && !read.contains(&(open.number, tensor.name.clone()))
            };
            if let Some(open) = self.open.iter().find(missed) {
                let why =
                    "the engine computes this matrix in a form that takes no adapter; fuse it into the model";
                return Err(open.refused(format!("tensor {}: {why}", tensor.name)));
            }
        }
        Ok(())
    }
}

impl OpenAdapter {
    fn open(
        AdapterDir { name, dir }: &AdapterDir,
        number: u32,
        tensors: &[(Tensor, Stored)],
    ) -> Result<Self, WeightsError> {
        let refused = |reason: String| WeightsError::Adapter { adapter: name.clone(), reason };
        let wrong = |error: FileError| refused(error.to_string());
        let path = dir.join(ADAPTER_CONFIG);
        let config = small_file::read(&path, MAX_ADAPTER_CONFIG_BYTES)
            .map_err(|source| WeightsError::Io { path: path.clone(), source })?;
        let problem = || format!("{ADAPTER_CONFIG} is missing");
        let config = config.ok_or_else(|| wrong(FileError::BadAdapter { problem: problem() }))?;
        let found =
            ADAPTER_WEIGHTS.iter().map(|file| (*file, dir.join(file))).find(|(_, path)| path.exists());
        let neither = || format!("it has neither {}", ADAPTER_WEIGHTS.join(" nor "));
        let (file_name, path) = found.ok_or_else(|| wrong(FileError::BadAdapter { problem: neither() }))?;
        let weights = PlainFile::open(path, file_name, wrong)?;
        let adapter = Adapter::read(&config, weights.headers()).map_err(|error| match error {
            Error::File(error) => refused(error.to_string()),
            Error::Unsupported(error) => refused(error.to_string()),
        })?;
        let binding = adapter.bind(tensors).map_err(|error| refused(error.to_string()))?;
        Ok(Self { name: name.clone(), number, adapter, binding, weights })
    }

    fn refused(&self, reason: String) -> WeightsError {
        WeightsError::Adapter { adapter: self.name.clone(), reason }
    }

    /// What it makes of one tensor, of which this rank has `weight`.
    fn change(
        &self,
        tensor: &Tensor,
        AdaptedTensor { module, rows }: AdaptedTensor,
        (weight, shard, dtype): (&Weight, TpShard, LoadDtype),
        whole: &mut impl FnMut() -> Result<Weight, WeightsError>,
    ) -> Result<LowRank, WeightsError> {
        let module = &self.adapter.modules[module];
        let mlx = |error: Exception| WeightsError::mlx(&tensor.name, &error);
        let outputs = |array: Array| self.outputs_of(tensor, array, rows, shard);
        let a = self.factor(&module.a, dtype)?;
        let own = match tensor.axis.dim() {
            Some(dim) if dim + 1 == tensor.shape.len() => shared(tensor, &a, -2, shard)?,
            _ => a.clone(),
        };
        let b = outputs(self.factor(&module.b, dtype)?)?;
        let scale = Array::from_f32(module.scale).as_dtype(b.dtype()).map_err(mlx)?;
        let row_scale = match &module.magnitude {
            None => None,
            Some(magnitude) => {
                let magnitude = outputs(self.array(magnitude, dtype)?.reshape(&[-1]).map_err(mlx)?)?;
                // Rows that are shared among ranks are as long as all of their parts are.
                let is_whole = own.shape() == a.shape();
                let all;
                let weight = if is_whole {
                    weight
                } else {
                    all = whole()?;
                    &all
                };
                let lengths = row_lengths(weight, &a, &b, &scale).map_err(mlx)?;
                Some(magnitude.divide(lengths).map_err(mlx)?)
            }
        };
        let change = LowRank { number: self.number, a: own, b, scale, row_scale };
        let arrays = [Some(&change.a), Some(&change.b), change.row_scale.as_ref()];
        mlx_rs::transforms::eval(arrays.into_iter().flatten()).map_err(mlx)?;
        Ok(change)
    }

    /// Of an array whose last dimension is a module's outputs: those of the tensor that this rank has.
    fn outputs_of(
        &self,
        tensor: &Tensor,
        array: Array,
        rows: Option<Rows>,
        shard: TpShard,
    ) -> Result<Array, WeightsError> {
        let mlx = |error: Exception| WeightsError::mlx(&tensor.name, &error);
        let mut array = array;
        let dim = tensor.shape.len() - 2;
        if let Some(Rows { from, step, .. }) = rows {
            let count = tensor.shape.get(dim).copied().unwrap_or(0);
            let picked: Vec<i32> = (0..count).map(|row| (from + row * step) as i32).collect();
            let picked = Array::from_slice(&picked, &[picked.len() as i32]);
            array = array.take_axis(picked, -1).map_err(mlx)?;
        }
        if tensor.axis.dim() == Some(dim) { shared(tensor, &array, -1, shard) } else { Ok(array) }
    }

    /// One of the two matrices of a module, `[…, inputs, rank]` or `[…, rank, outputs]`.
    fn factor(
        &self,
        Factor { tensor, transposed }: &Factor,
        dtype: LoadDtype,
    ) -> Result<Array, WeightsError> {
        turned(tensor, self.array(tensor, dtype)?, *transposed)
    }

    /// A whole tensor.
    fn array(&self, name: &str, load: LoadDtype) -> Result<Array, WeightsError> {
        let array = self.weights.tensor(name)?;
        match load {
            LoadDtype::AsStored | LoadDtype::AsStoredWide => Ok(array),
            LoadDtype::Float32 => {
                array.as_dtype(Dtype::Float32).map_err(|error| WeightsError::mlx(name, &error))
            }
        }
    }
}

/// This rank's share of a dimension of `array` that runs along the one that the ranks share of `tensor`.
fn shared(tensor: &Tensor, array: &Array, axis: i32, shard: TpShard) -> Result<Array, WeightsError> {
    if shard.count == 1 {
        return Ok(array.clone());
    }
    let length = array.dim(axis) as u64;
    let runs = shares(&tensor.axis, length, shard).map_err(|length| WeightsError::NotDivisible {
        tensor: tensor.name.clone(),
        length,
        what: "rows or columns",
        of: shard.count,
    })?;
    let indices: Vec<i32> =
        runs.into_iter().flat_map(|(from, count)| from as i32..(from + count) as i32).collect();
    let indices = Array::from_slice(&indices, &[indices.len() as i32]);
    array.take_axis(indices, axis).map_err(|error| WeightsError::mlx(&tensor.name, &error))
}

/// Length of each row of a matrix with its change, `[outputs]` in 32 bits.
fn row_lengths(weight: &Weight, a: &Array, b: &Array, scale: &Array) -> Result<Array, Exception> {
    let outputs = b.dim(-1);
    let mut lengths = Vec::new();
    for from in (0..outputs).step_by(ROWS_AT_ONCE as usize) {
        let span = from..(from + ROWS_AT_ONCE).min(outputs);
        let rows: Vec<i32> = span.clone().collect();
        let own = weight.rows(&Array::from_slice(&rows, &[rows.len() as i32]))?;
        let change = b.try_index((.., span))?.multiply(scale)?.transpose()?.matmul(a.transpose()?)?;
        let row = own.add(change)?.as_dtype(Dtype::Float32)?;
        let length = row.square()?.sum_axis(-1, false)?.sqrt()?;
        length.eval()?;
        lengths.push(length);
    }
    concatenate(&lengths, 0)
}
