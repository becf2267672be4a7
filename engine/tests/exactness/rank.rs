//! One process of a group: rank 0 runs the comparison, the other ranks execute its steps.

use std::{io::Write, path::Path};

use anyhow::{Context, Result, bail, ensure};
use russet_engine::{
    executor::{DraftRewind, Executor, SampleSpec, SequenceStep},
    prefix_cache,
    runtime::{Runtime, RuntimeConfig, StepOutput},
    weights::LoadDtype,
};
use russet_wire::{engine_config::OverlapScheduling, engine_options::RouterBroadcast};
use serde::{Deserialize, Serialize};

use crate::{Case, ComparisonReport, Oracle, group::RankOrders};

/// Sequences that run at once, step by step in turn, as in a busy engine.
const SLOTS: usize = 4;

/// How concurrent sequences are batched.
#[derive(Clone, Copy)]
enum Batching {
    /// Each in a batch of its own, as in mlx-lm.
    Separate,
    /// All in one batch. Matrix products of several rows are summed in another order than those of one row.
    Together,
    /// All in one batch, with draft tokens, some of them wrong.
    Speculative,
}

impl Batching {
    /// Output tokens that are compared. Sequences that are also compared one by one need only enough in
    /// batches for batches to begin, grow and end.
    fn answers(self) -> usize {
        match self {
            Self::Separate => usize::MAX,
            Self::Together => 16,
            Self::Speculative => 24,
        }
    }
}

/// Tolerances of a comparison.
#[derive(Clone, Copy)]
struct Tolerance {
    /// Maximum difference of log-probabilities.
    difference: f32,
    /// Tokens may differ where the gap between the oracle's two best tokens is at most this.
    gap: f32,
    /// Maximum share of such tokens.
    excused: f64,
    /// Such tokens, where there are too few for a share.
    spare: f64,
}

impl Tolerance {
    /// With the same kernels on both sides the results are equal bit by bit; with other BLAS kernels on one
    /// side, float32 differed by 5e-6.
    fn equal(dtype: &str) -> Self {
        let difference = if dtype == "float32" { 5e-5 } else { 1e-3 };
        Self { difference, gap: 10.0 * difference, excused: 0.01, spare: 0.0 }
    }

    /// A tensor parallel stage against a single rank, which sums in another order: in float32 the same rule
    /// holds. In 16 bits, mlx-lm's own sharding differed from itself by 0.25, two steps of the largest
    /// numbers, and 2 of 100 tokens differed, where the best two were at most 0.03 apart. With a quantised
    /// cache this rule applies to batches too: a value that rounds the other way moves by a whole step, in
    /// float32 by 7.7e-4 of a log-probability in 8 bits and 5.0e-3 in 4 bits.
    fn rounding(oracle: &Oracle) -> Self {
        match (oracle.dtype.as_str(), oracle.kv_bits) {
            ("float32", None) => Self::equal(&oracle.dtype),
            ("float32", Some(8)) => Self { difference: 5e-3, gap: 1e-2, excused: 0.01, spare: 0.0 },
            ("float32", Some(_)) => Self { difference: 4e-2, gap: 8e-2, excused: 0.05, spare: 0.0 },
            _ => Self { difference: 0.5, gap: 0.1, excused: 0.05, spare: 0.0 },
        }
    }
}

/// Orders of rank 0 to the other ranks, relayed by the parent.
#[derive(Serialize, Deserialize)]
enum LeaderMessage {
    Run(Vec<StepMessage>),
    Trim { slot: u32, length: u32 },
    Reset { slot: u32 },
}

/// A step, as sent to the other ranks.
#[derive(Serialize, Deserialize)]
struct StepMessage {
    slot: u32,
    offset: u32,
    tokens: Vec<u32>,
    draft_tokens: u32,
    adapter: u32,
}

impl StepMessage {
    fn from_step(step: &SequenceStep) -> Self {
        let SequenceStep { slot, offset, tokens, draft_tokens, adapter, sample: _, score: _ } = step;
        let (slot, offset, adapter) = (*slot, *offset, *adapter);
        Self { slot, offset, tokens: tokens.clone(), draft_tokens: *draft_tokens, adapter }
    }

