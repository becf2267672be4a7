//! Parsers for Linux's `/sys` and `/proc`. Their root is an argument, so that tests read directories of their
//! own. Nothing here evaluates the results. The machines this was written on have neither Thunderbolt nor
//! InfiniBand: both follow the kernel's documentation (`Documentation/ABI`) and were never run on real ones.

pub mod cgroup;
pub mod infiniband;
pub mod nvidia;
pub mod pressure;
pub mod thermal;
pub mod thunderbolt;

use std::fs;
use std::path::{Path, PathBuf};

/// Subdirectories of `folder`, by name; empty if it does not exist.
fn folders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    paths.sort();
    paths
}

/// The text of a file without its last line break; `None` if it is missing or empty.
fn word(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?.trim().to_owned();
    (!text.is_empty()).then_some(text)
}

/// The last part of a path.
fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Bits per second in `20.0 Gb/s` or `100 Gb/sec (4X EDR)`.
fn gigabits(speed: &str) -> Option<u64> {
    let number: f64 = speed.split_once(" Gb/s")?.0.trim().parse().ok()?;
    (number.is_finite() && number >= 0.0).then_some((number * 1e9) as u64)
}
