//! A causal convolution of each channel by itself: a position sees its own input and a few before it, of which the last
//! are kept for the positions that come.

use mlx_rs::{
    Array,
    error::Exception,
    ops::{concatenate, conv1d, indexing::TryIndexOp, zeros_dtype},
};

use crate::weights::{Weights, WeightsError};

/// A convolution of this rank's channels.
#[derive(Debug)]
pub(super) struct CausalConv {
    /// `[channels, kernel, 1]`.
    weight: Array,
    /// `[channels]`.
    bias: Option<Array>,
    kernel: i32,
}

/// What it makes of some positions of one sequence.
pub(super) struct Convolved {
    /// What each position gives, `[1, positions, channels]`.
    pub output: Array,
    /// The inputs that the next position sees besides its own, `[1, kernel - 1, channels]`.
    pub tail: Array,
}

impl CausalConv {
    /// Loads `path.weight`, and `path.bias` where the model has one.
    pub fn load(weights: &mut Weights<'_>, path: &str, kernel: u32) -> Result<Self, WeightsError> {
        let (kernel, name) = (kernel as i32, format!("{path}.weight"));
        // The original export has the channel's one input before its kernel.
        let weight = weights.tensor(&name)?.reshape(&[-1, kernel, 1]);
        let weight = weight.map_err(|error| WeightsError::mlx(&name, &error))?;
        let bias = format!("{path}.bias");
        let bias = if weights.has(&bias) { Some(weights.tensor(&bias)?) } else { None };
        Ok(Self { weight, bias, kernel })
    }

    /// The positions of `input`, `[1, positions, channels]`, which follow those that left `tail`; without one they are
    /// the first.
    pub fn forward(&self, input: &Array, tail: Option<&Array>) -> Result<Convolved, Exception> {
        let (positions, channels) = (input.dim(1), input.dim(2));
        let tail = match tail {
            Some(tail) => tail.clone(),
            None => zeros_dtype(&[1, self.kernel - 1, channels], input.dtype())?,
        };
        let seen = concatenate(&[tail, input.clone()], 1)?;
        // A copy: as a view it would hold all of what was seen.
        let tail = seen.try_index((.., positions.., ..))?.contiguous()?;
        let convolved = conv1d(&seen, &self.weight, 1, 0, 1, channels)?;
        let output = match &self.bias {
            None => convolved,
            Some(bias) => convolved.add(bias)?,
        };
        Ok(Convolved { output, tail })
    }
}
