//! Linear layer: matrix product with optional bias, from plain or affine-quantised weights.

use mlx_rs::{
    Array,
    error::Exception,
    ops::{addmm, dequantize, quantized_matmul},
};

use super::tensor_parallel::TpGroup;
use crate::weights::{Weights, WeightsError};

/// A weight matrix `[outputs, inputs]`, as stored.
#[derive(Debug)]
pub enum Weight {
    /// One number per element.
    Plain(Array),
    /// Packed integers with a scale and a bias for each group of a row.
    Quantised {
        /// Packed values, 32 bits at a time.
        packed: Array,
        /// One per group.
        scales: Array,
        /// One per group.
        biases: Array,
        /// Elements per group.
        group_size: i32,
        /// Bits per element.
        bits: i32,
    },
}

impl Weight {
    /// `x` times the transposed matrix.
    pub fn apply(&self, x: &Array) -> Result<Array, Exception> {
        match self {
            Self::Plain(weight) => x.matmul(weight.transpose()?),
            Self::Quantised { packed, scales, biases, group_size, bits } => {
                quantized_matmul(x, packed, scales, biases, true, *group_size, *bits)
            }
        }
    }

    /// The rows at the given indices, dequantised.
    pub fn rows(&self, indices: &Array) -> Result<Array, Exception> {
        match self {
            Self::Plain(weight) => weight.take_axis(indices, 0),
            Self::Quantised { packed, scales, biases, group_size, bits } => dequantize(
                packed.take_axis(indices, 0)?,
                scales.take_axis(indices, 0)?,
                &biases.take_axis(indices, 0)?,
                *group_size,
                *bits,
            ),
        }
    }
}

/// A linear layer.
#[derive(Debug)]
pub struct Linear {
    weight: Weight,
    bias: Option<Array>,
}

impl Linear {
    /// Loads `path.weight`, and `path.bias` where the model has one: this rank's shards.
    pub fn load(weights: &mut Weights<'_>, path: &str) -> Result<Self, WeightsError> {
        let weight = weights.weight(path)?;
        let bias = format!("{path}.bias");
        let bias = if weights.has(&bias) { Some(weights.tensor(&bias)?) } else { None };
        Ok(Self { weight, bias })
    }

    /// The layer's output for `x`.
    pub fn forward(&self, x: &Array) -> Result<Array, Exception> {
        match (&self.weight, &self.bias) {
            (matrix, None) => matrix.apply(x),
            (Weight::Plain(weight), Some(bias)) => addmm(bias, x, weight.transpose()?, None, None),
            (matrix, Some(bias)) => matrix.apply(x)?.add(bias),
        }
    }

    /// Row-parallel output: `x` is sharded over the tensor ranks. Sums the partial products of all ranks,
    /// then adds the bias once.
    pub fn forward_summed(&self, x: &Array, stage: &TpGroup) -> Result<Array, Exception> {
        if stage.is_single_rank() {
            return self.forward(x);
        }
        let sum = stage.all_sum(self.weight.apply(x)?)?;
        match &self.bias {
            Some(bias) => sum.add(bias),
            None => Ok(sum),
        }
    }
}
