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

use std::{
    collections::{BTreeSet, VecDeque},
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, ExitCode, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use parking_lot::Mutex;
use russet_engine::{
    compute::{Choice, Compute, Step},
    runtime::{Runtime, RuntimeConfig, Stepped, environment},
    weights::LoadDtype,
};
use russet_wire::request::Sampling;
use serde::{Deserialize, Serialize};

/// The variant for the cases that have to go wrong.
const CONTROL: &str = "tied-llama3";
/// Sequences that run at once, step by step in turn, as a busy engine's do.
const SLOTS: usize = 4;
/// One group takes seconds; a group that hangs must fail the test and not hang it.
const PATIENCE: Duration = Duration::from_secs(300);
/// Most tokens that may be excused.
const EXCUSED_SHARE: f64 = 0.01;

/// How far log-probabilities may be apart. Both sides run the same kernels; in float32 the oracle's fused
/// element-wise operations round differently (5e-6 measured), in the half types every operation rounds to
/// the same few bits (no difference measured).
fn tolerance(dtype: &str) -> f32 {
    if dtype == "float32" { 5e-5 } else { 1e-3 }
}

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

/// What rank 0 tells the others, through the parent.
#[derive(Serialize, Deserialize)]
enum Order {
    Step { slot: u32, offset: u32, tokens: Vec<u32> },
    Reset { slot: u32 },
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
        Some((verb, rest)) if verb == "rank" => rank_process(rest),
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

/// The processes of a group. Only rank 0 speaks; the others listen.
struct Group {
    children: Vec<Child>,
    followers: Vec<ChildStdin>,
    lines: mpsc::Receiver<String>,
    started: Instant,
    _work: tempfile::TempDir,
}

impl Group {
    fn start(purpose: &str, variant: &Path, split: &[u32]) -> Result<Self> {
        let work = tempfile::tempdir()?;
        let hosts = free_addresses(split.len())?.join(",");
        let (say, lines) = mpsc::channel();
        let mut group =
            Self { children: Vec::new(), followers: Vec::new(), lines, started: Instant::now(), _work: work };
        for rank in 0..split.len() {
            let child = Command::new(std::env::current_exe()?)
                .args(["rank", purpose])
                .arg(variant)
                .args([&rank.to_string(), &serde_json::to_string(split)?, &hosts])
                .envs(environment::variables(Some((
                    rank as u32,
                    &group._work.path().join(format!("{rank}.json")),
                ))))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()?;
            group.children.push(child);
        }
        let output = group.children[0].stdout.take().context("rank 0 has no output")?;
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if say.send(line).is_err() {
                    break;
                }
            }
        });
        group.followers = group.children.iter_mut().skip(1).filter_map(|child| child.stdin.take()).collect();
        Ok(group)
    }

    /// Passes rank 0's orders on until it says `word`; what follows the word.
    fn relay(&mut self, word: &str) -> Result<String> {
        loop {
            let left =
                PATIENCE.checked_sub(self.started.elapsed()).context("the group did not finish in time")?;
            let Ok(line) = self.lines.recv_timeout(left) else {
                bail!("rank 0 said no more\n{}", self.errors());
            };
            match line.split_once(' ') {
                Some((said, rest)) if said == word => return Ok(rest.to_owned()),
                Some(("order", order)) => {
                    for follower in &mut self.followers {
                        // A follower that is gone shows in rank 0's error.
                        let _ = writeln!(follower, "{order}").and_then(|()| follower.flush());
                    }
                }
                _ => bail!("rank 0 said {line:?}\n{}", self.errors()),
            }
        }
    }

    /// The end of their input is the end of the followers, and every rank has to end well.
    fn end(&mut self) -> Result<()> {
        self.followers.clear();
        for rank in 0..self.children.len() {
            let status = self.children[rank].wait()?;
            ensure!(status.success(), "rank {rank} ended with {status}\n{}", self.errors());
        }
        Ok(())
    }

    /// What the ranks wrote to standard error; ends them.
    fn errors(&mut self) -> String {
        let mut text = String::new();
        for (rank, child) in self.children.iter_mut().enumerate() {
            let _ = child.kill();
            if let Some(stderr) = child.stderr.take() {
                let lines: Vec<String> = BufReader::new(stderr).lines().map_while(Result::ok).collect();
                text.push_str(&format!("rank {rank}: {}\n", lines.join("\n")));
            }
        }
        text
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Addresses that are free, below the range from which systems take ports for outgoing connections: MLX
/// binds them a moment later, and nothing else may have got them by then.
fn free_addresses(count: usize) -> Result<Vec<String>> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let base = 20_000 + (std::process::id() % 100) as u16 * 100;
    let mut addresses = Vec::new();
    for _ in 0..10_000 {
        let port = base.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let address = format!("127.0.0.1:{port}");
        if port >= 20_000 && TcpListener::bind(&address).is_ok() {
            addresses.push(address);
        }
        if addresses.len() == count {
            return Ok(addresses);
        }
    }
    bail!("no {count} free ports on loopback")
}

