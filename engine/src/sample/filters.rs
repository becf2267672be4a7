//! Random draws: which tokens pass a row's filters, and one of them by its probability.

use mlx_rs::{
    Array, Dtype,
    error::Exception,
    ops::{argsort_axis, indexing::TryIndexOp, indexing::argmax_axis, logical_and, select, stack},
    random,
};
use russet_wire::request::Sampling;

use super::is_greedy;
use crate::executor::SampleSpec;

/// A random token for each row, by probability at its temperature, among the tokens that pass its filters;
/// the values of greedy rows are meaningless.
pub(super) fn draw(choices: &[SampleSpec], logprobs: &Array) -> Result<Array, Exception> {
    let vocabulary = logprobs.dim(1);
    let column = |value: fn(&Sampling) -> f32| {
        let values: Vec<f32> = choices.iter().map(|choice| value(&choice.sampling)).collect();
        Array::from_slice(&values, &[choices.len() as i32, 1])
    };
    let temperature = column(|sampling| if is_greedy(sampling) { 1.0 } else { sampling.temperature });
    let noise = choices.iter().map(|choice| random::gumbel::<f32>(&[vocabulary][..], &noise_key(choice)?));
    let noise = stack(&noise.collect::<Result<Vec<_>, _>>()?, 0)?;
    let logprobs = &typical(choices, logprobs)?;
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
    let most = column(|sampling| if sampling.top_k > 0 { sampling.top_k as f32 } else { f32::INFINITY });
    let places = Array::arange::<i32, f32>(None, vocabulary, None)?;
    let places = if choices.iter().any(excludes_top) {
        allowed = without_top_choices(choices, &mass, &allowed)?;
        // Those that are left, counted from the first one.
        allowed.as_dtype(Dtype::Float32)?.cumsum(-1, None, None)?.subtract(Array::from_f32(1.0))?
    } else {
        places
    };
    allowed = logical_and(allowed, places.lt(most)?)?;
    let scaled = select(allowed, sorted.divide(temperature)?, Array::from_f32(f32::NEG_INFINITY))?;
    // The noise is indexed by token, so a row without filters gets the same token as in the unfiltered path.
    let place = argmax_axis(scaled.add(noise.take_along_axis(&order, -1)?)?, -1, true)?;
    order.take_along_axis(place, -1)?.flatten(None, None)?.as_dtype(Dtype::Uint32)
}

/// Typical sampling: the tokens whose surprise is nearest to the expected one, down to a mass; the others minus infinity.
fn typical(choices: &[SampleSpec], logprobs: &Array) -> Result<Array, Exception> {
    if !choices.iter().any(|choice| has_typical_p(&choice.sampling)) {
        return Ok(logprobs.clone());
    }
    let masses: Vec<f32> = choices
        .iter()
        .map(|choice| if has_typical_p(&choice.sampling) { choice.sampling.typical_p } else { 2.0 })
        .collect();
    let masses = Array::from_slice(&masses, &[choices.len() as i32, 1]);
    let (zero, infinite) = (Array::from_f32(0.0), Array::from_f32(f32::INFINITY));
    // What was banned before has no part of the mass.
    let surprise = logprobs.logsumexp_axis(-1, true)?.subtract(logprobs)?;
    let mass = surprise.negative()?.exp()?;
    let possible = mass.gt(&zero)?;
    let expected = select(&possible, surprise.multiply(&mass)?, &zero)?.sum_axis(-1, true)?;
    let distance = select(&possible, surprise.subtract(expected)?.abs()?, infinite)?;
    let order = argsort_axis(&distance, -1)?;
    let sorted = mass.take_along_axis(&order, -1)?;
    let before = sorted.cumsum(-1, None, None)?.subtract(&sorted)?;
    let kept = select(
        before.lt(&masses)?,
        distance.take_along_axis(&order, -1)?,
        Array::from_f32(f32::NEG_INFINITY),
    )?;
    let farthest = kept.max_axis(-1, true)?;
    select(distance.le(farthest)?, logprobs, Array::from_f32(f32::NEG_INFINITY))
}

/// Exclusion of top choices: of the tokens above a row's threshold only the least probable one stays. `mass` and
/// `allowed` are sorted.
fn without_top_choices(choices: &[SampleSpec], mass: &Array, allowed: &Array) -> Result<Array, Exception> {
    let thresholds: Vec<f32> = choices
        .iter()
        .map(|choice| if excludes_top(choice) { choice.sampling.xtc_threshold } else { f32::INFINITY })
        .collect();
    let thresholds = Array::from_slice(&thresholds, &[choices.len() as i32, 1]);
    let left = select(allowed, mass, Array::from_f32(0.0))?;
    let share = left.divide(left.sum_axis(-1, true)?)?;
    let least = select(share.gt(thresholds)?, &share, Array::from_f32(f32::INFINITY))?.min_axis(-1, true)?;
    logical_and(allowed, share.le(least)?)
}

/// Whether top choices are excluded for this token: a draw of its own, of seed and index.
fn excludes_top(choice: &SampleSpec) -> bool {
    let probability = choice.sampling.xtc_probability;
    probability > 0.0 && uniform(choice.seed ^ 0x5bd1_e995_9d1b_54a5, choice.index) < f64::from(probability)
}

/// A number from 0 to below 1, by SplitMix64.
fn uniform(seed: u64, index: u32) -> f64 {
    let mut state = seed.wrapping_add((u64::from(index) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((state ^ (state >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
}

fn has_typical_p(sampling: &Sampling) -> bool {
    sampling.typical_p > 0.0 && sampling.typical_p < 1.0
}

fn has_top_p(sampling: &Sampling) -> bool {
    sampling.top_p > 0.0 && sampling.top_p < 1.0
}

fn is_filtered(sampling: &Sampling) -> bool {
    has_top_p(sampling) || sampling.min_p > 0.0 || sampling.top_k > 0 || sampling.xtc_probability > 0.0
}

/// Random key of one token: it depends only on the seed and the index, so a resumed output continues
/// unchanged.
fn noise_key(choice: &SampleSpec) -> Result<Array, Exception> {
    // Seeds within a request differ by a constant that shares no factor with 2^64.
    random::key(choice.seed.wrapping_add(u64::from(choice.index).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}
