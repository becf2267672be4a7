//! What MLX's bindings expect of the operating system and Linux does not have.

/// `mlx-rs` seeds its random state with macOS's approximate clock. We always pass seeds ourselves;
/// this only has to exist and to differ from call to call.
#[cfg(not(target_vendor = "apple"))]
#[unsafe(no_mangle)]
extern "C" fn mach_approximate_time() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_nanos() as u64)
}
