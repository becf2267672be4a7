//! Blocks of packed numbers, decoded to 32 bits: what a file's bytes stand for, whatever the engine makes of them.

use super::{block_type::BlockType, iq, k_quants};
use crate::float16::{from_bf16, from_f16};

/// The values of IQ4_NL, IQ4_XS: closer together near zero, where most weights are.
const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// The values of MXFP4: a sign, two bits of exponent and one of fraction.
const MXFP4_VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Decodes one block. A block or an output of another length than the type's leaves the output as it was: the layout
/// of a file has only whole ones.
pub fn decode(kind: BlockType, block: &[u8], out: &mut [f32]) {
    if block.len() != kind.block_bytes() || out.len() != kind.block_elements() {
        return;
    }
    match kind {
        BlockType::F32 => out[0] = f32_at(block, 0),
        BlockType::F16 => out[0] = half_at(block, 0),
        BlockType::Bf16 => out[0] = from_bf16(u16_at(block, 0)),
        BlockType::F64 => {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(block);
            out[0] = f64::from_le_bytes(bytes) as f32;
        }
        BlockType::Q4_0 | BlockType::Q4_1 | BlockType::Q5_0 | BlockType::Q5_1 | BlockType::Q8_0 => {
            let Integers { scale, bias, values } = integers(kind, block);
            for (out, value) in out.iter_mut().zip(values) {
                *out = scale * f32::from(value) + bias;
            }
        }
        BlockType::Q2K => k_quants::q2(block, out),
        BlockType::Q3K => k_quants::q3(block, out),
        BlockType::Q4K | BlockType::Q5K => {
            let subblocks = k_quants::subblocks(kind, block);
            for (out, Integers { scale, bias, values }) in out.chunks_exact_mut(32).zip(subblocks) {
                for (out, value) in out.iter_mut().zip(values) {
                    *out = scale * f32::from(value) + bias;
                }
            }
        }
        BlockType::Q6K => k_quants::q6(block, out),
        BlockType::Q8K => {
            let scale = f32_at(block, 0);
            for (out, &value) in out.iter_mut().zip(&block[4..260]) {
                *out = scale * f32::from(value as i8);
            }
        }
        BlockType::Iq1S
        | BlockType::Iq1M
        | BlockType::Iq2Xxs
        | BlockType::Iq2Xs
        | BlockType::Iq2S
        | BlockType::Iq3Xxs
        | BlockType::Iq3S => iq::decode(kind, block, out),
        BlockType::Iq4Nl => iq4(half_at(block, 0), &block[2..], out),
        BlockType::Iq4Xs => {
            let (scale, high) = (half_at(block, 0), u16_at(block, 2));
            for (at, (out, values)) in out.chunks_exact_mut(32).zip(block[8..].chunks_exact(16)).enumerate() {
                let low = block[4 + at / 2] >> (4 * (at % 2)) & 15;
                let own = i32::from(low) | i32::from(high >> (2 * at) & 3) << 4;
                iq4(scale * (own - 32) as f32, values, out);
            }
        }
        BlockType::Mxfp4 => {
            // The scale is a power of two, of which the byte is the exponent.
            let scale = (i32::from(block[0]) - 127) as f32;
            let scale = scale.exp2();
            for (at, &byte) in block[1..].iter().enumerate() {
                out[at] = scale * MXFP4_VALUES[usize::from(byte & 15)];
                out[at + 16] = scale * MXFP4_VALUES[usize::from(byte >> 4)];
            }
        }
    }
}

/// 32 neighbours as integers without a sign, what one of them counts, and what zero stands for: MLX's affine packing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Integers {
    pub scale: f32,
    pub bias: f32,
    pub values: [u8; 32],
}

/// The integers of a block of the types that are affine themselves.
pub(super) fn integers(kind: BlockType, block: &[u8]) -> Integers {
    let scale = half_at(block, 0);
    let mut values = [0; 32];
    let mut nibbles = |bytes: &[u8]| {
        for (at, &byte) in bytes.iter().enumerate().take(16) {
            (values[at], values[at + 16]) = (byte & 15, byte >> 4);
        }
    };
    let bias = match kind {
        BlockType::Q4_0 => {
            nibbles(&block[2..]);
            -8.0 * scale
        }
        BlockType::Q4_1 => {
            nibbles(&block[4..]);
            half_at(block, 2)
        }
        BlockType::Q5_0 => {
            nibbles(&block[6..]);
            fifth_bits(u32_at(block, 2), &mut values);
            -16.0 * scale
        }
        BlockType::Q5_1 => {
            nibbles(&block[8..]);
            fifth_bits(u32_at(block, 4), &mut values);
            half_at(block, 2)
        }
        _ => {
            for (value, &byte) in values.iter_mut().zip(&block[2..]) {
                // From −128 on.
                *value = byte ^ 0x80;
            }
            -128.0 * scale
        }
    };
    Integers { scale, bias, values }
}

fn fifth_bits(bits: u32, values: &mut [u8; 32]) {
    for (at, value) in values.iter_mut().enumerate() {
        *value |= ((bits >> at & 1) as u8) << 4;
    }
}

fn iq4(scale: f32, values: &[u8], out: &mut [f32]) {
    for (at, &byte) in values.iter().enumerate().take(16) {
        out[at] = scale * f32::from(IQ4_VALUES[usize::from(byte & 15)]);
        out[at + 16] = scale * f32::from(IQ4_VALUES[usize::from(byte >> 4)]);
    }
}

pub(super) fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

pub(super) fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from(u16_at(block, at)) | u32::from(u16_at(block, at + 2)) << 16
}

pub(super) fn half_at(block: &[u8], at: usize) -> f32 {
    from_f16(u16_at(block, at))
}

fn f32_at(block: &[u8], at: usize) -> f32 {
    f32::from_bits(u32_at(block, at))
}

#[cfg(test)]
mod tests;
