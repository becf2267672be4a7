//! Sampler: tokens from log-probabilities, for all rows of a batch at once and without waiting for any value.
//! The sampled tokens are an array like any other, so the next step can start before they are read.
//!
//! Filters apply in mlx-lm's order: top-p, min-p, XTC, top-k, then the temperature; typical-p, which it lacks, before all
//! of them, and what may not be sampled at all before that. Sampling takes the argmax of
//! log-probabilities plus Gumbel noise, which depends only on the request's seed and the token's index.

mod filters;
mod masks;
mod top_logprobs;
#[cfg(test)]
mod vllm_cases;

use mlx_rs::{
    Array, Dtype,
    error::Exception,
    ops::{indexing::TryIndexOp, indexing::argmax_axis, select},
};
use russet_wire::request::Sampling;

use crate::executor::{SampleError, SampleSpec, SampledToken};
use crate::logit_edits::LogitEdits;
use filters::draw;
use masks::masked;
use top_logprobs::TopRows;

/// Temperatures below this are 0, greedy. No two log-probabilities that differ are as close, and dividing by a
/// subnormal number, which a GPU takes for 0, gives infinity for every token.
const MIN_TEMPERATURE: f32 = 1e-6;

/// Marks a row whose log-probabilities contain NaN or infinity. No vocabulary is as large.
const NOT_FINITE: u32 = u32::MAX;

/// Sampled tokens that are not read yet.
#[derive(Debug)]
pub struct SampledTokens {
    /// `[rows]`, with [`NOT_FINITE`] where there is none.
    codes: Array,
    /// `[rows]`, each one valid in the vocabulary.
    pub ids: Array,
    /// Why nothing can be sampled, for each row.
    errors: Vec<Option<SampleError>>,
    top: Option<TopRows>,
}

impl SampledTokens {
    /// Samples a token for each row of `logprobs`, `[rows, vocabulary]` in float32, by its sample spec. `unedited` are
    /// those of the model, before penalties and biases: clients are told of these.
    pub fn sample(choices: &[SampleSpec], logprobs: &Array, unedited: &Array) -> Result<Self, Exception> {
        let finite = logprobs.is_finite()?.all_axis(-1, false)?;
        let (allowed, errors) = masked(choices, logprobs)?;
        let best = argmax_axis(&allowed, -1, false)?;
        let greedy: Vec<bool> = choices.iter().map(|choice| is_greedy(&choice.sampling)).collect();
        let chosen = if greedy.iter().all(|greedy| *greedy) {
            best
        } else {
            let greedy = Array::from_slice(&greedy, &[choices.len() as i32]);
            select(greedy, best, draw(choices, &allowed)?)?
        };
        let nothing = |code: u32| Array::from_slice(&[code], &[1]);
        let ids = select(&finite, &chosen, nothing(0))?;
        let top = TopRows::of(choices, unedited, &ids)?;
        Ok(Self { codes: select(&finite, &chosen, nothing(NOT_FINITE))?, ids, errors, top })
    }

    /// The arrays to evaluate before the tokens can be read.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        [&self.codes, &self.ids].into_iter().chain(self.top.iter().flat_map(TopRows::arrays))
    }

    /// Waits for the tokens.
    pub fn read(&self) -> Result<Vec<Result<SampledToken, SampleError>>, Exception> {
        let codes = self.codes.to_vec_exact::<u32>();
        let codes = codes.map_err(|error| Exception::custom(error.to_string()))?;
        let mut top = self.top.as_ref().map_or(Ok(Vec::new()), TopRows::read)?.into_iter();
        let rows = codes.into_iter().zip(&self.errors);
        Ok(rows
            .map(|(code, error)| {
                let logprobs = top.next().flatten();
                match error {
                    Some(error) => Err(error.clone()),
                    None if code == NOT_FINITE => Err(SampleError::NotFinite),
                    None => Ok(SampledToken { id: code, logprobs }),
                }
            })
            .collect())
    }
}

/// The logits, `[rows, vocabulary]`, with the changes of each row's sample spec; the same array where there are none.
pub fn edited(choices: &[SampleSpec], logits: &Array) -> Result<Array, Exception> {
    if choices.iter().all(|choice| choice.edits.is_none()) {
        return Ok(logits.clone());
    }
    let rows = choices.iter().enumerate().map(|(row, choice)| {
        let row = row as i32;
        let logits = logits.try_index((row..row + 1, ..))?;
        match &choice.edits {
            Some(edits) => edit(edits, &logits),
            None => Ok(logits),
        }
    });
    mlx_rs::ops::concatenate(&rows.collect::<Result<Vec<_>, Exception>>()?, 0)
}

