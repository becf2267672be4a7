//! From numbers to MLX's affine packing: integers of a few bits, of which each group of neighbours has a scale and a
//! bias. Blocks that are affine themselves keep their integers; all others are packed anew from what they stand for.

use super::{
    block_type::BlockType,
    blocks::{self, Integers, decode},
    k_quants,
};
use crate::{load_quantization::LoadQuantization, value_type::ValueType};

/// Bits of weights that are packed anew where none are asked for: with these an answer rarely differs from that of the
/// file's own numbers.
const ANEW_BITS: u32 = 8;
/// Smallest scale of a group that is packed anew, of which F16 has a value: a group of equal numbers divides by it.
const MIN_SCALE: f32 = 1e-7;

/// Integers of `bits` bits, of which `group_size` neighbours share a scale and a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupPacking {
    /// Values that share a scale and a bias.
    pub group_size: u32,
    /// Bits of a value.
    pub bits: u32,
}

/// How a matrix of a block type with rows of `columns` is packed, with so many bits what is packed anew; `None` for plain
/// numbers, and for MXFP4, which MLX has too.
pub fn packing(kind: BlockType, columns: u64, anew: Option<LoadQuantization>) -> Option<GroupPacking> {
    match kind {
        BlockType::F32 | BlockType::F16 | BlockType::Bf16 | BlockType::F64 | BlockType::Mxfp4 => None,
        BlockType::Q4_0 | BlockType::Q4_1 | BlockType::Q4K => Some(GroupPacking { group_size: 32, bits: 4 }),
        BlockType::Q5_0 | BlockType::Q5_1 | BlockType::Q5K => Some(GroupPacking { group_size: 32, bits: 5 }),
        BlockType::Q8_0 => Some(GroupPacking { group_size: 32, bits: 8 }),
        _ => Some(GroupPacking {
            group_size: if columns.is_multiple_of(64) { 64 } else { 32 },
            bits: match anew {
                Some(LoadQuantization::Int4) => 4,
                _ => ANEW_BITS,
            },
        }),
    }
}

/// Whether the integers of a block are not the file's own.
pub fn is_packed_anew(kind: BlockType) -> bool {
    !kind.is_plain() && !is_affine(kind) && kind != BlockType::Mxfp4
}

fn is_affine(kind: BlockType) -> bool {
    matches!(
        kind,
        BlockType::Q4_0
            | BlockType::Q4_1
            | BlockType::Q4K
            | BlockType::Q5_0
            | BlockType::Q5_1
            | BlockType::Q5K
            | BlockType::Q8_0
    )
}

/// Packed groups: what MLX takes for a matrix or a part of it.
#[derive(Debug, Default)]
pub(super) struct Packed {
    /// Integers, lowest bits first.
    pub values: Vec<u8>,
    /// One for each group.
    pub scales: Vec<f32>,
    /// One for each group.
    pub biases: Vec<f32>,
}

impl Packed {
    /// Adds whole blocks, which must be whole groups too.
    pub fn add(&mut self, kind: BlockType, raw: &[u8], packing: GroupPacking, value: ValueType) {
        if is_affine(kind) {
            for block in raw.chunks_exact(kind.block_bytes()) {
                if matches!(kind, BlockType::Q4K | BlockType::Q5K) {
                    k_quants::subblocks(kind, block).iter().for_each(|part| self.push(part, packing.bits));
                } else {
                    self.push(&blocks::integers(kind, block), packing.bits);
                }
            }
            return;
        }
        let group = packing.group_size as usize;
        let elements = kind.block_elements();
        let mut values = vec![0.0; group.max(elements)];
        for blocks in raw.chunks_exact(kind.block_bytes() * (values.len() / elements)) {
            for (block, out) in blocks.chunks_exact(kind.block_bytes()).zip(values.chunks_exact_mut(elements))
            {
                decode(kind, block, out);
            }
            values.chunks_exact(group).for_each(|group| self.quantise(group, packing.bits, value));
        }
    }

    fn push(&mut self, part: &Integers, bits: u32) {
        self.scales.push(part.scale);
        self.biases.push(part.bias);
        pack(&part.values, bits, &mut self.values);
    }

    /// Packs a group anew: from its least number, or a little less, in equal steps to its greatest, or a little more, so
    /// that no number is off by more than half a step. MLX's own rule meets zero exactly instead, and misses one end by
    /// up to a step, or two after its scale is rounded to 16 bits.
    fn quantise(&mut self, group: &[f32], bits: u32, value: ValueType) {
        let most = ((1_u32 << bits) - 1) as f32;
        let (least, greatest) =
            group.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(least, greatest), &x| {
                (least.min(x), greatest.max(x))
            });
        let bias = -value.at_least(-least);
        let scale = value.at_least(((greatest - bias) / most).max(MIN_SCALE));
        self.scales.push(scale);
        self.biases.push(bias);
        let mut integers = [0; 128];
        for (integer, x) in integers.iter_mut().zip(group) {
            // What is no number becomes 0.
            *integer = ((x - bias) / scale).round_ties_even().clamp(0.0, most) as u8;
        }
        pack(&integers[..group.len().min(128)], bits, &mut self.values);
    }
}

