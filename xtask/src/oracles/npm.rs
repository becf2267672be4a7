//! Peers from npm. No install scripts of their packages are run.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use super::emptied;
use crate::mlx::cache_dir;
use crate::step;

/// Its version.
const AZURITE: &str = "3.37.0";

/// Azurite's blob server, installed if missing. Created aside and renamed: an existing one is complete.
pub fn azurite() -> Result<PathBuf> {
    let cache = cache_dir()?;
    let folder = cache.join(format!("azurite-{AZURITE}"));
    let program = folder.join("node_modules/.bin/azurite-blob");
    if program.exists() {
        return Ok(program);
    }
    fs::create_dir_all(&cache).with_context(|| format!("{}", cache.display()))?;
    let lock = fs::File::create(cache.join(format!("azurite-{AZURITE}.lock")))?;
    lock.lock().with_context(|| format!("lock {}", cache.display()))?;
    if !program.exists() {
        println!("▸ installing azurite {AZURITE} from npm (once, about a minute)");
        let part = emptied(&cache, &format!("azurite-{AZURITE}.part"))?;
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
        npm.arg(&part).arg(format!("azurite@{AZURITE}"));
        step::run(&mut npm, "install azurite with npm (on Debian: apt-get install npm)")?;
        fs::rename(&part, &folder)?;
    }
    Ok(program)
}
