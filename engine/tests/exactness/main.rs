//! Exactness against mlx-lm: the same prompts on the same weights have to give the same log-probabilities
//! within a tolerance, and the same greedy tokens wherever the oracle's choice was clear. On one rank and on
//! pipelines of two and three processes over MLX's ring on loopback.
//!
//! **The rule.** Log-probabilities differ by at most the tolerance. Tokens are equal wherever the gap between
//! the oracle's two best tokens exceeds ten times the tolerance; elsewhere a different token is excused,
//! counted and printed, and at most one in a hundred tokens may be. After an excused token both sides
//! continue with the oracle's. (A tensor parallel stage in 16 bits rounds its sums differently from a single
//! rank, and so do quantised caches in batches; `Tolerance::rounding`.)
//!
//! `RUSSET_ORACLE` names the folder that `oracle.py` filled; `cargo xtask test` sets it. Without it there is
//! nothing to compare with, which is a failure in CI.
//!
//! Groups of four tensor ranks busy-wait for each other and are slow on two cores. `RUSSET_SLICE`, a number,
//! selects a third of them; without it, or with `all`, every one runs. With `RUSSET_PART`, as in CI, it
//! selects a third of all groups.
//!
//! No libtest harness: every rank is a process of its own, which runs this program again.

mod group;
mod rank;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, bail, ensure};
use parking_lot::Mutex;
use russet_engine::args::KvCacheType;
use serde::{Deserialize, Serialize};

use group::RankGroup;

/// The variant for the negative cases.
const CONTROL: &str = "tied-llama3";
/// The same for stages of several tensor ranks.
const SHARDED_CONTROL: &str = "sharded";

/// Parts into which groups are divided: those of four ranks, or all.
const SLICES: usize = 3;

/// The oracle's data of one variant.
#[derive(Deserialize)]
struct Oracle {
    vocabulary: usize,
    widen: bool,
    dtype: String,
    /// Bits of mlx-lm's quantised KV cache; `None` where it is not quantised.
    #[serde(default)]
    kv_bits: Option<u32>,
    splits: Vec<Vec<u32>>,
    /// Tensor parallel size → layers per stage.
    #[serde(default)]
    stages: BTreeMap<u32, Vec<Vec<u32>>>,
    prompts: Vec<Vec<u32>>,
    tokens: Vec<Vec<u32>>,
    gaps: Vec<Vec<f32>>,
}

impl Oracle {
    fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("oracle.json");
        let text = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        Ok(serde_json::from_slice(&text)?)
    }

    fn kv_cache(&self) -> Result<KvCacheType> {
        match self.kv_bits {
            None => Ok(KvCacheType::AsComputed),
            Some(8) => Ok(KvCacheType::Int8),
            Some(4) => Ok(KvCacheType::Int4),
            Some(other) => bail!("the oracle has caches of {other} bits, which the engine has not"),
        }
    }
}

/// One group on one model.
#[derive(Clone, Serialize, Deserialize)]
struct Case {
    name: String,
    model: PathBuf,
    /// Folder of the oracle for the same split.
    oracle: PathBuf,
    /// Layers of every stage.
    split: Vec<u32>,
    /// Tensor parallel size.
    members: u32,
}

impl Case {
    fn new(model: &Path, split: &[u32], members: u32) -> Self {
        let variant = model.file_name().unwrap_or_default().to_string_lossy();
        let (name, oracle) = match members {
            1 => (format!("{variant} on {split:?}"), model.to_owned()),
            _ => (format!("{variant} on {split:?} by {members}"), model.join(format!("tensor-{members}"))),
        };
        Self { name, model: model.to_owned(), oracle, split: split.to_vec(), members }
    }

    fn layers_per_rank(&self) -> Vec<u32> {
        self.split.iter().flat_map(|&layers| vec![layers; self.members as usize]).collect()
    }
}

