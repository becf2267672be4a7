//! A weight matrix, plain or quantised, and its products; also of several experts or heads, each a matrix.

use mlx_rs::{Array, Dtype, error::Exception, ops::gather_mm};
use russet_mlx::quantized::QuantizedWeight;

/// A weight matrix `[outputs, inputs]`, or several of them, `[experts, outputs, inputs]`, as stored.
#[derive(Debug)]
pub enum Weight {
    /// One number per element.
    Plain(Array),
    /// Packed numbers with a scale for each group of a row.
    Quantised(QuantizedWeight),
    /// The same, whose products are computed in float32 and are of the type of what is multiplied, nevertheless.
    QuantisedWide(QuantizedWeight),
}

impl Weight {
    /// `x` times the transposed matrix; of several, each with its own.
    pub fn apply(&self, x: &Array) -> Result<Array, Exception> {
        match self {
            Self::Plain(weight) => x.matmul(weight.swap_axes(-1, -2)?),
            Self::Quantised(weight) => weight.matmul(x, true).map_err(exception),
            Self::QuantisedWide(weight) => wide(x, |x| weight.matmul(x, true)),
        }
    }

    /// `x` times the matrix as it is; of several, each with its own.
    pub fn apply_reversed(&self, x: &Array) -> Result<Array, Exception> {
        match self {
            Self::Plain(weight) => x.matmul(weight),
            Self::Quantised(weight) => weight.matmul(x, false).map_err(exception),
            Self::QuantisedWide(weight) => wide(x, |x| weight.matmul(x, false)),
        }
    }

    /// `x`, `[…, 1, 1, inputs]`, times the transposed matrix that each of `indices` names. Sorted indices let MLX read
    /// each matrix once.
    pub fn gather(&self, x: &Array, indices: &Array, is_sorted: bool) -> Result<Array, Exception> {
        match self {
            Self::Plain(weight) => gather_mm(x, weight.swap_axes(-1, -2)?, None, indices, is_sorted),
            Self::Quantised(weight) => weight.gather_matmul(x, indices, is_sorted).map_err(exception),
            Self::QuantisedWide(weight) => wide(x, |x| weight.gather_matmul(x, indices, is_sorted)),
        }
    }

    /// The rows at the given indices, unpacked.
    pub fn rows(&self, indices: &Array) -> Result<Array, Exception> {
        match self {
            Self::Plain(weight) => weight.take_axis(indices, 0),
            Self::Quantised(weight) | Self::QuantisedWide(weight) => {
                let QuantizedWeight { packed, scales, biases, quantization } = weight;
                let biases = biases.as_ref().map(|biases| biases.take_axis(indices, 0)).transpose()?;
                let rows = QuantizedWeight {
                    packed: packed.take_axis(indices, 0)?,
                    scales: scales.take_axis(indices, 0)?,
                    biases,
                    quantization: *quantization,
                };
                rows.dequantize(None).map_err(exception)
            }
        }
    }
}

/// A product in float32, in the type of `x`.
fn wide(
    x: &Array,
    product: impl FnOnce(&Array) -> Result<Array, russet_mlx::Error>,
) -> Result<Array, Exception> {
    product(&x.as_dtype(Dtype::Float32)?).map_err(exception)?.as_dtype(x.dtype())
}

/// An error of the bindings as one of mlx-rs.
pub fn exception(error: russet_mlx::Error) -> Exception {
    Exception::custom(error.to_string())
}
