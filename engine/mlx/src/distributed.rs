//! MLX process groups: ranks, point-to-point operations and collectives. MLX runs these operations on a CPU
//! stream whatever the device of the arrays. They are lazy like any other operation, so network errors come
//! from the evaluation, not from the calls here.
//!
//! MLX's protocol has no authentication and no timeouts, and any TCP connection to a rank's port is taken for
//! its neighbour: run a group on a trusted network and monitor it from outside. After a network error a group
//! is unusable: the next operation on it fails too, and those after that wait forever. The same process can
//! join new rings.

use std::ffi::{CString, OsStr};
use std::sync::Mutex;

use mlx_rs::{Array, Dtype, Stream};

use crate::error::{Error, check, install_error_handler};

/// One join at a time, because it passes settings to MLX through environment variables.
static JOIN_LOCK: Mutex<()> = Mutex::new(());

unsafe extern "C" {
    /// `void mlx::core::distributed::clear_backends()`, which the C interface lacks. A C++ function that
    /// takes and returns nothing is called like a C function; only its name is mangled, and equally by every
    /// compiler MLX is built with. If it were removed, the engine would not link.
    #[link_name = "_ZN3mlx4core11distributed14clear_backendsEv"]
    fn clear_backends();
}

/// A joined group. Its connections stay open until it is dropped, no pending array uses it, and MLX's cache
/// has released it ([`release_last_group`], or the next [`ProcessGroup::join`]).
#[derive(Debug)]
pub struct ProcessGroup {
    handle: mlx_sys::mlx_distributed_group,
    rank: usize,
    size: usize,
}

impl ProcessGroup {
    /// Joins a group in addition to those joined before. MLX reads the environment of `backend` now (for
    /// `ring`: `MLX_RANK` and `MLX_HOSTFILE`), blocks until the neighbours are connected, and gives up after
    /// about half a minute on a neighbour that does not listen.
    ///
    /// `variables` are the environment of this group. Each of them must exist since the start of the process;
    /// a different value is overwritten.
    pub fn join(backend: &str, variables: &[(&str, &OsStr)]) -> Result<Self, Error> {
        install_error_handler();
        let name = CString::new(backend).map_err(|_| Error::ZeroByte(backend.to_owned()))?;
        let _one = JOIN_LOCK.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for (name, value) in variables {
            overwrite_variable(name, value)?;
        }
        // MLX answers a second request for a backend with the first one's group; this call clears that cache.
        // SAFETY: the call drops references that MLX's cache holds; groups handed out hold their own. No
        // other code uses the cache at the same time: only `join` requests groups, and it holds the lock.
        unsafe { clear_backends() };
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

    /// This process's rank in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of processes in the group.
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

/// Clears MLX's cached reference to the group that was joined last.
pub fn release_last_group() {
    let _one = JOIN_LOCK.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // SAFETY: as in `ProcessGroup::join`; the lock is held.
    unsafe { clear_backends() };
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        // SAFETY: the handle is owned here, and MLX counts references inside.
        unsafe { mlx_sys::mlx_distributed_group_free(self.handle) };
    }
}

/// Overwrites an existing environment variable.
///
/// Changing the environment of a process with threads is dangerous for two reasons: adding a variable may
/// move the list that another thread is reading, and a reader may keep a pointer to a value that is freed.
/// Neither happens to a variable that exists already: glibc then puts the address of a new string into the
/// list's entry, one aligned word, and never frees a string; macOS copies or replaces the string under the
/// lock that its `getenv` takes too. What remains is a reader of this same variable that sees the old value
/// or, on macOS, a mixture: only MLX reads these names, from inside [`ProcessGroup::join`], which holds a
/// lock. Rust's own access to the environment has its own lock.
fn overwrite_variable(name: &str, value: &OsStr) -> Result<(), Error> {
    match std::env::var_os(name) {
        Some(now) if now == value => Ok(()),
        Some(_) => {
            // SAFETY: the variable exists, so its entry is overwritten in place; see above.
            unsafe { std::env::set_var(name, value) };
            Ok(())
        }
        None => Err(Error::Variable(name.to_owned())),
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
    fn joining_an_unknown_backend_is_an_error() {
        let error = ProcessGroup::join("no-such-backend", &[]).unwrap_err();
        assert!(matches!(error, Error::Mlx { operation: "join the group", .. }), "{error}");
    }

    #[test]
    fn only_variables_that_exist_are_overwritten() {
        let never = OsStr::new("RUSSET_NEVER_SET");
        let error = ProcessGroup::join("no-such-backend", &[("RUSSET_NEVER_SET", never)]).unwrap_err();
        assert_eq!(error, Error::Variable("RUSSET_NEVER_SET".into()));
        assert_eq!(std::env::var_os(never), None);
        // Cargo sets this variable for every test, and no code here reads it.
        overwrite_variable("CARGO_PKG_README", OsStr::new("x")).unwrap();
        assert_eq!(std::env::var_os("CARGO_PKG_README"), Some("x".into()));
    }
}
