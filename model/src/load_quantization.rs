//! Packing of a repository's matrices while they are read: what mlx-lm's `convert` makes of a model, so that 16-bit
//! repositories run in 8 or 4 bits. Which matrices get how many bits, a description and the table of its tensors say;
//! here is what each then takes. The numbers themselves are MLX's to pack.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    error::Unsupported,
    safetensors::shorten,
    tensors::{Packing, PackingMode},
};

/// Values that share a scale and a bias, as in mlx-lm; matrices whose rows do not divide by it stay as they are.
pub const GROUP_SIZE: u32 = 64;

/// Bits that matrices are packed in while they are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum LoadQuantization {
    /// 8 bits.
    Int8,
    /// 4 bits, and 8 for what mlx-lm keeps in more.
    Int4,
    /// A value from a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// What of mlx-lm's `convert` holds for a matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatrixQuantization {
    /// The bits that were asked for.
    #[default]
    AsAsked,
    /// Eight bits whatever was asked for: the choice of experts is discrete, and a small error changes it.
    EightBits,
    /// It stays as it is: mlx-lm computes with it outside its quantised layers.
    Never,
}

impl LoadQuantization {
    /// All that this release knows.
    pub const ALL: [Self; 2] = [Self::Int8, Self::Int4];

    /// How a matrix with rows of so many values is packed; `None` where it stays as it is.
    pub fn packing(self, columns: u64, matrix: MatrixQuantization) -> Option<Packing> {
        let bits = match (self, matrix) {
            (Self::Unknown, _) | (_, MatrixQuantization::Never) => return None,
            (Self::Int8, _) | (_, MatrixQuantization::EightBits) => 8,
            (Self::Int4, MatrixQuantization::AsAsked) => 4,
        };
        let fits = columns > 0 && columns.is_multiple_of(GROUP_SIZE.into());
        fits.then_some(Packing { mode: PackingMode::Affine, group_size: GROUP_SIZE, bits })
    }

    /// Why a repository with such a tensor is not packed.
    pub(crate) fn refuse(self, tensor: &str, packing: Packing) -> Unsupported {
        let Packing { mode, bits, .. } = packing;
        let reason = format!(
            "it is packed already, as {} with {bits} bits, and spec.engine.quantization is {self:?}",
            mode.name()
        );
        let remedy = "leave spec.engine.quantization out, or use the model in 16 bits";
        Unsupported::tensor(&shorten(tensor), reason, remedy)
    }
}

impl Packing {
    /// Bytes of so many values with their scales and biases, each of `value_bytes`.
    pub fn bytes(&self, values: u64, value_bytes: u64) -> u64 {
        let groups = values / u64::from(self.group_size).max(1);
        let packed = u128::from(values) * u128::from(self.bits) / 8;
        let bytes = packed + 2 * u128::from(groups) * u128::from(value_bytes);
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_get_the_bits_that_convert_gives_them() {
        use MatrixQuantization::{AsAsked, EightBits, Never};
        for (quantization, columns, matrix, bits) in [
            (LoadQuantization::Int4, 128, AsAsked, Some(4)),
            (LoadQuantization::Int4, 128, EightBits, Some(8)),
            (LoadQuantization::Int8, 128, AsAsked, Some(8)),
            (LoadQuantization::Int8, 128, Never, None),
            (LoadQuantization::Int4, 96, AsAsked, None),
            (LoadQuantization::Int4, 0, AsAsked, None),
        ] {
            let found = quantization.packing(columns, matrix).map(|packing| packing.bits);
            assert_eq!(found, bits, "{quantization:?} {columns} {matrix:?}");
        }
    }

    #[test]
    fn packed_bytes_are_values_scales_and_biases() {
        let four = LoadQuantization::Int4.packing(64, MatrixQuantization::AsAsked).unwrap();
        assert_eq!(four.bytes(1 << 20, 2), (1 << 19) + 4 * (1 << 14));
        let eight = LoadQuantization::Int8.packing(64, MatrixQuantization::AsAsked).unwrap();
        assert_eq!(eight.bytes(u64::MAX, 4), u64::MAX);
    }
}