/// Writes integers of `bits` bits, lowest bits first, without gaps.
fn pack(values: &[u8], bits: u32, out: &mut Vec<u8>) {
    if bits == 8 {
        out.extend_from_slice(values);
        return;
    }
    let (mut word, mut filled) = (0_u32, 0);
    for &value in values {
        word |= u32::from(value) << filled;
        filled += bits;
        while filled >= 8 {
            out.push(word as u8);
            word >>= 8;
            filled -= 8;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a group stands for.
    fn unpacked(packed: &Packed, bits: u32, group: usize) -> Vec<f32> {
        let bit = |at: usize| u32::from(packed.values[at / 8] >> (at % 8) & 1);
        let count = packed.values.len() * 8 / bits as usize;
        (0..count)
            .map(|at| {
                let integer: u32 = (0..bits).map(|own| bit(at * bits as usize + own as usize) << own).sum();
                packed.scales[at / group] * integer as f32 + packed.biases[at / group]
            })
            .collect()
    }

    #[test]
    fn affine_blocks_keep_their_numbers_exactly() {
        for kind in [
            BlockType::Q4_0,
            BlockType::Q4_1,
            BlockType::Q5_0,
            BlockType::Q5_1,
            BlockType::Q8_0,
            BlockType::Q4K,
            BlockType::Q5K,
        ] {
            let raw: Vec<u8> = (0..2 * kind.block_bytes())
                .map(|at| match at % kind.block_bytes() {
                    // Scales of a usual size: 0.0123 and −0.0492.
                    0 => 0x4c,
                    1 => 0x22,
                    2 => 0x4c,
                    3 => 0xaa,
                    at => (at * 37 + 11) as u8,
                })
                .collect();
            let own = packing(kind, 512, None).unwrap();
            let mut packed = Packed::default();
            packed.add(kind, &raw, own, ValueType::F16);
            let mut expected = vec![0.0; 2 * kind.block_elements()];
            for (block, out) in
                raw.chunks_exact(kind.block_bytes()).zip(expected.chunks_exact_mut(kind.block_elements()))
            {
                decode(kind, block, out);
            }
            assert_eq!(unpacked(&packed, own.bits, 32), expected, "{kind:?}");
            if !matches!(kind, BlockType::Q4K | BlockType::Q5K) {
                for value in packed.scales.iter().chain(&packed.biases) {
                    assert_eq!(ValueType::F16.round(*value), *value, "{kind:?}");
                }
            }
        }
    }

    #[test]
    fn numbers_packed_anew_are_within_half_a_step() {
        let kind = BlockType::Iq4Nl;
        for (columns, value) in
            [(64, ValueType::F16), (96, ValueType::F16), (64, ValueType::Bf16), (96, ValueType::F32)]
        {
            let own = packing(kind, columns, None).unwrap();
            let raw: Vec<u8> = (0..columns as usize / 32 * 18)
                .map(|at| match at % 18 {
                    0 => 0x00,
                    1 => 0x2c,
                    at => (at * at * 31 + columns as usize) as u8,
                })
                .collect();
            let mut packed = Packed::default();
            packed.add(kind, &raw, own, value);
            let values = unpacked(&packed, 8, own.group_size as usize);
            assert_eq!(values.len() as u64, columns);
            for (block, got) in raw.chunks_exact(18).zip(values.chunks_exact(32)) {
                let mut expected = [0.0; 32];
                decode(kind, block, &mut expected);
                for (got, expected) in got.iter().zip(expected) {
                    let step = packed.scales[0].abs();
                    assert!((got - expected).abs() <= 0.501 * step, "{got} {expected} {step}");
                }
            }
        }
    }

    #[test]
    fn zeros_and_hostile_numbers_pack_to_something() {
        for values in [[0.0; 32], [f32::NAN; 32], [f32::INFINITY; 32], [f32::MIN; 32], [1e-30; 32]] {
            let mut packed = Packed::default();
            packed.quantise(&values, 8, ValueType::F16);
            assert_eq!((packed.values.len(), packed.scales.len()), (32, 1), "{values:?}");
        }
        let mut packed = Packed::default();
        packed.quantise(&[0.0; 32], 8, ValueType::Bf16);
        assert_eq!(unpacked(&packed, 8, 32), [0.0; 32]);
    }
}