    fn step(self) -> SequenceStep {
        let Self { slot, offset, tokens, draft_tokens, adapter } = self;
        SequenceStep { slot, offset, tokens, draft_tokens, adapter, sample: None, score: None }
    }
}

/// `rank PURPOSE ORDERS`: one process of a group.
pub fn run(arguments: &[String]) -> Result<()> {
    let [purpose, orders] = arguments else { bail!("rank PURPOSE ORDERS") };
    let RankOrders { case, rank, addresses } = serde_json::from_str(orders)?;
    let oracle = Oracle::read(&case.oracle)?;
    let runtime = Runtime::start(RuntimeConfig {
        model_dir: case.model.clone(),
        layers_per_rank: Some(case.layers_per_rank()),
        tensor_size: case.members,
        rank,
        devices: None,
        dtype: if oracle.widen { LoadDtype::Float32 } else { LoadDtype::AsStored },
        quantization: oracle.quantization()?,
        kv_cache: oracle.kv_cache()?,
        router_broadcast: RouterBroadcast::Auto,
        blas_threads: 1,
        overlap: OverlapScheduling::Auto,
        wired: true,
        disk_cache: None,
        draft_dir: None,
        adapters: oracle.adapters(&case.model),
    })?;
    runtime.load().blocking_recv()??;
    let progress = runtime.progress();
    ensure!(
        progress.loaded_bytes == progress.total_bytes && progress.total_bytes > 0,
        "rank {rank} read {} of {} bytes",
        progress.loaded_bytes,
        progress.total_bytes
    );
    runtime.join(addresses).blocking_recv()??;
    match (rank, purpose.as_str()) {
        (0, "lose") => lose(runtime, &oracle),
        (0, _) => lead(&runtime, &case, &oracle),
        _ => follow(&runtime),
    }
}

/// Executes rank 0's orders until its input ends.
fn follow(runtime: &Runtime) -> Result<()> {
    for line in std::io::stdin().lines() {
        match serde_json::from_str(&line?)? {
            LeaderMessage::Run(batch) => {
                let batch: Vec<SequenceStep> = batch.into_iter().map(StepMessage::step).collect();
                let answers = runtime.run(batch).blocking_recv()??;
                ensure!(answers.iter().all(|answer| answer.sampled.is_empty()), "a follower chose a token");
            }
            LeaderMessage::Trim { slot, length } => {
                runtime.apply_cache_command(prefix_cache::CacheCommand::Truncate { slot, length })
            }
            LeaderMessage::Reset { slot } => runtime.reset(slot),
        }
    }
    Ok(())
}

