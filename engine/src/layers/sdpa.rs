//! Scaled dot-product attention over a KV cache in any format, chunked over the queries. Not here:
//! projections and positions.

use std::ops::Range;

use mlx_rs::{
    Array,
    error::Exception,
    fast::{ScaledDotProductAttentionMask, scaled_dot_product_attention},
    ops::{arange, broadcast_to, concatenate, indexing::TryIndexOp, logical_and, select, softmax_axis},
};

use russet_model::cost;

use super::{activation::scalar, on_gpu};
use crate::cache::format::{KvView, QuantizedTensor};

/// Bytes of attention scores written down at the same time. MLX's own kernel on a GPU writes none; elsewhere
/// a prompt's would be heads × positions × context, gigabytes of a long one. The planner reserves as much.
const MAX_SCORE_BYTES: usize = cost::SCORE_BUDGET_BYTES as usize;

/// How queries are scored against keys.
#[derive(Clone, Copy)]
pub(super) struct Scores<'a> {
    /// What scores are multiplied by.
    pub scale: f32,
    /// Whether a position sees none behind it. Those of a cache never do.
    pub causal: bool,
    /// Tokens that a position sees, itself included; `None` is all.
    pub window: Option<i32>,
    /// A score of each head that takes its share of attention and gives nothing.
    pub sinks: Option<&'a Array>,
}

/// Attention of the queries, `[1, heads, rows, width]`, which are the last positions of the sequence, in
/// chunks that [`MAX_SCORE_BYTES`] allows. A row of the result depends on no other row, so chunking does not
/// change it.
pub(super) fn chunked_sdpa(
    queries: &Array,
    held: &KvView,
    how: Scores<'_>,
    scores: &mut ScoreBudget,
) -> Result<Array, Exception> {
    let (length, context) = (queries.dim(2), held.positions());
    let row = score_row_bytes(queries, held)?;
    let rows = rows_per_chunk(row, length);
    if rows >= length {
        let attended = sdpa(queries, held, how)?;
        scores.reserve(row * length as usize, &attended)?;
        return Ok(attended);
    }
    let mut pieces = Vec::new();
    for from in (0..length).step_by(rows as usize) {
        let to = length.min(from + rows);
        let rows = queries.try_index((.., .., from..to, ..))?;
        // A row of a chunk attends to the positions before it, so the KV view ends with the chunk's last row.
        let piece = sdpa(&rows, &held.range(0..context - length + to)?, how)?;
        // Evaluated now: MLX would allocate the scores of several chunks before it frees those of the first.
        piece.eval()?;
        pieces.push(piece);
    }
    concatenate(&pieces, 2)
}

/// Most texts of this length whose scores [`MAX_SCORE_BYTES`] allows together, one at least. `queries` are
/// `[1, positions, heads, width]`.
pub(super) fn texts_per_chunk(queries: &Array, length: i32) -> usize {
    let (heads, length) = (queries.dim(2).max(1) as usize, length.max(1) as usize);
    (MAX_SCORE_BYTES / (heads * length * length * queries.item_size()).max(1)).max(1)
}

/// Attention of texts of one length, `[texts, heads, length, width]`, each to all of itself that it sees, in chunks that
/// [`MAX_SCORE_BYTES`] allows.
pub(super) fn text_sdpa(
    queries: &Array,
    keys: &Array,
    values: &Array,
    how: Scores<'_>,
    budget: &mut ScoreBudget,
) -> Result<Array, Exception> {
    let (texts, heads, length) = (queries.dim(0), queries.dim(1), queries.dim(2));
    let row = texts as usize * heads as usize * length as usize * queries.item_size();
    let rows = rows_per_chunk(row, length);
    let mut pieces = Vec::new();
    for from in (0..length).step_by(rows.max(1) as usize) {
        let to = length.min(from + rows);
        let queries =
            if rows < length { queries.try_index((.., .., from..to, ..))? } else { queries.clone() };
        let mask = seen(from..to, length, how)?;
        let mask = mask.as_ref().map(ScaledDotProductAttentionMask::Array);
        let piece = scaled_dot_product_attention(queries, keys, values, how.scale, mask, how.sinks)?;
        match rows < length {
            true => piece.eval()?,
            false => budget.reserve(row * length as usize, &piece)?,
        }
        pieces.push(piece);
    }
    concatenate(&pieces, 2)
}

