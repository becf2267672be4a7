//! Calls of cargo, always for the whole workspace: building single packages would select other features for
//! shared dependencies and compile them twice.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::mlx;

/// The repository.
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// `cargo VERB …` with MLX's configuration, run in the repository.
pub fn command(prepared: &mlx::Prepared, arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // Clippy ignores arguments before its name, and passes on those after it.
    match arguments.split_first() {
        Some((&"clippy", rest)) => command.arg("clippy").args(prepared.cargo_args()).args(rest),
        _ => command.args(prepared.cargo_args()).args(arguments),
    };
    without_own_variables(&mut command);
    command
}

/// Runs in the repository, without the variables that cargo sets for this program itself: with them every
/// build looks changed.
pub fn without_own_variables(command: &mut Command) -> &mut Command {
    command.current_dir(root());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("CARGO_PKG_")
            || name == "CARGO_MANIFEST_DIR"
            || name == "CARGO_MANIFEST_PATH"
        {
            command.env_remove(name);
        }
    }
    command
}

/// Runs it; it must succeed.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.stdin(Stdio::null()).status().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(status.success(), "{command:?} ended with {status}");
    Ok(())
}

/// Folder of the built programs.
pub fn programs() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    target.join("debug")
}
