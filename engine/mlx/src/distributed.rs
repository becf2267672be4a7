//! Process groups: who the ranks are, and sending arrays between them. MLX runs these operations on
//! a CPU stream whatever the device of the arrays. They are lazy like any other operation, so errors
//! of the wire come back from the evaluation, not from the calls here.
//!
//! The wire has no authentication and no timeouts, and any TCP connection to a rank's port is taken
//! for its neighbour: whoever starts a group keeps it on a trusted network and watches it from
//! outside. After one wire error a process is done for.

use std::ffi::CString;

use mlx_rs::{Array, Dtype, Stream};

use crate::error::{Error, check, install_error_handler};

/// A joined group. Dropping it leaves the connections open until the process ends.
#[derive(Debug)]
pub struct Group {
    handle: mlx_sys::mlx_distributed_group,
    rank: usize,
    size: usize,
}

impl Group {
    /// Joins a group. MLX reads the environment of `backend` at this moment (for `ring`: `MLX_RANK`
    /// and `MLX_HOSTFILE`), blocks until the neighbours are there, and gives up on a neighbour that
    /// does not listen after about half a minute.
    pub fn join(backend: &str) -> Result<Self, Error> {
        install_error_handler();
        let name = CString::new(backend).map_err(|_| Error::ZeroByte(backend.to_owned()))?;
        // SAFETY: makes a null handle, which the next call fills.
        let mut handle = unsafe { mlx_sys::mlx_distributed_group_new() };
        // SAFETY: the handle is ours, the name is zero-terminated and outlives the call.
        let status = unsafe { mlx_sys::mlx_distributed_init(&mut handle, true, name.as_ptr()) };
        check("join the group", status)?;
        // SAFETY: the handle was filled by a call that succeeded.
        let (rank, size) = unsafe {
            (mlx_sys::mlx_distributed_group_rank(handle), mlx_sys::mlx_distributed_group_size(handle))
        };
        Ok(Self { handle, rank: rank.max(0) as usize, size: size.max(1) as usize })
    }

    /// This process's place in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Processes in the group.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Sends `x` to the neighbour `to` once the returned array is evaluated; its value is `x`.
    pub fn send(&self, x: &Array, to: usize) -> Result<Array, Error> {
        let stream = Stream::cpu();
        array("send an array", |out| {
            // SAFETY: all handles are live for the call.
            unsafe { mlx_sys::mlx_distributed_send(out, x.as_ptr(), to as i32, self.handle, stream.as_ptr()) }
        })
    }

    /// An array of `shape` from the neighbour `from`, received when it is evaluated.
    pub fn recv(&self, shape: &[i32], dtype: Dtype, from: usize) -> Result<Array, Error> {
        let stream = Stream::cpu();
        array("receive an array", |out| {
            // SAFETY: all handles are live for the call, and the shape has the length given.
            unsafe {
                mlx_sys::mlx_distributed_recv(
                    out,
                    shape.as_ptr(),
                    shape.len(),
                    dtype.into(),
                    from as i32,
                    self.handle,
                    stream.as_ptr(),
                )
            }
        })
    }

    /// The sum of every rank's `x`.
    pub fn all_sum(&self, x: &Array) -> Result<Array, Error> {
        let stream = Stream::cpu();
        array("sum over the group", |out| {
            // SAFETY: all handles are live for the call.
            unsafe { mlx_sys::mlx_distributed_all_sum(out, x.as_ptr(), self.handle, stream.as_ptr()) }
        })
    }

    /// Every rank's `x`, joined along the first axis in rank order.
    pub fn all_gather(&self, x: &Array) -> Result<Array, Error> {
        let stream = Stream::cpu();
        array("gather over the group", |out| {
            // SAFETY: all handles are live for the call.
            unsafe { mlx_sys::mlx_distributed_all_gather(out, x.as_ptr(), self.handle, stream.as_ptr()) }
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: the handle is owned here, and MLX counts references inside.
        unsafe { mlx_sys::mlx_distributed_group_free(self.handle) };
    }
}

fn array(
    operation: &'static str,
    call: impl FnOnce(*mut mlx_sys::mlx_array) -> std::ffi::c_int,
) -> Result<Array, Error> {
    // SAFETY: a null handle that the call fills; `Array` owns it in every case.
    let mut handle = unsafe { mlx_sys::mlx_array_new() };
    let status = call(&mut handle);
    // SAFETY: the handle is ours alone.
    let result = unsafe { Array::from_ptr(handle) };
    check(operation, status)?;
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joining_a_backend_that_is_not_there_is_an_error_and_not_the_end() {
        let error = Group::join("no-such-backend").unwrap_err();
        assert!(matches!(error, Error::Mlx { operation: "join the group", .. }), "{error}");
    }
}
