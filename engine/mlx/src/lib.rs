//! What `mlx-rs` lacks and the engine needs: process groups (several in one process), `depends`, `synchronize`, arrays from
//! raw bytes, the number of BLAS threads, what a device recommends. All `unsafe` of the workspace lives in this crate, behind
//! safe functions. It knows nothing of models, and holds no operation that `mlx-rs` already has.

pub mod array;
pub mod blas;
pub mod device;
pub mod distributed;
mod error;
mod graph;
mod platform;

pub use error::{Error, install_error_handler};
pub use graph::{depends, synchronize};
pub use platform::{request_low_latency, exit_immediately};
