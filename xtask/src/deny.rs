//! The dependency policy of `deny.toml`, checked by cargo-deny, which is built once per version into the
//! user's cache folder. Advisories are checked only if their database can be fetched.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::{cargo, mlx};

/// The required version.
const VERSION: &str = "0.20.2";

/// The workspace's, and those of the fuzz targets.
const MANIFESTS: &[&str] =
    &["Cargo.toml", "model/fuzz/Cargo.toml", "chat/fuzz/Cargo.toml", "gateway/fuzz/Cargo.toml"];

/// Licenses, bans and sources.
pub fn run() -> Result<()> {
    for manifest in MANIFESTS {
        let status = Command::new(program()?)
            .args(["--all-features", "--manifest-path", manifest, "--config", "deny.toml"])
            .args(["check", "--hide-inclusion-graph", "licenses", "bans", "sources"])
            .current_dir(cargo::root())
            .status()?;
        ensure!(status.success(), "{manifest} breaks the dependency policy; deny.toml says what may come in");
    }
    Ok(())
}

fn program() -> Result<PathBuf> {
    let folder = mlx::cache_dir()?.join(format!("cargo-deny-{VERSION}"));
    let program = folder.join("bin/cargo-deny");
    if !program.exists() {
        println!("▸ building cargo-deny {VERSION} (once, some minutes)");
        let status = Command::new("cargo")
            .args(["install", "cargo-deny", "--locked", "--version", VERSION, "--root"])
            .arg(&folder)
            .status()?;
        ensure!(status.success(), "cargo install cargo-deny ended with {status}");
    }
    Ok(program)
}
