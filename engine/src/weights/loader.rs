//! Makes the arrays of a rank's tensors.

use std::{path::Path, rc::Rc, sync::OnceLock};

use mlx_rs::{Array, Dtype, error::Exception, memory, transforms::eval};
use russet_mlx::{
    filled::{FillError, filled},
    quantized::{Quantization, QuantizedWeight},
};
use russet_model::{
    safetensors,
    tensors::{Packing, PackingMode, Recipe, Stored, Tensor},
};

use super::{
    Checkpoint, LoadDtype, Weight, WeightsError,
    checkpoint::{Field, SourceRead},
    weight_file::in_threads,
};
use crate::{
    adapters::{ActiveAdapters, Adapted, AdapterFiles},
    partition::TpShard,
};

/// Loads tensors for a model under construction, counting bytes as it goes.
pub struct Weights<'a> {
    checkpoint: &'a Checkpoint,
    dtype: LoadDtype,
    shard: TpShard,
    adapters: Option<&'a AdapterFiles>,
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
        Self { checkpoint, dtype, shard, adapters: None, on_bytes }
    }

    /// The same with adapters of the model.
    pub fn with_adapters(self, adapters: &'a AdapterFiles) -> Self {
        Self { adapters: Some(adapters), ..self }
    }

    /// What the decoder selects adapters by.
    pub fn active_adapters(&self) -> Rc<ActiveAdapters> {
        self.adapters.map_or_else(Rc::default, AdapterFiles::active)
    }

    /// What the adapters make of the matrix `path.weight`, or of the matrices, of which this rank has `weight`.
    pub fn adapted(&self, path: &str, weight: &Weight) -> Result<Adapted, WeightsError> {
        let Some(adapters) = self.adapters else { return Ok(Adapted::default()) };
        let (checkpoint, dtype) = (self.checkpoint, self.dtype);
        let name = format!("{path}.weight");
        let (tensor, _) = self.require(&name)?;
        adapters.of_tensor(tensor, (weight, self.shard, dtype), || {
            Weights::new(checkpoint, dtype, TpShard::WHOLE, &mut |_| {}).weight(path)
        })
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
            LoadDtype::AsStored | LoadDtype::AsStoredWide => Ok(array),
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
        if stored.packs {
            return self.packed_while_read(tensor, quantization);
        }
        // The scales first: where their number cannot be shared, nothing is read.
        let scales = self.build(tensor, Field::Scales)?;
        let packed = self.build(tensor, Field::Weight)?;
        let affine = mode == PackingMode::Affine;
        let biases = affine.then(|| self.build(tensor, Field::Biases)).transpose()?;
        let quantised = QuantizedWeight { packed, scales, biases, quantization };
        // Heads that are transposed, packed along what becomes another dimension, are packed anew.
        let heads = match tensor.recipe {
            Recipe::HeadRows { transposed, .. } => {
                let unpacked = evaluate_with(&weight, quantised.dequantize(None))?;
                let heads = turned(&weight, unpacked, transposed)?;
                let packed = quantization.quantize(&heads);
                packed.map_err(|error| mlx_failed(&weight, &error.to_string()))?
            }
            _ => quantised,
        };
        match self.dtype {
            LoadDtype::AsStored => Ok(Weight::Quantised(heads)),
            LoadDtype::AsStoredWide => Ok(Weight::QuantisedWide(heads)),
            LoadDtype::Float32 => self.unpacked(&weight, heads).map(Weight::Plain),
        }
    }

    /// A shard of plain numbers, packed. Groups lie within rows, so what is packed of a shard is a shard of what is packed
    /// of the whole.
    fn packed_while_read(
        &mut self,
        tensor: &Tensor,
        quantization: Quantization,
    ) -> Result<Weight, WeightsError> {
        let failed = |error: russet_mlx::Error| mlx_failed(&tensor.name, &error.to_string());
        let plain = self.build(tensor, Field::Weight)?;
        let packed = quantization.quantize(&plain).map_err(failed)?;
        let parts = [Some(&packed.packed), Some(&packed.scales), packed.biases.as_ref()];
        eval(parts.into_iter().flatten()).map_err(|error| WeightsError::mlx(&tensor.name, &error))?;
        drop(plain);
        // What was allocated for it is not kept for the next one: their sizes differ.
        let _ = memory::clear_cache();
        match self.dtype {
            LoadDtype::AsStored => Ok(Weight::Quantised(packed)),
            LoadDtype::AsStoredWide => Ok(Weight::QuantisedWide(packed)),
            LoadDtype::Float32 => self.unpacked(&tensor.name, packed).map(Weight::Plain),
        }
    }

    /// The numbers of a packed matrix in 32 bits; affine ones are computed in them, too.
    fn unpacked(&self, name: &str, weight: QuantizedWeight) -> Result<Array, WeightsError> {
        let QuantizedWeight { packed, scales, biases, quantization } = weight;
        let Some(biases) = biases else {
            let weight = QuantizedWeight { packed, scales, biases: None, quantization };
            return evaluate_with(name, weight.dequantize(Some(Dtype::Float32)));
        };
        let wide = |array: Array| evaluate(name, array.as_dtype(Dtype::Float32));
        let wide =
            QuantizedWeight { packed, scales: wide(scales)?, biases: Some(wide(biases)?), quantization };
        evaluate_with(name, wide.dequantize(None))
    }

    fn require(&self, name: &str) -> Result<&'a (Tensor, Stored), WeightsError> {
        self.checkpoint.tensor(name).ok_or_else(|| WeightsError::NoTensor(name.to_owned()))
    }

    /// What the recipe makes of one field of the stored tensors.
    fn build(&mut self, tensor: &Tensor, field: Field) -> Result<Array, WeightsError> {
        let stored = self.checkpoint.tensor(&tensor.name).map(|(_, stored)| *stored).unwrap_or_default();
        let packed = stored.packing.is_some() && !stored.packs;
        let array = self.array(tensor, &self.checkpoint.reads(tensor, field, self.shard)?)?;
        match tensor.recipe {
            Recipe::HeadRows { transposed, .. } if !packed => turned(&tensor.name, array, transposed),
            Recipe::AddOne => {
                let one = Array::from_f32(1.0).as_dtype(array.dtype());
                evaluate(&tensor.name, one.and_then(|one| array.add(one)))
            }
            Recipe::AsIs | Recipe::Stack | Recipe::Rows(_) | Recipe::HeadRows { .. } => Ok(array),
        }
    }

    /// What is read of the sources of a tensor; of several, one behind the other.
    fn array(&mut self, tensor: &Tensor, sources: &[SourceRead<'_>]) -> Result<Array, WeightsError> {
        let Some(first) = sources.first() else {
            return Err(WeightsError::NoTensor(tensor.name.clone()));
        };
        let failed = |reason: String| WeightsError::Mlx { tensor: first.name.clone(), reason };
        let dtype = match first.entry.dtype {
            safetensors::Dtype::F32 => Dtype::Float32,
            safetensors::Dtype::F16 => Dtype::Float16,
            safetensors::Dtype::BF16 => Dtype::Bfloat16,
            safetensors::Dtype::U32 => Dtype::Uint32,
            // The scales of a packing, or packed values as bytes.
            safetensors::Dtype::Other("U8", _) if first.shard.is_viewed => Dtype::Uint32,
            safetensors::Dtype::Other("U8", _) => Dtype::Uint8,
            safetensors::Dtype::Other(..) | safetensors::Dtype::Unknown(_) => {
                return Err(failed(format!("its element type {} is not supported", first.entry.dtype)));
            }
        };
        let mut shape = first.shard.shape.clone();
        if tensor.recipe == Recipe::Stack {
            shape.insert(0, sources.len() as u64);
        }
        let dims = shape.iter().map(|&dim| i32::try_from(dim)).collect::<Result<Vec<i32>, _>>();
        let dims = dims.map_err(|_| failed(format!("shape {shape:?} is beyond 32 bits")))?;
        let path = OnceLock::new();
        let array = filled(&dims, dtype, |memory| {
            let bytes = memory.len();
            let (mut pieces, mut rest) = (Vec::new(), memory);
            for SourceRead { file, start, shard, .. } in sources {
                let (own, others) = rest.split_at_mut(shard.bytes() as usize);
                pieces.extend(shard.pieces(*start, own, bytes).map(|(piece, out)| ((file, piece), out)));
                rest = others;
            }
            in_threads(pieces, |(file, piece), out| {
                let read = piece.read(out, &|bytes, runs| file.file.read(bytes, runs));
                read.inspect_err(|_| {
                    let _ = path.set(file.path.as_path());
                })
            })
        });
        let array = array.map_err(|error| match error {
            FillError::Mlx(error) => failed(error.to_string()),
            FillError::Fill(source) => {
                let path = path.get().copied().unwrap_or(Path::new(""));
                WeightsError::Io { path: path.to_owned(), source }
            }
        })?;
        (self.on_bytes)(array.nbytes() as u64);
        Ok(array)
    }
}

/// Heads `[heads, rows, columns]`, each transposed if asked.
pub(crate) fn turned(tensor: &str, heads: Array, transposed: bool) -> Result<Array, WeightsError> {
    if !transposed {
        return Ok(heads);
    }
    evaluate(tensor, heads.swap_axes(-1, -2).and_then(|turned| turned.contiguous()))
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
