//! Tokens that must not be sampled: banned ones, and those that a grammar does not allow.

use mlx_rs::{
    Array,
    error::Exception,
    ops::{indexing::TryIndexOp, select},
};
use russet_chat::grammar::TokenMask;

use crate::executor::{SampleError, SampleSpec};

/// The log-probabilities, `[rows, vocabulary]`, of banned and masked tokens minus infinity; and for each row why no token
/// of it can be sampled, if so.
pub(super) fn masked(
    choices: &[SampleSpec],
    logprobs: &Array,
) -> Result<(Array, Vec<Option<SampleError>>), Exception> {
    let allowed = without_banned(choices, logprobs)?;
    if choices.iter().all(|choice| choice.mask.is_none()) {
        return Ok((allowed, vec![None; choices.len()]));
    }
    let vocabulary = logprobs.dim(1) as usize;
    let mut bits = Vec::with_capacity(choices.len() * vocabulary);
    let errors = choices.iter().map(|choice| match choice.mask.as_ref().map(|mask| mask.get()) {
        None | Some(Ok(None)) => {
            bits.resize(bits.len() + vocabulary, true);
            None
        }
        Some(Ok(Some(mask))) => {
            push(&mask, vocabulary, &mut bits);
            (!leaves_a_token(&mask, &choice.banned, vocabulary)).then(|| {
                let wrong = "the grammar of the response allows none of the tokens that are not banned";
                SampleError::Grammar(wrong.to_owned())
            })
        }
        Some(Err(error)) => {
            bits.resize(bits.len() + vocabulary, true);
            Some(SampleError::Grammar(error.to_string()))
        }
    });
    let errors = errors.collect();
    let mask = Array::from_slice(&bits, &[choices.len() as i32, vocabulary as i32]);
    Ok((select(mask, &allowed, Array::from_f32(f32::NEG_INFINITY))?, errors))
}

/// The bits of a mask, one for each token of the vocabulary.
fn push(mask: &TokenMask, vocabulary: usize, bits: &mut Vec<bool>) {
    let end = bits.len() + vocabulary;
    for word in mask.words().iter().take(vocabulary.div_ceil(32)) {
        let of_word: [bool; 32] = std::array::from_fn(|bit| word >> bit & 1 == 1);
        bits.extend_from_slice(&of_word);
    }
    bits.resize(end, false);
}

fn leaves_a_token(mask: &TokenMask, banned: &[u32], vocabulary: usize) -> bool {
    let words = mask.words().iter().enumerate().take(vocabulary.div_ceil(32));
    let allowed: usize = words.clone().map(|(_, word)| word.count_ones() as usize).sum();
    allowed > banned.len()
        || (0..vocabulary as u32).any(|token| mask.allows(token) && !banned.contains(&token))
}

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