/// `rank PURPOSE VARIANT RANK SPLIT HOSTS`: one process of a group.
fn rank_process(arguments: &[String]) -> Result<()> {
    let [purpose, variant, rank, split, hosts] = arguments else {
        bail!("rank PURPOSE VARIANT RANK SPLIT HOSTS")
    };
    let variant = PathBuf::from(variant);
    let oracle: Oracle = serde_json::from_slice(&std::fs::read(variant.join("oracle.json"))?)?;
    let split: Vec<u32> = serde_json::from_str(split)?;
    let rank: u32 = rank.parse()?;
    let runtime = Runtime::start(RuntimeConfig {
        model_dir: variant.clone(),
        layers_per_rank: Some(split),
        rank,
        hosts: hosts.split(',').map(str::to_owned).collect(),
        dtype: if oracle.widen { LoadDtype::Float32 } else { LoadDtype::AsStored },
        blas_threads: 1,
    })?;
    runtime.load().blocking_recv()??;
    let progress = runtime.progress();
    ensure!(
        progress.loaded_bytes == progress.total_bytes && progress.total_bytes > 0,
        "rank {rank} read {} of {} bytes",
        progress.loaded_bytes,
        progress.total_bytes
    );
    runtime.join().blocking_recv()??;
    match (rank, purpose.as_str()) {
        (0, "lose") => lose(runtime, &oracle),
        (0, _) => lead(&runtime, &variant, &oracle),
        _ => follow(&runtime),
    }
}

/// Does what rank 0 says until it says no more.
fn follow(runtime: &Runtime) -> Result<()> {
    for line in std::io::stdin().lines() {
        match serde_json::from_str(&line?)? {
            Order::Step { slot, offset, tokens } => {
                let answer = runtime.step(Step { slot, offset, tokens, choice: None }).blocking_recv()??;
                ensure!(answer.is_none(), "a follower chose a token");
            }
            Order::Reset { slot } => runtime.reset(slot),
        }
    }
    Ok(())
}

/// One good step, then steps until the neighbour, which is being killed, is missed.
fn lose(runtime: Runtime, oracle: &Oracle) -> Result<()> {
    let prompt =
        oracle.prompts.iter().find(|prompt| prompt.len() > 10).context("no prompt is long enough")?;
    let mut said = false;
    for (offset, &token) in prompt.iter().enumerate() {
        let (slot, offset, tokens) = (0, offset as u32, vec![token]);
        say("order", &Order::Step { slot, offset, tokens: tokens.clone() })?;
        if let Err(error) = runtime.step(Step { slot, offset, tokens, choice: None }).blocking_recv()? {
            return say("failed", &error.to_string());
        }
        if !said {
            say("stepped", &0)?;
            said = true;
            // The parent kills the neighbour now. Whether the next step meets it dying or dead does not matter.
        }
    }
    bail!("{} steps went well without a neighbour", prompt.len())
}

/// One sequence under comparison.
struct Sequence<'a> {
    prompt: &'a [u32],
    tokens: &'a [u32],
    gaps: &'a [f32],
    logprobs: &'a [f32],
    /// Tokens asked for so far, so in the caches.
    length: usize,
    /// Tokens compared.
    compared: usize,
}

