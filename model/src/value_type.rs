//! The types of numbers that the engine computes in.

use std::io;

use crate::{
    float16::{from_bf16, from_f16, to_bf16, to_f16},
    safetensors::Dtype,
};

/// What the engine computes in, and so what scales, biases and plain tensors are converted to: a single tensor of
/// another type would make MLX compute all that follows in 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueType {
    /// 16 bits.
    F16,
    /// 16 bits, the exponent of 32.
    Bf16,
    /// 32 bits.
    F32,
}

impl ValueType {
    /// The type that a header names, if the engine computes in it.
    pub fn of(dtype: &Dtype) -> Option<Self> {
        match dtype {
            Dtype::F16 => Some(Self::F16),
            Dtype::BF16 => Some(Self::Bf16),
            Dtype::F32 => Some(Self::F32),
            Dtype::U32 | Dtype::Other(..) | Dtype::Unknown(_) => None,
        }
    }

    /// As headers name it.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::F16 => Dtype::F16,
            Self::Bf16 => Dtype::BF16,
            Self::F32 => Dtype::F32,
        }
    }

    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    /// The nearest value there is.
    pub(crate) fn round(self, value: f32) -> f32 {
        match self {
            Self::F16 => from_f16(to_f16(value)),
            Self::Bf16 => from_bf16(to_bf16(value)),
            Self::F32 => value,
        }
    }

    /// A value that is not less, and hardly more.
    pub(crate) fn at_least(self, value: f32) -> f32 {
        let precision = match self {
            Self::F16 => 1.0 / 2048.0,
            Self::Bf16 => 1.0 / 256.0,
            Self::F32 => return value,
        };
        let nearest = self.round(value);
        if nearest < value { self.round(value + value.abs() * precision) } else { nearest }
    }

    /// The number that starts with these bytes; 0 of too few.
    pub(crate) fn read(self, bytes: &[u8]) -> f32 {
        match (self, bytes) {
            (Self::F16, &[low, high, ..]) => from_f16(u16::from_le_bytes([low, high])),
            (Self::Bf16, &[low, high, ..]) => from_bf16(u16::from_le_bytes([low, high])),
            (Self::F32, &[first, second, third, fourth, ..]) => {
                f32::from_le_bytes([first, second, third, fourth])
            }
            _ => 0.0,
        }
    }

    /// Writes a value to as many bytes; an error is one of which this type has no finite one.
    pub(crate) fn put(self, value: f32, out: &mut [u8]) -> Result<(), f32> {
        if !self.round(value).is_finite() {
            return Err(value);
        }
        match self {
            Self::F16 => out.copy_from_slice(&to_f16(value).to_le_bytes()),
            Self::Bf16 => out.copy_from_slice(&to_bf16(value).to_le_bytes()),
            Self::F32 => out.copy_from_slice(&value.to_le_bytes()),
        }
        Ok(())
    }

    /// Adds values as bytes; an error is the first of which this type has no finite one.
    pub(crate) fn write(self, values: &[f32], out: &mut Vec<u8>) -> Result<(), f32> {
        for &value in values {
            let begin = out.len();
            out.resize(begin + self.bytes(), 0);
            self.put(value, &mut out[begin..])?;
        }
        Ok(())
    }

    /// That a tensor has a number which this type has no value for.
    pub(crate) fn beyond(self, tensor: &str, found: f32) -> io::Error {
        let problem = format!(
            "tensor {tensor} has a number or a scale, {found:e}, that {} has no value for; fetch or quantise the model again",
            self.dtype()
        );
        io::Error::new(io::ErrorKind::InvalidData, problem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_and_those_beyond_the_type_are_errors() {
        for value in [ValueType::F16, ValueType::Bf16, ValueType::F32] {
            let mut out = Vec::new();
            assert_eq!(value.write(&[-1.5, 0.25], &mut out), Ok(()));
            let read: Vec<f32> = out.chunks(value.bytes()).map(|bytes| value.read(bytes)).collect();
            assert_eq!(read, [-1.5, 0.25]);
            assert_eq!(ValueType::of(&value.dtype()), Some(value));
            assert_eq!(value.read(&[1]), 0.0);
        }
        let mut out = Vec::new();
        assert_eq!(ValueType::F16.write(&[1.0, 1e6], &mut out), Err(1e6));
        assert_eq!(ValueType::Bf16.write(&[1.0, 1e6], &mut out), Ok(()));
    }
}
