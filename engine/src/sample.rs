//! Chooses the next token from the log-probabilities of the last position. Pure: no arrays, no
//! clock; randomness comes from a seed. Filters apply in the order mlx-lm has: top-p, min-p, top-k,
//! then temperature.

use std::cmp::Ordering;

use rand::{Rng, SeedableRng, rngs::StdRng};
use russet_wire::request::Sampling;
use thiserror::Error;

use crate::compute::Choice;

/// Tokens sorted first when looking for the nucleus; almost always it lies within them.
const NUCLEUS_GUESS: usize = 512;

/// The token chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub token: u32,
    /// Its log-probability before any filter or temperature.
    pub logprob: f32,
}

/// No token can be chosen.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum SampleError {
    /// The model computed something that is not a number, or is infinite.
    #[error(
        "the logits of {bad} of {vocabulary} tokens are no finite numbers; the weights are damaged or overflow in this dtype, try --dtype f32"
    )]
    NotFinite {
        /// Tokens affected.
        bad: usize,
        /// Tokens in all.
        vocabulary: usize,
    },
    /// Every token is banned.
    #[error("all {vocabulary} tokens are banned; ban fewer")]
    NothingLeft {
        /// Tokens in all.
        vocabulary: usize,
    },
}

/// Chooses a token as `choice` says; `logprobs` has one entry per token of the vocabulary and is used up.
pub fn choose(choice: &Choice, logprobs: &mut [f32]) -> Result<Sampled, SampleError> {
    let vocabulary = logprobs.len();
    let bad = logprobs.iter().filter(|value| !value.is_finite()).count();
    if bad > 0 {
        return Err(SampleError::NotFinite { bad, vocabulary });
    }
    for &token in choice.banned.iter() {
        if let Some(logprob) = logprobs.get_mut(token as usize) {
            *logprob = f32::NEG_INFINITY;
        }
    }
    let best = most_probable(logprobs).ok_or(SampleError::NothingLeft { vocabulary })?;
    if choice.sampling.temperature <= 0.0 {
        return Ok(best);
    }
    let kept = kept(&choice.sampling, logprobs, best);
    Ok(draw(choice, &kept).unwrap_or(best))
}

/// The tokens that pass every filter.
fn kept(sampling: &Sampling, logprobs: &[f32], best: Sampled) -> Vec<Sampled> {
    let mut kept: Vec<Sampled> = logprobs
        .iter()
        .enumerate()
        .filter(|(_, logprob)| **logprob > f32::NEG_INFINITY)
        .map(|(token, &logprob)| Sampled { token: token as u32, logprob })
        .collect();
    if sampling.top_p > 0.0 && sampling.top_p < 1.0 {
        keep_nucleus(&mut kept, sampling.top_p);
    }
    if sampling.min_p > 0.0 {
        let floor = best.logprob + sampling.min_p.ln();
        kept.retain(|candidate| candidate.logprob >= floor);
    }
    let top_k = sampling.top_k as usize;
    if top_k > 0 && top_k < kept.len() {
        kept.select_nth_unstable_by(top_k - 1, by_probability);
        kept.truncate(top_k);
    }
    kept
}

