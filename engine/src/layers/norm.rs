//! Root-mean-square normalisation.

use mlx_rs::{Array, error::Exception, fast};

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
}
