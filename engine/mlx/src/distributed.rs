//! Process groups: who the ranks are, and sending arrays between them. MLX runs these operations on
//! a CPU stream whatever the device of the arrays. They are lazy like any other operation, so errors
//! of the wire come back from the evaluation, not from the calls here.
//!
//! The wire has no authentication and no timeouts, and any TCP connection to a rank's port is taken
//! for its neighbour: whoever starts a group keeps it on a trusted network and watches it from
//! outside. After a wire error a group is done for: the next operation on it fails too, and those after
//! that wait for ever. Rings can be joined anew by the same process.

use std::ffi::{CString, OsStr};
use std::sync::Mutex;

use mlx_rs::{Array, Dtype, Stream};

use crate::error::{Error, check, install_error_handler};

/// One join at a time: it speaks to MLX through variables of the process.
static JOIN_LOCK: Mutex<()> = Mutex::new(());

unsafe extern "C" {
    /// `void mlx::core::distributed::clear_backends()`, which the C interface lacks. A C++ function
    /// that takes and returns nothing is called like one of C; only its name is mangled, and alike by
    /// every compiler MLX is built with. Were it ever gone, the engine would not link.
    #[link_name = "_ZN3mlx4core11distributed14clear_backendsEv"]
    fn clear_backends();
}

/// A joined group. Its connections are open until it is dropped, no array that waits for it is left, and
/// MLX has forgotten it ([`forget`], or the next [`Group::join`]).
#[derive(Debug)]
pub struct ProcessGroup {
    handle: mlx_sys::mlx_distributed_group,
    rank: usize,
    size: usize,
}

impl ProcessGroup {
    /// Joins a group beside those joined before. MLX reads the environment of `backend` at this moment
    /// (for `ring`: `MLX_RANK` and `MLX_HOSTFILE`), blocks until the neighbours are there, and gives up
    /// on a neighbour that does not listen after about half a minute.
    ///
    /// `variables` are what the environment has to say for this group. Each of them must be there
    /// already, from the start of the process; where it says something else, it is overwritten.
    pub fn join(backend: &str, variables: &[(&str, &OsStr)]) -> Result<Self, Error> {
        install_error_handler();
        let name = CString::new(backend).map_err(|_| Error::ZeroByte(backend.to_owned()))?;
        let _one = JOIN_LOCK.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for (name, value) in variables {
            overwrite_variable(name, value)?;
        }
        // MLX answers a second request for a backend with the first one's group; it forgets that here.
        // SAFETY: the call drops references that MLX's cache holds; groups handed out hold their own.
        // Nothing else uses the cache meanwhile: only `join` asks for groups, and it holds the lock.
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

/// Has MLX forget the group that was joined last, which it would otherwise keep for whoever asks for it
/// again.
pub fn release_last_group() {
    let _one = JOIN_LOCK.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // SAFETY: as in `Group::join`; the lock is held.
    unsafe { clear_backends() };
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        // SAFETY: the handle is owned here, and MLX counts references inside.
        unsafe { mlx_sys::mlx_distributed_group_free(self.handle) };
    }
}

/// Makes an existing variable say `value`.
///
/// Changing the environment of a process with threads is dangerous for two reasons: adding a variable may
/// move the list that another thread is reading, and a reader may keep a pointer to a value that is freed.
/// Neither happens to a variable that exists already: glibc then puts the address of a new text into
/// the list's entry, one aligned word, and never frees a text; macOS copies or replaces the text under the
/// lock that its `getenv` takes too. What remains is a reader of this same variable that sees the old
/// value or, on macOS, a mixture: nobody reads these names but MLX, from inside [`Group::join`], which
/// holds a lock. Rust's own access to the environment has its lock besides.
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
        // Cargo sets this one for every test, and nothing here reads it.
        overwrite_variable("CARGO_PKG_README", OsStr::new("x")).unwrap();
        assert_eq!(std::env::var_os("CARGO_PKG_README"), Some("x".into()));
    }
}
