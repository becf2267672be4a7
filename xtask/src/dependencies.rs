//! Compiled dependencies, kept beside the checkout: CI runs in a fresh clone, and would compile them again. Only crates
//! of registries are kept, never ours. What is fresh is cargo's decision: it compares fingerprints, and compiles again
//! whatever differs.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cargo;
use crate::mlx::cache_dir;
use crate::step::fingerprint;

/// How many sets are kept, each of one state of Cargo.lock, Cargo.toml and the compiler.
const MAX_SETS: usize = 2;
const PREFIX: &str = "dependencies-";
/// A set's file with how many sets it grew from: each has what the one before it had, also what no Cargo.lock names any more.
const GENERATION: &str = "dependencies-generation";
/// Most sets that one grows from.
const MAX_GENERATION: u32 = 4;
/// Folders of `target/debug` with an entry a unit.
const UNITS: [&str; 2] = [".fingerprint", "build"];
/// The folder with their products.
const PRODUCTS: &str = "deps";

/// `take` fills `target` before a build, `keep` copies from it afterwards.
pub fn run(arguments: &[String]) -> Result<()> {
    match arguments {
        [verb] if verb == "take" => take(),
        [verb] if verb == "keep" => keep(),
        _ => anyhow::bail!("cargo xtask dependencies takes take or keep"),
    }
}

/// Copies a set into `target`, this state's or else the newest one, most of which is the same; a file that is there stays.
fn take() -> Result<()> {
    let cache = cache_dir()?;
    let set = cache.join(format!("{PREFIX}{:016x}", key()?));
    let newest = || sets(&cache).ok()?.pop().filter(|set| generation(set) < MAX_GENERATION);
    let Some(set) = Some(set).filter(|set| set.exists()).or_else(newest) else {
        println!("▸ no compiled dependencies are kept");
        return Ok(());
    };
    let copied = copy(&set, &cargo::programs())?;
    println!("▸ {copied} files of compiled dependencies are from {}", set.display());
    Ok(())
}

/// Copies what cargo compiled of registries' crates, unless this state's set is there.
fn keep() -> Result<()> {
    let cache = cache_dir()?;
    let set = cache.join(format!("{PREFIX}{:016x}", key()?));
    // Two runs on one machine may keep at the same time.
    let lock = fs::File::create(cache.join("dependencies.lock"))?;
    lock.lock().with_context(|| format!("lock {}", cache.display()))?;
    if set.exists() {
        return Ok(());
    }
    let aside = cache.join("dependencies.part");
    let _ = fs::remove_dir_all(&aside);
    let target = cargo::programs();
    let units = units(&target, &members()?)?;
    for folder in UNITS {
        for unit in &units {
            let from = target.join(folder).join(unit);
            if from.exists() {
                copy(&from, &aside.join(folder).join(unit))?;
            }
        }
    }
    let hashes: BTreeSet<&str> = units.iter().filter_map(|unit| hash(unit)).collect();
    for file in entries(&target.join(PRODUCTS))? {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if hash(name.split('.').next().unwrap_or_default()).is_some_and(|hash| hashes.contains(hash)) {
            copy(&file, &aside.join(PRODUCTS).join(name))?;
        }
    }
    let grown = if target.join(GENERATION).exists() { generation(&target) + 1 } else { 0 };
    fs::write(aside.join(GENERATION), grown.to_string())?;
    // Published by one rename, so that a killed run leaves nothing partial.
    fs::rename(&aside, &set).with_context(|| format!("publish {}", set.display()))?;
    let sets = sets(&cache)?;
    sets.iter().take(sets.len().saturating_sub(MAX_SETS)).try_for_each(fs::remove_dir_all)?;
    Ok(())
}

/// The sets, the newest last.
fn sets(cache: &Path) -> Result<Vec<PathBuf>> {
    let mut sets: Vec<PathBuf> = entries(cache)?;
    sets.retain(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX)));
    sets.sort_by_key(|path| fs::metadata(path).and_then(|about| about.modified()).ok());
    Ok(sets)
}

