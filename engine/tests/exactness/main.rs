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
//! `RUSSET_EXACTNESS` names a file that lists the groups and where `oracle.py`'s answers for them are; `cargo xtask
//! test` sets it for some of them and `cargo xtask proof exactness` for all. Without it there is nothing to compare
//! with, which under CI is a failure. `RUSSET_EXACTNESS_REPORT` names a file for the figures.
//!
//! No libtest harness: every rank is a process of its own, which runs this program again.

mod group;
mod rank;

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, bail, ensure};
use parking_lot::Mutex;
use russet_model::load_quantization::LoadQuantization;
use russet_wire::{engine_config::AdapterDir, engine_options::KvCacheType};
use serde::{Deserialize, Serialize};

use group::RankGroup;

/// Lengths of the prompts of a comparison in brief.
const BRIEF: [usize; 6] = [1, 3, 64, 190, 256, 257];
/// Tokens of every answer there.
const BRIEF_TOKENS: usize = 24;

/// The oracle's data of one variant.
#[derive(Deserialize)]
struct Oracle {
    vocabulary: usize,
    widen: bool,
    dtype: String,
    /// Bits of mlx-lm's quantised KV cache; `None` where it is not quantised.
    #[serde(default)]
    kv_bits: Option<u32>,
    /// Bits that mlx-lm's `convert` packed the weights in, which the engine packs while it reads them.
    #[serde(default)]
    load_bits: Option<u32>,
    /// Whether mlx-lm answered with the adapter that lies in the folder `adapter` of the model.
    #[serde(default)]
    adapter: bool,
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

    /// The same with some of the prompts, on both sides of every border but the longest, and the beginnings of answers.
    fn brief(&self) -> Self {
        let places = self.prompts.iter().zip(&self.tokens).zip(&self.gaps);
        let some = places.filter(|((prompt, _), _)| BRIEF.contains(&prompt.len()));
        let mut brief = Self {
            prompts: Vec::new(),
            tokens: Vec::new(),
            gaps: Vec::new(),
            dtype: self.dtype.clone(),
            vocabulary: self.vocabulary,
            widen: self.widen,
            kv_bits: self.kv_bits,
            load_bits: self.load_bits,
            adapter: self.adapter,
        };
        for ((prompt, tokens), gaps) in some {
            brief.prompts.push(prompt.clone());
            brief.tokens.push(tokens.iter().copied().take(BRIEF_TOKENS).collect());
            brief.gaps.push(gaps.iter().copied().take(BRIEF_TOKENS).collect());
        }
        brief
    }

    /// The adapters of the engine.
    fn adapters(&self, model: &Path) -> Vec<AdapterDir> {
        let own = || AdapterDir { name: "oracle".to_owned(), dir: model.join("adapter") };
        self.adapter.then(own).into_iter().collect()
    }

    /// Number of the adapter that answers.
    fn adapter(&self) -> u32 {
        u32::from(self.adapter)
    }

    fn quantization(&self) -> Result<Option<LoadQuantization>> {
        match self.load_bits {
            None => Ok(None),
            Some(8) => Ok(Some(LoadQuantization::Int8)),
            Some(4) => Ok(Some(LoadQuantization::Int4)),
            Some(other) => bail!("the oracle has weights of {other} bits, which the engine packs none in"),
        }
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
    /// Whether some prompts and the beginnings of answers are enough.
    brief: bool,
}

/// What the file named by `RUSSET_EXACTNESS` holds.
#[derive(Deserialize)]
struct Plan {
    cases: Vec<Case>,
    /// Those that have to go wrong: one rank, one stage of two members, and a pipeline of two.
    alone: Case,
    stage: Case,
    pipeline: Case,
}

/// One group's figures, for the report.
#[derive(Serialize)]
struct Figures {
    name: String,
    reports: Vec<ComparisonReport>,
    seconds: f32,
}

impl Case {
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
    /// Draft tokens that were taken back.
    rejected: usize,
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
    let Some(path) = std::env::var_os("RUSSET_EXACTNESS").map(PathBuf::from) else {
        ensure!(
            std::env::var_os("CI").is_none(),
            "RUSSET_EXACTNESS is not set; run `cargo xtask test`, which sets it"
        );
        println!("exactness: not run, RUSSET_EXACTNESS is not set (cargo xtask test sets it)");
        return Ok(());
    };
    let text = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    let Plan { cases, alone, stage, pipeline } = serde_json::from_slice(&text)?;
    ensure!(!cases.is_empty(), "{} lists no group", path.display());
    let total = cases.len() + 4;
    let (pipelines, stages): (VecDeque<Case>, VecDeque<Case>) =
        cases.into_iter().partition(|case| case.members == 1);
    let (pipelines, stages) = (Mutex::new(pipelines), Mutex::new(stages));
    let (failures, figures) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    let work = |cases: &Mutex<VecDeque<Case>>| {
        // Bound in a statement of its own, so that the lock is free while the group runs.
        loop {
            let next = cases.lock().pop_front();
            let Some(case) = next else { return };
            match compare_on(&case) {
                Ok(found) => {
                    println!("exactness: {}: {}", case.name, summary(&found));
                    figures.lock().push(found);
                }
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
    if let Some(path) = std::env::var_os("RUSSET_EXACTNESS_REPORT") {
        std::fs::write(path, serde_json::to_vec(&*figures.lock())?)?;
    }
    for (case, outcome) in [
        ("a wrong token is noticed", spoiled_oracle(&alone)),
        ("a wrong token of a sharded model is noticed", spoiled_oracle(&stage)),
        ("a neighbour that dies is an error", lost_neighbour(&pipeline)),
        ("a member that dies is an error", lost_neighbour(&stage)),
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

/// One group against its oracles. MLX connects its ring for a moment only, which a busy machine may miss; then the group
/// is formed again, as engines do.
fn compare_on(case: &Case) -> Result<Figures> {
    match compare_once(case) {
        Err(error) if error.to_string().contains("could not join the group") => {
            println!(
                "exactness: {} is formed again: {}",
                case.name,
                error.to_string().lines().next().unwrap_or_default()
            );
            compare_once(case)
        }
        compared => compared,
    }
}

fn compare_once(case: &Case) -> Result<Figures> {
    let mut group = RankGroup::start("compare", case)?;
    let reports: Vec<ComparisonReport> = serde_json::from_str(&group.relay("report")?)?;
    group.end()?;
    Ok(Figures { name: case.name.clone(), reports, seconds: group.started.elapsed().as_secs_f32() })
}

/// A group's figures in a line.
fn summary(figures: &Figures) -> String {
    let parts: Vec<String> = figures
        .reports
        .iter()
        .map(|ComparisonReport { beside, tokens, largest_difference, close_calls, excused, .. }| {
            format!(
                "{beside}{tokens} tokens, {excused} excused, {close_calls} close calls, log-probabilities within {largest_difference:.1e}"
            )
        })
        .collect();
    format!("{} ({:.1} s)", parts.join("; "), figures.seconds)
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
        Ok(found) => bail!("nothing was noticed: {}", summary(&found)),
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
