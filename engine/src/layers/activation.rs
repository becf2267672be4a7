//! What the gate of a block passes, or what a block without one does, each compiled into one kernel.

use std::cell::RefCell;

use mlx_rs::{
    Array,
    error::Exception,
    ops::{erf, maximum, minimum, sigmoid, tanh},
    transforms::compile::{compile, disable_compile},
};
use russet_model::description::Activation;

/// `activation(gate) · up`, or `activation(up)` of those without a gate, compiled into one kernel: its operations would
/// each read and write the whole array.
pub struct GatedActivation(RefCell<Box<CompiledActivation>>);

type CompiledActivation = dyn for<'a> FnMut((&'a Array, &'a Array)) -> Result<Array, Exception>;

/// `√(2/π)`, of the approximated Gaussian error unit.
const GELU_SCALE: f32 = 0.797_884_6;

impl GatedActivation {
    /// The kernel of this activation.
    pub fn new(activation: Activation) -> Self {
        // Shapeless, because otherwise each prompt length would be compiled again.
        let compiled: Box<CompiledActivation> = match activation {
            Activation::Silu => Box::new(compile(silu, true)),
            Activation::GeluTanh => Box::new(compile(gelu_tanh, true)),
            Activation::ClippedSwiGlu { alpha, limit } => {
                let clipped = move |(gate, up): (&Array, &Array)| clipped_swiglu(gate, up, alpha, limit);
                Box::new(compile(clipped, true))
            }
            Activation::SquaredRelu => Box::new(compile(squared_relu, true)),
            Activation::Gelu => Box::new(compile(gelu, true)),
        };
        Self(RefCell::new(compiled))
    }

    /// Applies it; `gate` is what there is of one.
    pub fn apply(&self, gate: Option<&Array>, up: &Array) -> Result<Array, Exception> {
        (self.0.borrow_mut())((gate.unwrap_or(up), up))
    }
}

impl std::fmt::Debug for GatedActivation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Gated")
    }
}

fn silu((gate, up): (&Array, &Array)) -> Result<Array, Exception> {
    gate.multiply(sigmoid(gate)?)?.multiply(up)
}

fn gelu_tanh((gate, up): (&Array, &Array)) -> Result<Array, Exception> {
    let number = |value: f32| scalar(value, gate);
    // A power, as mlx-lm has it: two products round otherwise in 16 bits.
    let cubed = gate.power(number(3.0)?)?;
    let inner = gate.add(number(0.044_715)?.multiply(cubed)?)?.multiply(number(GELU_SCALE)?)?;
    let share = number(1.0)?.add(tanh(inner)?)?;
    number(0.5)?.multiply(gate)?.multiply(share)?.multiply(up)
}

fn clipped_swiglu(gate: &Array, up: &Array, alpha: f32, limit: f32) -> Result<Array, Exception> {
    let number = |value: f32| scalar(value, gate);
    let gate = minimum(gate, number(limit)?)?;
    let up = minimum(maximum(up, number(-limit)?)?, number(limit)?)?;
    let share = gate.multiply(sigmoid(number(alpha)?.multiply(&gate)?)?)?;
    up.add(number(1.0)?)?.multiply(share)
}

fn gelu((_, up): (&Array, &Array)) -> Result<Array, Exception> {
    let number = |value: f32| scalar(value, up);
    let share = number(1.0)?.add(erf(up.multiply(number(std::f32::consts::FRAC_1_SQRT_2)?)?)?)?;
    number(0.5)?.multiply(up)?.multiply(share)
}

fn squared_relu((_, up): (&Array, &Array)) -> Result<Array, Exception> {
    maximum(up, scalar(0.0, up)?)?.square()
}

/// A number in the type of an array: one in 32 bits would widen what it meets.
pub fn scalar(value: f32, like: &Array) -> Result<Array, Exception> {
    Array::from_f32(value).as_dtype(like.dtype())
}

/// Tests whether MLX can compile kernels here; otherwise blocks run uncompiled. On a CPU, compilation
/// needs g++ and MLX's headers, and every batch would fail without them.
pub fn try_to_compile() {
    // Two numbers: MLX has another kernel for one, which no batch needs.
    let ones = Array::from_slice(&[1.0_f32; 2], &[1, 2]);
    let compiled = GatedActivation::new(Activation::Silu).apply(Some(&ones), &ones);
    if let Err(error) = compiled.and_then(|gated| gated.eval()) {
        disable_compile();
        tracing::info!(
            error = error.what(),
            "kernels cannot be compiled on this machine; prompts are read a little slower"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_kernel_gates_whatever_its_shape() {
        type Expected = fn(f32, f32) -> f32;
        let cases: [(Activation, Expected); 5] = [
            (Activation::Silu, |gate, up| gate / (1.0 + (-gate).exp()) * up),
            (Activation::GeluTanh, |gate, up| {
                0.5 * gate * (1.0 + (GELU_SCALE * (gate + 0.044_715 * gate.powi(3))).tanh()) * up
            }),
            (Activation::ClippedSwiGlu { alpha: 1.702, limit: 2.0 }, |gate, up| {
                let (gate, up) = (gate.min(2.0), up.clamp(-2.0, 2.0));
                (up + 1.0) * gate / (1.0 + (-1.702 * gate).exp())
            }),
            (Activation::SquaredRelu, |_, up| up.max(0.0).powi(2)),
            // Abramowitz and Stegun's approximation of the error function, 7.1.26, whose error is below 2e-7.
            (Activation::Gelu, |_, up| {
                let x = up * std::f32::consts::FRAC_1_SQRT_2;
                let t = 1.0 / (1.0 + 0.327_591_1 * x);
                let series = [1.061_405_4, -1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6];
                let sum = series.iter().fold(0.0, |sum: f32, factor| (sum + factor) * t);
                0.5 * up * (2.0 - sum * (-x * x).exp())
            }),
        ];
        for (activation, expected) in cases {
            let gated = GatedActivation::new(activation);
            for (rows, width) in [(1, 8), (3, 8), (1, 5), (2, 64)] {
                let numbers = |from: f32| {
                    let values: Vec<f32> = (0..rows * width).map(|place| from + place as f32 * 0.1).collect();
                    (Array::from_slice(&values, &[1, rows, width]), values)
                };
                let ((gate, gates), (up, ups)) = (numbers(-3.0), numbers(1.0));
                let result = gated.apply(activation.has_gate().then_some(&gate), &up).unwrap();
                assert_eq!(result.shape(), [1, rows, width]);
                for ((result, gate), up) in result.as_slice::<f32>().iter().zip(gates).zip(ups) {
                    let expected = expected(gate, up);
                    assert!(
                        (result - expected).abs() <= 1e-5 * expected.abs().max(1.0),
                        "{activation:?}: {result}, not {expected}"
                    );
                }
            }
        }
    }
}
