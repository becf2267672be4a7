//! Arrays from bytes that came from a file, and arrays written into others.

use mlx_rs::{Array, Dtype, Stream};

use crate::{Error, error::check};

/// Bytes one element takes.
pub fn item_size(dtype: Dtype) -> usize {
    match dtype {
        Dtype::Bool | Dtype::Uint8 | Dtype::Int8 => 1,
        Dtype::Uint16 | Dtype::Int16 | Dtype::Float16 | Dtype::Bfloat16 => 2,
        Dtype::Uint32 | Dtype::Int32 | Dtype::Float32 => 4,
        Dtype::Uint64 | Dtype::Int64 | Dtype::Float64 | Dtype::Complex64 => 8,
    }
}

/// An array of `shape` that owns a copy of `bytes`, which are little-endian elements in row order.
pub fn from_bytes(bytes: &[u8], shape: &[i32], dtype: Dtype) -> Result<Array, Error> {
    crate::install_error_handler();
    let item = item_size(dtype);
    let required =
        shape.iter().try_fold(item, |product, &dim| usize::try_from(dim).ok()?.checked_mul(product));
    if required != Some(bytes.len()) {
        return Err(Error::Size { bytes: bytes.len(), shape: shape.to_vec(), item });
    }
    // SAFETY: the buffer holds exactly the bytes the shape and type call for (checked above), MLX
    // copies them byte by byte before the call returns, and every bit pattern is a valid element.
    Ok(unsafe { Array::from_raw_data(bytes.as_ptr().cast(), shape, dtype) })
}

/// `into` with `new` in place of its elements from `start` on, one index per axis. Written in place if no
/// other array shares `into` by the time this is computed. The mlx-rs equivalent adds two reshapes, which
/// cost as much as a small write.
pub fn write_slice(into: &Array, new: &Array, start: &[i32]) -> Result<Array, Error> {
    crate::install_error_handler();
    if start.len() != into.ndim() || start.len() != new.ndim() {
        let (into, new) = (into.shape().to_vec(), new.shape().to_vec());
        return Err(Error::Axes { into, new, start: start.to_vec() });
    }
    let stop: Vec<i32> =
        start.iter().zip(new.shape()).map(|(start, count)| start.saturating_add(*count)).collect();
    let strides = vec![1; start.len()];
    let stream = Stream::thread_local_or_default();
    // SAFETY: a null handle that the next call fills; owned by `result` in every case.
    let mut handle = unsafe { mlx_sys::mlx_array_new() };
    // SAFETY: arrays and stream are live, and each list has the length given.
    let status = unsafe {
        mlx_sys::mlx_slice_update(
            &mut handle,
            into.as_ptr(),
            new.as_ptr(),
            start.as_ptr(),
            start.len(),
            stop.as_ptr(),
            stop.len(),
            strides.as_ptr(),
            strides.len(),
            stream.as_ptr(),
        )
    };
    // SAFETY: the handle is ours alone.
    let result = unsafe { Array::from_ptr(handle) };
    check("write into an array", status)?;
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_become_elements_in_row_order() {
        let bytes: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        let array = from_bytes(&bytes, &[2, 2], Dtype::Float32).unwrap();
        assert_eq!(array.as_slice::<f32>(), &[1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn a_wrong_number_of_bytes_is_refused_with_the_numbers() {
        let error = from_bytes(&[0; 7], &[2, 2], Dtype::Float16).unwrap_err();
        assert_eq!(error.to_string(), "7 bytes do not make an array of [2, 2] elements of 2 bytes");
        assert!(from_bytes(&[], &[-1], Dtype::Float16).is_err());
    }

    #[test]
    fn slice_write_replaces_only_its_elements() {
        let into = Array::from_slice(&[0.0f32; 12], &[1, 2, 3, 2]);
        let new = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[1, 2, 1, 2]);
        let written = write_slice(&into, &new, &[0, 0, 1, 0]).unwrap();
        assert_eq!(written.shape(), into.shape());
        assert_eq!(written.as_slice::<f32>(), &[0., 0., 1., 2., 0., 0., 0., 0., 3., 4., 0., 0.]);
        assert_eq!(into.as_slice::<f32>(), &[0.0; 12]);
    }

    #[test]
    fn slice_write_rejects_mismatched_shapes() {
        let into = Array::from_slice(&[0.0f32; 12], &[1, 2, 3, 2]);
        let flat = Array::from_slice(&[1.0f32], &[1]);
        let error = write_slice(&into, &flat, &[0]).unwrap_err();
        assert_eq!(error.to_string(), "an array of [1] cannot be written into one of [1, 2, 3, 2] at [0]");
        let wide = Array::from_slice(&[1.0f32; 6], &[1, 1, 1, 6]);
        assert!(matches!(write_slice(&into, &wide, &[0, 0, 0, 0]), Err(Error::Mlx { .. })));
    }
}
