//! Root-mean-square normalisation.

use mlx_rs::{Array, Dtype, error::Exception, fast};

use super::tensor_parallel::TpGroup;
use crate::weights::{Weights, WeightsError};

/// Normalises the last axis and scales it.
#[derive(Debug)]
pub struct RmsNorm {
    weight: Array,
    epsilon: f32,
}

impl RmsNorm {
    /// Loads `path.weight`.
    pub fn load(weights: &mut Weights<'_>, path: &str, epsilon: f32) -> Result<Self, WeightsError> {
        Ok(Self { weight: weights.tensor(&format!("{path}.weight"))?, epsilon })
    }

    /// The normalised `x`.
    pub fn forward(&self, x: &Array) -> Result<Array, Exception> {
        fast::rms_norm(x, Some(&self.weight), self.epsilon)
    }

    /// The same where each rank of a group has a share of the axis: the sum of squares is over all ranks.
    pub fn forward_shared(&self, x: &Array, stage: &TpGroup) -> Result<Array, Exception> {
        if stage.is_single_rank() {
            return self.forward(x);
        }
        let wide = x.as_dtype(Dtype::Float32)?;
        let squares = stage.all_sum(wide.square()?.sum_axis(-1, true)?)?;
        let width = Array::from_f32((x.dim(-1) as usize * stage.size()) as f32);
        let scale = squares.divide(width)?.add(Array::from_f32(self.epsilon))?.rsqrt()?;
        wide.multiply(scale)?.multiply(&self.weight)?.as_dtype(x.dtype())
    }
}
