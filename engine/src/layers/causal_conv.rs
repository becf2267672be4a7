//! A short causal convolution: each channel by itself, over a position and the few before it, then SiLU.

use mlx_rs::{
    Array,
    error::Exception,
    ops::{concatenate, conv1d, indexing::TryIndexOp, sigmoid, zeros_dtype},
};

use crate::weights::{Weights, WeightsError};

/// A short causal convolution.
#[derive(Debug)]
pub struct CausalConv {
    /// `[channels, kernel, 1]`.
    weight: Array,
    bias: Option<Array>,
}

impl CausalConv {
    /// Loads `path.weight`, and `path.bias` where the model has one.
    pub fn load(weights: &mut Weights<'_>, path: &str, kernel: u32) -> Result<Self, WeightsError> {
        let name = format!("{path}.weight");
        // The original export has the channel's one input before its kernel.
        let weight = weights.tensor(&name)?.reshape(&[-1, kernel as i32, 1]);
        let weight = weight.map_err(|error| WeightsError::mlx(&name, &error))?;
        let bias = format!("{path}.bias");
        let bias = if weights.has(&bias) { Some(weights.tensor(&bias)?) } else { None };
        Ok(Self { weight, bias })
    }

    /// The result for `x`, `[1, positions, channels]`, of one sequence, and the last inputs, which the next positions
    /// need; `before` are those of the positions before, `None` at the beginning.
    pub fn forward(&self, x: &Array, before: Option<&Array>) -> Result<(Array, Array), Exception> {
        let (channels, kept) = (x.dim(2), self.weight.dim(1) - 1);
        let before = match before {
            Some(before) => before.clone(),
            None => zeros_dtype(&[1, kept, channels], x.dtype())?,
        };
        let input = concatenate(&[before, x.clone()], 1)?;
        // A copy: as a view it would hold all of the input.
        let last = input.try_index((.., x.dim(1).., ..))?.contiguous()?;
        let mut mixed = conv1d(&input, &self.weight, 1, 0, 1, channels)?;
        if let Some(bias) = &self.bias {
            mixed = mixed.add(bias)?;
        }
        Ok((mixed.multiply(sigmoid(&mixed)?)?, last))
    }
}