/// One successful step, then steps until the loss of the neighbour, which is being killed, is detected.
fn lose(runtime: Runtime, oracle: &Oracle) -> Result<()> {
    let prompt =
        oracle.prompts.iter().find(|prompt| prompt.len() > 10).context("no prompt is long enough")?;
    let mut said = false;
    for (offset, &token) in prompt.iter().enumerate() {
        let step = SequenceStep {
            slot: 0,
            offset: offset as u32,
            tokens: vec![token],
            draft_tokens: 0,
            adapter: oracle.adapter(),
            sample: None,
            score: None,
        };
        say("order", &LeaderMessage::Run(vec![StepMessage::from_step(&step)]))?;
        if let Err(error) = runtime.run(vec![step]).blocking_recv()? {
            return say("failed", &error.to_string());
        }
        if !said {
            say("stepped", &0)?;
            said = true;
            // The parent kills the neighbour now. Whether the next step meets it dying or dead does not
            // matter.
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
    /// Tokens requested so far, which are in the caches.
    length: usize,
    /// Tokens in the caches before the last step.
    step_offset: usize,
    /// Tokens compared.
    compared: usize,
    /// Accepted draft tokens of the last step.
    accepted_draft_tokens: usize,
    /// Number of the adapter that answers.
    adapter: u32,
}

/// Compares the group with its oracle, and a tensor parallel one with the oracle of a single rank too.
fn lead(runtime: &Runtime, case: &Case, oracle: &Oracle) -> Result<()> {
    let (prompts, tokens) = match case.members {
        1 => (20, 64),
        2 => (8, 32),
        _ => (4, 12),
    };
    let answered = oracle.tokens.iter().map(Vec::len).min().unwrap_or_default();
    ensure!(oracle.prompts.len() >= prompts && answered >= tokens, "the oracle answered too little");
    let shortened = case.brief.then(|| oracle.brief());
    let asked = shortened.as_ref().unwrap_or(oracle);
    let spare = f64::from(u8::from(case.brief));
    let equal = Tolerance { spare, ..Tolerance::equal(&oracle.dtype) };
    let alike = case.members == 1 && oracle.kv_bits.is_none();
    let batched = if alike { equal } else { Tolerance { spare, ..Tolerance::rounding(oracle) } };
    let apart = compare(runtime, &case.oracle, oracle, asked, equal, Batching::Separate)?;
    let together = compare(runtime, &case.oracle, oracle, asked, batched, Batching::Together);
    let together = together.context("in batches")?;
    let mut reports = vec![apart, ComparisonReport { beside: "in batches ".to_owned(), ..together }];
    let drafted = compare(runtime, &case.oracle, oracle, asked, batched, Batching::Speculative);
    let drafted = drafted.context("with drafts")?;
    ensure!(drafted.rejected > 0, "no draft token was rejected");
    reports.push(ComparisonReport { beside: "with drafts ".to_owned(), ..drafted });
    if case.layers_per_rank().len() == 1 {
        reports
            .push(compare_overlapped(runtime, oracle, batched).context("with tokens that nobody has read")?);
    }
    if case.members > 1 {
        let alone = Oracle::read(&case.model)?;
        let rule = Tolerance { spare, ..Tolerance::rounding(&alone) };
        let report = compare(runtime, &case.model, &alone, asked, rule, Batching::Separate);
        let report = report.context("compared with a single rank")?;
        reports.push(ComparisonReport { beside: "beside a single rank ".to_owned(), ..report });
    }
    say("report", &reports)
}

/// Runs every prompt that the other oracle has too, a few at a time, for as many tokens, and compares.
fn compare(
    runtime: &Runtime,
    folder: &Path,
    oracle: &Oracle,
    asked: &Oracle,
    rule: Tolerance,
    turns: Batching,
) -> Result<ComparisonReport> {
    let bytes = std::fs::read(folder.join("oracle.f32"))?;
    let logprobs: Vec<f32> =
        bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]])).collect();
    let per_prompt = oracle.tokens.first().map_or(0, Vec::len) * oracle.vocabulary;
    ensure!(logprobs.len() == per_prompt * oracle.prompts.len(), "oracle.f32 does not belong to oracle.json");
    let expected = asked.tokens.first().map_or(0, Vec::len).min(turns.answers());
    let mut sequences: Vec<Sequence<'_>> = oracle
        .prompts
        .iter()
        .zip(&oracle.tokens)
        .zip(&oracle.gaps)
        .zip(logprobs.chunks_exact(per_prompt))
        .filter(|(((prompt, _), _), _)| asked.prompts.contains(prompt))
        .map(|(((prompt, tokens), gaps), logprobs)| Sequence {
            prompt,
            tokens: &tokens[..expected],
            gaps,
            logprobs,
            length: 0,
            step_offset: 0,
            compared: 0,
            accepted_draft_tokens: 0,
            adapter: asked.adapter(),
        })
        .collect();
    ensure!(sequences.len() == asked.prompts.len(), "the oracles were not asked the same");
    let mut report = ComparisonReport::default();
    for some in sequences.chunks_mut(SLOTS) {
        run_some(runtime, some, oracle, (rule, turns), &mut report)?;
    }
    let allowed = rule.spare.max(rule.excused * report.tokens as f64);
    ensure!(
        report.excused as f64 <= allowed,
        "{} of {} tokens were excused, too many",
        report.excused,
        report.tokens
    );
    Ok(report)
}

