//! Sampler: tokens from log-probabilities, for all rows of a batch at once and without waiting for any value.
//! The sampled tokens are an array like any other, so the next step can start before they are read.
//!
//! Filters apply in mlx-lm's order: top-p, min-p, top-k, then the temperature. Sampling takes the argmax of
//! log-probabilities plus Gumbel noise, which depends only on the request's seed and the token's index.

use mlx_rs::{
    Array, Dtype,
    error::Exception,
    ops::{argsort_axis, indexing::TryIndexOp, indexing::argmax_axis, logical_and, select, stack},
    random,
};
use russet_wire::request::Sampling;

use crate::executor::{SampleError, SampleSpec};
use crate::logit_edits::LogitEdits;

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
}

impl SampledTokens {
    /// Samples a token for each row of `logprobs`, `[rows, vocabulary]` in float32, by its sample spec.
    pub fn sample(choices: &[SampleSpec], logprobs: &Array) -> Result<Self, Exception> {
        let finite = logprobs.is_finite()?.all_axis(-1, false)?;
        let allowed = without_banned(choices, logprobs)?;
        let best = argmax_axis(&allowed, -1, false)?;
        let greedy: Vec<bool> = choices.iter().map(|choice| is_greedy(&choice.sampling)).collect();
        let chosen = if greedy.iter().all(|greedy| *greedy) {
            best
        } else {
            let greedy = Array::from_slice(&greedy, &[choices.len() as i32]);
            select(greedy, best, draw(choices, &allowed)?)?
        };
        let nothing = |code: u32| Array::from_slice(&[code], &[1]);
        Ok(Self {
            codes: select(&finite, &chosen, nothing(NOT_FINITE))?,
            ids: select(&finite, &chosen, nothing(0))?,
        })
    }

