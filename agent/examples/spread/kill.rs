//! Kills or stops a test's program at one of its steps.

#![allow(clippy::unwrap_used, reason = "a program of tests fails by panicking")]

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Signal, getpid, kill_process};

/// Sends `signal` to this process when it reaches `point:count` for that time.
pub fn signal_at(step: &str, signal: Signal) {
    let (point, count) = step.split_once(':').unwrap();
    let left = AtomicU64::new(count.parse().unwrap());
    let come = move || {
        if left.fetch_sub(1, Ordering::SeqCst) == 1 {
            kill_process(getpid(), signal).unwrap();
        }
    };
    fail::cfg_callback(point, come).unwrap();
}