/// Which of `length` positions those of `rows` see, `[rows, length]`; `None` where that is all.
fn seen(rows: Range<i32>, length: i32, how: Scores<'_>) -> Result<Option<Array>, Exception> {
    let window = how.window.filter(|&window| window < length);
    if !how.causal && window.is_none() {
        return Ok(None);
    }
    let own = arange::<_, i32>(rows.start, rows.end, None)?.reshape(&[-1, 1])?;
    let behind = own.subtract(arange::<_, i32>(0, length, None)?)?;
    let zero = Array::from_int(0);
    Ok(Some(match (how.causal, window) {
        (true, None) => behind.ge(zero)?,
        (true, Some(window)) => logical_and(behind.ge(zero)?, behind.lt(Array::from_int(window))?)?,
        (false, window) => behind.abs()?.lt(Array::from_int(window.unwrap_or(length)))?,
    }))
}

/// Causal attention of all of `queries`.
fn sdpa(queries: &Array, held: &KvView, how: Scores<'_>) -> Result<Array, Exception> {
    let length = queries.dim(2);
    let held = match how.window {
        // Positions that not even the first row sees.
        Some(window) if held.positions() > window + length - 1 => {
            &held.range(held.positions() - (window + length - 1)..held.positions())?
        }
        _ => held,
    };
    let context = held.positions();
    let window = how.window.filter(|&window| length > 1 && context > window);
    match held {
        KvView::AsComputed { keys, values } => {
            let mask = window.map(|window| visible(length, context, Some(window))).transpose()?;
            let mask = match &mask {
                Some(mask) => Some(ScaledDotProductAttentionMask::Array(mask)),
                // A single position attends to everything, so it needs no mask.
                None => (length > 1).then_some(ScaledDotProductAttentionMask::Causal),
            };
            scaled_dot_product_attention(queries, keys, values, how.scale, mask, how.sinks)
        }
        KvView::Quantised { keys, values } => {
            let mask = (length > 1).then(|| visible(length, context, window)).transpose()?;
            quantized_sdpa(queries, keys, values, how, mask.as_ref())
        }
    }
}

/// Which of `context` keys each of the last `length` positions sees, `[length, context]`.
pub(super) fn visible(length: i32, context: i32, window: Option<i32>) -> Result<Array, Exception> {
    let own = arange::<_, i32>(context - length, context, None)?.reshape(&[-1, 1])?;
    let keys = arange::<_, i32>(0, context, None)?;
    let causal = own.ge(&keys)?;
    match window {
        None => Ok(causal),
        Some(window) => logical_and(causal, own.lt(keys.add(Array::from_int(window))?)?),
    }
}

/// Attention with quantised keys and values, in the steps of mlx-lm: MLX has no fused kernel for it.
fn quantized_sdpa(
    queries: &Array,
    keys: &QuantizedTensor,
    values: &QuantizedTensor,
    how: Scores<'_>,
    mask: Option<&Array>,
) -> Result<Array, Exception> {
    let (batch, heads, length, width) = (queries.dim(0), queries.dim(1), queries.dim(2), queries.dim(3));
    let scaled = queries.multiply(scalar(how.scale, queries)?)?;
    let grouped = scaled.reshape(&[batch, keys.heads(), -1, length, width])?;
    let mut scores = keys.matmul_transposed(&grouped)?;
    if let Some(mask) = mask {
        let nothing = scalar(f32::NEG_INFINITY, &scores)?;
        scores = select(mask, scores, nothing)?;
    }
    let context = scores.dim(-1);
    let weights = match how.sinks {
        None => softmax_axis(scores, -1, true)?,
        Some(sinks) => {
            let each = heads / keys.heads();
            let sinks = sinks.reshape(&[1, keys.heads(), each, 1, 1])?.as_dtype(scores.dtype())?;
            let sinks = broadcast_to(sinks, &[batch, keys.heads(), each, length, 1])?;
            let weights = softmax_axis(concatenate(&[scores, sinks], -1)?, -1, true)?;
            weights.try_index((.., .., .., .., ..context))?
        }
    };
    let attended = values.matmul(&weights)?;
    let wide = attended.dim(-1);
    attended.reshape(&[batch, heads, length, wide])
}

/// Bytes of scores stored per position; 0 where MLX's fused kernel stores none.
fn score_row_bytes(queries: &Array, held: &KvView) -> Result<usize, Exception> {
    let (heads, width) = (queries.dim(1), queries.dim(3));
    let on_gpu = on_gpu()?;
    // Head sizes for which MLX has a prefill kernel.
    if on_gpu && matches!(held, KvView::AsComputed { .. }) && matches!(width, 64 | 80 | 128) {
        return Ok(0);
    }
    Ok(heads as usize * held.positions() as usize * queries.item_size())
}

/// Number of `length` positions per chunk, at `row` bytes of scores per position.
pub(super) fn rows_per_chunk(row: usize, length: i32) -> i32 {
    MAX_SCORE_BYTES.checked_div(row).map_or(length, |rows| rows.clamp(1, length.max(1) as usize) as i32)
}

