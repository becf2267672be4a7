//! What queries see of what a cache holds, in whatever form it holds it, and how many of them look at once. It
//! knows nothing of projections and positions.

use mlx_rs::{
    Array,
    error::Exception,
    fast::{ScaledDotProductAttentionMask, scaled_dot_product_attention},
    ops::{arange, concatenate, indexing::TryIndexOp, select, softmax_axis},
};

use super::on_gpu;
use crate::cache::form::{Held, Packed};

/// Bytes of attention scores written down at the same time. MLX's own kernel on a GPU writes none; elsewhere
/// a prompt's would be heads × positions × context, gigabytes of a long one. The planner reserves as much
/// (`SCORES` in plan/src/fit.rs). No smaller than it needs to be: smaller products are slower.
const SCORES: usize = 64 << 20;

/// What the queries, `[1, heads, rows, width]` and the last positions of the sequence, see of it: as many of them at
/// once as [`SCORES`] allows. A row of the result depends on no other, so the pieces are what the whole would be.
pub(super) fn attend(
    queries: &Array,
    held: &Held,
    scale: f32,
    scores: &mut Scores,
) -> Result<Array, Exception> {
    let (length, context) = (queries.dim(2), held.positions());
    let row = row_of_scores(queries, held)?;
    let rows = rows_at_once(row, length);
    if rows >= length {
        let attended = seen(queries, held, scale)?;
        scores.add(row * length as usize, &attended)?;
        return Ok(attended);
    }
    let mut pieces = Vec::new();
    for from in (0..length).step_by(rows as usize) {
        let to = length.min(from + rows);
        let rows = queries.try_index((.., .., from..to, ..))?;
        // A row of a piece sees what comes before it, so what is held ends with the piece's last row.
        let piece = seen(&rows, &held.first(context - length + to)?, scale)?;
        // At once: MLX would make room for the scores of many pieces before it frees those of the first.
        piece.eval()?;
        pieces.push(piece);
    }
    concatenate(&pieces, 2)
}

/// What all of `queries` see, each what is held up to its own position.
fn seen(queries: &Array, held: &Held, scale: f32) -> Result<Array, Exception> {
    match held {
        Held::AsComputed { keys, values } => {
            // A single position may see everything, so it needs no mask.
            let causal = (queries.dim(2) > 1).then_some(ScaledDotProductAttentionMask::Causal);
            scaled_dot_product_attention(queries, keys, values, scale, causal, None)
        }
        Held::Quantised { keys, values } => seen_quantised(queries, keys, values, scale),
    }
}

/// The same of quantised keys and values, step by step as mlx-lm does it: MLX has no kernel for the whole.
fn seen_quantised(queries: &Array, keys: &Packed, values: &Packed, scale: f32) -> Result<Array, Exception> {
    let (batch, heads, length, width) = (queries.dim(0), queries.dim(1), queries.dim(2), queries.dim(3));
    let scaled = queries.multiply(Array::from_f32(scale).as_dtype(queries.dtype())?)?;
    let grouped = scaled.reshape(&[batch, keys.heads(), -1, length, width])?;
    let mut scores = keys.times_transposed(&grouped)?;
    if length > 1 {
        let context = scores.dim(-1);
        let own = arange::<_, i32>(context - length, context, None)?.reshape(&[-1, 1])?;
        let visible = own.ge(arange::<_, i32>(0, context, None)?)?;
        let nothing = Array::from_f32(f32::NEG_INFINITY).as_dtype(scores.dtype())?;
        scores = select(visible, scores, nothing)?;
    }
    let weights = softmax_axis(scores, -1, true)?;
    values.times(&weights)?.reshape(&[batch, heads, length, width])
}

/// Bytes of scores that are written down for one position; none where MLX's own kernel writes none.
fn row_of_scores(queries: &Array, held: &Held) -> Result<usize, Exception> {
    let (heads, width) = (queries.dim(1), queries.dim(3));
    let on_gpu = on_gpu()?;
    // The widths MLX's kernel for prompts is built for.
    if on_gpu && matches!(held, Held::AsComputed { .. }) && matches!(width, 64 | 80 | 128) {
        return Ok(0);
    }
    Ok(heads as usize * held.positions() as usize * queries.item_size())
}

/// How many of `length` positions are attended at once, where one writes `row` bytes of scores.
fn rows_at_once(row: usize, length: i32) -> i32 {
    SCORES.checked_div(row).map_or(length, |rows| rows.clamp(1, length.max(1) as usize) as i32)
}

