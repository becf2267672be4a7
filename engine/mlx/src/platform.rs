//! Operating-system support for MLX: a clock that Linux lacks, exit without clean-up, and scheduling of
//! threads beside MLX's busy-waiting ones.

/// `mlx-rs` seeds its random state with macOS's approximate clock. This crate's callers always pass seeds
/// themselves; the function only has to exist and to differ from call to call.
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

/// Exits at once, without MLX's clean-up. A thread that hangs in a collective would run into that clean-up,
/// and the process would crash instead of exiting with `code`.
pub fn exit_immediately(code: i32) -> ! {
    // SAFETY: the call takes any number, and nothing of the process is used after it.
    unsafe { end_process(code) }
}

/// Asks the system to schedule this thread as soon as it is runnable, for a tenth of a millisecond at a time.
/// MLX's threads busy-wait for their neighbours; where they share a core with the threads that carry the
/// neighbours' bytes, Linux would otherwise let them use their whole time slice of about 3 ms first. Linux
/// before 6.12 ignores this, and other systems have no equivalent.
pub fn request_low_latency() {
    #[cfg(target_os = "linux")]
    slice::set_slice(100_000);
}

/// Time slice of a thread on Linux, in nanoseconds.
#[cfg(target_os = "linux")]
mod slice {
    use std::ffi::{c_int, c_long, c_uint};

    /// `struct sched_attr` as Linux 5.3 extended it.
    #[repr(C)]
    #[derive(Default)]
    struct SchedAttr {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        slice: u64,
        deadline: u64,
        period: u64,
        util_min: u32,
        util_max: u32,
    }

    const SIZE: u32 = std::mem::size_of::<SchedAttr>() as u32;
    const CURRENT_THREAD: c_int = 0;
    const NO_FLAGS: c_uint = 0;
    /// `sched_setattr`, on x86-64 and on all younger architectures; `sched_getattr` comes next.
    const SYS_SCHED_SETATTR: c_long = if cfg!(target_arch = "x86_64") { 314 } else { 274 };
    const SYS_SCHED_GETATTR: c_long = SYS_SCHED_SETATTR + 1;

    unsafe extern "C" {
        fn syscall(number: c_long, ...) -> c_long;
    }

    fn sched_getattr() -> Option<SchedAttr> {
        let mut attributes = SchedAttr::default();
        // SAFETY: the attributes are live and ours, and the system writes at most `SIZE` bytes.
        let answer = unsafe {
            syscall(SYS_SCHED_GETATTR, CURRENT_THREAD, &raw mut attributes, SIZE as c_uint, NO_FLAGS)
        };
        (answer == 0).then_some(attributes)
    }

    pub(super) fn set_slice(slice: u64) {
        // All other attributes are kept: the user may have set another priority for the process.
        let Some(attributes) = sched_getattr() else { return };
        let attributes = SchedAttr { size: SIZE, slice, ..attributes };
        // SAFETY: the attributes are live, of the size they name, and the system only reads them. A refusal
        // changes nothing, and this thread keeps its default time slice.
        unsafe { syscall(SYS_SCHED_SETATTR, CURRENT_THREAD, &raw const attributes, NO_FLAGS) };
    }

    #[cfg(test)]
    mod tests {
        #[test]
        fn linux_thread_gets_a_short_scheduler_slice() {
            let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
            let mut numbers = release.split(['.', '-']).map_while(|word| word.parse::<u32>().ok());
            let known = (numbers.next().unwrap(), numbers.next().unwrap()) >= (6, 12);
            let (before, after) = std::thread::spawn(|| {
                let before = super::sched_getattr().unwrap();
                super::super::request_low_latency();
                (before, super::sched_getattr().unwrap())
            })
            .join()
            .unwrap();
            assert_eq!((after.policy, after.nice), (before.policy, before.nice));
            assert_eq!(after.slice == 100_000, known, "{} on {release}", after.slice);
        }
    }
}
