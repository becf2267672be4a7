//! Blocks of 256 numbers that are rows of a table (`iq_grids`), with signs and scales: the types of one to three bits.
//! Lengths are those of the types; `blocks` has checked them.

use super::{
    block_type::BlockType,
    blocks::{half_at, u16_at, u32_at},
    iq_grids,
};
use crate::float16::from_f16;

/// What the digits of rows of two bits stand for.
const TWO_BITS: [f32; 3] = [8.0, 25.0, 43.0];
/// What those of IQ3_XXS stand for.
const THREE_BITS: [f32; 8] = [4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0];
/// How far the rows of one bit are moved, up or down.
const SHIFT: f32 = 0.125;

/// Decodes a block.
pub(super) fn decode(kind: BlockType, block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 0);
    let nibble = |byte: u8, at: usize| f32::from(byte >> (4 * (at % 2)) & 15);
    // Runs of eight, of which four share 32 elements.
    for (run, out) in out.chunks_exact_mut(8).enumerate() {
        let (part, own) = (run / 4, run % 4);
        match kind {
            BlockType::Iq2Xxs => {
                let words = 2 + 8 * part;
                let signs = u32_at(block, words + 4);
                let scale = scale * (0.5 + (signs >> 28) as f32) * 0.25;
                row_of_two_bits(iq_grids::IQ2_XXS[usize::from(block[words + own])], scale, out);
                negate(even(signs >> (7 * own)), out);
            }
            BlockType::Iq2Xs => {
                let word = u16_at(block, 2 + 2 * run);
                let scale = scale * (0.5 + nibble(block[66 + part], own / 2)) * 0.25;
                row_of_two_bits(iq_grids::IQ2_XS[usize::from(word & 511)], scale, out);
                negate(even(u32::from(word >> 9)), out);
            }
            BlockType::Iq2S => {
                let high = u16::from(block[66 + part] >> (2 * own) & 3) << 8;
                let scale = scale * (0.5 + nibble(block[74 + part], own / 2)) * 0.25;
                row_of_two_bits(iq_grids::IQ2_S[usize::from(u16::from(block[2 + run]) | high)], scale, out);
                negate(block[34 + run], out);
            }
            BlockType::Iq3Xxs => {
                let signs = u32_at(block, 66 + 4 * part);
                let scale = scale * (0.5 + (signs >> 28) as f32) * 0.5;
                for (half, out) in out.chunks_exact_mut(4).enumerate() {
                    let row = iq_grids::IQ3_XXS[usize::from(block[2 + 2 * run + half])];
                    for (at, out) in out.iter_mut().enumerate() {
                        *out = scale * THREE_BITS[usize::from(row >> (3 * at) & 7)];
                    }
                }
                negate(even(signs >> (7 * own)), out);
            }
            BlockType::Iq3S => {
                let scale = scale * (1.0 + 2.0 * nibble(block[106 + part / 2], part));
                for (half, out) in out.chunks_exact_mut(4).enumerate() {
                    let at = 2 * run + half;
                    let high = u16::from(block[66 + at / 8] >> (at % 8) & 1) << 8;
                    let row = iq_grids::IQ3_S[usize::from(u16::from(block[2 + at]) | high)];
                    for (at, out) in out.iter_mut().enumerate() {
                        // Odd numbers from 1 on.
                        *out = scale * f32::from(2 * (row >> (3 * at) & 7) + 1);
                    }
                }
                negate(block[74 + run], out);
            }
            BlockType::Iq1S => {
                let word = u16_at(block, 34 + 2 * part);
                let high = (word >> (3 * own) & 7) << 8;
                let scale = scale * f32::from(2 * (word >> 12 & 7) + 1);
                let shift = if word >> 15 == 0 { SHIFT } else { -SHIFT };
                row_of_one_bit(u16::from(block[2 + run]) | high, scale, shift, out);
            }
            _ => {
                // IQ1_M: the scale of all is in the highest bits of four words.
                let word = |at: usize| u16_at(block, 48 + 2 * at);
                let bits = (0..4).fold(0, |bits, at| bits | word(at) >> 12 << (4 * at));
                let three = word(part / 2) >> (6 * (part % 2) + 3 * (own / 2)) & 7;
                let scale = from_f16(bits) * f32::from(2 * three + 1);
                let high = block[32 + run / 2] >> (4 * (run % 2)) & 15;
                let shift = if high & 8 == 0 { SHIFT } else { -SHIFT };
                row_of_one_bit(u16::from(block[run]) | u16::from(high & 7) << 8, scale, shift, out);
            }
        }
    }
}

fn row_of_two_bits(mut row: u16, scale: f32, out: &mut [f32]) {
    for out in out {
        *out = scale * TWO_BITS[usize::from(row % 3)];
        row /= 3;
    }
}

fn row_of_one_bit(number: u16, scale: f32, shift: f32, out: &mut [f32]) {
    let mut row = iq_grids::IQ1[usize::from(number)];
    for out in out {
        *out = scale * (f32::from(row % 3) - 1.0 + shift);
        row /= 3;
    }
}

/// Eight signs of seven bits: the eighth makes the number of minus signs even.
fn even(bits: u32) -> u8 {
    let bits = (bits & 127) as u8;
    bits | ((bits.count_ones() & 1) as u8) << 7
}

fn negate(signs: u8, out: &mut [f32]) {
    for (at, out) in out.iter_mut().enumerate() {
        if signs >> at & 1 == 1 {
            *out = -*out;
        }
    }
}
