//! MLX errors as values. The C interface's own handler prints and exits; `mlx-rs` installs one that stores
//! the message, but only its own calls can read it. This handler stores a copy for this crate and forwards
//! every message, so both sides can report the error.

use std::{
    cell::RefCell,
    ffi::{CStr, c_char, c_int, c_void},
    sync::Once,
};

use thiserror::Error;

/// A failed MLX call.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Error {
    /// MLX refused or failed.
    #[error("MLX could not {operation}: {message}")]
    Mlx {
        /// The operation.
        operation: &'static str,
        /// MLX's message.
        message: String,
    },
    /// Bytes that do not match shape and type.
    #[error("{bytes} bytes do not make an array of {shape:?} elements of {item} bytes")]
    Size {
        /// Bytes given.
        bytes: usize,
        /// Shape asked for.
        shape: Vec<i32>,
        /// Bytes per element.
        item: usize,
    },
    /// Arrays with different numbers of axes.
    #[error("an array of {new:?} cannot be written into one of {into:?} at {start:?}")]
    Axes {
        /// Shape of the target.
        into: Vec<i32>,
        /// Shape of the update.
        new: Vec<i32>,
        /// Start index.
        start: Vec<i32>,
    },
    /// A variable to overwrite that does not exist.
    #[error("{0} is not in this process's environment; it has to be there before the process begins")]
    Variable(String),
    /// A string with a zero byte inside.
    #[error("{0:?} holds a zero byte")]
    ZeroByte(String),
}

thread_local! {
    static LAST_ERROR: RefCell<Option<String>> = const { RefCell::new(None) };
}

unsafe extern "C" {
    /// The handler of `mlx-rs`, which exports it under this name.
    fn default_mlx_error_handler(message: *const c_char, data: *mut c_void);
}

extern "C" fn record_message(message: *const c_char, data: *mut c_void) {
    if !message.is_null() {
        // SAFETY: MLX passes a zero-terminated text that lives until the handler returns.
        let text = unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned();
        LAST_ERROR.with_borrow_mut(|last| *last = Some(text));
    }
    // SAFETY: same arguments, same contract; `mlx-rs` copies the text.
    unsafe { default_mlx_error_handler(message, data) };
}

/// Turns every MLX error into a value instead of a process exit. Must run before any other MLX call; every
/// function of this crate ensures that.
pub fn install_error_handler() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        // `mlx-rs` installs its handler once, at its first call; this one must come after it.
        let _ = mlx_rs::memory::active_memory();
        // SAFETY: the handler is a plain function, and it needs no data.
        unsafe { mlx_sys::mlx_set_error_handler(Some(record_message), std::ptr::null_mut(), None) };
    });
}

/// The result of a call that returned `status`.
pub(crate) fn check(operation: &'static str, status: c_int) -> Result<(), Error> {
    if status == 0 {
        return Ok(());
    }
    let message = LAST_ERROR.with_borrow_mut(Option::take).unwrap_or_else(|| format!("status {status}"));
    Err(Error::Mlx { operation, message })
}
