//! MLX bindings that `mlx-rs` lacks and the engine needs: process groups (several in one process), `depends`,
//! `synchronize`, arrays from raw bytes or filled in place, quantised weights in every mode, BLAS threads, device properties. All `unsafe` of the workspace lives
//! in this crate, behind safe functions. Not here: models, and operations that `mlx-rs` already has.

pub mod array;
pub mod blas;
pub mod device;
pub mod distributed;
mod error;
pub mod filled;
mod graph;
mod platform;
pub mod quantized;

pub use error::{Error, install_error_handler};
pub use graph::{depends, synchronize};
pub use platform::{exit_immediately, request_low_latency};
