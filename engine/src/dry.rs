//! DRY, "don't repeat yourself": penalties of tokens that would make a run of tokens longer that was there before. Pure.

use std::collections::{BTreeMap, BTreeSet};

use russet_wire::request::DrySampling;

/// A penalty beyond this forbids a token all the same.
const MAX_PENALTY: f32 = 1e6;

/// What is subtracted from the logits of tokens after these. Takes time in the number of tokens alone.
pub(crate) fn penalties(dry: &DrySampling, breakers: &BTreeSet<u32>, tokens: &[u32]) -> BTreeMap<u32, f32> {
    let DrySampling { multiplier, base, allowed_length, last_tokens, sequence_breakers: _ } = dry;
    let window = if *last_tokens == 0 { tokens.len() } else { (*last_tokens as usize).min(tokens.len()) };
    let newest_first: Vec<u32> = tokens[tokens.len() - window..].iter().rev().copied().collect();
    // No run goes on over a breaker.
    let longest = newest_first.iter().take_while(|token| !breakers.contains(token)).count();
    let mut runs: BTreeMap<u32, usize> = BTreeMap::new();
    for (at, length) in matches(&newest_first).into_iter().enumerate().skip(1) {
        let (length, next) = (length.min(longest), newest_first[at - 1]);
        if length >= (*allowed_length).max(1) as usize && !breakers.contains(&next) {
            let run = runs.entry(next).or_default();
            *run = length.max(*run);
        }
    }
    let penalty = |length: usize| {
        let beyond = length.saturating_sub(*allowed_length as usize);
        (multiplier * base.powf(beyond as f32)).min(MAX_PENALTY)
    };
    runs.into_iter().map(|(token, length)| (token, penalty(length))).collect()
}

/// For each position, how many tokens from there on equal those at the beginning (the Z algorithm).
fn matches(tokens: &[u32]) -> Vec<usize> {
    let mut matches = vec![0; tokens.len()];
    let (mut begin, mut end) = (0, 0);
    for at in 1..tokens.len() {
        let mut length = if at < end { matches[at - begin].min(end - at) } else { 0 };
        while at + length < tokens.len() && tokens[length] == tokens[at + length] {
            length += 1;
        }
        if at + length > end {
            (begin, end) = (at, at + length);
        }
        matches[at] = length;
    }
    matches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, dry: &DrySampling) -> Vec<(char, f32)> {
        let tokens: Vec<u32> = text.chars().map(u32::from).collect();
        let found = penalties(dry, &BTreeSet::from([u32::from(':')]), &tokens);
        found.into_iter().map(|(token, penalty)| (char::from_u32(token).unwrap(), penalty)).collect()
    }

    #[test]
    fn runs_that_were_there_are_penalised_by_their_length() {
        let dry = DrySampling { multiplier: 1.0, base: 2.0, allowed_length: 2, ..DrySampling::default() };
        for (text, expected) in [
            ("", vec![]),
            ("abc", vec![]),
            // One token is free; two are not, and each further one doubles it.
            ("a1 a", vec![]),
            ("ab1 ab", vec![('1', 1.0)]),
            ("xab1 xab", vec![('1', 2.0)]),
            // The longest run of a token counts, and each token that follows one.
            ("ab1 cab1 ab2,cab", vec![('1', 2.0), ('2', 1.0)]),
            ("aaaa", vec![('a', 2.0)]),
            // No run goes on over a breaker, and none is penalised.
            ("xa:b1 xa:b", vec![]),
            ("xa:bc1 xa:bc", vec![('1', 1.0)]),
            ("ab: ab", vec![]),
        ] {
            assert_eq!(of(text, &dry), expected, "{text:?}");
        }
        let near = DrySampling { last_tokens: 4, ..dry.clone() };
        assert_eq!(of("ab1 ab", &near), []);
        assert_eq!(of(&"ab".repeat(500), &dry), [('a', MAX_PENALTY)]);
        let strict = DrySampling { allowed_length: 0, ..dry };
        assert_eq!(of("ab1 ab", &strict), [('1', 4.0)]);
    }

    #[test]
    fn matches_are_those_of_comparing_all() {
        let mut state = 1_u32;
        for length in 0..200 {
            let tokens: Vec<u32> = (0..length)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    state >> 30
                })
                .collect();
            let count = |at: usize| tokens.iter().zip(&tokens[at..]).take_while(|(a, b)| a == b).count();
            let expected: Vec<usize> = (0..length).map(|at| if at == 0 { 0 } else { count(at) }).collect();
            assert_eq!(matches(&tokens), expected);
        }
    }
}