/// One token at random, by probability at the temperature. The random number depends on the seed and
/// the index alone, so an answer that is taken up elsewhere goes on as it would have.
fn draw(choice: &Choice, kept: &[Sampled]) -> Option<Sampled> {
    // Seeds of one request differ by a constant that shares no factor with 2^64.
    let seed = choice.seed.wrapping_add(u64::from(choice.index).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let best = kept.iter().map(|candidate| candidate.logprob).fold(f32::NEG_INFINITY, f32::max);
    let temperature = f64::from(choice.sampling.temperature);
    let weight = |candidate: &Sampled| (f64::from(candidate.logprob - best) / temperature).exp();
    let total: f64 = kept.iter().map(weight).sum();
    let mut point = StdRng::seed_from_u64(seed).random::<f64>() * total;
    for candidate in kept {
        point -= weight(candidate);
        if point < 0.0 {
            return Some(*candidate);
        }
    }
    kept.last().copied()
}

/// The first token with the highest log-probability, as an argmax over an array finds it.
fn most_probable(logprobs: &[f32]) -> Option<Sampled> {
    let mut best: Option<Sampled> = None;
    for (token, &logprob) in logprobs.iter().enumerate() {
        if logprob > best.map_or(f32::NEG_INFINITY, |best| best.logprob) {
            best = Some(Sampled { token: token as u32, logprob });
        }
    }
    best
}

/// Most probable first; the id breaks ties, so that the order is one.
fn by_probability(a: &Sampled, b: &Sampled) -> Ordering {
    b.logprob.total_cmp(&a.logprob).then(a.token.cmp(&b.token))
}

/// Keeps the smallest set of most probable tokens whose mass reaches `top_p` of the whole.
fn keep_nucleus(candidates: &mut Vec<Sampled>, top_p: f32) {
    let mass = |candidate: &Sampled| f64::from(candidate.logprob).exp();
    let wanted = f64::from(top_p) * candidates.iter().map(mass).sum::<f64>();
    // Sorting a vocabulary of 128 thousand for every token costs more than the rest of sampling.
    for size in [NUCLEUS_GUESS, candidates.len()] {
        let size = size.min(candidates.len());
        if size > 0 && size < candidates.len() {
            candidates.select_nth_unstable_by(size - 1, by_probability);
        }
        candidates[..size].sort_unstable_by(by_probability);
        let mut reached = 0.0;
        for (index, candidate) in candidates[..size].iter().enumerate() {
            reached += mass(candidate);
            if reached >= wanted {
                candidates.truncate(index + 1);
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn logprobs(probabilities: &[f32]) -> Vec<f32> {
        probabilities.iter().map(|probability| probability.ln()).collect()
    }

    fn sampling(temperature: f32, top_p: f32, top_k: u32, min_p: f32) -> Sampling {
        Sampling { temperature, top_p, top_k, min_p, seed: None }
    }

    fn choice(sampling: Sampling, banned: &[u32], seed: u64, index: u32) -> Choice {
        Choice { sampling, seed, index, banned: Arc::from(banned) }
    }

    /// The set of tokens that 400 draws reach.
    fn reached(sampling: Sampling, banned: &[u32], probabilities: &[f32]) -> Vec<u32> {
        let draw = |index| choose(&choice(sampling.clone(), banned, 7, index), &mut logprobs(probabilities));
        let mut tokens: Vec<u32> = (0..400).map(|index| draw(index).unwrap().token).collect();
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    }

    #[test]
    fn filters_keep_exactly_the_tokens_they_should() {
        let probabilities = [0.1, 0.4, 0.2, 0.3];
        for (case, sampling, banned, expected) in [
            ("greedy", sampling(0.0, 1.0, 0, 0.0), &[][..], vec![1]),
            ("greedy with the best banned", sampling(0.0, 1.0, 0, 0.0), &[1][..], vec![3]),
            ("everything", sampling(1.0, 1.0, 0, 0.0), &[][..], vec![0, 1, 2, 3]),
            ("top-p cuts after the mass is reached", sampling(1.0, 0.65, 0, 0.0), &[][..], vec![1, 3]),
            ("top-p of a renormalised rest", sampling(1.0, 0.5, 0, 0.0), &[1][..], vec![3]),
            ("top-k", sampling(1.0, 1.0, 3, 0.0), &[][..], vec![1, 2, 3]),
            ("top-k of one is greedy", sampling(1.0, 1.0, 1, 0.0), &[][..], vec![1]),
            ("min-p relative to the best", sampling(1.0, 1.0, 0, 0.7), &[][..], vec![1, 3]),
            ("banned ids beyond the vocabulary do nothing", sampling(0.0, 1.0, 0, 0.0), &[99][..], vec![1]),
        ] {
            assert_eq!(reached(sampling, banned, &probabilities), expected, "{case}");
        }
    }

    #[test]
    fn the_first_of_equal_tokens_wins_as_in_an_argmax() {
        let greedy = choice(Sampling::default(), &[], 0, 0);
        assert_eq!(choose(&greedy, &mut [-2.0, -1.0, -1.0]).unwrap(), Sampled { token: 1, logprob: -1.0 });
    }

    #[test]
    fn one_seed_gives_one_sequence_from_any_index_on() {
        let draw = |seed, from| -> Vec<u32> {
            let one = |index| {
                choose(&choice(sampling(1.0, 1.0, 0, 0.0), &[], seed, index), &mut logprobs(&[0.25; 4]))
            };
            (from..32).map(|index| one(index).unwrap().token).collect()
        };
        assert_eq!(draw(1, 0), draw(1, 0));
        assert_eq!(draw(1, 0)[9..], draw(1, 9));
        assert_ne!(draw(1, 0), draw(2, 0));
    }

    #[test]
    fn draws_follow_the_probabilities_and_low_temperature_sharpens_them() {
        for (temperature, least, most) in [(1.0, 550, 650), (0.05, 975, 1000)] {
            let one = |index| {
                choose(&choice(sampling(temperature, 1.0, 0, 0.0), &[], 3, index), &mut logprobs(&[0.4, 0.6]))
            };
            let best = (0..1000).filter(|&index| one(index).unwrap().token == 1).count();
            assert!((least..=most).contains(&best), "{best} of 1000 at {temperature}");
        }
    }

    #[test]
    fn a_nucleus_wider_than_the_guess_is_found_too() {
        let mut wide = vec![(1.0f32 / 2000.0).ln(); 2000];
        wide[1999] += 0.01;
        let mut candidates: Vec<Sampled> = wide
            .iter()
            .enumerate()
            .map(|(token, &logprob)| Sampled { token: token as u32, logprob })
            .collect();
        keep_nucleus(&mut candidates, 0.5);
        assert!((998..=1002).contains(&candidates.len()), "{}", candidates.len());
        assert_eq!(candidates[0].token, 1999);
    }

    #[test]
    fn impossible_choices_are_errors() {
        let all_banned = choice(Sampling::default(), &[0, 1], 0, 0);
        assert_eq!(choose(&all_banned, &mut [-1.0, -1.0]), Err(SampleError::NothingLeft { vocabulary: 2 }));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(
                choose(&all_banned, &mut [bad, -1.0]),
                Err(SampleError::NotFinite { bad: 1, vocabulary: 2 })
            );
        }
    }
}
