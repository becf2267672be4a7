//! Normalisation of the last axis: by the root of the mean square, or by mean and variance.

use mlx_rs::{Array, Dtype, error::Exception, fast};
use russet_model::description::NormKind;

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

/// A norm of either kind.
#[derive(Debug)]
pub enum Norm {
    /// By the root of the mean square.
    Rms(RmsNorm),
    /// By mean and variance.
    Layer(LayerNorm),
}

impl Norm {
    /// Loads `path.weight`, and `path.bias` where the kind has one.
    pub fn load(
        weights: &mut Weights<'_>,
        path: &str,
        kind: NormKind,
        epsilon: f32,
    ) -> Result<Self, WeightsError> {
        Ok(match kind {
            NormKind::Rms => Self::Rms(RmsNorm::load(weights, path, epsilon)?),
            NormKind::Layer => Self::Layer(LayerNorm::load(weights, path, epsilon)?),
        })
    }

    /// The normalised `x`.
    pub fn forward(&self, x: &Array) -> Result<Array, Exception> {
        match self {
            Self::Rms(norm) => norm.forward(x),
            Self::Layer(norm) => norm.forward(x),
        }
    }
}

/// Takes the mean of the last axis off, divides by the standard deviation, scales and adds a bias.
#[derive(Debug)]
pub struct LayerNorm {
    weight: Array,
    bias: Array,
    epsilon: f32,
}

impl LayerNorm {
    /// Loads `path.weight` and `path.bias`.
    pub fn load(weights: &mut Weights<'_>, path: &str, epsilon: f32) -> Result<Self, WeightsError> {
        let mut tensor = |field: &str| weights.tensor(&format!("{path}.{field}"));
        Ok(Self { weight: tensor("weight")?, bias: tensor("bias")?, epsilon })
    }

    /// The normalised `x`.
    pub fn forward(&self, x: &Array) -> Result<Array, Exception> {
        fast::layer_norm(x, Some(&self.weight), Some(&self.bias), self.epsilon)
    }
}
