//! Rotary position embedding, with the scalings that families use.

use std::f64::consts::PI;

use mlx_rs::{
    Array,
    error::Exception,
    fast,
    ops::{arange, clip, concatenate, full, indexing::TryIndexOp},
};
use russet_model::description::{self, RopeScaling, Yarn};
use thiserror::Error;

use super::activation::scalar;

/// Why a rotary embedding cannot be built.
#[derive(Debug, Error)]
pub enum RopeError {
    /// MLX failed.
    #[error(transparent)]
    Mlx(#[from] Exception),
}

/// Rotates queries and keys by their position.
#[derive(Debug)]
pub struct Rope {
    width: i32,
    traditional: bool,
    frequencies: Frequencies,
    /// What the rotated part is multiplied by.
    scale: f32,
}

#[derive(Debug)]
enum Frequencies {
    /// Frequencies from powers of one base; positions are multiplied by a scale.
    Base { base: f32, scale: f32 },
    /// One wavelength per pair of elements.
    Table(Array),
}

impl Rope {
    /// As described.
    pub fn new(description: &description::Rope) -> Result<Self, RopeError> {
        let description::Rope { width, base, traditional, ref scaling } = *description;
        let mut scale = 1.0;
        let frequencies = match scaling {
            RopeScaling::None => Frequencies::Base { base, scale: 1.0 },
            RopeScaling::Linear { factor } => Frequencies::Base { base, scale: 1.0 / factor },
            &RopeScaling::Llama3 { factor, low, high, original } => {
                Frequencies::Table(Llama3Scaling { factor, low, high, original }.table(width as usize, base)?)
            }
            RopeScaling::Yarn(yarn) => {
                scale = yarn.scale;
                Frequencies::Table(yarn_table(yarn, width as i32, base)?)
            }
            &RopeScaling::Proportional { rotated, factor } => {
                Frequencies::Table(proportional_table(width as i32, base, (rotated as i32, factor))?)
            }
            RopeScaling::Factors { factors, scale: own } => {
                scale = *own;
                let table = Array::from_slice(factors, &[factors.len() as i32])
                    .multiply(wavelengths(width as i32, base)?)?;
                table.eval()?;
                Frequencies::Table(table)
            }
        };
        Ok(Self { width: width as i32, traditional, frequencies, scale })
    }

    /// Rotates `x`, `[batch, heads, positions, width]`, whose first position is `offset`.
    pub fn forward(&self, x: &Array, offset: i32) -> Result<Array, Exception> {
        let x = &self.scaled(x)?;
        match &self.frequencies {
            Frequencies::Base { base, scale } => {
                fast::rope(x, self.width, self.traditional, *base, *scale, offset, None)
            }
            Frequencies::Table(table) => {
                fast::rope(x, self.width, self.traditional, None, 1.0, offset, table)
            }
        }
    }

    /// Rotates `x`, `[rows, heads, 1, width]`, each row by its own offset in `offsets`, `[rows]`.
    pub fn forward_each(&self, x: &Array, offsets: &Array) -> Result<Array, Exception> {
        let (base, scale, table) = match &self.frequencies {
            Frequencies::Base { base, scale } => (Some(*base), *scale, None),
            Frequencies::Table(table) => (None, 1.0, Some(table)),
        };
        fast::rope_dynamic(self.scaled(x)?, self.width, self.traditional, base, scale, offsets, table)
    }

