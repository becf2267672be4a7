//! The feed-forward block: `down(activation(gate(x)) · up(x))`, or `down(activation(up(x)))` without a gate.

use mlx_rs::{Array, error::Exception};
use russet_model::description::Activation;

use super::{activation::GatedActivation, linear::Linear, tensor_parallel::TpGroup};
use crate::weights::{Weights, WeightsError};

/// A feed-forward block.
#[derive(Debug)]
pub struct FeedForward {
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
    gated: GatedActivation,
}

impl FeedForward {
    /// Loads `gate_proj`, where the activation has a gate, `up_proj` and `down_proj` under `path`.
    pub fn load(weights: &mut Weights<'_>, path: &str, activation: Activation) -> Result<Self, WeightsError> {
        let gate = activation.has_gate().then(|| Linear::load(weights, &format!("{path}.gate_proj")));
        Ok(Self {
            gate: gate.transpose()?,
            up: Linear::load(weights, &format!("{path}.up_proj"))?,
            down: Linear::load(weights, &format!("{path}.down_proj"))?,
            gated: GatedActivation::new(activation),
        })
    }

    /// The block's output for `x`.
    pub fn forward(&self, x: &Array, stage: &TpGroup) -> Result<Array, Exception> {
        self.down.forward_summed(&self.hidden(x)?, stage)
    }

    /// This rank's part of the output, for a sum over ranks that its caller makes. It has no biases of the output.
    pub fn forward_partial(&self, x: &Array) -> Result<Array, Exception> {
        self.down.forward(&self.hidden(x)?)
    }

    fn hidden(&self, x: &Array) -> Result<Array, Exception> {
        let gate = self.gate.as_ref().map(|gate| gate.forward(x)).transpose()?;
        self.gated.apply(gate.as_ref(), &self.up.forward(x)?)
    }
}
