//! Memory of a process, from /proc: what it holds, and the most that it held since it was last looked at.

use anyhow::{Context, Result};

/// Resident memory, in bytes.
pub fn resident(pid: i32) -> Result<u64> {
    field(pid, "VmRSS:")
}

/// The most resident memory since [`reset_peak`], in bytes.
pub fn peak(pid: i32) -> Result<u64> {
    field(pid, "VmHWM:")
}

/// Makes the current size the peak (proc_pid_clear_refs(5): 5).
pub fn reset_peak(pid: i32) -> Result<()> {
    let path = format!("/proc/{pid}/clear_refs");
    std::fs::write(&path, "5").with_context(|| path)
}

fn field(pid: i32, name: &str) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.map(|kib| kib << 10).with_context(|| format!("{path} has no {name}"))
}
