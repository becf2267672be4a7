//! vLLM's cases for its sampler, as tables: what penalties, biases and bans make of logits that are all the same, in batches
//! of 1, 2 and 32 rows.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use mlx_rs::Array;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use russet_wire::request::Sampling;

use super::{SampledTokens, edited};
use crate::executor::SampleSpec;
use crate::logit_edits::LogitEditor;

const VOCABULARY: u32 = 1024;
/// The same logit for every token.
const LOGIT: f32 = 0.01;

/// A sequence: its prompt, and a response in which each token is once more than the one before.
struct History {
    prompt: Vec<u32>,
    response: Vec<u32>,
    most_frequent: u32,
}

impl History {
    fn random(random: &mut StdRng) -> Self {
        let distinct: BTreeSet<u32> =
            (0..random.random_range(2..10)).map(|_| random.random_range(0..VOCABULARY)).collect();
        let response =
            distinct.iter().enumerate().flat_map(|(index, token)| vec![*token; index + 1]).collect();
        let prompt = (0..random.random_range(1..64)).map(|_| random.random_range(0..VOCABULARY)).collect();
        Self { prompt, response, most_frequent: distinct.last().copied().unwrap() }
    }

    fn spec(&self, sampling: &Sampling) -> SampleSpec {
        let sampling = Arc::new(sampling.clone());
        let mut editor = LogitEditor::new(sampling.clone(), &self.prompt);
        self.response.iter().for_each(|token| editor.count(*token));
        SampleSpec { sampling, edits: editor.edits(), ..SampleSpec::greedy(self.response.len() as u32) }
    }
}

/// The rows of logits after the edits of each spec.
fn rows(specs: &[SampleSpec]) -> Vec<Vec<f32>> {
    let logits = vec![LOGIT; specs.len() * VOCABULARY as usize];
    let logits = Array::from_slice(&logits, &[specs.len() as i32, VOCABULARY as i32]);
    let found = edited(specs, &logits).unwrap().to_vec_exact::<f32>().unwrap();
    found.chunks(VOCABULARY as usize).map(<[f32]>::to_vec).collect()
}

/// The tokens with the lowest logit, and those with the highest one.
fn extremes(row: &[f32]) -> (BTreeSet<u32>, BTreeSet<u32>) {
    let with =
        |logit: f32| (0..).zip(row).filter(|(_, one)| **one == logit).map(|(token, _)| token).collect();
    (
        with(row.iter().copied().fold(f32::INFINITY, f32::min)),
        with(row.iter().copied().fold(f32::NEG_INFINITY, f32::max)),
    )
}

/// Runs a check on each row of batches of 1, 2 and 32 sequences with this sampling.
fn in_batches(sampling: &Sampling, check: impl Fn(&History, &[f32])) {
    for size in [1, 2, 32] {
        let mut random = StdRng::seed_from_u64(size);
        let histories: Vec<History> = (0..size).map(|_| History::random(&mut random)).collect();
        let specs: Vec<SampleSpec> = histories.iter().map(|history| history.spec(sampling)).collect();
        let rows = rows(&specs);
        assert_eq!(rows.len(), histories.len());
        histories.iter().zip(&rows).for_each(|(history, row)| check(history, row));
    }
}

#[test]
fn presence_penalties_are_of_what_was_said() {
    for presence_penalty in [-2.0, 2.0] {
        let sampling = Sampling { presence_penalty, ..Sampling::default() };
        in_batches(&sampling, |history, row| {
            let said: BTreeSet<u32> = history.response.iter().copied().collect();
            let (lowest, highest) = extremes(row);
            let penalised = if presence_penalty > 0.0 { lowest } else { highest };
            assert_eq!(penalised, said, "{presence_penalty}");
        });
    }
}

#[test]
fn frequency_penalties_are_of_how_often() {
    for frequency_penalty in [-2.0, 2.0] {
        let sampling = Sampling { frequency_penalty, ..Sampling::default() };
        in_batches(&sampling, |history, row| {
            let (lowest, highest) = extremes(row);
            let (most, others) = if frequency_penalty > 0.0 { (lowest, highest) } else { (highest, lowest) };
            assert_eq!(most, [history.most_frequent].into(), "{frequency_penalty}");
            assert!(history.response.iter().all(|token| !others.contains(token)), "{frequency_penalty}");
        });
    }
}

#[test]
fn repetition_penalties_are_of_prompt_and_response() {
    for repetition_penalty in [0.1, 1.9] {
        let sampling = Sampling { repetition_penalty, ..Sampling::default() };
        in_batches(&sampling, |history, row| {
            let there: BTreeSet<u32> = history.prompt.iter().chain(&history.response).copied().collect();
            let (lowest, highest) = extremes(row);
            let penalised = if repetition_penalty > 1.0 { lowest } else { highest };
            assert_eq!(penalised, there, "{repetition_penalty}");
        });
    }
}

#[test]
fn a_bias_is_added_to_the_named_tokens_alone() {
    for bias in [-0.1, 1.2] {
        let biases: Vec<BTreeMap<u32, f32>> = (0..32).map(|row| [(row, bias)].into()).collect();
        let history = History { prompt: vec![1], response: vec![2], most_frequent: 2 };
        let spec = |logit_bias: &BTreeMap<u32, f32>| {
            history.spec(&Sampling { logit_bias: logit_bias.clone(), ..Sampling::default() })
        };
        let specs: Vec<SampleSpec> = biases.iter().map(spec).collect();
        for (row, logits) in rows(&specs).iter().enumerate() {
            for (token, logit) in logits.iter().enumerate() {
                let expected = if token == row { LOGIT + bias } else { LOGIT };
                assert!((logit - expected).abs() < 1e-6, "row {row}, token {token}: {logit}");
            }
        }
    }
}

#[test]
fn banned_tokens_are_never_sampled() {
    // As vLLM's `min_tokens` bans end tokens, and as sequences say: each row has bans of its own.
    let mut random = StdRng::seed_from_u64(3);
    for size in [1, 2, 32] {
        let banned: Vec<Vec<u32>> = (0..size)
            .map(|_| {
                (0..random.random_range(0..VOCABULARY)).map(|_| random.random_range(0..VOCABULARY)).collect()
            })
            .collect();
        let sampling = Arc::new(Sampling { temperature: 2.0, ..Sampling::default() });
        let spec = |(row, banned): (u32, &Vec<u32>)| SampleSpec {
            sampling: sampling.clone(),
            banned: Arc::from(banned.as_slice()),
            seed: u64::from(row),
            ..SampleSpec::greedy(row)
        };
        let specs: Vec<SampleSpec> = (0..).zip(&banned).map(spec).collect();
        let logits = vec![-(VOCABULARY as f32).ln(); specs.len() * VOCABULARY as usize];
        let logits = Array::from_slice(&logits, &[specs.len() as i32, VOCABULARY as i32]);
        let sampled = SampledTokens::sample(&specs, &logits, &logits).unwrap().read().unwrap();
        for (sampled, banned) in sampled.into_iter().zip(&banned) {
            assert!(!banned.contains(&sampled.unwrap().id));
        }
    }
}