fn run_some(
    runtime: &Runtime,
    sequences: &mut [Sequence<'_>],
    oracle: &Oracle,
    (rule, turns): (Tolerance, Batching),
    report: &mut ComparisonReport,
) -> Result<()> {
    while sequences.iter().any(|sequence| sequence.compared < sequence.tokens.len()) {
        // All steps start before any is awaited, so that ranks work on different sequences at once.
        let steps = sequences.iter_mut().enumerate();
        let steps = steps.filter(|(_, sequence)| sequence.compared < sequence.tokens.len());
        let drafts = matches!(turns, Batching::Speculative);
        let steps: Vec<SequenceStep> =
            steps.map(|(slot, sequence)| sequence.next_step(slot as u32, drafts)).collect();
        let batches: Vec<Vec<SequenceStep>> = match turns {
            Batching::Separate => steps.into_iter().map(|step| vec![step]).collect(),
            Batching::Together | Batching::Speculative => vec![steps],
        };
        let mut answers = Vec::new();
        for batch in batches {
            say("order", &LeaderMessage::Run(batch.iter().map(StepMessage::from_step).collect()))?;
            let slots: Vec<usize> = batch.iter().map(|step| step.slot as usize).collect();
            answers.push((slots, runtime.run_detailed(batch)));
        }
        for (slots, answer) in answers {
            for (slot, stepped) in slots.into_iter().zip(answer.blocking_recv()??) {
                let sequence = &mut sequences[slot];
                let drafted = stepped.len().saturating_sub(1);
                // After a rejected draft token, nothing matches the oracle.
                let right = drafted.min(sequence.accepted_draft_tokens);
                for stepped in stepped.into_iter().take(right + 1) {
                    sequence.compare(&stepped?, oracle, rule, report)?;
                }
                if right < drafted {
                    report.rejected += drafted - right;
                    match runtime.cache_support().draft_rewind() {
                        DraftRewind::ToLastAccepted => sequence.length -= drafted - right,
                        DraftRewind::ToStepBeginning => sequence.length = sequence.step_offset,
                    }
                    let (slot, length) = (slot as u32, sequence.length as u32);
                    say("order", &LeaderMessage::Trim { slot, length })?;
                    runtime.apply_cache_command(prefix_cache::CacheCommand::Truncate { slot, length });
                }
            }
        }
    }
    for slot in 0..sequences.len() as u32 {
        say("order", &LeaderMessage::Reset { slot })?;
        runtime.reset(slot);
    }
    Ok(())
}

/// Output tokens whose steps start before the earlier tokens are read.
const OVERLAPPED_TOKENS: usize = 24;

/// Overlap scheduling: some prompts together, each step started before the token of the previous one is read;
/// the sampled token feeds the next step on the device. Equal to the oracle up to the first token where its
/// two best are close.
fn compare_overlapped(runtime: &Runtime, oracle: &Oracle, rule: Tolerance) -> Result<ComparisonReport> {
    let mut report = ComparisonReport { beside: "unread ".to_owned(), ..ComparisonReport::default() };
    for (group, prompts) in oracle.prompts.chunks(SLOTS).take(2).enumerate() {
        let step = |slot: usize, offset: usize, tokens: &[u32], index: Option<usize>| {
            let choice = index.map(|index| SampleSpec::greedy(index as u32));
            SequenceStep {
                slot: slot as u32,
                offset: offset as u32,
                tokens: tokens.to_vec(),
                draft_tokens: 0,
                adapter: oracle.adapter(),
                sample: choice,
                score: None,
            }
        };
        let each = |make: &dyn Fn(usize, &Vec<u32>) -> SequenceStep| -> Vec<SequenceStep> {
            prompts.iter().enumerate().map(|(slot, prompt)| make(slot, prompt)).collect()
        };
        for (slot, prompt) in prompts.iter().enumerate().filter(|(_, prompt)| prompt.len() > 1) {
            runtime.run(vec![step(slot, 0, &prompt[..prompt.len() - 1], None)]).blocking_recv()??;
        }
        let last = each(&|slot, prompt| step(slot, prompt.len() - 1, &prompt[prompt.len() - 1..], Some(0)));
        let mut answers = vec![runtime.run(last)];
        for index in 1..OVERLAPPED_TOKENS {
            let next = each(&|slot, prompt| step(slot, prompt.len() + index - 1, &[], Some(index)));
            answers.push(runtime.run(next));
        }
        let mut open = vec![true; prompts.len()];
        for (at, answer) in answers.into_iter().enumerate() {
            for (slot, chosen) in answer.blocking_recv()??.into_iter().enumerate() {
                if !open[slot] {
                    continue;
                }
                let index = group * SLOTS + slot;
                let (theirs, gap) = (oracle.tokens[index][at], oracle.gaps[index][at]);
                let ours = chosen.sampled.into_iter().next().context("no token was chosen")??;
                report.tokens += 1;
                report.close_calls += usize::from(gap <= rule.gap);
                if ours != theirs {
                    ensure!(
                        gap <= rule.gap,
                        "token {at} of prompt {index}: {}, not {theirs}, gap {gap}",
                        ours.id
                    );
                    report.excused += 1;
                    open[slot] = false;
                }
            }
        }
        (0..prompts.len() as u32).for_each(|slot| runtime.reset(slot));
    }
    ensure!(report.excused * 20 <= report.tokens, "{} of {} tokens differ", report.excused, report.tokens);
    Ok(report)
}

impl Sequence<'_> {
    /// The prompt in chunks of 2048 with its last token alone, then one token at a time, as in mlx-lm; or
    /// with draft tokens, and with the tokens of a step that was taken back.
    fn next_step(&mut self, slot: u32, drafts: bool) -> SequenceStep {
        let offset = self.length as u32;
        self.step_offset = self.length;
        let before_last = self.prompt.len() - 1;
        let (mut tokens, chosen) = if self.length < before_last {
            (self.prompt[self.length..before_last.min(self.length + 2048)].to_vec(), false)
        } else if self.length == before_last {
            (vec![self.prompt[before_last]], true)
        } else {
            (self.tokens[self.length - self.prompt.len()..self.compared].to_vec(), true)
        };
        let known = tokens.len();
        if drafts && self.compared > 0 {
            // None to three correct draft tokens, and a wrong one after every third token.
            let left = &self.tokens[self.compared..];
            let right = left[..left.len() - 1].iter().take(self.compared % 4);
            self.accepted_draft_tokens = right.len();
            tokens.extend(right);
            let behind = self
                .tokens
                .get(self.compared + self.accepted_draft_tokens)
                .filter(|_| self.compared.is_multiple_of(3));
            tokens.extend(behind.map(|token| if *token == 7 { 8 } else { 7 }));
        }
        let drafted = (tokens.len() - known) as u32;
        self.length += tokens.len();
        let index = self.compared as u32;
        let choice = chosen.then(|| SampleSpec::greedy(index));
        let adapter = self.adapter;
        SequenceStep { slot, offset, tokens, draft_tokens: drafted, adapter, sample: choice, score: None }
    }

    fn compare(
        &mut self,
        stepped: &StepOutput,
        oracle: &Oracle,
        rule: Tolerance,
        report: &mut ComparisonReport,
    ) -> Result<()> {
        let at = self.compared;
        let expected = &self.logprobs[at * oracle.vocabulary..][..oracle.vocabulary];
        ensure!(stepped.logprobs.len() == expected.len(), "the engine has {} tokens", stepped.logprobs.len());
        let difference = expected
            .iter()
            .zip(&stepped.logprobs)
            .map(|(one, other)| (one - other).abs())
            .fold(0.0, |most: f32, one| if one.is_nan() { f32::INFINITY } else { most.max(one) });
        let place = || format!("token {at} after a prompt of {}", self.prompt.len());
        ensure!(
            difference <= rule.difference,
            "{}: log-probabilities differ by {difference}, more than {}",
            place(),
            rule.difference
        );

        let close = self.gaps[at] <= rule.gap;
        let (ours, theirs) = (stepped.token, self.tokens[at]);
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
