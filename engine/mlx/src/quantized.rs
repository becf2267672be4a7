//! Quantised weights in every mode of MLX: mlx-rs takes them to be affine.

use std::ffi::CString;

use mlx_rs::{Array, Dtype, Stream};

use crate::error::{Error, check, install_error_handler};

/// How a weight is quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantization {
    /// MLX's name of the mode: `affine`, `mxfp4`, `mxfp8` or `nvfp4`.
    pub mode: &'static str,
    /// Values that share a scale.
    pub group_size: i32,
    /// Bits of a value.
    pub bits: i32,
}

/// A quantised weight: packed values `[…, rows, columns × bits / 32]`, and scales `[…, rows, columns / group]`.
#[derive(Clone, Debug)]
pub struct QuantizedWeight {
    /// Packed values, 32 bits at a time.
    pub packed: Array,
    /// One per group.
    pub scales: Array,
    /// One per group; none but in mode affine.
    pub biases: Option<Array>,
    /// How.
    pub quantization: Quantization,
}

/// Arguments of a call in the form that C takes.
struct Arguments {
    mode: CString,
    group_size: mlx_sys::mlx_optional_int,
    bits: mlx_sys::mlx_optional_int,
    stream: Stream,
}

impl Quantization {
    fn arguments(self) -> Result<Arguments, Error> {
        install_error_handler();
        let optional = |value| mlx_sys::mlx_optional_int { value, has_value: true };
        Ok(Arguments {
            mode: CString::new(self.mode).unwrap_or_default(),
            group_size: optional(self.group_size),
            bits: optional(self.bits),
            stream: Stream::thread_local_or_default(),
        })
    }

    /// Quantises a weight `[…, rows, columns]`.
    pub fn quantize(self, weight: &Array) -> Result<QuantizedWeight, Error> {
        let Arguments { mode, group_size, bits, stream } = self.arguments()?;
        // SAFETY: an empty vector that the next call fills; freed below in every case.
        let mut outputs = unsafe { mlx_sys::mlx_vector_array_new() };
        // SAFETY: a null handle, which says that there is no global scale.
        let none = unsafe { mlx_sys::mlx_array_new() };
        // SAFETY: all handles are live, and the text outlives the call.
        let status = unsafe {
            mlx_sys::mlx_quantize(
                &mut outputs,
                weight.as_ptr(),
                group_size,
                bits,
                mode.as_ptr(),
                none,
                stream.as_ptr(),
            )
        };
        let mut parts = Vec::new();
        // SAFETY: the vector is live.
        let count = if status == 0 { unsafe { mlx_sys::mlx_vector_array_size(outputs) } } else { 0 };
        for place in 0..count {
            // SAFETY: a null handle that the next call fills; owned by the array in every case.
            let mut handle = unsafe { mlx_sys::mlx_array_new() };
            // SAFETY: the vector has this many.
            let got = unsafe { mlx_sys::mlx_vector_array_get(&mut handle, outputs, place) };
            // SAFETY: the handle is ours alone.
            let part = unsafe { Array::from_ptr(handle) };
            check("take a part of a quantised weight", got)?;
            parts.push(part);
        }
        // SAFETY: made above, and used by nothing else.
        unsafe { mlx_sys::mlx_vector_array_free(outputs) };
        check("quantise a weight", status)?;
        let mut parts = parts.into_iter();
        let (Some(packed), Some(scales)) = (parts.next(), parts.next()) else {
            let message = "it returned fewer than two arrays".to_owned();
            return Err(Error::Mlx { operation: "quantise a weight", message });
        };
        Ok(QuantizedWeight { packed, scales, biases: parts.next(), quantization: self })
    }
}

impl QuantizedWeight {
    /// `x` times the weight, transposed if asked.
    pub fn matmul(&self, x: &Array, transpose: bool) -> Result<Array, Error> {
        let Arguments { mode, group_size, bits, stream } = self.quantization.arguments()?;
        // SAFETY: null handles; the first is owned by the result, the second says that there are no biases.
        let (mut handle, none) = unsafe { (mlx_sys::mlx_array_new(), mlx_sys::mlx_array_new()) };
        // SAFETY: all arrays are live, and the text outlives the call.
        let status = unsafe {
            mlx_sys::mlx_quantized_matmul(
                &mut handle,
                x.as_ptr(),
                self.packed.as_ptr(),
                self.scales.as_ptr(),
                self.biases.as_ref().map_or(none, Array::as_ptr),
                transpose,
                group_size,
                bits,
                mode.as_ptr(),
                stream.as_ptr(),
            )
        };
        // SAFETY: the handle is ours alone.
        let result = unsafe { Array::from_ptr(handle) };
        check("multiply by a quantised weight", status)?;
        Ok(result)
    }

