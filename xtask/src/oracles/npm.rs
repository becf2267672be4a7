//! Programs from npm. No install scripts of their packages are run.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::emptied;
use crate::mlx::cache_dir;
use crate::step;

/// A program, or a set of libraries, of npm.
pub struct NpmProgram {
    /// Folder in the cache: name and version.
    pub name: &'static str,
    pub version: &'static str,
    /// The packages, with their versions.
    pub packages: &'static [&'static str],
    /// The program, below `node_modules`; `PLATFORM` stands for npm's name of this one.
    pub program: &'static str,
}

/// Azurite's blob server.
pub const AZURITE: NpmProgram = NpmProgram {
    name: "azurite",
    version: "3.37.0",
    packages: &["azurite@3.37.0"],
    program: ".bin/azurite-blob",
};

impl NpmProgram {
    /// The program, installed if missing. Created aside and renamed: an existing one is complete.
    pub fn installed(&self) -> Result<PathBuf> {
        let Self { name, version, packages, program } = self;
        let cache = cache_dir()?;
        let folder = cache.join(format!("{name}-{version}"));
        let program = folder.join("node_modules").join(program.replace("PLATFORM", &platform()));
        if program.exists() {
            return Ok(program);
        }
        fs::create_dir_all(&cache).with_context(|| format!("{}", cache.display()))?;
        let lock = fs::File::create(cache.join(format!("{name}-{version}.lock")))?;
        lock.lock().with_context(|| format!("lock {}", cache.display()))?;
        if !folder.exists() {
            println!("▸ installing {name} {version} from npm (once, about a minute)");
            let part = emptied(&cache, &format!("{name}-{version}.part"))?;
            let mut npm = Command::new("npm");
            npm.args([
                "install",
                "--ignore-scripts",
                "--no-fund",
                "--no-audit",
                "--loglevel",
                "error",
                "--prefix",
            ]);
            npm.arg(&part).args(*packages);
            step::run(&mut npm, &format!("install {name} with npm (on Debian: apt-get install npm)"))?;
            fs::rename(&part, &folder)?;
        }
        ensure!(program.exists(), "{name} {version} of npm has no {}", program.display());
        Ok(program)
    }
}

/// npm's name of this platform.
fn platform() -> String {
    let system = if cfg!(target_os = "macos") { "darwin" } else { "linux" };
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "x64" };
    format!("{system}-{architecture}")
}
