//! Holds the engine to mlx-lm: the same prompts on the same weights have to give the same log-probabilities
//! within a tolerance, and the same greedy tokens wherever the oracle's choice was clear. On one rank and
//! on pipelines of two and three processes over MLX's ring on loopback.
//!
//! **The rule.** Log-probabilities differ by at most the tolerance. Tokens are equal wherever the gap between
//! the oracle's two best tokens exceeds ten times the tolerance; elsewhere a different token is excused,
//! counted and printed, and at most one in a hundred tokens may be. After an excused token both go on
//! with the oracle's.
//!
//! `RUSSET_ORACLE` names the folder that `oracle.py` filled; `cargo xtask test` sets it. Without it there is
//! nothing to compare with, which under CI is a failure.
//!
//! Not a libtest: every rank is a process of its own, and that process is this program again.

mod group;
mod rank;

use std::{
    collections::{BTreeSet, VecDeque},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, bail, ensure};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use group::Group;

/// The variant for the cases that have to go wrong.
const CONTROL: &str = "tied-llama3";
/// What `oracle.py` wrote of one variant.
#[derive(Deserialize)]
struct Oracle {
    vocabulary: usize,
    widen: bool,
    dtype: String,
    splits: Vec<Vec<u32>>,
    prompts: Vec<Vec<u32>>,
    tokens: Vec<Vec<u32>>,
    gaps: Vec<Vec<f32>>,
}

/// What rank 0 found.
#[derive(Default, Serialize, Deserialize)]
struct Report {
    tokens: usize,
    largest_difference: f32,
    close_calls: usize,
    excused: usize,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.split_first() {
        Some((verb, rest)) if verb == "rank" => rank::run(rest),
        _ => parent(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("exactness: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn parent() -> Result<()> {
    let Some(folder) = std::env::var_os("RUSSET_ORACLE").map(PathBuf::from) else {
        ensure!(
            std::env::var_os("CI").is_none(),
            "RUSSET_ORACLE is not set; run `cargo xtask test`, which sets it"
        );
        println!("exactness: not run, RUSSET_ORACLE is not set (cargo xtask test sets it)");
        return Ok(());
    };
    let mut variants: Vec<PathBuf> = std::fs::read_dir(&folder)
        .with_context(|| format!("read {}", folder.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.join("oracle.json").exists())
        .collect();
    variants.sort();
    ensure!(!variants.is_empty(), "{} holds no variant with an oracle.json; run oracle.py", folder.display());

    let only = std::env::var("RUSSET_EXACTNESS_ONLY").unwrap_or_default();
    let (mut cases, mut sizes) = (VecDeque::new(), BTreeSet::new());
    for variant in variants {
        let name = variant.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let oracle: Oracle = serde_json::from_slice(&std::fs::read(variant.join("oracle.json"))?)?;
        for split in oracle.splits {
            sizes.insert(split.len());
            let case = format!("{name} on {split:?}");
            if case.contains(&only) {
                cases.push_back((case, variant.clone(), split));
            }
        }
    }
    ensure!(sizes.is_superset(&BTreeSet::from([1, 2, 3])), "the oracle asks for groups of {sizes:?} only");
    let (cases, failures) = (Mutex::new(cases), Mutex::new(Vec::new()));
    let total = cases.lock().len() + 2;
    let work = || {
        // Bound on a line of its own, so that the lock is free while the group runs.
        loop {
            let next = cases.lock().pop_front();
            let Some((case, variant, split)) = next else { return };
            match compare_on(&variant, &split) {
                Ok(summary) => println!("exactness: {case}: {summary}"),
                Err(error) => {
                    println!("exactness: {case}: FAILED: {error:#}");
                    failures.lock().push(case);
                }
            }
        }
    };
    // Ranks of one group mostly wait for each other, so two groups at a time keep two cores busy.
    std::thread::scope(|scope| {
        scope.spawn(work);
        scope.spawn(work);
    });
    let known = folder.join(CONTROL);
    for (case, outcome) in [
        ("a wrong token is noticed", spoiled_oracle(&known)),
        ("a neighbour that dies is an error", lost_neighbour(&known)),
    ] {
        match outcome {
            Ok(message) => println!("exactness: {case}: {message}"),
            Err(error) => {
                println!("exactness: {case}: FAILED: {error:#}");
                failures.lock().push(case.to_owned());
            }
        }
    }
    let failures = failures.into_inner();
    let verdict = if failures.is_empty() { "ok" } else { "FAILED" };
    println!(
        "test result: {verdict}. {} passed; {} failed; 0 ignored; 0 measured; 0 filtered out",
        total - failures.len(),
        failures.len()
    );
    ensure!(failures.is_empty(), "{} groups are not as they should be: {failures:?}", failures.len());
    Ok(())
}

/// One group against the oracle.
fn compare_on(variant: &Path, split: &[u32]) -> Result<String> {
    let mut group = Group::start("compare", variant, split)?;
    let report: Report = serde_json::from_str(&group.relay("report")?)?;
    group.end()?;
    Ok(format!(
        "{} tokens, {} excused, {} close calls, log-probabilities within {:.1e} ({:.1} s)",
        report.tokens,
        report.excused,
        report.close_calls,
        report.largest_difference,
        group.started.elapsed().as_secs_f32()
    ))
}

/// An oracle that says another token has to be contradicted, or all of this would prove nothing.
fn spoiled_oracle(variant: &Path) -> Result<String> {
    let copy = tempfile::tempdir()?;
    for entry in std::fs::read_dir(variant)? {
        let entry = entry?;
        std::fs::copy(entry.path(), copy.path().join(entry.file_name()))?;
    }
    let path = copy.path().join("oracle.json");
    let mut oracle: serde_json::Value = serde_json::from_slice(&std::fs::read(&path)?)?;
    let token = oracle["tokens"][0][9].as_u64().context("the oracle has no tenth token")?;
    oracle["tokens"][0][9] = (if token == 0 { 1 } else { token - 1 }).into();
    std::fs::write(&path, oracle.to_string())?;
    match compare_on(copy.path(), &[5]) {
        Ok(summary) => bail!("nothing was noticed: {summary}"),
        Err(error) => {
            let error = format!("{error:#}");
            let noticed = error.lines().find(|line| line.contains("token 9 after a prompt of"));
            noticed.map(str::to_owned).with_context(|| format!("something else went wrong: {error}"))
        }
    }
}

/// Rank 0 waits for activations of a rank that is killed: the step has to fail, not hang or abort.
fn lost_neighbour(variant: &Path) -> Result<String> {
    let mut group = Group::start("lose", variant, &[3, 2])?;
    group.relay("stepped")?;
    group.children[1].kill()?;
    let message = group.relay("failed")?;
    ensure!(message.contains("MLX failed on rank 0 of 2"), "rank 0 said {message}");
    ensure!(group.children[0].wait()?.success(), "rank 0 did not end well: {}", group.errors());
    Ok(message)
}