/// Runs every prompt, a few at a time, and compares.
fn lead(runtime: &Runtime, variant: &Path, oracle: &Oracle) -> Result<()> {
    let bytes = std::fs::read(variant.join("oracle.f32"))?;
    let logprobs: Vec<f32> =
        bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]])).collect();
    let per_prompt = oracle.tokens.first().map_or(0, Vec::len) * oracle.vocabulary;
    ensure!(logprobs.len() == per_prompt * oracle.prompts.len(), "oracle.f32 does not belong to oracle.json");
    ensure!(
        oracle.prompts.len() >= 20 && per_prompt / oracle.vocabulary >= 64,
        "the oracle answered too little"
    );

    let mut sequences: Vec<Sequence<'_>> = oracle
        .prompts
        .iter()
        .zip(&oracle.tokens)
        .zip(&oracle.gaps)
        .zip(logprobs.chunks_exact(per_prompt))
        .map(|(((prompt, tokens), gaps), logprobs)| Sequence {
            prompt,
            tokens,
            gaps,
            logprobs,
            length: 0,
            compared: 0,
        })
        .collect();
    let mut report = Report::default();
    for some in sequences.chunks_mut(SLOTS) {
        run_together(runtime, some, oracle, &mut report)?;
    }
    let share = report.excused as f64 / report.tokens as f64;
    ensure!(
        share <= EXCUSED_SHARE,
        "{} of {} tokens were excused, more than 1 %",
        report.excused,
        report.tokens
    );
    say("report", &report)
}

fn run_together(
    runtime: &Runtime,
    sequences: &mut [Sequence<'_>],
    oracle: &Oracle,
    report: &mut Report,
) -> Result<()> {
    while sequences.iter().any(|sequence| sequence.compared < sequence.tokens.len()) {
        // All are asked before any is waited for, so that ranks work on different sequences at once.
        let mut answers = Vec::new();
        for (slot, sequence) in sequences.iter_mut().enumerate() {
            if sequence.compared < sequence.tokens.len() {
                let step = sequence.next_step(slot as u32);
                let Step { slot, offset, tokens, .. } = step.clone();
                say("order", &Order::Step { slot, offset, tokens })?;
                answers.push((slot as usize, runtime.step_in_detail(step)));
            }
        }
        for (slot, answer) in answers {
            if let Some(stepped) = answer.blocking_recv()?? {
                sequences[slot].compare(&stepped, oracle, report)?;
            }
        }
    }
    for slot in 0..sequences.len() as u32 {
        say("order", &Order::Reset { slot })?;
        runtime.reset(slot);
    }
    Ok(())
}

impl Sequence<'_> {
    /// The prompt in chunks of 2048 with its last token alone, then one token at a time: as mlx-lm does.
    fn next_step(&mut self, slot: u32) -> Step {
        let offset = self.length as u32;
        let before_last = self.prompt.len() - 1;
        let (tokens, chosen) = if self.length < before_last {
            (self.prompt[self.length..before_last.min(self.length + 2048)].to_vec(), false)
        } else if self.length == before_last {
            (vec![self.prompt[before_last]], true)
        } else {
            (vec![self.tokens[self.compared - 1]], true)
        };
        self.length += tokens.len();
        let index = self.compared as u32;
        let choice =
            chosen.then(|| Choice { sampling: Sampling::default(), seed: 0, index, banned: Arc::from([]) });
        Step { slot, offset, tokens, choice }
    }

    fn compare(&mut self, stepped: &Stepped, oracle: &Oracle, report: &mut Report) -> Result<()> {
        let at = self.compared;
        let expected = &self.logprobs[at * oracle.vocabulary..][..oracle.vocabulary];
        ensure!(stepped.logprobs.len() == expected.len(), "the engine has {} tokens", stepped.logprobs.len());
        let difference = expected
            .iter()
            .zip(&stepped.logprobs)
            .map(|(one, other)| (one - other).abs())
            .fold(0.0, |most: f32, one| if one.is_nan() { f32::INFINITY } else { most.max(one) });
        let place = || format!("token {at} after a prompt of {}", self.prompt.len());
        let tolerance = tolerance(&oracle.dtype);
        ensure!(
            difference <= tolerance,
            "{}: log-probabilities differ by {difference}, more than {tolerance}",
            place()
        );

        let close = self.gaps[at] <= 10.0 * tolerance;
        let (ours, theirs) = (stepped.sampled.token, self.tokens[at]);
        if ours != theirs {
            ensure!(close, "{}: {ours} instead of {theirs}, with a gap of {}", place(), self.gaps[at]);
            report.excused += 1;
        }
        report.close_calls += usize::from(close);
        report.tokens += 1;
        report.largest_difference = report.largest_difference.max(difference);
        self.compared += 1;
        Ok(())
    }
}

fn say(word: &str, value: &impl Serialize) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{word} {}", serde_json::to_string(value)?)?;
    out.flush()?;
    Ok(())
}
