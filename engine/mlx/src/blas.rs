//! The number of threads of the BLAS that MLX's CPU backend calls on Linux.

#[cfg(target_os = "linux")]
unsafe extern "C" {
    fn openblas_set_num_threads(threads: std::ffi::c_int);
}

/// Sets the threads that a float32 product may use. On macOS the system decides, and this does
/// nothing. On Linux the call matters twice: it is also what keeps OpenBLAS linked in, ahead of the
/// much slower reference BLAS that comes with MLX's wheel.
pub fn set_threads(threads: usize) {
    #[cfg(target_os = "linux")]
    {
        let threads = threads.clamp(1, 1024) as std::ffi::c_int;
        // SAFETY: the function takes any positive count and keeps no pointer.
        unsafe { openblas_set_num_threads(threads) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = threads;
}
