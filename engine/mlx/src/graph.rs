//! Dependencies in the lazy graph: `depends` adds edges between arrays, `synchronize` waits for a stream.

use mlx_rs::{Array, Stream};

use crate::error::{Error, check, install_error_handler};

/// A vector of array handles for C; frees itself.
struct ArrayVector(mlx_sys::mlx_vector_array);

impl ArrayVector {
    fn new(arrays: &[&Array]) -> Result<Self, Error> {
        // SAFETY: makes an empty vector, owned by the guard from here on.
        let handles = Self(unsafe { mlx_sys::mlx_vector_array_new() });
        for array in arrays {
            // SAFETY: both handles are live; the vector takes its own reference.
            let status = unsafe { mlx_sys::mlx_vector_array_append_value(handles.0, array.as_ptr()) };
            check("collect arrays", status)?;
        }
        Ok(handles)
    }
}

impl Drop for ArrayVector {
    fn drop(&mut self) {
        // SAFETY: the guard is the only owner.
        unsafe { mlx_sys::mlx_vector_array_free(self.0) };
    }
}

/// `array`, but evaluated only after `dependencies`: keeps a `send` whose result is unused in an evaluated
/// graph.
pub fn depends(array: &Array, dependencies: &[&Array]) -> Result<Array, Error> {
    install_error_handler();
    let inputs = ArrayVector::new(&[array])?;
    let dependencies = ArrayVector::new(dependencies)?;
    let mut outputs = ArrayVector::new(&[])?;
    // SAFETY: three live vectors; MLX fills the first.
    check("tie arrays together", unsafe { mlx_sys::mlx_depends(&mut outputs.0, inputs.0, dependencies.0) })?;
    // SAFETY: a null handle that the next call fills; owned by `result` in every case.
    let mut handle = unsafe { mlx_sys::mlx_array_new() };
    // SAFETY: the vector has one element, as many as the inputs.
    let status = unsafe { mlx_sys::mlx_vector_array_get(&mut handle, outputs.0, 0) };
    // SAFETY: the handle is ours alone.
    let result = unsafe { Array::from_ptr(handle) };
    check("tie arrays together", status)?;
    Ok(result)
}

/// Waits until everything queued on the calling thread's default stream is done.
pub fn synchronize() -> Result<(), Error> {
    install_error_handler();
    let stream = Stream::new();
    // SAFETY: the stream is live for the call.
    check("wait for the stream", unsafe { mlx_sys::mlx_synchronize(stream.as_ptr()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depends_keeps_the_value() {
        let one = Array::from_slice(&[1.0f32, 2.0], &[2]);
        let other = Array::from_slice(&[5.0f32], &[1]);
        let tied = depends(&one, &[&other]).unwrap();
        tied.eval().unwrap();
        assert_eq!(tied.as_slice::<f32>(), &[1.0, 2.0]);
        synchronize().unwrap();
    }
}
