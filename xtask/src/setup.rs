//! Missing prerequisites: system packages if apt may install them, else their names and an error; then MLX
//! and Python, in the user's cache folder.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{mlx, python};

/// Debian and Ubuntu packages, each with its purpose.
const DEBIAN: &[(&str, &str)] = &[
    ("g++", "compiles MLX's C interface"),
    ("cmake", "configures MLX's C interface"),
    ("ninja-build", "builds MLX's C interface"),
    ("libclang-dev", "reads its headers"),
    ("libfmt-dev", "std::format for compilers before GCC 13"),
    ("protobuf-compiler", "reads the protocol of etcd"),
    ("libprotobuf-dev", "has what that protocol includes"),
    ("libopenblas-dev", "matrix products, 25 times quicker than the wheel's own"),
    ("python3", "fetches the MLX wheels, runs the oracles"),
    ("python3-venv", "keeps their packages apart"),
    ("iproute2", "makes the second machine of the demo"),
    ("curl", "asks the hub what it says of the catalogue's models"),
];

/// Manual steps for a Mac.
const MAC: &str = "\
  xcode-select --install            (or Xcode from the App Store, opened once)
  xcodebuild -downloadComponent MetalToolchain
  brew install cmake protobuf python@3.12";

/// System packages, then MLX.
pub fn all() -> Result<mlx::Prepared> {
    system()?;
    mlx::prepare()
}

/// All of it and Python, which only tests need.
pub fn with_python() -> Result<(mlx::Prepared, python::Python)> {
    Ok((all()?, python::prepare()?))
}

fn system() -> Result<()> {
    if cfg!(target_os = "macos") {
        if !has("cmake") || !succeeds("xcrun", &["-find", "metal"]) {
            bail!(
                "this Mac lacks Xcode's Metal compiler or cmake. Do this once, then run the command again:\n{MAC}"
            );
        }
        return Ok(());
    }
    if !has("dpkg-query") {
        let missing: Vec<&str> =
            ["g++", "cmake", "ninja", "python3"].into_iter().filter(|program| !has(program)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        bail!(
            "this system has no apt, and {} missing; install by its own means what Debian calls: {}",
            missing.join(", "),
            names(DEBIAN).join(" ")
        );
    }
    packages(DEBIAN)
}

/// Installs the missing packages, each with its purpose.
pub fn packages(required: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<(&str, &str)> = required.iter().copied().filter(|(name, _)| !installed(name)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    for (name, why) in &missing {
        println!("▸ {name} is missing ({why})");
    }
    let mut install = vec![
        "apt-get",
        // Another installation may run on this machine.
        "-o",
        "DPkg::Lock::Timeout=300",
        "install",
        "-y",
        "--no-install-recommends",
    ];
    install.extend(names(&missing));
    let root = is_root();
    let sudo = !root && succeeds("sudo", &["-n", "true"]);
    if !root && !sudo {
        bail!(
            "installing needs an administrator. Run this once, then the command again:\n  sudo {}",
            install.join(" ")
        );
    }
    for step in [vec!["apt-get", "update"], install] {
        println!("▸ {}", step.join(" "));
        let mut command = if sudo { Command::new("sudo") } else { Command::new(step[0]) };
        if sudo {
            command.arg("-n").arg("--").args(&step);
        } else {
            command.args(&step[1..]);
        }
        let output = command
            .env("DEBIAN_FRONTEND", "noninteractive")
            .output()
            .with_context(|| format!("cannot run {}", step.join(" ")))?;
        if !output.status.success() {
            bail!("{} failed:\n{}", step.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
    }
    Ok(())
}

/// Whether this user is root.
pub fn is_root() -> bool {
    succeeds("sh", &["-c", "test \"$(id -u)\" = 0"])
}

fn names<'a>(packages: &[(&'a str, &str)]) -> Vec<&'a str> {
    packages.iter().map(|(name, _)| *name).collect()
}

fn installed(package: &str) -> bool {
    Command::new("dpkg-query")
        .args(["-W", "-f=${Status}", package])
        .output()
        .is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("install ok installed"))
        // A Python from elsewhere (pyenv, uv) is accepted too.
        || package.starts_with("python3") && succeeds("python3", &["-c", "import venv, ensurepip"])
}

fn has(program: &str) -> bool {
    succeeds("sh", &["-c", &format!("command -v {program}")])
}

fn succeeds(program: &str, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success())
}
