//! What is sampled, against mlx-lm's own processors: no token that they drop, and the others as often as they say. Seeds are fixed, so the draws are the same in every run.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use mlx_rs::Array;
use russet_engine::executor::SampleSpec;
use russet_engine::logit_edits::LogitEdits;
use russet_engine::sample::{SampledTokens, edited};
use russet_tests::provided;
use russet_wire::request::Sampling;
use serde_json::{Value, json};

/// Tokens of the vocabulary.
const VOCABULARY: usize = 48;
/// Draws of each case.
const DRAWS: u32 = 2000;

/// Logits with steps between them of which none is a tie.
fn logits(seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from((state >> 16) as u16) / 65536.0
    };
    (0..VOCABULARY).map(|_| next() * 6.0 - 2.0).collect()
}

/// A case: what it is called, and the parameters under their names in requests.
fn cases() -> Vec<(&'static str, Value)> {
    vec![
        ("greedy", json!({"temperature": 0.0})),
        ("a subnormal temperature", json!({"temperature": 1e-40})),
        ("plain", json!({"temperature": 1.0})),
        ("cold", json!({"temperature": 0.3})),
        ("hot", json!({"temperature": 2.0})),
        ("top-p", json!({"temperature": 1.0, "top_p": 0.8})),
        ("min-p", json!({"temperature": 1.0, "min_p": 0.1})),
        ("top-k", json!({"temperature": 0.8, "top_k": 7})),
        ("top-p, min-p and top-k", json!({"temperature": 1.3, "top_p": 0.9, "min_p": 0.02, "top_k": 12})),
        ("XTC", json!({"temperature": 1.0, "xtc_threshold": 0.05})),
        ("XTC of one top choice", json!({"temperature": 1.0, "xtc_threshold": 0.4})),
        (
            "XTC after top-p, before top-k",
            json!({"temperature": 1.0, "top_p": 0.9, "xtc_threshold": 0.06, "top_k": 5}),
        ),
        ("typical", json!({"temperature": 1.0, "typical_p": 0.6})),
        ("typical of little", json!({"temperature": 0.7, "typical_p": 0.1})),
        ("typical, then top-p", json!({"temperature": 1.0, "typical_p": 0.9, "top_p": 0.7})),
        ("a bias", json!({"temperature": 1.0, "logit_bias": {"3": 4.0, "9": -100.0}})),
        ("a repetition penalty", json!({"temperature": 1.0, "repetition_penalty": 1.8})),
    ]
}

fn sampling(case: &Value) -> Sampling {
    let number = |name: &str, usual: f32| case[name].as_f64().map_or(usual, |number| number as f32);
    Sampling {
        temperature: number("temperature", 1.0),
        top_p: number("top_p", 1.0),
        min_p: number("min_p", 0.0),
        top_k: case["top_k"].as_u64().unwrap_or(0) as u32,
        typical_p: number("typical_p", 1.0),
        xtc_threshold: number("xtc_threshold", 0.1),
        xtc_probability: if case["xtc_threshold"].is_number() { 1.0 } else { 0.0 },
        ..Sampling::default()
    }
}

/// Tokens that are there already.
const TOKENS: [u32; 4] = [0, 5, 7, 30];

fn edits(case: &Value) -> Option<Arc<LogitEdits>> {
    let mut edits: BTreeMap<u32, (f32, f32)> = BTreeMap::new();
    for (token, bias) in case["logit_bias"].as_object().into_iter().flatten() {
        edits.insert(token.parse().unwrap(), (1.0, bias.as_f64().unwrap() as f32));
    }
    if let Some(penalty) = case["repetition_penalty"].as_f64() {
        edits.extend(TOKENS.map(|token| (token, (penalty as f32, 0.0))));
    }
    let (tokens, changes): (Vec<u32>, Vec<(f32, f32)>) = edits.into_iter().unzip();
    let (factors, added) = changes.into_iter().unzip();
    (!tokens.is_empty()).then(|| Arc::new(LogitEdits { tokens, factors, added }))
}

