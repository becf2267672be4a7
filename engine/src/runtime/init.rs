//! What MLX is told once in a process, before anything is loaded.

use mlx_rs::memory;

use super::RuntimeConfig;
use crate::layers::mlp::try_to_compile;

/// Errors become answers, products have their threads, and pieces are compiled where they can be.
pub(super) fn init(config: &RuntimeConfig) {
    russet_mlx::install_error_handler();
    russet_mlx::blas::set_threads(config.blas_threads);
    if config.wired {
        set_wired_limit();
    }
    try_to_compile();
}

/// Has a GPU keep what it computes with in memory, where its driver says how much of it. Without it answers are
/// slower when others want memory, and right all the same.
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