/// Budget for scores of a batch's sequences that exist at the same time because nothing was evaluated in
/// between.
#[derive(Default)]
pub(super) struct ScoreBudget {
    bytes: usize,
    last_output: Option<Array>,
}

impl ScoreBudget {
    /// Adds the scores of `attended`; evaluates the earlier ones first if the sum would exceed the budget.
    pub(super) fn reserve(&mut self, bytes: usize, attended: &Array) -> Result<(), Exception> {
        if self.bytes + bytes > MAX_SCORE_BYTES {
            self.bytes = 0;
            self.last_output.take().map_or(Ok(()), |last| last.eval())?;
        }
        self.bytes += bytes;
        self.last_output = (bytes > 0).then(|| attended.clone());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use russet_wire::engine_options::KvCacheType;

    use super::*;
    use crate::cache::{format::KvFormat, kv::KvCache};

    /// Values that differ from position to position.
    fn numbers(shape: [i32; 4]) -> Array {
        let count: i32 = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|place| (place as f32 * 0.37).sin()).collect();
        Array::from_slice(&values, &shape)
    }

    fn by(scale: f32) -> Scores<'static> {
        Scores { scale, causal: true, window: None, sinks: None }
    }

    fn held(kind: KvCacheType, keys: &Array, values: &Array) -> KvView {
        let form = KvFormat::new(kind, keys.dim(3) as usize).unwrap();
        KvCache::new(form).append(keys, values).unwrap()
    }

    fn apart(one: &Array, other: &Array) -> f32 {
        assert_eq!(one.shape(), other.shape());
        let [one, other] = [one, other].map(|array| array.contiguous().unwrap());
        let pairs = one.as_slice::<f32>().iter().zip(other.as_slice::<f32>());
        pairs.map(|(one, other)| (one - other).abs()).fold(0.0, f32::max)
    }

    #[test]
    fn chunked_attention_equals_whole_attention() {
        // Scores of 164 MB, so three chunks; few values per head keep it fast.
        let (heads, length, context) = (512, 40, 2000);
        for (kind, width) in [(KvCacheType::AsComputed, 2), (KvCacheType::Int8, 32)] {
            let queries = numbers([1, heads, length, width]);
            let (keys, values) = (numbers([1, 1, context, width]), numbers([1, 1, context, width]));
            let held = held(kind, &keys, &values);
            assert_eq!(rows_per_chunk(score_row_bytes(&queries, &held).unwrap(), length), 16);
            let pieces = chunked_sdpa(&queries, &held, by(1.0), &mut ScoreBudget::default()).unwrap();
            let whole = sdpa(&queries, &held, by(1.0)).unwrap();
            let difference = apart(&pieces, &whole);
            assert!(difference < 1e-5, "{kind:?}: {difference}");
        }
    }

    #[test]
    fn one_token_and_short_prompts_are_never_chunked() {
        for (length, context) in [(1, 100_000), (1, 16_000_000), (300, 300), (1000, 1000)] {
            let queries = Array::zeros::<f32>(&[1, 12, length, 64]).unwrap();
            let all = Array::zeros::<f32>(&[1, 1, context, 64]).unwrap();
            let held = KvView::AsComputed { keys: all.clone(), values: all };
            assert_eq!(rows_per_chunk(score_row_bytes(&queries, &held).unwrap(), length), length);
        }
    }

    #[test]
    fn quantised_attention_is_close_to_exact_attention() {
        for (heads, kv_heads, length, context, width) in
            [(4, 4, 1, 1, 64), (4, 2, 1, 300, 64), (4, 1, 7, 7, 64), (6, 2, 5, 70, 96), (8, 2, 33, 300, 128)]
        {
            let queries = numbers([1, heads, length, width]);
            let keys = numbers([1, kv_heads, context, width]);
            let values = numbers([1, kv_heads, context, width]).negative().unwrap();
            let scale = (width as f32).powf(-0.5);
            let exact = sdpa(&queries, &held(KvCacheType::AsComputed, &keys, &values), by(scale)).unwrap();
            // A quantisation step is the range of a group, at most 2, divided by the number of levels. A
            // value is off by at most half a step, and errors in the keys' scores shift the weights.
            for (kind, most) in [(KvCacheType::Int8, 0.02), (KvCacheType::Int4, 0.3)] {
                let close = sdpa(&queries, &held(kind, &keys, &values), by(scale)).unwrap();
                let difference = apart(&exact, &close);
                assert!(difference > 0.0 && difference < most, "{kind:?}, {heads} of {width}: {difference}");
            }
        }
    }
}
