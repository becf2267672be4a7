//! Blocks of 256 numbers in 8 or 16 parts, whose scales are packed integers themselves (K-quants). Lengths are those
//! of the types; `blocks` has checked them.

use super::{
    block_type::BlockType,
    blocks::{Integers, half_at},
};

/// Two bits each, in 16 parts with a scale and a minimum of four bits.
pub(super) fn q2(block: &[u8], out: &mut [f32]) {
    let (scales, values) = (&block[..16], &block[16..80]);
    let (scale, least) = (half_at(block, 80), half_at(block, 82));
    for (part, out) in out.chunks_exact_mut(16).enumerate() {
        let (scale, least) = (scale * f32::from(scales[part] & 15), least * f32::from(scales[part] >> 4));
        let (first, shift) = (first_byte(part), shift(part));
        for (out, byte) in out.iter_mut().zip(&values[first..]) {
            *out = scale * f32::from(byte >> shift & 3) - least;
        }
    }
}

/// Three bits each, the highest apart, in 16 parts with a scale of six bits.
pub(super) fn q3(block: &[u8], out: &mut [f32]) {
    let (high, values, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let scale = half_at(block, 108);
    for (part, out) in out.chunks_exact_mut(16).enumerate() {
        let low = if part < 8 { scales[part] & 15 } else { scales[part - 8] >> 4 };
        let own = low | (scales[8 + part % 4] >> (2 * (part / 4)) & 3) << 4;
        let scale = scale * f32::from(own as i8 - 32);
        let (first, shift) = (first_byte(part), shift(part));
        // One bit of each high byte for 32 neighbours.
        let (high, bit) = (&high[16 * (part % 2)..], part / 2);
        for ((out, byte), high) in out.iter_mut().zip(&values[first..]).zip(high) {
            let value = (byte >> shift & 3) as i8 - if high >> bit & 1 == 1 { 0 } else { 4 };
            *out = scale * f32::from(value);
        }
    }
}

/// Six bits each, the highest two apart, in 16 parts with a scale of eight bits.
pub(super) fn q6(block: &[u8], out: &mut [f32]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let scale = half_at(block, 208);
    for (at, out) in out.iter_mut().enumerate() {
        // Halves of 128, of four runs of 32 each.
        let (half, run, own) = (at / 128, at % 128 / 32, at % 32);
        let nibbles = low[64 * half + 32 * (run % 2) + own];
        let nibble = if run < 2 { nibbles & 15 } else { nibbles >> 4 };
        let top = high[32 * half + own] >> (2 * run) & 3;
        let part = scale * f32::from(scales[at / 16] as i8);
        *out = part * f32::from((nibble | top << 4) as i8 - 32);
    }
}

/// Four or five bits each, in 8 parts with a scale and a minimum of six bits.
pub(super) fn subblocks(kind: BlockType, block: &[u8]) -> [Integers; 8] {
    let (scale, least) = (half_at(block, 0), half_at(block, 2));
    let packed = &block[4..16];
    let (high, values) = if kind == BlockType::Q5K {
        (Some(&block[16..48]), &block[48..176])
    } else {
        (None, &block[16..144])
    };
    std::array::from_fn(|part| {
        let (own_scale, own_least) = match part {
            0..4 => (packed[part] & 63, packed[part + 4] & 63),
            _ => (
                packed[part + 4] & 15 | packed[part - 4] >> 6 << 4,
                packed[part + 4] >> 4 | packed[part] >> 6 << 4,
            ),
        };
        let nibbles = &values[32 * (part / 2)..];
        let values = std::array::from_fn(|at| {
            let nibble = nibbles[at] >> (4 * (part % 2)) & 15;
            nibble | high.map_or(0, |high| (high[at] >> part & 1) << 4)
        });
        Integers { scale: scale * f32::from(own_scale), bias: -(least * f32::from(own_least)), values }
    })
}

/// Where the pairs of bits of a part begin: four parts share bytes, each its own pair.
fn first_byte(part: usize) -> usize {
    32 * (part / 8) + 16 * (part % 2)
}

fn shift(part: usize) -> usize {
    part % 8 / 2 * 2
}
