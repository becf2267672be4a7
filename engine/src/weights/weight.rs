//! A weight matrix, plain or affine-quantised, and its products.

use mlx_rs::{
    Array,
    error::Exception,
    ops::{dequantize, quantized_matmul},
};

/// A weight matrix `[outputs, inputs]`, as stored.
#[derive(Debug)]
pub enum Weight {
    /// One number per element.
    Plain(Array),
    /// Packed integers with a scale and a bias for each group of a row.
    Quantised {
        /// Packed values, 32 bits at a time.
        packed: Array,
        /// One per group.
        scales: Array,
        /// One per group.
        biases: Array,
        /// Elements per group.
        group_size: i32,
        /// Bits per element.
        bits: i32,
    },
}

impl Weight {
    /// `x` times the transposed matrix.
    pub fn apply(&self, x: &Array) -> Result<Array, Exception> {
        match self {
            Self::Plain(weight) => x.matmul(weight.transpose()?),
            Self::Quantised { packed, scales, biases, group_size, bits } => {
                quantized_matmul(x, packed, scales, biases, true, *group_size, *bits)
            }
        }
    }

    /// The rows at the given indices, dequantised.
    pub fn rows(&self, indices: &Array) -> Result<Array, Exception> {
        match self {
            Self::Plain(weight) => weight.take_axis(indices, 0),
            Self::Quantised { packed, scales, biases, group_size, bits } => dequantize(
                packed.take_axis(indices, 0)?,
                scales.take_axis(indices, 0)?,
                &biases.take_axis(indices, 0)?,
                *group_size,
                *bits,
            ),
        }
    }
}
