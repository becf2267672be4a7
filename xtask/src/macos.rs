//! `cargo xtask macos`: checks on Linux that everything but MLX's half of the engine compiles for Macs. Not
//! linked and never run: that needs Apple's SDK. The C code of dependencies (ring) is compiled by Zig, which
//! has the system's headers.

use std::process::Command;

use anyhow::{Result, ensure};

use crate::{cargo, python};

const TARGET: &str = "aarch64-apple-darwin";

/// From PyPI, which every machine with the tests' Python can reach.
const PINS: &str = "ziglang==0.17.1\ncargo-zigbuild==0.24.0\n";

/// Crates that link MLX: `mlx-sys` builds MLX itself for Macs, with Xcode.
const MLX_HALF: [&str; 4] = ["--exclude", "russet-engine", "--exclude", "russet-mlx"];

/// Checks, or says why it cannot be checked here.
pub fn run() -> Result<()> {
    if cfg!(target_os = "macos") {
        println!("skipped: this is a Mac, and `cargo xtask build` compiles everything for it");
        return Ok(());
    }
    let zigbuild = match tools() {
        Ok(zigbuild) => zigbuild,
        Err(reason) => {
            println!("skipped: {reason:#}");
            return Ok(());
        }
    };
    let workspace = ["--workspace", "--all-targets"];
    check(&zigbuild, &[&workspace[..], &MLX_HALF].concat())?;
    // Without the feature `mlx`, the engine is its serving half: tokenizer, scheduler, tunnels.
    check(&zigbuild, &["--package", "russet-engine", "--lib", "--no-default-features"])?;
    println!("everything but MLX's half of the engine compiles for {TARGET}");
    Ok(())
}

/// The folder of `cargo-zigbuild`, with Rust's target installed.
fn tools() -> Result<std::path::PathBuf> {
    let installed = Command::new("rustup").args(["target", "list", "--installed"]).output();
    let installed =
        installed.map_err(|error| anyhow::anyhow!("there is no rustup to add {TARGET}: {error}"))?;
    if !String::from_utf8_lossy(&installed.stdout).lines().any(|line| line == TARGET) {
        let added =
            Command::new("rustup").args(["target", "add", TARGET]).current_dir(cargo::root()).output()?;
        let words = String::from_utf8_lossy(&added.stderr);
        ensure!(
            added.status.success(),
            "rustup cannot add the target {TARGET}: {}",
            words.lines().last().unwrap_or("it says nothing")
        );
    }
    Ok(python::environment("Zig, which compiles C for Macs", PINS)?.programs())
}

fn check(zigbuild: &std::path::Path, what: &[&str]) -> Result<()> {
    let mut path = vec![zigbuild.to_owned()];
    path.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    let mut command = Command::new(zigbuild.join("cargo-zigbuild"));
    command.args(["check", "--target", TARGET]).args(what);
    cargo::run(cargo::without_own_variables(&mut command).env("PATH", std::env::join_paths(path)?))
}
