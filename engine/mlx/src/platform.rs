//! What MLX needs of the operating system: a clock that Linux does not have, and an end without clean-up.

/// `mlx-rs` seeds its random state with macOS's approximate clock. We always pass seeds ourselves;
/// this only has to exist and to differ from call to call.
#[cfg(not(target_vendor = "apple"))]
#[unsafe(no_mangle)]
extern "C" fn mach_approximate_time() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_nanos() as u64)
}

unsafe extern "C" {
    #[link_name = "_exit"]
    fn end_process(code: std::ffi::c_int) -> !;
}

/// Ends the process at once, without running MLX's clean-up. A thread that hangs in a collective would meet
/// that clean-up half done, and the process would end in a crash instead of with `code`.
pub fn leave(code: i32) -> ! {
    // SAFETY: the call takes any number, and nothing of the process is used after it.
    unsafe { end_process(code) }
}
