//! One-time MLX setup of a process, before anything is loaded.

use mlx_rs::memory;

use super::RuntimeConfig;
use crate::layers::activation::try_to_compile;

/// Turns MLX errors into values, sets the BLAS threads, and tests whether kernels can be compiled.
pub(super) fn init(config: &RuntimeConfig) {
    russet_mlx::install_error_handler();
    russet_mlx::blas::set_threads(config.blas_threads);
    if config.wired {
        set_wired_limit();
    }
    try_to_compile();
}

/// Has the GPU keep its memory resident, up to the limit its driver recommends. Without it, the engine is
/// slower when other programs need memory, with the same results.
fn set_wired_limit() {
    let wired = match russet_mlx::device::recommended_working_set() {
        Ok(None) => return,
        Ok(Some(bytes)) => memory::set_wired_limit(bytes).map(|_| bytes).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    match wired {
        Ok(bytes) => tracing::info!(bytes, "the GPU's memory stays resident"),
        Err(error) => tracing::warn!(error, "the GPU's memory may be paged out"),
    }
}
