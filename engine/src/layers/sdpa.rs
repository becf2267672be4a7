//! Scaled dot-product attention over a KV cache in any format, chunked over the queries. Not here:
//! projections and positions.

use mlx_rs::{
    Array,
    error::Exception,
    fast::{ScaledDotProductAttentionMask, scaled_dot_product_attention},
    ops::{arange, concatenate, indexing::TryIndexOp, select, softmax_axis},
};

use russet_model::cost;

use super::on_gpu;
use crate::cache::format::{KvView, QuantizedTensor};

/// Bytes of attention scores written down at the same time. MLX's own kernel on a GPU writes none; elsewhere
/// a prompt's would be heads × positions × context, gigabytes of a long one. The planner reserves as much.
const MAX_SCORE_BYTES: usize = cost::SCORE_BUDGET_BYTES as usize;

/// Attention of the queries, `[1, heads, rows, width]`, which are the last positions of the sequence, in
/// chunks that [`MAX_SCORE_BYTES`] allows. A row of the result depends on no other row, so chunking does not
/// change it.
pub(super) fn chunked_sdpa(
    queries: &Array,
    held: &KvView,
    scale: f32,
    scores: &mut ScoreBudget,
) -> Result<Array, Exception> {
    let (length, context) = (queries.dim(2), held.positions());
    let row = score_row_bytes(queries, held)?;
    let rows = rows_per_chunk(row, length);
    if rows >= length {
        let attended = sdpa(queries, held, scale)?;
        scores.reserve(row * length as usize, &attended)?;
        return Ok(attended);
    }
    let mut pieces = Vec::new();
    for from in (0..length).step_by(rows as usize) {
        let to = length.min(from + rows);
        let rows = queries.try_index((.., .., from..to, ..))?;
        // A row of a chunk attends to the positions before it, so the KV view ends with the chunk's last row.
        let piece = sdpa(&rows, &held.prefix(context - length + to)?, scale)?;
        // Evaluated now: MLX would allocate the scores of several chunks before it frees those of the first.
        piece.eval()?;
        pieces.push(piece);
    }
    concatenate(&pieces, 2)
}

/// Causal attention of all of `queries`.
fn sdpa(queries: &Array, held: &KvView, scale: f32) -> Result<Array, Exception> {
    match held {
        KvView::AsComputed { keys, values } => {
            // A single position attends to everything, so it needs no mask.
            let causal = (queries.dim(2) > 1).then_some(ScaledDotProductAttentionMask::Causal);
            scaled_dot_product_attention(queries, keys, values, scale, causal, None)
        }
        KvView::Quantised { keys, values } => quantized_sdpa(queries, keys, values, scale),
    }
}

/// Attention with quantised keys and values, in the steps of mlx-lm: MLX has no fused kernel for it.
fn quantized_sdpa(
    queries: &Array,
    keys: &QuantizedTensor,
    values: &QuantizedTensor,
    scale: f32,
) -> Result<Array, Exception> {
    let (batch, heads, length, width) = (queries.dim(0), queries.dim(1), queries.dim(2), queries.dim(3));
    let scaled = queries.multiply(Array::from_f32(scale).as_dtype(queries.dtype())?)?;
    let grouped = scaled.reshape(&[batch, keys.heads(), -1, length, width])?;
    let mut scores = keys.matmul_transposed(&grouped)?;
    if length > 1 {
        let context = scores.dim(-1);
        let own = arange::<_, i32>(context - length, context, None)?.reshape(&[-1, 1])?;
        let visible = own.ge(arange::<_, i32>(0, context, None)?)?;
        let nothing = Array::from_f32(f32::NEG_INFINITY).as_dtype(scores.dtype())?;
        scores = select(visible, scores, nothing)?;
    }
    let weights = softmax_axis(scores, -1, true)?;
    values.matmul(&weights)?.reshape(&[batch, heads, length, width])
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
fn rows_per_chunk(row: usize, length: i32) -> i32 {
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
    fn reserve(&mut self, bytes: usize, attended: &Array) -> Result<(), Exception> {
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
            let pieces = chunked_sdpa(&queries, &held, 1.0, &mut ScoreBudget::default()).unwrap();
            let whole = sdpa(&queries, &held, 1.0).unwrap();
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
            let exact = sdpa(&queries, &held(KvCacheType::AsComputed, &keys, &values), scale).unwrap();
            // A quantisation step is the range of a group, at most 2, divided by the number of levels. A
            // value is off by at most half a step, and errors in the keys' scores shift the weights.
            for (kind, most) in [(KvCacheType::Int8, 0.02), (KvCacheType::Int4, 0.3)] {
                let close = sdpa(&queries, &held(kind, &keys, &values), scale).unwrap();
                let difference = apart(&exact, &close);
                assert!(difference > 0.0 && difference < most, "{kind:?}, {heads} of {width}: {difference}");
            }
        }
    }
}
