//! One preparation step: a command whose output matters only if it fails, and the fingerprint that names the
//! folder of its result.

use std::process::Command;

use anyhow::{Context, Result, bail};

/// Runs one step; its output is shown only if it fails.
pub fn run(command: &mut Command, step: &str) -> Result<()> {
    let output = command.output().with_context(|| format!("{step}: start {:?}", command.get_program()))?;
    if !output.status.success() {
        bail!(
            "could not {step}\n{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}

/// FNV-1a: names a folder, not for security.
pub fn fingerprint(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