/// How many sets this one, or what is in `target`, grew from.
fn generation(folder: &Path) -> u32 {
    let text = fs::read_to_string(folder.join(GENERATION)).unwrap_or_default();
    text.trim().parse().unwrap_or_default()
}

/// What decides which dependencies are compiled, and how.
fn key() -> Result<u64> {
    let mut bytes = Command::new("rustc").arg("-vV").current_dir(cargo::root()).output()?.stdout;
    for file in ["Cargo.lock", "Cargo.toml"] {
        bytes.extend(fs::read(cargo::root().join(file)).with_context(|| file.to_owned())?);
    }
    Ok(fingerprint(&bytes))
}

/// Names of our packages.
fn members() -> Result<BTreeSet<String>> {
    let mut metadata = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    metadata.args(["metadata", "--format-version", "1", "--no-deps"]).current_dir(cargo::root());
    let output = metadata.output().context("run cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    Ok(packages.iter().filter_map(|package| package["name"].as_str()).map(str::to_owned).collect())
}

/// Names of the compiled units of packages that are not ours: `PACKAGE-HASH`.
fn units(target: &Path, ours: &BTreeSet<String>) -> Result<Vec<String>> {
    let all = entries(&target.join(UNITS[0]))?;
    let names = all.iter().filter_map(|path| path.file_name()?.to_str().map(str::to_owned));
    Ok(names
        .filter(|name| name.rsplit_once('-').is_some_and(|(package, _)| !ours.contains(package)))
        .collect())
}

/// `libserde_json-17650b9a68cc17dd` → the part after the last dash.
fn hash(name: &str) -> Option<&str> {
    name.rsplit_once('-').map(|(_, hash)| hash)
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    Ok(entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?)
}

/// Whether a file may have two names: a library. Cargo changes others in place.
fn shared(file: &Path) -> bool {
    file.extension().is_some_and(|end| end == "rlib" || end == "rmeta" || end == "so")
}

/// Copies a file or folder, with the times by which cargo compares; leaves what is there. Returns how many files.
fn copy(from: &Path, to: &Path) -> Result<usize> {
    let about = fs::symlink_metadata(from).with_context(|| from.display().to_string())?;
    if about.is_dir() {
        fs::create_dir_all(to)?;
        let mut copied = 0;
        for path in entries(from)? {
            copied += copy(&path, &to.join(path.file_name().unwrap_or_default()))?;
        }
        return Ok(copied);
    }
    if fs::symlink_metadata(to).is_ok() {
        return Ok(0);
    }
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    // One file under two names, as cargo itself has them: compilers and linkers write new files and change none.
    if shared(from) && fs::hard_link(from, to).is_ok() {
        return Ok(1);
    }
    fs::copy(from, to).with_context(|| format!("copy {} to {}", from.display(), to.display()))?;
    let times = fs::FileTimes::new().set_modified(fs::metadata(from)?.modified()?);
    fs::File::options().write(true).open(to).and_then(|file| file.set_times(times))?;
    Ok(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_says_how_many_it_grew_from() {
        let folder = std::env::temp_dir().join(format!("russet-generation-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        assert_eq!(generation(&folder), 0);
        fs::write(folder.join(GENERATION), "3\n").unwrap();
        let three = generation(&folder);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(three, 3);
    }

    #[test]
    fn units_of_our_packages_are_never_kept() {
        let folder = std::env::temp_dir().join(format!("russet-units-{}", std::process::id()));
        for unit in ["ring-1", "russet-plan-2", "russet-plan-macros-3", "odd"] {
            fs::create_dir_all(folder.join(UNITS[0]).join(unit)).unwrap();
        }
        let mut retained = units(&folder, &BTreeSet::from(["russet-plan".to_owned()])).unwrap();
        retained.sort();
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(retained, ["ring-1", "russet-plan-macros-3"]);
        assert!(members().unwrap().contains("russet-xtask"));
        assert_eq!(hash("libserde_json-17650b9a68cc17dd"), Some("17650b9a68cc17dd"));
    }
}