/// Rank 0's report.
#[derive(Default, Serialize, Deserialize)]
struct ComparisonReport {
    /// Other subject of the comparison, if it is not the engine with its oracle.
    beside: String,
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
    let (mut cases, mut shapes) = (VecDeque::new(), BTreeSet::new());
    for variant in variants {
        let oracle = Oracle::read(&variant)?;
        let sharded = oracle
            .stages
            .iter()
            .flat_map(|(&members, splits)| splits.iter().map(move |split| (split, members)));
        for (split, members) in oracle.splits.iter().map(|split| (split, 1)).chain(sharded) {
            shapes.insert((split.len(), members));
            cases.push_back(Case::new(&variant, split, members));
        }
    }
    let wanted = BTreeSet::from([(1, 1), (2, 1), (3, 1), (1, 2), (1, 4), (2, 2)]);
    ensure!(shapes.is_superset(&wanted), "the oracle asks for stages and members {shapes:?} only");
    cases.retain(|case| case.name.contains(&only));
    if let Some(slice) = slice()? {
        // Where the long suites run in part, groups of every kind are divided.
        let all = std::env::var_os("RUSSET_PART").is_some();
        let ranks = |case: &Case| case.layers_per_rank().len();
        cases.make_contiguous().sort_by_key(|case| (case.members, ranks(case)));
        let mut dealt = 0;
        cases.retain(|case| {
            let deals = all || ranks(case) == 4 && case.members > 1;
            dealt += usize::from(deals);
            !deals || dealt % SLICES == slice
        });
    }
    ensure!(!cases.is_empty(), "RUSSET_EXACTNESS_ONLY={only} leaves no case");
    let total = cases.len() + 4;
    let (pipelines, stages): (VecDeque<Case>, VecDeque<Case>) =
        cases.into_iter().partition(|case| case.members == 1);
    let (pipelines, stages) = (Mutex::new(pipelines), Mutex::new(stages));
    let failures = Mutex::new(Vec::new());
    let work = |cases: &Mutex<VecDeque<Case>>| {
        // Bound in a statement of its own, so that the lock is free while the group runs.
        loop {
            let next = cases.lock().pop_front();
            let Some(case) = next else { return };
            match compare_on(&case) {
                Ok(summary) => println!("exactness: {}: {summary}", case.name),
                Err(error) => {
                    println!("exactness: {}: FAILED: {error:#}", case.name);
                    failures.lock().push(case.name);
                }
            }
        }
    };
    // Ranks of a pipeline mostly wait for each other, so two groups at a time keep two cores busy. Tensor
    // ranks work at the same time and busy-wait, so such groups come last, one after the other.
    std::thread::scope(|scope| {
        scope.spawn(|| work(&pipelines));
        scope.spawn(|| work(&pipelines));
    });
    work(&stages);
    let (known, sharded) = (folder.join(CONTROL), folder.join(SHARDED_CONTROL));
    for (case, outcome) in [
        ("a wrong token is noticed", spoiled_oracle(&Case::new(&known, &[5], 1))),
        ("a wrong token of a sharded model is noticed", spoiled_oracle(&Case::new(&sharded, &[3], 2))),
        ("a neighbour that dies is an error", lost_neighbour(&Case::new(&known, &[3, 2], 1))),
        ("a member that dies is an error", lost_neighbour(&Case::new(&sharded, &[3], 2))),
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

/// The selected part of the [`SLICES`]; `None` for all of them.
fn slice() -> Result<Option<usize>> {
    match std::env::var("RUSSET_SLICE").as_deref() {
        Err(_) | Ok("" | "all") => Ok(None),
        Ok(number) => {
            let number: usize = number.parse().with_context(|| format!("RUSSET_SLICE={number}"))?;
            println!("exactness: slice {} of {SLICES}", number % SLICES + 1);
            Ok(Some(number % SLICES))
        }
    }
}

/// One group against its oracles.
fn compare_on(case: &Case) -> Result<String> {
    let mut group = RankGroup::start("compare", case)?;
    let reports: Vec<ComparisonReport> = serde_json::from_str(&group.relay("report")?)?;
    group.end()?;
    let told: Vec<String> = reports
        .iter()
        .map(|ComparisonReport { beside, tokens, largest_difference, close_calls, excused }| {
            format!(
                "{beside}{tokens} tokens, {excused} excused, {close_calls} close calls, log-probabilities within {largest_difference:.1e}"
            )
        })
        .collect();
    let seconds = group.started.elapsed().as_secs_f32();
    Ok(format!("{} ({seconds:.1} s)", told.join("; ")))
}

/// Negative control: an oracle with a changed token must be contradicted.
fn spoiled_oracle(case: &Case) -> Result<String> {
    let copy = tempfile::tempdir()?;
    for file in ["oracle.json", "oracle.f32"] {
        std::fs::copy(case.oracle.join(file), copy.path().join(file))?;
    }
    let path = copy.path().join("oracle.json");
    let mut oracle: serde_json::Value = serde_json::from_slice(&std::fs::read(&path)?)?;
    let token = oracle["tokens"][0][9].as_u64().context("the oracle has no tenth token")?;
    oracle["tokens"][0][9] = (if token == 0 { 1 } else { token - 1 }).into();
    std::fs::write(&path, oracle.to_string())?;
    match compare_on(&Case { oracle: copy.path().to_owned(), ..case.clone() }) {
        Ok(summary) => bail!("nothing was noticed: {summary}"),
        Err(error) => {
            let error = format!("{error:#}");
            let noticed = error.lines().find(|line| line.contains("token 9 after a prompt of"));
            noticed.map(str::to_owned).with_context(|| format!("something else went wrong: {error}"))
        }
    }
}

/// Rank 0 waits for a rank that is killed: the step has to fail, not hang or abort.
fn lost_neighbour(case: &Case) -> Result<String> {
    let mut group = RankGroup::start("lose", case)?;
    group.relay("stepped")?;
    group.children[1].kill()?;
    let message = group.relay("failed")?;
    ensure!(message.contains("MLX failed on rank 0 of 2"), "rank 0 said {message}");
    group.ended_well(0)?;
    Ok(message)
}
