//! What tests need and a checkout has not: programs and files of others, which `cargo xtask test` names by variables.

use std::path::PathBuf;

/// The program, file or folder that a variable names. `None` without it, which is said, and which CI does not allow.
///
/// # Panics
/// In CI, where the variable is not set.
pub fn path(variable: &str) -> Option<PathBuf> {
    let path = std::env::var_os(variable).map(PathBuf::from);
    assert!(
        path.is_some() || std::env::var_os("CI").is_none(),
        "CI must set {variable}; `cargo xtask test` does"
    );
    if path.is_none() {
        println!("{variable} is not set: what needs it did not run; `cargo xtask test` sets it");
    }
    path
}