    /// The arrays to evaluate before the tokens can be read.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        [&self.codes, &self.ids].into_iter()
    }

    /// Waits for the tokens.
    pub fn read(&self) -> Result<Vec<Result<u32, SampleError>>, Exception> {
        let token = |code| if code == NOT_FINITE { Err(SampleError::NotFinite) } else { Ok(code) };
        let codes = self.codes.to_vec_exact::<u32>();
        Ok(codes.map_err(|error| Exception::custom(error.to_string()))?.into_iter().map(token).collect())
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

/// Masks banned tokens.
fn without_banned(choices: &[SampleSpec], logprobs: &Array) -> Result<Array, Exception> {
    let vocabulary = logprobs.dim(1) as u32;
    let banned = |choice: &SampleSpec| -> Vec<u32> {
        choice.banned.iter().copied().filter(|token| *token < vocabulary).collect()
    };
    let Some((first, others)) = choices.split_first() else { return Ok(logprobs.clone()) };
    // Usually all rows have the same list.
    if others.iter().all(|other| other.banned == first.banned) {
        return ban(&banned(first), logprobs);
    }
    let rows = choices.iter().enumerate().map(|(row, choice)| {
        let row = row as i32;
        ban(&banned(choice), &logprobs.try_index((row..row + 1, ..))?)
    });
    mlx_rs::ops::concatenate(&rows.collect::<Result<Vec<_>, _>>()?, 0)
}

fn ban(tokens: &[u32], rows: &Array) -> Result<Array, Exception> {
    if tokens.is_empty() {
        return Ok(rows.clone());
    }
    let indices = Array::from_slice(tokens, &[1, tokens.len() as i32]);
    let indices = mlx_rs::ops::broadcast_to(indices, &[rows.dim(0), tokens.len() as i32])?;
    rows.put_along_axis(indices, Array::from_f32(f32::NEG_INFINITY), -1)
}

/// A random token for each row, by probability at its temperature, among the tokens that pass its filters;
/// the values of greedy rows are meaningless.
fn draw(choices: &[SampleSpec], logprobs: &Array) -> Result<Array, Exception> {
    let vocabulary = logprobs.dim(1);
    let column = |value: fn(&Sampling) -> f32| {
        let values: Vec<f32> = choices.iter().map(|choice| value(&choice.sampling)).collect();
        Array::from_slice(&values, &[choices.len() as i32, 1])
    };
    let temperature = column(|sampling| if is_greedy(sampling) { 1.0 } else { sampling.temperature });
    let noise = choices.iter().map(|choice| random::gumbel::<f32>(&[vocabulary][..], &noise_key(choice)?));
    let noise = stack(&noise.collect::<Result<Vec<_>, _>>()?, 0)?;
    if !choices.iter().any(|choice| is_filtered(&choice.sampling)) {
        return argmax_axis(logprobs.divide(temperature)?.add(noise)?, -1, false);
    }
    // Most probable first; the sort is stable, so the token id breaks ties.
    let order = argsort_axis(logprobs.negative()?, -1)?;
    let sorted = logprobs.take_along_axis(&order, -1)?;
    let mass = sorted.exp()?;
    let before = mass.cumsum(-1, None, None)?.subtract(&mass)?;
    // A disabled filter must not cut tokens because of rounding in the sum.
    let nucleus = column(|sampling| if has_top_p(sampling) { sampling.top_p } else { 2.0 });
    let mut allowed = before.lt(nucleus.multiply(mass.sum_axis(-1, true)?)?)?;
    let floor = column(|sampling| sampling.min_p.max(0.0).ln());
    allowed = logical_and(allowed, sorted.ge(sorted.try_index((.., 0..1))?.add(floor)?)?)?;
    let places = Array::arange::<i32, f32>(None, vocabulary, None)?;
    let most = column(|sampling| if sampling.top_k > 0 { sampling.top_k as f32 } else { f32::INFINITY });
    allowed = logical_and(allowed, places.lt(most)?)?;
    let scaled = select(allowed, sorted.divide(temperature)?, Array::from_f32(f32::NEG_INFINITY))?;
    // The noise is indexed by token, so a row without filters gets the same token as in the unfiltered path.
    let place = argmax_axis(scaled.add(noise.take_along_axis(&order, -1)?)?, -1, true)?;
    order.take_along_axis(place, -1)?.flatten(None, None)?.as_dtype(Dtype::Uint32)
}

fn is_greedy(sampling: &Sampling) -> bool {
    sampling.temperature < MIN_TEMPERATURE
}

fn has_top_p(sampling: &Sampling) -> bool {
    sampling.top_p > 0.0 && sampling.top_p < 1.0
}

fn is_filtered(sampling: &Sampling) -> bool {
    has_top_p(sampling) || sampling.min_p > 0.0 || sampling.top_k > 0
}

/// Random key of one token: it depends only on the seed and the index, so a resumed output continues
/// unchanged.
fn noise_key(choice: &SampleSpec) -> Result<Array, Exception> {
    // Seeds within a request differ by a constant that shares no factor with 2^64.
    random::key(choice.seed.wrapping_add(u64::from(choice.index).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    type SampledToken = Result<u32, SampleError>;

    /// Samples the same logits with each spec.
    fn choose(choices: &[SampleSpec], logprobs: &[f32]) -> Vec<SampledToken> {
        let rows: Vec<f32> = choices.iter().flat_map(|_| logprobs.iter().copied()).collect();
        let rows = Array::from_slice(&rows, &[choices.len() as i32, logprobs.len() as i32]);
        SampledTokens::sample(choices, &rows).unwrap().read().unwrap()
    }

    fn tokens(choices: &[SampleSpec], probabilities: &[f32]) -> Vec<u32> {
        let logprobs: Vec<f32> = probabilities.iter().map(|probability| probability.ln()).collect();
        choose(choices, &logprobs).into_iter().map(Result::unwrap).collect()
    }

    fn sampling(temperature: f32, top_p: f32, top_k: u32, min_p: f32) -> Sampling {
        Sampling { temperature, top_p, top_k, min_p, ..Sampling::default() }
    }

    fn choice(sampling: &Sampling, banned: &[u32], seed: u64, index: u32) -> SampleSpec {
        SampleSpec { sampling: sampling.clone(), seed, index, banned: Arc::from(banned), edits: None }
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
