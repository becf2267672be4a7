//! Arrays from bytes that came from a file.

use mlx_rs::{Array, Dtype};

use crate::Error;

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
    let wanted = shape.iter().try_fold(item, |product, &dim| usize::try_from(dim).ok()?.checked_mul(product));
    if wanted != Some(bytes.len()) {
        return Err(Error::Size { bytes: bytes.len(), shape: shape.to_vec(), item });
    }
    // SAFETY: the buffer holds exactly the bytes the shape and type call for (checked above), MLX
    // copies them byte by byte before the call returns, and every bit pattern is a valid element.
    Ok(unsafe { Array::from_raw_data(bytes.as_ptr().cast(), shape, dtype) })
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
}
