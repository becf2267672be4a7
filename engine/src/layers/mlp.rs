//! The gated feed-forward block: `down(silu(gate(x)) · up(x))`.

use std::cell::RefCell;

use mlx_rs::{
    Array,
    error::Exception,
    ops::sigmoid,
    transforms::compile::{compile, disable_compile},
};

use super::{linear::Linear, tensor_parallel::TpGroup};
use crate::weights::{Weights, WeightsError};

/// A gated feed-forward block.
#[derive(Debug)]
pub struct GatedMlp {
    gate: Linear,
    up: Linear,
    down: Linear,
    gated: GatedActivation,
}

impl GatedMlp {
    /// Loads `gate_proj`, `up_proj` and `down_proj` under `path`.
    pub fn load(weights: &mut Weights<'_>, path: &str) -> Result<Self, WeightsError> {
        Ok(Self {
            gate: Linear::load(weights, &format!("{path}.gate_proj"))?,
            up: Linear::load(weights, &format!("{path}.up_proj"))?,
            down: Linear::load(weights, &format!("{path}.down_proj"))?,
            gated: GatedActivation::default(),
        })
    }

    /// The block's output for `x`.
    pub fn forward(&self, x: &Array, stage: &TpGroup) -> Result<Array, Exception> {
        let gated = self.gated.apply(&self.gate.forward(x)?, &self.up.forward(x)?)?;
        self.down.forward_summed(&gated, stage)
    }
}

/// Tests whether MLX can compile kernels here; otherwise the block runs uncompiled. On a CPU, compilation
/// needs g++ and MLX's headers, and every batch would fail without them.
pub fn try_to_compile() {
    let one = Array::from_f32(1.0);
    if let Err(error) = GatedActivation::default().apply(&one, &one).and_then(|gated| gated.eval()) {
        disable_compile();
        tracing::info!(
            error = error.what(),
            "kernels cannot be compiled on this machine; prompts are read a little slower"
        );
    }
}

/// `silu(gate) · up`, compiled into one kernel: its four operations would each read and write the whole
/// array.
struct GatedActivation(RefCell<Box<CompiledActivation>>);

type CompiledActivation = dyn for<'a> FnMut((&'a Array, &'a Array)) -> Result<Array, Exception>;

impl GatedActivation {
    fn apply(&self, gate: &Array, up: &Array) -> Result<Array, Exception> {
        (self.0.borrow_mut())((gate, up))
    }
}

impl Default for GatedActivation {
    fn default() -> Self {
        let gated = |(gate, up): (&Array, &Array)| gate.multiply(sigmoid(gate)?)?.multiply(up);
        // Shapeless, because otherwise each prompt length would be compiled again.
        Self(RefCell::new(Box::new(compile(gated, true))))
    }
}

impl std::fmt::Debug for GatedActivation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Gated")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_kernel_gates_whatever_its_shape() {
        let gated = GatedActivation::default();
        for (rows, width) in [(1, 8), (3, 8), (1, 5), (2, 64)] {
            let numbers = |from: f32| {
                let values: Vec<f32> = (0..rows * width).map(|place| from + place as f32 * 0.1).collect();
                (Array::from_slice(&values, &[1, rows, width]), values)
            };
            let ((gate, gates), (up, ups)) = (numbers(-3.0), numbers(1.0));
            let result = gated.apply(&gate, &up).unwrap();
            assert_eq!(result.shape(), [1, rows, width]);
            for ((result, gate), up) in result.as_slice::<f32>().iter().zip(gates).zip(ups) {
                let expected = gate / (1.0 + (-gate).exp()) * up;
                assert!(
                    (result - expected).abs() <= 1e-5 * expected.abs().max(1.0),
                    "{result}, not {expected}"
                );
            }
        }
    }
}
