//! How probable the tokens of a prompt are: the logits of all its positions, a few at a time, because those of a whole chunk of
//! prompt over the vocabulary would take gigabytes. Of each position a few numbers are read, which the device gathers.

use mlx_rs::{
    Array, Dtype,
    error::Exception,
    ops::{
        argpartition_axis, concatenate,
        indexing::{TryIndexOp, argmax_axis},
        logsumexp_axis,
    },
    transforms::eval,
};

use super::RuntimeError;
use crate::executor::{ScoreSpec, TokenScore};

/// Bytes of the logits that are there at once. The planner reserves more for the states of a chunk of prompt, most of which
/// are gone when its logits are computed.
const PIECE_BYTES: usize = 64 << 20;
/// Bytes of a token's logit of one position: as computed, widened, compared, and what orders them.
const LOGIT_BYTES: usize = 24;
/// Most positions at once: more would read the head's weights hardly less often.
const MAX_PIECE: usize = 256;

/// The scores of the tokens that follow the hidden states `[1, positions, width]`, of which `logits` makes logits.
pub(super) fn token_scores(
    ScoreSpec { tokens, top }: &ScoreSpec,
    hidden: &Array,
    vocabulary: u32,
    logits: impl Fn(&Array) -> Result<Array, RuntimeError>,
    failed: impl Fn(Exception) -> RuntimeError,
) -> Result<Vec<TokenScore>, RuntimeError> {
    // Behind this, of the chunk nothing is kept but its caches and this.
    eval([hidden]).map_err(&failed)?;
    let piece = (PIECE_BYTES / LOGIT_BYTES / vocabulary.max(1) as usize).clamp(1, MAX_PIECE);
    let mut scores = Vec::with_capacity(tokens.len());
    for (index, tokens) in tokens.chunks(piece).enumerate() {
        let begin = (index * piece) as i32;
        let states = hidden.try_index((.., begin..begin + tokens.len() as i32, ..)).map_err(&failed)?;
        let logits = logits(&states)?;
        scores.extend(piece_scores(tokens, *top, &logits).map_err(&failed)?);
    }
    Ok(scores)
}

/// The scores of these tokens by the logits of their positions, `[1, positions, vocabulary]`.
fn piece_scores(tokens: &[u32], top: u32, logits: &Array) -> Result<Vec<TokenScore>, Exception> {
    let rows = tokens.len() as i32;
    // Sums of log-probabilities compare texts: 16 bits would round each of them to two or three digits.
    let logits = logits.reshape(&[rows, -1])?.as_dtype(Dtype::Float32)?;
    let total = logsumexp_axis(&logits, -1, true)?;
    let given = Array::from_slice(tokens, &[rows, 1]);
    let given = logits.take_along_axis(&given, -1)?;
    let better = logits.gt(&given)?.as_dtype(Dtype::Uint32)?.sum_axis(-1, true)?;
    let most = (top.min(logits.dim(1) as u32)) as i32;
    let best = match most {
        0 => None,
        1 => Some(argmax_axis(&logits, -1, true)?),
        most => Some(argpartition_axis(logits.negative()?, most - 1, -1)?.try_index((.., 0..most))?),
    };
    let mut numbers = vec![given];
    if let Some(best) = &best {
        numbers.push(logits.take_along_axis(best, -1)?);
    }
    let numbers = concatenate(&numbers, -1)?.subtract(&total)?;
    let best = best.map(|best| best.as_dtype(Dtype::Uint32)?.contiguous()).transpose()?;
    eval([&numbers, &better].into_iter().chain(&best))?;
    let unread = |error: &dyn std::fmt::Display| Exception::custom(error.to_string());
    let ids = |array: &Array| array.to_vec_exact::<u32>().map_err(|error| unread(&error));
    let numbers = numbers.to_vec_exact::<f32>().map_err(|error| unread(&error))?;
    let better = ids(&better)?;
    let best = best.as_ref().map_or(Ok(Vec::new()), ids)?;
    let most = most as usize;
    let rows = numbers.chunks_exact(1 + most).zip(better).enumerate();
    Ok(rows
        .map(|(row, (numbers, better))| {
            let ids = &best[row * most..(row + 1) * most];
            let mut top: Vec<(u32, f32)> = ids.iter().copied().zip(numbers[1..].iter().copied()).collect();
            top.sort_by(|one, other| other.1.total_cmp(&one.1).then(one.0.cmp(&other.0)));
            TokenScore { logprob: numbers[0], rank: better + 1, top }
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The scores of these tokens, each behind the logits of its row.
    fn scores(tokens: &[u32], top: u32, rows: &[f32]) -> Vec<TokenScore> {
        let width = rows.len() / tokens.len();
        let logits = Array::from_slice(rows, &[1, tokens.len() as i32, width as i32]);
        piece_scores(tokens, top, &logits).unwrap()
    }

    #[test]
    fn scores_are_log_probabilities_with_rank_and_best_tokens() {
        let rows = [0.1f32, 0.4, 0.2, 0.3, 0.25, 0.25, 0.25, 0.25].map(|probability| probability.ln() + 3.0);
        for top in [0, 1, 2, 3, 4, 9] {
            let found = scores(&[2, 3], top, &rows);
            for (score, (probability, rank)) in found.iter().zip([(0.2f32, 3), (0.25, 1)]) {
                assert!((score.logprob - probability.ln()).abs() < 1e-6, "{score:?}");
                assert_eq!((score.rank, score.top.len()), (rank, top.min(4) as usize), "{score:?}");
            }
            let ids: Vec<u32> = found[0].top.iter().map(|(id, _)| *id).collect();
            assert_eq!(ids, [1, 3, 2, 0][..top.min(4) as usize]);
            // A token that is told twice has one number: clients compare them.
            let same = found[0].top.iter().find(|(id, _)| *id == 2);
            assert!(same.is_none_or(|(_, logprob)| *logprob == found[0].logprob), "{found:?}");
        }
    }

    #[test]
    fn pieces_give_the_scores_of_the_whole() {
        let (positions, width) = (700, 40);
        let hidden: Vec<f32> = (0..positions * width).map(|at| (at as f32 * 0.37).sin() * 4.0).collect();
        let hidden = Array::from_slice(&hidden, &[1, positions, width]);
        let spec = ScoreSpec { tokens: (0..positions as u32).map(|at| at % width as u32).collect(), top: 2 };
        let failed =
            |error: Exception| RuntimeError::Mlx { rank: 0, size: 1, reason: error.what().to_owned() };
        // A vocabulary for which a piece is small is cut more often, and gives the same.
        for vocabulary in [width as u32, 1 << 20] {
            let found =
                token_scores(&spec, &hidden, vocabulary, |states| Ok(states.clone()), failed).unwrap();
            let whole = piece_scores(&spec.tokens, 2, &hidden).unwrap();
            assert_eq!(found, whole);
        }
    }
}
