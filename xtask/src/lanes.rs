//! Two lanes of `cargo xtask test`. Cargo runs one test binary after another, and some of them mostly wait: for
//! deadlines, heartbeats, processes. Those run in a lane of their own beside the others. No more of them at a time than
//! cargo chooses: with six, three of 21 were not ready within their 90 s on a busy machine.
//! Engines compute in none of them, and so disturb nothing that does.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::{Context, Result};

use crate::{cargo, mlx};

/// The tests that wait, by package and binary: whole clusters in one process, whose engines compute nothing.
const WAITING: (&str, &str) = ("russet-agent", "cluster");
/// `cargo test` for the tests that wait.
pub fn waiting(prepared: &mlx::Prepared) -> Result<Command> {
    lane(prepared, "waiting", &["--test", WAITING.1])
}

/// `cargo test` for all others.
pub fn others(prepared: &mlx::Prepared) -> Result<Command> {
    lane(prepared, "others", &[])
}

fn lane(prepared: &mlx::Prepared, lane: &str, which: &[&str]) -> Result<Command> {
    let this = std::env::current_exe().context("the path of xtask is not to be had")?;
    let runner =
        format!("target.'cfg(all())'.runner = [{:?}, \"lane\", {lane:?}]", this.display().to_string());
    let arguments = [&["--config", &runner, "test", "--workspace", "--no-fail-fast"], which].concat();
    Ok(cargo::command(prepared, &arguments))
}

/// Runs a test binary in place of this process, if it is of that lane: cargo calls it for each, in its environment.
pub fn run(arguments: &[String]) -> Result<()> {
    let [lane, program, rest @ ..] = arguments else { anyhow::bail!("cargo names no lane and program") };
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_default();
    if ((package.as_str(), binary(program)) == WAITING) != (lane == "waiting") {
        return Ok(());
    }
    Err(Command::new(program).args(rest).exec()).with_context(|| format!("cannot run {program}"))
}

/// `…/deps/cluster-429cd2d0d5ad8ef6` → `cluster`.
fn binary(program: &str) -> &str {
    let file = program.rsplit('/').next().unwrap_or(program);
    file.rsplit_once('-').map_or(file, |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_that_wait_are_known_by_their_binary() {
        for (program, name) in [
            ("/a/target/debug/deps/cluster-429cd2d0d5ad8ef6", "cluster"),
            ("deps/cluster_of-4", "cluster_of"),
            ("/a-b/russet-demo", "russet"),
            ("cluster", "cluster"),
        ] {
            assert_eq!(binary(program), name);
        }
        let folder =
            cargo::root().join(WAITING.0.trim_start_matches("russet-")).join("tests").join(WAITING.1);
        assert!(folder.join("main.rs").is_file(), "{} has no tests", folder.display());
    }
}
