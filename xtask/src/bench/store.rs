//! Stores that are killed, and flipped bits between machines, many times.

use anyhow::{Context, Result};
use serde_json::Value;

use super::{BenchRow, Goal, figures};
use crate::{cargo, mlx};

pub const ABOUT: &str = "A store in a process of its own is killed, as by `kill -9`, at every step that changes its disk, \
    while it receives a model of 72 MiB from another one, fetches it or removes it: after each kill whatever engines could \
    be given is whole and right, the next process finds every chunk that was journalled, and ends what was begun. Between \
    two agents a proxy changes one bit of each connection, anywhere; every transfer of 40 MiB ends with the right bytes, and \
    what came again for each bit is shown. Sources cut, refuse, redirect and change what they serve; disks are full in the \
    middle, as a fail point says and as the kernel does of a file system that is made smaller; models are deleted \
    there. `N` are kills at each step and times of each fault, and 500 bits each.";

/// Flipped bits per round of kills.
const BITS: usize = 500;

/// Parts of the names of the tests that print a figure.
const FAULTS: [&str; 9] = [
    "a_store_that_is_killed",
    "every_bit_that_changes",
    "a_disk_that_is_full_in_the_middle",
    "a_download_that_breaks",
    "a_source_that_is_busy_or_fails",
    "redirects_in_a_circle",
    "a_file_that_changed_at_its_source",
    "two_that_ask_each_other",
    "deleted_in_the_middle",
];

/// One kill at each step.
pub fn run(prepared: &mlx::Prepared) -> Result<Vec<BenchRow>> {
    many(prepared, 1)
}

/// `rounds` kills at each step.
pub fn many(prepared: &mlx::Prepared, rounds: usize) -> Result<Vec<BenchRow>> {
    // The programs to kill; tests by name build no examples.
    cargo::run(&mut cargo::command(prepared, &["build", "--workspace", "--examples"]))?;
    // The whole workspace, so that nothing is built a second time with other features.
    let mut test =
        vec!["test", "--workspace", "--lib", "--test", "kills", "--test", "flips", "--test", "store"];
    test.extend(["--", "--nocapture", "--test-threads=1"]);
    test.extend(FAULTS);
    let mut tests = cargo::command(prepared, &test);
    tests.env("RUSSET_FAULT_ROUNDS", rounds.to_string()).env("RUSSET_FLIPS", (rounds * BITS).to_string());
    figures(&mut tests, "the proof of the store")?.iter().map(row).collect()
}

fn row(figure: &Value) -> Result<BenchRow> {
    let what = figure["what"].as_str().context("a figure without a name")?.to_owned();
    let ours = figure["ours"].as_f64().with_context(|| format!("no figure in {figure}"))?;
    let (unit, goal) = match figure["unit"].as_str() {
        // A chunk.
        Some("MiB") => ("MiB", Goal::AtMost(16.0)),
        Some("bits") => ("bits", Goal::None),
        Some("times") => ("times", Goal::None),
        _ => ("kills", Goal::None),
    };
    Ok(BenchRow { area: "store", what, ours, peer: None, unit, ratio: None, goal })
}
