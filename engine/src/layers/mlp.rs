//! The gated feed-forward block: `down(silu(gate(x)) · up(x))`.

use mlx_rs::{Array, error::Exception, ops::sigmoid};

use super::{linear::Linear, stage::Stage};
use crate::weights::{Weights, WeightsError};

/// A gated feed-forward block.
#[derive(Debug)]
pub struct GatedMlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl GatedMlp {
    /// Loads `gate_proj`, `up_proj` and `down_proj` under `path`.
    pub fn load(
        weights: &mut Weights<'_>,
        path: &str,
        width: usize,
        inner: usize,
        bias: bool,
    ) -> Result<Self, WeightsError> {
        Ok(Self {
            gate: Linear::load(weights, &format!("{path}.gate_proj"), width, inner, bias)?,
            up: Linear::load(weights, &format!("{path}.up_proj"), width, inner, bias)?,
            down: Linear::load(weights, &format!("{path}.down_proj"), inner, width, bias)?,
        })
    }

    /// The block's output for `x`.
    pub fn forward(&self, x: &Array, stage: &Stage) -> Result<Array, Exception> {
        let gate = self.gate.forward(x)?;
        let silu = gate.multiply(sigmoid(&gate)?)?;
        self.down.forward_summed(&silu.multiply(self.up.forward(x)?)?, stage)
    }
}