    /// `x` with the rotated part scaled.
    fn scaled(&self, x: &Array) -> Result<Array, Exception> {
        if self.scale == 1.0 {
            return Ok(x.clone());
        }
        let scale = scalar(self.scale, x)?;
        if self.width == x.dim(-1) {
            return x.multiply(scale);
        }
        let [rotated, plain] =
            [x.try_index((.., .., .., ..self.width))?, x.try_index((.., .., .., self.width..))?];
        concatenate(&[rotated.multiply(scale)?, plain], -1)
    }
}

/// The wavelength of each pair, by 2π: powers of the base.
fn wavelengths(width: i32, base: f32) -> Result<Array, Exception> {
    let steps: Vec<f32> = (0..width).step_by(2).map(|step| step as f32).collect();
    let exponents = Array::from_slice(&steps, &[steps.len() as i32]).divide(Array::from_f32(width as f32))?;
    Array::from_f32(base).power(exponents)
}

/// The wavelengths of the first pairs, stretched; the others do not turn.
fn proportional_table(width: i32, base: f32, (rotated, factor): (i32, f32)) -> Result<Array, Exception> {
    let turning = wavelengths(width, base)?.try_index(..rotated / 2)?;
    let still = full::<f32>(&[(width - rotated) / 2], Array::from_f32(f32::INFINITY))?;
    let table = concatenate(&[Array::from_f32(factor).multiply(turning)?, still], 0)?;
    table.eval()?;
    Ok(table)
}

/// YaRN: pairs that turn often within the original context are kept, those that turn seldom are stretched. Computed with
/// MLX's own float32 operations, so that the table equals the oracle's bit by bit.
fn yarn_table(yarn: &Yarn, width: i32, base: f32) -> Result<Array, Exception> {
    let number = Array::from_f32;
    let pair = |turns: f32| {
        f64::from(width) * (f64::from(yarn.original) / (f64::from(turns) * 2.0 * PI)).ln()
            / (2.0 * f64::from(base).ln())
    };
    let low = pair(yarn.beta_fast).floor().max(0.0);
    let mut high = pair(yarn.beta_slow).ceil().min(f64::from(width - 1));
    if low == high {
        high += 0.001;
    }
    let plain = wavelengths(width, base)?;
    let stretched = number(yarn.factor).multiply(&plain)?;
    let places = arange::<_, f32>(0, width / 2, None)?;
    let ramp = places.subtract(number(low as f32))?.divide(number((high - low) as f32))?;
    let kept = number(1.0).subtract(clip(ramp, (0.0, 1.0))?)?;
    let blend = stretched.multiply(&kept)?.add(plain.multiply(number(1.0).subtract(&kept)?)?)?;
    let table = stretched.multiply(&plain)?.divide(blend)?;
    table.eval()?;
    Ok(table)
}

/// Llama 3's scaling: long wavelengths are stretched, short ones kept, those between blended.
struct Llama3Scaling {
    factor: f32,
    low: f32,
    high: f32,
    original: f32,
}

impl Llama3Scaling {
    /// Computed with MLX's own float32 operations, so that the table equals the oracle's bit by bit.
    fn table(&self, width: usize, base: f32) -> Result<Array, Exception> {
        use mlx_rs::ops::{logical_and, select};
        let number = Array::from_f32;
        let steps: Vec<i32> = (0..width as i32).step_by(2).collect();
        let exponents = Array::from_slice(&steps, &[steps.len() as i32]).divide(number(width as f32))?;
        let plain = number(base).power(exponents)?;
        let wavelengths = number(2.0 * std::f32::consts::PI).multiply(&plain)?;
        let (long, short) = (self.original / self.low, self.original / self.high);
        let stretched = select(wavelengths.gt(number(long))?, plain.multiply(number(self.factor))?, &plain)?;
        let between = logical_and(wavelengths.gt(number(short))?, wavelengths.lt(number(long))?)?;
        let smooth = number(self.original)
            .divide(&wavelengths)?
            .subtract(number(self.low))?
            .divide(number(self.high - self.low))?;
        let blend = number(1.0).subtract(&smooth)?.divide(number(self.factor))?.add(&smooth)?;
        let table = select(between, stretched.divide(blend)?, &stretched)?;
        table.eval()?;
        Ok(table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_keeps_short_wavelengths_and_stretches_long_ones() {
        let llama3 = Llama3Scaling { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
        let table = llama3.table(128, 500_000.0).unwrap();
        let table = table.as_slice::<f32>();
        assert_eq!(table[0], 1.0);
        let plain_last = 500_000f32.powf(126.0 / 128.0);
        assert!((table[63] / plain_last - 8.0).abs() < 1e-4, "{} {plain_last}", table[63]);
    }

    #[test]
    fn rope_per_position_equals_batched_rope_bit_by_bit() {
        let llama3 = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 64.0 };
        let (heads, positions, width, offset) = (3, 70, 64, 251);
        let numbers: Vec<f32> =
            (0..heads * positions * width).map(|place| (place as f32 * 0.37).sin()).collect();
        let all = Array::from_slice(&numbers, &[1, positions, heads, width]);
        let by_head = |all: &Array| all.transpose_axes(&[0, 2, 1, 3]).unwrap();
        let each_position: Vec<i32> = (offset..offset + positions).collect();
        let each_position = Array::from_slice(&each_position, &[positions]);
        for (traditional, kind) in [(false, RopeScaling::None), (true, RopeScaling::None), (false, llama3)] {
            let scaling = kind.clone();
            let described = description::Rope { width: width as u32, base: 1e4, traditional, scaling };
            let rope = Rope::new(&described).unwrap();
            let together = by_head(&rope.forward(&by_head(&all), offset).unwrap()).contiguous().unwrap();
            let each = all.reshape(&[positions, heads, 1, width]).unwrap();
            let each = rope.forward_each(&each, &each_position).unwrap();
            assert_eq!(each.as_slice::<f32>(), together.as_slice::<f32>(), "{traditional}, {kind:?}");
        }
    }
}