/// What the oracle would sample from; `None` without a Python, which CI does not allow.
fn oracle(cases: &[Value]) -> Option<Vec<Vec<f64>>> {
    let python = provided::path("RUSSET_PYTHON")?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sampling/oracle.py");
    let mut child =
        Command::new(python).arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(Value::from(cases.to_vec()).to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "oracle.py failed: {}", output.status);
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

/// How often each token is drawn, in one batch of rows.
fn drawn(case: &Value, logits: &[f32]) -> Vec<u32> {
    let sampling = Arc::new(sampling(case));
    let edits = edits(case);
    let spec = |index| SampleSpec {
        sampling: sampling.clone(),
        seed: 11,
        edits: edits.clone(),
        ..SampleSpec::greedy(index)
    };
    let specs: Vec<SampleSpec> = (0..DRAWS).map(spec).collect();
    let rows: Vec<f32> = specs.iter().flat_map(|_| logits.iter().copied()).collect();
    let rows = Array::from_slice(&rows, &[DRAWS as i32, VOCABULARY as i32]);
    // Rows with edits are changed one by one: all of them have the same.
    let first = edited(&specs[..1], &Array::from_slice(logits, &[1, VOCABULARY as i32])).unwrap();
    let rows = mlx_rs::ops::broadcast_to(&first, rows.shape()).unwrap();
    let logprobs = log_softmax(&rows);
    let mut counts = vec![0; VOCABULARY];
    for token in SampledTokens::sample(&specs, &logprobs, &logprobs).unwrap().read().unwrap() {
        counts[token.unwrap().id as usize] += 1;
    }
    counts
}

fn log_softmax(logits: &Array) -> Array {
    logits.subtract(logits.logsumexp_axis(-1, true).unwrap()).unwrap()
}

/// Pearson's statistic, and its degrees of freedom, over tokens that are expected five times or more.
fn statistic(counts: &[u32], expected: &[f64]) -> (f64, f64) {
    let (mut sum, mut cells) = (0.0, 0.0_f64);
    let (mut rest, mut rest_expected) = (0.0, 0.0);
    for (count, probability) in counts.iter().zip(expected) {
        let mean = probability * f64::from(DRAWS);
        if mean < 5.0 {
            rest += f64::from(*count);
            rest_expected += mean;
        } else {
            sum += (f64::from(*count) - mean).powi(2) / mean;
            cells += 1.0;
        }
    }
    if rest_expected >= 5.0 {
        sum += (rest - rest_expected).powi(2) / rest_expected;
        cells += 1.0;
    }
    (sum, (cells - 1.0).max(1.0))
}

#[test]
fn tokens_are_drawn_as_mlx_lm_would() {
    let all: Vec<(String, Vec<f32>, Value)> = cases()
        .into_iter()
        .flat_map(|(name, case)| {
            [3, 8].map(|seed| (format!("{name}, logits {seed}"), logits(seed), case.clone()))
        })
        .collect();
    let asked: Vec<Value> = all
        .iter()
        .map(|(_, logits, case)| {
            let mut case = case.clone();
            case["logits"] = json!(logits);
            case["tokens"] = json!(TOKENS);
            case
        })
        .collect();
    let Some(expected) = oracle(&asked) else { return };
    println!("| case | tokens | drawn | statistic | of |\n|---|---|---|---|---|");
    for ((name, logits, case), expected) in all.iter().zip(&expected) {
        let counts = drawn(case, logits);
        let possible = expected.iter().filter(|probability| **probability > 1e-9).count();
        let found = counts.iter().filter(|count| **count > 0).count();
        for (token, (count, probability)) in counts.iter().zip(expected).enumerate() {
            assert!(
                *count == 0 || *probability > 1e-9,
                "{name}: token {token} is dropped, and drawn {count} times"
            );
        }
        let (sum, degrees) = statistic(&counts, expected);
        // Five standard deviations of a chi-squared sum.
        let most = degrees + 5.0 * (2.0 * degrees).sqrt();
        println!("| {name} | {possible} | {found} | {sum:.1} | {most:.1} |");
        assert!(sum <= most, "{name}: {sum:.1}, more than {most:.1}");
    }
}

#[test]
fn top_choices_are_excluded_as_often_as_asked() {
    let logits: Vec<f32> = (0..VOCABULARY).map(|token| if token == 4 { 5.0 } else { 0.0 }).collect();
    let case = json!({"temperature": 1.0});
    let rate = |probability: f32| {
        let mut asked = sampling(&case);
        (asked.xtc_probability, asked.xtc_threshold) = (probability, 0.001);
        let sampling = Arc::new(asked);
        let specs: Vec<SampleSpec> = (0..DRAWS)
            .map(|index| SampleSpec { sampling: sampling.clone(), seed: 3, ..SampleSpec::greedy(index) })
            .collect();
        let row = Array::from_slice(&logits, &[1, VOCABULARY as i32]);
        let rows = mlx_rs::ops::broadcast_to(&row, &[DRAWS as i32, VOCABULARY as i32]).unwrap();
        let logprobs = log_softmax(&rows);
        let sampled = SampledTokens::sample(&specs, &logprobs, &logprobs).unwrap().read().unwrap();
        let best = sampled.into_iter().filter(|token| token.as_ref().unwrap().id == 4).count();
        best as f64 / f64::from(DRAWS)
    };
    let unexcluded = rate(0.0);
    assert!(unexcluded > 0.7, "{unexcluded}");
    for probability in [0.25, 0.5, 1.0] {
        let expected = unexcluded * (1.0 - f64::from(probability));
        let found = rate(probability);
        // Five standard deviations of 2,000 draws are below 6 %.
        assert!((found - expected).abs() < 0.06, "{found} at {probability}, not {expected}");
    }
}
