//! KV format: keys and values as computed, or quantised. Not here: appending and truncating positions.

use std::ops::Range;

use mlx_rs::{
    Array,
    error::Exception,
    ops::{indexing::TryIndexOp, quantize, quantized_matmul},
};
use russet_model::kv_quantization::kv_group;
use russet_wire::engine_options::KvCacheType;

/// Format of one layer's keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvFormat {
    /// As computed: one array each.
    #[default]
    AsComputed,
    /// Packed, with scales and biases: three arrays each.
    Quantised(Quantisation),
}

/// Parameters of MLX's affine quantisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantisation {
    /// Bits per element.
    pub bits: i32,
    /// Group size: neighbours within a head that share a scale and a bias.
    pub group_size: i32,
}

impl KvFormat {
    /// The requested format for this head size; `None` if MLX has no group size for it.
    pub fn new(asked: KvCacheType, head_dim: usize) -> Option<Self> {
        let bits = match asked {
            KvCacheType::AsComputed => return Some(Self::AsComputed),
            KvCacheType::Int8 => 8,
            KvCacheType::Int4 => 4,
            // A configuration with it is refused.
            KvCacheType::Unknown => return None,
        };
        let group_size = kv_group(u32::try_from(head_dim).ok()?)? as i32;
        Some(Self::Quantised(Quantisation { bits, group_size }))
    }

    /// The arrays for keys and values of `[batch, heads, positions, width]`. All of them have positions on
    /// the same axis, so that they can be sliced and joined without knowing the format.
    pub(super) fn encode(self, keys: &Array, values: &Array) -> Result<Vec<Array>, Exception> {
        match self {
            Self::AsComputed => Ok(vec![keys.clone(), values.clone()]),
            Self::Quantised(quantisation) => {
                let [keys, values] = [quantisation.quantize(keys)?, quantisation.quantize(values)?];
                Ok(keys.into_iter().chain(values).collect())
            }
        }
    }

    /// Number of these arrays.
    pub fn tensor_count(self) -> usize {
        match self {
            Self::AsComputed => 2,
            Self::Quantised(_) => 6,
        }
    }

    /// A view of arrays made by [`Self::encode`].
    pub(super) fn view(self, parts: &[Array]) -> Result<KvView, Exception> {
        match (self, parts) {
            (Self::AsComputed, [keys, values]) => {
                Ok(KvView::AsComputed { keys: keys.clone(), values: values.clone() })
            }
            (Self::Quantised(how), [keys, key_scales, key_biases, values, value_scales, value_biases]) => {
                Ok(KvView::Quantised {
                    keys: how.quantized_tensor([keys, key_scales, key_biases].map(Array::clone)),
                    values: how.quantized_tensor([values, value_scales, value_biases].map(Array::clone)),
                })
            }
            _ => Err(Exception::custom(format!("{} arrays are no cache in the form {self:?}", parts.len()))),
        }
    }
}

impl Quantisation {
    /// Quantises each position and head by itself: packed values, scales and biases.
    fn quantize(self, numbers: &Array) -> Result<[Array; 3], Exception> {
        let (packed, scales, biases) = quantize(numbers, self.group_size, self.bits)?;
        Ok([packed, scales, biases])
    }

    fn quantized_tensor(self, [numbers, scales, biases]: [Array; 3]) -> QuantizedTensor {
        QuantizedTensor { numbers, scales, biases, quantisation: self }
    }
}

/// View of a layer's KV cache of one sequence.
#[derive(Clone, Debug)]
pub enum KvView {
    /// `[batch, heads, positions, width]` each.
    AsComputed {
        /// Keys.
        keys: Array,
        /// Values.
        values: Array,
    },
    /// Quantised keys and values of the same shape.
    Quantised {
        /// Keys.
        keys: QuantizedTensor,
        /// Values.
        values: QuantizedTensor,
    },
}

impl KvView {
    /// Number of positions.
    pub fn positions(&self) -> i32 {
        match self {
            Self::AsComputed { keys, .. } => keys.dim(2),
            Self::Quantised { keys, .. } => keys.scales.dim(2),
        }
    }

    /// Some positions.
    pub fn range(&self, positions: Range<i32>) -> Result<Self, Exception> {
        Ok(match self {
            Self::AsComputed { keys, values } => {
                Self::AsComputed { keys: range(keys, &positions)?, values: range(values, &positions)? }
            }
            Self::Quantised { keys, values } => {
                Self::Quantised { keys: keys.range(&positions)?, values: values.range(&positions)? }
            }
        })
    }
}

/// Quantised tensor of shape `[batch, heads, positions, width]`.
#[derive(Clone, Debug)]
pub struct QuantizedTensor {
    /// Packed values, 32 bits at a time, `[batch, heads, positions, width × bits / 32]`.
    numbers: Array,
    /// One per group, `[batch, heads, positions, width / group]`.
    scales: Array,
    /// One per group.
    biases: Array,
    quantisation: Quantisation,
}

impl QuantizedTensor {
    /// Key/value heads.
    pub fn heads(&self) -> i32 {
        self.scales.dim(1)
    }

    /// `x`, `[batch, heads, queries per head, rows, width]`, times the values of its head, transposed.
    pub fn matmul_transposed(&self, x: &Array) -> Result<Array, Exception> {
        self.quantized_matmul(x, true)
    }

    /// `x`, `[batch, heads, queries per head, rows, positions]`, times the values of its head.
    pub fn matmul(&self, x: &Array) -> Result<Array, Exception> {
        self.quantized_matmul(x, false)
    }

    fn quantized_matmul(&self, x: &Array, transpose: bool) -> Result<Array, Exception> {
        let Self { numbers, scales, biases, quantisation: Quantisation { bits, group_size } } = self;
        let apart = |array: &Array| array.expand_dims(2);
        quantized_matmul(x, apart(numbers)?, apart(scales)?, &apart(biases)?, transpose, *group_size, *bits)
    }

    fn range(&self, positions: &Range<i32>) -> Result<Self, Exception> {
        let Self { numbers, scales, biases, quantisation: how } = self;
        let parts = [range(numbers, positions)?, range(scales, positions)?, range(biases, positions)?];
        Ok(how.quantized_tensor(parts))
    }
}

/// Some positions of an array with positions on the same axis as keys and values.
pub(super) fn range(array: &Array, positions: &Range<i32>) -> Result<Array, Exception> {
    if *positions == (0..array.dim(2)) {
        return Ok(array.clone());
    }
    array.try_index((.., .., positions.clone(), ..))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_that_no_group_divides_cannot_be_quantised() {
        let quantised = |bits, group_size| Some(KvFormat::Quantised(Quantisation { bits, group_size }));
        for (asked, head_dim, form) in [
            (KvCacheType::AsComputed, 80, Some(KvFormat::AsComputed)),
            (KvCacheType::Int8, 80, None),
            (KvCacheType::Int8, 128, quantised(8, 64)),
            (KvCacheType::Int4, 64, quantised(4, 64)),
            (KvCacheType::Int4, 96, quantised(4, 32)),
            (KvCacheType::Int4, 16, None),
        ] {
            assert_eq!(KvFormat::new(asked, head_dim), form, "{asked:?}, {head_dim}");
        }
    }

    #[test]
    fn another_number_of_arrays_is_an_error() {
        let two = [Array::from_int(0), Array::from_int(0)];
        assert!(KvFormat::AsComputed.view(&two).is_ok());
        let form = KvFormat::new(KvCacheType::Int8, 64).unwrap();
        let error = form.view(&two).unwrap_err();
        assert!(error.what().contains("2 arrays are no cache in the form Quantised"), "{error}");
    }
}