/// Scores of a batch's sequences that may be there at the same time, because nothing was evaluated since.
#[derive(Default)]
pub(super) struct Scores {
    bytes: usize,
    last: Option<Array>,
}

impl Scores {
    /// Counts those of `attended`; what was attended before is evaluated first if they would be too many together.
    fn add(&mut self, bytes: usize, attended: &Array) -> Result<(), Exception> {
        if self.bytes + bytes > SCORES {
            self.bytes = 0;
            self.last.take().map_or(Ok(()), |last| last.eval())?;
        }
        self.bytes += bytes;
        self.last = (bytes > 0).then(|| attended.clone());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        args::KvCacheType,
        cache::{KvCache, form::Form},
    };

    /// Numbers that differ from place to place.
    fn numbers(shape: [i32; 4]) -> Array {
        let count: i32 = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|place| (place as f32 * 0.37).sin()).collect();
        Array::from_slice(&values, &shape)
    }

    fn held(kind: KvCacheType, keys: &Array, values: &Array) -> Held {
        let form = Form::new(kind, keys.dim(3) as usize).unwrap();
        KvCache::new(form).append(keys, values).unwrap()
    }

    fn apart(one: &Array, other: &Array) -> f32 {
        assert_eq!(one.shape(), other.shape());
        let [one, other] = [one, other].map(|array| array.contiguous().unwrap());
        let pairs = one.as_slice::<f32>().iter().zip(other.as_slice::<f32>());
        pairs.map(|(one, other)| (one - other).abs()).fold(0.0, f32::max)
    }

    #[test]
    fn a_long_prompt_in_pieces_sees_what_the_whole_sees() {
        // Scores of 164 MB, so three pieces; few values to a head keep it quick.
        let (heads, length, context) = (512, 40, 2000);
        for (kind, width) in [(KvCacheType::AsComputed, 2), (KvCacheType::Int8, 32)] {
            let queries = numbers([1, heads, length, width]);
            let (keys, values) = (numbers([1, 1, context, width]), numbers([1, 1, context, width]));
            let held = held(kind, &keys, &values);
            assert_eq!(rows_at_once(row_of_scores(&queries, &held).unwrap(), length), 16);
            let pieces = attend(&queries, &held, 1.0, &mut Scores::default()).unwrap();
            let whole = seen(&queries, &held, 1.0).unwrap();
            let difference = apart(&pieces, &whole);
            assert!(difference < 1e-5, "{kind:?}: {difference}");
        }
    }

    #[test]
    fn one_token_and_short_prompts_are_never_cut() {
        for (length, context) in [(1, 100_000), (1, 16_000_000), (300, 300), (1000, 1000)] {
            let queries = Array::zeros::<f32>(&[1, 12, length, 64]).unwrap();
            let all = Array::zeros::<f32>(&[1, 1, context, 64]).unwrap();
            let held = Held::AsComputed { keys: all.clone(), values: all };
            assert_eq!(rows_at_once(row_of_scores(&queries, &held).unwrap(), length), length);
        }
    }

    #[test]
    fn what_is_seen_of_quantised_heads_is_nearly_what_is_seen_of_the_numbers() {
        for (heads, kv_heads, length, context, width) in
            [(4, 4, 1, 1, 64), (4, 2, 1, 300, 64), (4, 1, 7, 7, 64), (6, 2, 5, 70, 96), (8, 2, 33, 300, 128)]
        {
            let queries = numbers([1, heads, length, width]);
            let keys = numbers([1, kv_heads, context, width]);
            let values = numbers([1, kv_heads, context, width]).negative().unwrap();
            let scale = (width as f32).powf(-0.5);
            let exact = seen(&queries, &held(KvCacheType::AsComputed, &keys, &values), scale).unwrap();
            // A step is the range of a group, at most 2, by the numbers of its bits; half of one is the most that a
            // number is off, and scores of keys that are off move weights.
            for (kind, most) in [(KvCacheType::Int8, 0.02), (KvCacheType::Int4, 0.3)] {
                let close = seen(&queries, &held(kind, &keys, &values), scale).unwrap();
                let difference = apart(&exact, &close);
                assert!(difference > 0.0 && difference < most, "{kind:?}, {heads} of {width}: {difference}");
            }
        }
    }
}
