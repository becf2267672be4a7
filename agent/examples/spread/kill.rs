//! Programs that tests kill at a step of theirs.

#![allow(clippy::unwrap_used, reason = "a program of tests fails by panicking")]

use std::sync::atomic::{AtomicU64, Ordering};

/// Has this process killed, as by `kill -9`, when it comes to `point:count` for that time.
pub fn end_at(end: &str) {
    let (point, count) = end.split_once(':').unwrap();
    let left = AtomicU64::new(count.parse().unwrap());
    let come = move || {
        if left.fetch_sub(1, Ordering::SeqCst) == 1 {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
        }
    };
    fail::cfg_callback(point, come).unwrap();
}
