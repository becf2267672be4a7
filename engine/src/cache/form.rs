//! In what form keys and values are kept: as they were computed, or quantised. It knows nothing of positions that
//! come and go.

use mlx_rs::{
    Array,
    error::Exception,
    ops::{indexing::TryIndexOp, quantize, quantized_matmul},
};
use russet_model::kv_quantization::kv_group;

use crate::args::KvCacheType;

/// The form of one layer's keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// As computed: an array each.
    #[default]
    AsComputed,
    /// Packed, with scales and biases: three arrays each.
    Quantised(Quantisation),
}

/// How numbers are quantised, in the way MLX calls affine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantisation {
    /// Bits of a number.
    pub bits: i32,
    /// Neighbours within a head that share a scale and a bias.
    pub group_size: i32,
}

impl Form {
    /// The form asked for, of heads this wide; `None` where MLX has no groups for them.
    pub fn new(asked: KvCacheType, head_dim: usize) -> Option<Self> {
        let bits = match asked {
            KvCacheType::AsComputed => return Some(Self::AsComputed),
            KvCacheType::Int8 => 8,
            KvCacheType::Int4 => 4,
        };
        let group_size = kv_group(u32::try_from(head_dim).ok()?)? as i32;
        Some(Self::Quantised(Quantisation { bits, group_size }))
    }

    /// The arrays that are kept of keys and values, `[batch, heads, positions, width]`. Each of them has its
    /// positions where these have theirs, so that whoever cuts and joins them need not know what they are.
    pub(super) fn parts(self, keys: &Array, values: &Array) -> Result<Vec<Array>, Exception> {
        match self {
            Self::AsComputed => Ok(vec![keys.clone(), values.clone()]),
            Self::Quantised(quantisation) => {
                let [keys, values] = [quantisation.pack(keys)?, quantisation.pack(values)?];
                Ok(keys.into_iter().chain(values).collect())
            }
        }
    }

    /// How many arrays that are.
    pub fn arrays(self) -> usize {
        match self {
            Self::AsComputed => 2,
            Self::Quantised(_) => 6,
        }
    }

    /// What [`Self::parts`] made.
    pub(super) fn held(self, parts: &[Array]) -> Result<Held, Exception> {
        match (self, parts) {
            (Self::AsComputed, [keys, values]) => {
                Ok(Held::AsComputed { keys: keys.clone(), values: values.clone() })
            }
            (Self::Quantised(how), [keys, key_scales, key_biases, values, value_scales, value_biases]) => {
                Ok(Held::Quantised {
                    keys: how.packed([keys, key_scales, key_biases].map(Array::clone)),
                    values: how.packed([values, value_scales, value_biases].map(Array::clone)),
                })
            }
            _ => Err(Exception::custom(format!("{} arrays are no cache in the form {self:?}", parts.len()))),
        }
    }
}

impl Quantisation {
    /// Packed numbers, scales and biases; of each position and head by itself.
    fn pack(self, numbers: &Array) -> Result<[Array; 3], Exception> {
        let (packed, scales, biases) = quantize(numbers, self.group_size, self.bits)?;
        Ok([packed, scales, biases])
    }

    fn packed(self, [numbers, scales, biases]: [Array; 3]) -> Packed {
        Packed { numbers, scales, biases, how: self }
    }
}

/// Everything a layer's cache holds of a sequence.
#[derive(Clone, Debug)]
pub enum Held {
    /// `[batch, heads, positions, width]` each.
    AsComputed {
        /// Keys.
        keys: Array,
        /// Values.
        values: Array,
    },
    /// The same, quantised.
    Quantised {
        /// Keys.
        keys: Packed,
        /// Values.
        values: Packed,
    },
}

impl Held {
    /// Positions held.
    pub fn positions(&self) -> i32 {
        match self {
            Self::AsComputed { keys, .. } => keys.dim(2),
            Self::Quantised { keys, .. } => keys.scales.dim(2),
        }
    }

    /// The first `count` positions.
    pub fn first(&self, count: i32) -> Result<Self, Exception> {
        Ok(match self {
            Self::AsComputed { keys, values } => {
                Self::AsComputed { keys: first(keys, count)?, values: first(values, count)? }
            }
            Self::Quantised { keys, values } => {
                Self::Quantised { keys: keys.first(count)?, values: values.first(count)? }
            }
        })
    }
}

/// Quantised numbers of `[batch, heads, positions, width]`.
#[derive(Clone, Debug)]
pub struct Packed {
    /// 32 bits at a time, `[batch, heads, positions, width × bits / 32]`.
    numbers: Array,
    /// One per group, `[batch, heads, positions, width / group]`.
    scales: Array,
    /// One per group.
    biases: Array,
    how: Quantisation,
}

impl Packed {
    /// Key/value heads.
    pub fn heads(&self) -> i32 {
        self.scales.dim(1)
    }

    /// `x`, `[batch, heads, queries per head, rows, width]`, times the numbers of its head, transposed.
    pub fn times_transposed(&self, x: &Array) -> Result<Array, Exception> {
        self.product(x, true)
    }

    /// `x`, `[batch, heads, queries per head, rows, positions]`, times the numbers of its head.
    pub fn times(&self, x: &Array) -> Result<Array, Exception> {
        self.product(x, false)
    }

    fn product(&self, x: &Array, transpose: bool) -> Result<Array, Exception> {
        let Self { numbers, scales, biases, how: Quantisation { bits, group_size } } = self;
        let apart = |array: &Array| array.expand_dims(2);
        quantized_matmul(x, apart(numbers)?, apart(scales)?, &apart(biases)?, transpose, *group_size, *bits)
    }

    fn first(&self, count: i32) -> Result<Self, Exception> {
        let Self { numbers, scales, biases, how } = self;
        Ok(how.packed([first(numbers, count)?, first(scales, count)?, first(biases, count)?]))
    }
}

/// The first `count` positions of an array that has them where keys and values have theirs.
pub(super) fn first(array: &Array, count: i32) -> Result<Array, Exception> {
    if count == array.dim(2) { Ok(array.clone()) } else { array.try_index((.., .., 0..count, ..)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_that_no_group_divides_cannot_be_quantised() {
        let quantised = |bits, group_size| Some(Form::Quantised(Quantisation { bits, group_size }));
        for (asked, head_dim, form) in [
            (KvCacheType::AsComputed, 80, Some(Form::AsComputed)),
            (KvCacheType::Int8, 80, None),
            (KvCacheType::Int8, 128, quantised(8, 64)),
            (KvCacheType::Int4, 64, quantised(4, 64)),
            (KvCacheType::Int4, 96, quantised(4, 32)),
            (KvCacheType::Int4, 16, None),
        ] {
            assert_eq!(Form::new(asked, head_dim), form, "{asked:?}, {head_dim}");
        }
    }

    #[test]
    fn another_number_of_arrays_is_an_error() {
        let two = [Array::from_int(0), Array::from_int(0)];
        assert!(Form::AsComputed.held(&two).is_ok());
        let form = Form::new(KvCacheType::Int8, 64).unwrap();
        let error = form.held(&two).unwrap_err();
        assert!(error.what().contains("2 arrays are no cache in the form Quantised"), "{error}");
    }
}