fn edit(edits: &LogitEdits, row: &Array) -> Result<Array, Exception> {
    let vocabulary = row.dim(1) as u32;
    let LogitEdits { tokens, factors, added } = edits;
    let known: Vec<usize> = (0..tokens.len()).filter(|at| tokens[*at] < vocabulary).collect();
    if known.is_empty() {
        return Ok(row.clone());
    }
    let shape = [1, known.len() as i32];
    let column = |values: &[f32]| {
        let values: Vec<f32> = known.iter().map(|at| values[*at]).collect();
        Array::from_slice(&values, &shape)
    };
    let tokens: Vec<u32> = known.iter().map(|at| tokens[*at]).collect();
    let tokens = Array::from_slice(&tokens, &shape);
    let (factors, added) = (column(factors), column(added));
    let before = row.take_along_axis(&tokens, -1)?.as_dtype(Dtype::Float32)?;
    let scaled =
        select(before.gt(Array::from_f32(0.0))?, before.divide(&factors)?, before.multiply(&factors)?)?;
    row.put_along_axis(&tokens, scaled.add(added)?.as_dtype(row.dtype())?, -1)
}

fn is_greedy(sampling: &Sampling) -> bool {
    sampling.temperature < MIN_TEMPERATURE
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Samples the same logits with each spec.
    fn choose(choices: &[SampleSpec], logprobs: &[f32]) -> Vec<Result<u32, SampleError>> {
        let rows: Vec<f32> = choices.iter().flat_map(|_| logprobs.iter().copied()).collect();
        let rows = Array::from_slice(&rows, &[choices.len() as i32, logprobs.len() as i32]);
        let sampled = SampledTokens::sample(choices, &rows, &rows).unwrap().read().unwrap();
        sampled.into_iter().map(|token| token.map(|token| token.id)).collect()
    }

    fn tokens(choices: &[SampleSpec], probabilities: &[f32]) -> Vec<u32> {
        let logprobs: Vec<f32> = probabilities.iter().map(|probability| probability.ln()).collect();
        choose(choices, &logprobs).into_iter().map(Result::unwrap).collect()
    }

    fn sampling(temperature: f32, top_p: f32, top_k: u32, min_p: f32) -> Sampling {
        Sampling { temperature, top_p, top_k, min_p, ..Sampling::default() }
    }

    fn choice(sampling: &Sampling, banned: &[u32], seed: u64, index: u32) -> SampleSpec {
        let (sampling, banned) = (Arc::new(sampling.clone()), Arc::from(banned));
        SampleSpec { sampling, seed, banned, ..SampleSpec::greedy(index) }
    }

    /// Cases of filters, with the tokens of [`PROBABILITIES`] that pass.
    fn cases() -> Vec<(&'static str, Sampling, Vec<u32>, Vec<u32>)> {
        vec![
            ("greedy", sampling(0.0, 1.0, 0, 0.0), vec![], vec![1]),
            ("greedy with the best banned", sampling(0.0, 1.0, 0, 0.0), vec![1], vec![3]),
            ("everything", sampling(1.0, 1.0, 0, 0.0), vec![], vec![0, 1, 2, 3]),
            ("everything but what is banned", sampling(1.0, 1.0, 0, 0.0), vec![0, 3], vec![1, 2]),
            ("top-p cuts after the mass is reached", sampling(1.0, 0.65, 0, 0.0), vec![], vec![1, 3]),
            ("top-p of a renormalised rest", sampling(1.0, 0.49, 0, 0.0), vec![1], vec![3]),
            ("top-k", sampling(1.0, 1.0, 3, 0.0), vec![], vec![1, 2, 3]),
            ("top-k of one is greedy", sampling(1.0, 1.0, 1, 0.0), vec![], vec![1]),
            ("min-p relative to the best", sampling(1.0, 1.0, 0, 0.7), vec![], vec![1, 3]),
            ("all of them", sampling(1.0, 0.95, 3, 0.6), vec![], vec![1, 3]),
            ("banned ids beyond the vocabulary do nothing", sampling(0.0, 1.0, 0, 0.0), vec![99], vec![1]),
        ]
    }

    const PROBABILITIES: [f32; 4] = [0.1, 0.4, 0.2, 0.3];

    #[test]
    fn filters_keep_exactly_the_tokens_they_should() {
        for (case, sampling, banned, expected) in cases() {
            let choices: Vec<SampleSpec> =
                (0..400).map(|index| choice(&sampling, &banned, 7, index)).collect();
            let mut reached = tokens(&choices, &PROBABILITIES);
            reached.sort_unstable();
            reached.dedup();
            assert_eq!(reached, expected, "{case}");
        }
    }

    #[test]
    fn logits_change_by_factor_and_sum_for_one_row_alone() {
        let edits = LogitEdits {
            tokens: vec![0, 1, 99, 3],
            factors: vec![2.0, 2.0, 2.0, 1.0],
            added: vec![0.0, 0.5, 9.0, -1.0],
        };
        let plain = choice(&Sampling::default(), &[], 0, 0);
        let changed = SampleSpec { edits: Some(Arc::new(edits)), ..plain.clone() };
        for dtype in [Dtype::Float32, Dtype::Bfloat16] {
            let logits = Array::from_slice(&[4.0f32, -4.0, 1.0, 2.0, 4.0, -4.0, 1.0, 2.0], &[2, 4]);
            let logits = logits.as_dtype(dtype).unwrap();
            let found = edited(&[plain.clone(), changed.clone()], &logits).unwrap();
            assert_eq!(found.dtype(), dtype);
            let found = found.as_dtype(Dtype::Float32).unwrap().to_vec_exact::<f32>().unwrap();
            assert_eq!(found, [4.0, -4.0, 1.0, 2.0, 2.0, -7.5, 1.0, 1.0]);
        }
    }

    #[test]
    fn batch_rows_sample_as_they_would_alone() {
        let choices: Vec<SampleSpec> = (0..20)
            .flat_map(|index| {
                cases().into_iter().map(move |(_, sampling, banned, _)| (index, sampling, banned))
            })
            .map(|(index, sampling, banned)| choice(&sampling, &banned, 11, index))
            .collect();
        let alone: Vec<u32> =
            choices.iter().flat_map(|one| tokens(std::slice::from_ref(one), &PROBABILITIES)).collect();
        assert_eq!(tokens(&choices, &PROBABILITIES), alone);
    }

    #[test]
    fn the_first_of_equal_tokens_wins_as_in_an_argmax() {
        assert_eq!(choose(&[choice(&Sampling::default(), &[], 0, 0)], &[-2.0, -1.0, -1.0]), [Ok(1)]);
    }

    #[test]
    fn one_seed_gives_one_sequence_from_any_index_on() {
        let draw = |seed, from: u32| {
            let choices: Vec<SampleSpec> =
                (from..32).map(|index| choice(&sampling(1.0, 1.0, 0, 0.0), &[], seed, index)).collect();
            tokens(&choices, &[0.25; 4])
        };
        assert_eq!(draw(1, 0), draw(1, 0));
        assert_eq!(draw(1, 0)[9..], draw(1, 9));
        assert_ne!(draw(1, 0), draw(2, 0));
    }

    #[test]
    fn sampling_follows_probabilities_and_temperature() {
        // Four standard deviations of a thousand draws are 62.
        for (temperature, top_p, least, most) in
            [(1.0, 1.0, 538, 662), (1.0, 0.999, 538, 662), (0.05, 1.0, 975, 1000)]
        {
            let sampling = sampling(temperature, top_p, 0, 0.0);
            let choices: Vec<SampleSpec> = (0..1000).map(|index| choice(&sampling, &[], 3, index)).collect();
            let best = tokens(&choices, &[0.4, 0.6]).into_iter().filter(|&token| token == 1).count();
            assert!((least..=most).contains(&best), "{best} of 1000 at {temperature}");
        }
    }

    #[test]
    fn sampling_rejects_nan_logits_and_fully_banned_vocabularies() {
        let greedy = Sampling::default();
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for sampling in [&greedy, &sampling(1.0, 0.9, 0, 0.0)] {
                assert_eq!(
                    choose(&[choice(sampling, &[], 0, 0)], &[bad, -1.0]),
                    [Err(SampleError::NotFinite)]
                );
            }
        }
        for (banned, left) in [(&[0, 1][..], false), (&[0, 0], true), (&[0, 5], true), (&[1, 5, 0], false)] {
            assert_eq!(choice(&greedy, banned, 0, 0).check(2).is_ok(), left, "{banned:?}");
        }
    }
}
