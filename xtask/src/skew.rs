//! `cargo xtask skew [REVISION]`: end-to-end scenarios with the previous release's agent and engine on the
//! far machine. That release is built once, by its own commands, from its own sources.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::mlx::cache_dir;
use crate::{cargo, setup, step, suites, test_binaries};

/// Runs the suite, or says why there is no release to compare with.
pub fn run(arguments: &[String]) -> Result<()> {
    let revision = match arguments.first() {
        Some(revision) => revision.clone(),
        None => match previous(&tags(&["--merged", "HEAD"])?, &tags(&["--points-at", "HEAD"])?) {
            Some(tag) => tag.to_owned(),
            None => {
                println!("skipped: no release tag yet");
                return Ok(());
            }
        },
    };
    let prepared = setup::all()?;
    suites::build(&[])?;
    let far = built(&revision)?;
    println!("▸ the far machine runs {revision}");
    let status = test_binaries::command(&prepared, "e2e")?.env("RUSSET_FAR_BIN", &far).status();
    let status = status.context("cannot run the end-to-end suite")?;
    ensure!(status.success(), "the end-to-end suite fails with {revision} on the far machine");
    Ok(())
}

fn tags(which: &[&str]) -> Result<Vec<String>> {
    let output =
        Command::new("git").args(["tag", "--list", "v*"]).args(which).current_dir(cargo::root()).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
}

/// The newest release among `tags` that is not one of those `here`.
fn previous<'a>(tags: &'a [String], here: &[String]) -> Option<&'a str> {
    let others = tags.iter().filter(|tag| !here.contains(tag)).map(String::as_str);
    others.filter_map(|tag| Some((release(tag)?, tag))).max().map(|(_, tag)| tag)
}

/// `v1.2.3` → [1, 2, 3]; release candidates and anything else are no releases.
fn release(tag: &str) -> Option<[u64; 3]> {
    let numbers: Option<Vec<u64>> = tag.strip_prefix('v')?.split('.').map(|part| part.parse().ok()).collect();
    numbers?.try_into().ok()
}

/// The folder with the programs of that revision, kept in the cache folder.
fn built(revision: &str) -> Result<PathBuf> {
    let output = Command::new("git")
        .args(["rev-parse", "--verify", &format!("{revision}^{{commit}}")])
        .current_dir(cargo::root())
        .output()?;
    ensure!(output.status.success(), "{revision} is no revision of this repository");
    let commit = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let cache = cache_dir()?;
    let programs = cache.join(format!("skew-{commit}"));
    if programs.exists() {
        return Ok(programs);
    }
    println!("▸ building {revision} (once; the first time takes minutes)");
    let work = cache.join(format!("skew-{commit}.{}", std::process::id()));
    let (source, target) = (work.join("source"), work.join("target"));
    fs::create_dir_all(&source)?;
    let built = export(&commit, &source).and_then(|()| {
        let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        build.args(["xtask", "build"]);
        cargo::run(
            cargo::without_own_variables(&mut build).current_dir(&source).env("CARGO_TARGET_DIR", &target),
        )?;
        let made = work.join("programs");
        fs::create_dir(&made)?;
        for program in ["russet", "russet-engine"] {
            fs::copy(target.join("debug").join(program), made.join(program))?;
        }
        // Published by one rename, so that a killed run leaves nothing partial.
        Ok(fs::rename(made, &programs)?)
    });
    fs::remove_dir_all(&work)?;
    built.map(|()| programs)
}

/// The sources of a commit, without touching this checkout.
fn export(commit: &str, into: &Path) -> Result<()> {
    let archive = into.join("source.tar");
    let mut git = Command::new("git");
    git.args(["archive", "--format=tar", "-o"]).arg(&archive).arg(commit).current_dir(cargo::root());
    step::run(&mut git, "export the previous release")?;
    step::run(
        Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(into),
        "unpack the previous release",
    )?;
    Ok(fs::remove_file(archive)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_previous_release_is_the_newest_that_is_not_this_one() {
        let list = |tags: &[&str]| tags.iter().map(|tag| (*tag).to_owned()).collect::<Vec<_>>();
        for (tags, here, expected) in [
            (&[][..], &[][..], None),
            (&["v0.1.0"], &["v0.1.0"], None),
            (&["v0.1.0"], &[], Some("v0.1.0")),
            (&["v0.9.0", "v0.10.0", "v0.2.0"], &[], Some("v0.10.0")),
            (&["v0.1.0", "v0.2.0"], &["v0.2.0"], Some("v0.1.0")),
            (&["v0.1.0", "v0.2.0-rc.1", "vision", "v1", "v0.2"], &[], Some("v0.1.0")),
        ] {
            assert_eq!(previous(&list(tags), &list(here)), expected, "{tags:?} at {here:?}");
        }
    }
}