    /// `x`, `[…, 1, 1, columns]`, times the transposed weight of the expert that each of `indices` names.
    pub fn gather_matmul(&self, x: &Array, indices: &Array, is_sorted: bool) -> Result<Array, Error> {
        let Arguments { mode, group_size, bits, stream } = self.quantization.arguments()?;
        // SAFETY: null handles; the first is owned by the result, the second says that there is nothing.
        let (mut handle, none) = unsafe { (mlx_sys::mlx_array_new(), mlx_sys::mlx_array_new()) };
        // SAFETY: all arrays are live, and the text outlives the call.
        let status = unsafe {
            mlx_sys::mlx_gather_qmm(
                &mut handle,
                x.as_ptr(),
                self.packed.as_ptr(),
                self.scales.as_ptr(),
                self.biases.as_ref().map_or(none, Array::as_ptr),
                none,
                indices.as_ptr(),
                true,
                group_size,
                bits,
                mode.as_ptr(),
                is_sorted,
                stream.as_ptr(),
            )
        };
        // SAFETY: the handle is ours alone.
        let result = unsafe { Array::from_ptr(handle) };
        check("multiply by quantised experts", status)?;
        Ok(result)
    }

    /// The numbers it stands for; in `dtype`, or in that of the scales.
    pub fn dequantize(&self, dtype: Option<Dtype>) -> Result<Array, Error> {
        let Arguments { mode, group_size, bits, stream } = self.quantization.arguments()?;
        let dtype = mlx_sys::mlx_optional_dtype {
            value: dtype.map_or(mlx_sys::mlx_dtype__MLX_FLOAT32, |dtype| dtype as mlx_sys::mlx_dtype),
            has_value: dtype.is_some(),
        };
        // SAFETY: null handles; the first is owned by the result, the second says that there is nothing.
        let (mut handle, none) = unsafe { (mlx_sys::mlx_array_new(), mlx_sys::mlx_array_new()) };
        // SAFETY: all arrays are live, and the text outlives the call.
        let status = unsafe {
            mlx_sys::mlx_dequantize(
                &mut handle,
                self.packed.as_ptr(),
                self.scales.as_ptr(),
                self.biases.as_ref().map_or(none, Array::as_ptr),
                group_size,
                bits,
                mode.as_ptr(),
                none,
                dtype,
                stream.as_ptr(),
            )
        };
        // SAFETY: the handle is ours alone.
        let result = unsafe { Array::from_ptr(handle) };
        check("unpack a quantised weight", status)?;
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(rows: i32, columns: i32) -> Array {
        let values: Vec<f32> = (0..rows * columns).map(|place| (place as f32 * 0.37).sin()).collect();
        Array::from_slice(&values, &[rows, columns])
    }

    #[test]
    fn every_mode_multiplies_as_what_it_unpacks_to() {
        for (mode, group_size, bits) in
            [("affine", 32, 4), ("affine", 64, 8), ("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]
        {
            let quantization = Quantization { mode, group_size, bits };
            let weight = quantization.quantize(&numbers(8, 64)).unwrap();
            assert_eq!(weight.biases.is_some(), mode == "affine", "{mode}");
            let unpacked = weight.dequantize(Some(Dtype::Float32)).unwrap();
            let x = numbers(3, 64);
            let [one, other] =
                [weight.matmul(&x, true).unwrap(), x.matmul(unpacked.transpose().unwrap()).unwrap()];
            let experts = QuantizedWeight {
                packed: weight.packed.expand_dims(0).unwrap(),
                scales: weight.scales.expand_dims(0).unwrap(),
                biases: weight.biases.as_ref().map(|biases| biases.expand_dims(0).unwrap()),
                quantization,
            };
            let indices = Array::from_slice(&[0_u32, 0, 0], &[3, 1]);
            let gathered =
                experts.gather_matmul(&x.reshape(&[3, 1, 1, 64]).unwrap(), &indices, false).unwrap();
            let gathered = gathered.reshape(&[3, 8]).unwrap();
            for result in [&one, &gathered] {
                let difference = result.subtract(&other).unwrap().abs().unwrap().max(None).unwrap();
                assert!(difference.item_exact::<f32>() < 1e-4, "{mode}: {}", difference.item_exact::<f32>());
            }
        }
    }
}
