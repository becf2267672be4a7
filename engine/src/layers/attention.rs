//! Multi-head attention with grouped key/value heads, rotary positions and a KV cache; of a stage
//! with several members, each computes some of the heads.

use mlx_rs::{
    Array, Device, DeviceType,
    error::Exception,
    fast::{ScaledDotProductAttentionMask, scaled_dot_product_attention},
    ops::{concatenate, indexing::TryIndexOp},
};

use super::{
    batch::{Batch, Row},
    linear::Linear,
    norm::RmsNorm,
    rope::Rope,
    stage::Stage,
};
use crate::{
    cache::KvCache,
    weights::{Weights, WeightsError},
};

/// Bytes of attention scores written down at the same time. MLX's own kernel on a GPU writes none; elsewhere
/// a prompt's would be heads × positions × context, gigabytes of a long one. The planner reserves as much
/// (`SCORES` in plan/src/fit.rs). No smaller than it needs to be: smaller products are slower.
const SCORES: usize = 64 << 20;

/// Sizes of one attention layer.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Width of the hidden state.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Whether the projections have biases.
    pub bias: bool,
    /// Epsilon of the norms that each head of queries and keys passes before it is rotated; `None`
    /// where there are none.
    pub head_norm: Option<f32>,
}

/// One attention layer.
#[derive(Debug)]
pub struct Attention {
    /// Query heads computed here.
    heads: i32,
    /// Key/value heads computed here.
    kv_heads: i32,
    head_dim: i32,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    query_norm: Option<RmsNorm>,
    key_norm: Option<RmsNorm>,
}

impl Attention {
    /// Loads `q_proj`, `k_proj`, `v_proj` and `o_proj` under `path`, `q_norm` and `k_norm` where the
    /// architecture has them.
    pub fn load(weights: &mut Weights<'_>, path: &str, shape: AttentionShape) -> Result<Self, WeightsError> {
        let AttentionShape { width, heads, kv_heads, head_dim, bias, head_norm } = shape;
        let mut linear =
            |name, inputs, outputs| Linear::load(weights, &format!("{path}.{name}"), inputs, outputs, bias);
        let query = linear("q_proj", width, heads * head_dim)?;
        let key = linear("k_proj", width, kv_heads * head_dim)?;
        let value = linear("v_proj", width, kv_heads * head_dim)?;
        let output = linear("o_proj", heads * head_dim, width)?;
        let mut norm = |name| {
            head_norm
                .map(|epsilon| RmsNorm::load(weights, &format!("{path}.{name}"), head_dim, epsilon))
                .transpose()
        };
        let (query_norm, key_norm) = (norm("q_norm")?, norm("k_norm")?);
        let members = weights.slice().of;
        Ok(Self {
            heads: (heads / members) as i32,
            kv_heads: (kv_heads / members) as i32,
            head_dim: head_dim as i32,
            query,
            key,
            value,
            output,
            query_norm,
            key_norm,
        })
    }

    /// Attends from every position of `x`, `[1, positions, width]`, to itself and all before it in its sequence;
    /// `layer` is which of the caches of `batch` are this one's.
    pub fn forward(
        &self,
        x: &Array,
        rope: &Rope,
        batch: &mut Batch<'_>,
        layer: usize,
        stage: &Stage,
    ) -> Result<Array, Exception> {
        let positions = x.dim(1);
        let split = |projected: Array, heads: i32, norm: Option<&RmsNorm>| {
            let split = projected.reshape(&[1, positions, heads, self.head_dim])?;
            norm.map_or(Ok(split.clone()), |norm| norm.forward(&split))
        };
        let queries = split(self.query.forward(x)?, self.heads, self.query_norm.as_ref())?;
        let keys = split(self.key.forward(x)?, self.kv_heads, self.key_norm.as_ref())?;
        let values = split(self.value.forward(x)?, self.kv_heads, None)?;
        let projected = Projected { queries, keys, values };

        let Batch { singles, offsets, longer } = batch;
        let mut pieces = Vec::new();
        let mut scores = Scores::default();
        let mut from = singles.len() as i32;
        if from > 0 {
            let caches = singles.iter_mut().map(|row| &mut row.caches[layer]);
            let own = projected.span(0, from)?;
            pieces.push(self.attend_singles(&own, rope, offsets, caches, &mut scores)?);
        }
        for Row { length, offset, caches } in longer {
            let own = projected.span(from, *length)?;
            pieces.push(self.attend_row(&own, rope, *offset, &mut caches[layer], &mut scores)?);
            from += *length;
        }
        let joined = match pieces.as_slice() {
            [whole] => whole.clone(),
            pieces => concatenate(pieces, 1)?,
        };
        self.output.forward_summed(&joined, stage)
    }

    /// Rows of one position each: rotated together, then each attends to its own sequence.
    fn attend_singles<'a>(
        &self,
        projected: &Projected,
        rope: &Rope,
        offsets: &Array,
        caches: impl Iterator<Item = &'a mut KvCache>,
        scores: &mut Scores,
    ) -> Result<Array, Exception> {
        let Projected { queries, keys, values } = projected;
        let rows = queries.dim(1);
        let apart = |all: &Array, heads: i32| all.reshape(&[rows, heads, 1, self.head_dim]);
        let queries = rope.forward_each(&apart(queries, self.heads)?, offsets)?;
        let keys = rope.forward_each(&apart(keys, self.kv_heads)?, offsets)?;
        let values = apart(values, self.kv_heads)?;
        let mut attended = Vec::with_capacity(rows as usize);
        for (row, cache) in caches.enumerate() {
            let row = row as i32;
            let own = |all: &Array| all.try_index((row..row + 1, .., .., ..));
            let (keys, values) = cache.append(&own(&keys)?, &own(&values)?)?;
            attended.push(attend(&own(&queries)?, &keys, &values, self.scale(), scores)?);
        }
        concatenate(&attended, 0)?.reshape(&[1, rows, self.heads * self.head_dim])
    }

    /// One sequence's positions.
    fn attend_row(
        &self,
        Projected { queries, keys, values }: &Projected,
        rope: &Rope,
        offset: i32,
        cache: &mut KvCache,
        scores: &mut Scores,
    ) -> Result<Array, Exception> {
        let length = queries.dim(1);
        let by_head = |all: &Array| all.transpose_axes(&[0, 2, 1, 3]);
        let queries = rope.forward(&by_head(queries)?, offset)?;
        let (keys, values) = cache.append(&rope.forward(&by_head(keys)?, offset)?, &by_head(values)?)?;
        let attended = attend(&queries, &keys, &values, self.scale(), scores)?;
        by_head(&attended)?.reshape(&[1, length, self.heads * self.head_dim])
    }

    fn scale(&self) -> f32 {
        (self.head_dim as f32).powf(-0.5)
    }
}

/// Queries, keys and values, `[1, positions, heads, width]` each.
struct Projected {
    queries: Array,
    keys: Array,
    values: Array,
}

impl Projected {
    /// `length` positions of them.
    fn span(&self, from: i32, length: i32) -> Result<Self, Exception> {
        let span = |all: &Array| {
            if length == all.dim(1) {
                Ok(all.clone())
            } else {
                all.try_index((.., from..from + length, .., ..))
            }
        };
        Ok(Self { queries: span(&self.queries)?, keys: span(&self.keys)?, values: span(&self.values)? })
    }
}

/// What the queries, the last positions of the sequence, see of it: as many of them at once as [`SCORES`]
/// allows. A row of the result depends on no other, so the pieces are what the whole would be.
fn attend(
    queries: &Array,
    keys: &Array,
    values: &Array,
    scale: f32,
    scores: &mut Scores,
) -> Result<Array, Exception> {
    let (length, context) = (queries.dim(2), keys.dim(2));
    // A single position may see everything, so it needs no mask.
    let causal = || (length > 1).then_some(ScaledDotProductAttentionMask::Causal);
    let row = row_of_scores(queries, context)?;
    let rows = rows_at_once(row, length);
    if rows >= length {
        let attended = scaled_dot_product_attention(queries, keys, values, scale, causal(), None)?;
        scores.add(row * length as usize, &attended)?;
        return Ok(attended);
    }
    let mut pieces = Vec::new();
    for from in (0..length).step_by(rows as usize) {
        let to = length.min(from + rows);
        // A row of a piece sees what comes before it, so the keys end with the piece's last row.
        let seen = context - length + to;
        let piece = scaled_dot_product_attention(
            queries.try_index((.., .., from..to, ..))?,
            keys.try_index((.., .., 0..seen, ..))?,
            values.try_index((.., .., 0..seen, ..))?,
            scale,
            causal(),
            None,
        )?;
        // At once: MLX would make room for the scores of many pieces before it frees those of the first.
        piece.eval()?;
        pieces.push(piece);
    }
    concatenate(&pieces, 2)
}

/// Bytes of scores that are written down for one position; none where MLX's own kernel writes none.
fn row_of_scores(queries: &Array, context: i32) -> Result<usize, Exception> {
    let (heads, width) = (queries.dim(1), queries.dim(3));
    let on_gpu = matches!(Device::try_default()?.get_type()?, DeviceType::Gpu);
    // The widths MLX's kernel for prompts is built for.
    if on_gpu && matches!(width, 64 | 80 | 128) {
        return Ok(0);
    }
    Ok(heads as usize * context as usize * queries.item_size())
}

/// How many of `length` positions are attended at once, where one writes `row` bytes of scores.
fn rows_at_once(row: usize, length: i32) -> i32 {
    SCORES.checked_div(row).map_or(length, |rows| rows.clamp(1, length.max(1) as usize) as i32)
}

/// Scores of a batch's sequences that may be there at the same time, because nothing was evaluated since.
#[derive(Default)]
struct Scores {
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

    /// Numbers that differ from place to place.
    fn numbers(shape: [i32; 4]) -> Array {
        let count: i32 = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|place| (place as f32 * 0.37).sin()).collect();
        Array::from_slice(&values, &shape)
    }

    #[test]
    fn a_long_prompt_in_pieces_sees_what_the_whole_sees() {
        // Scores of 164 MB, so three pieces; heads of two values each keep it quick.
        let (heads, length, context) = (512, 40, 2000);
        let queries = numbers([1, heads, length, 2]);
        let (keys, values) = (numbers([1, 1, context, 2]), numbers([1, 1, context, 2]));
        assert_eq!(rows_at_once(row_of_scores(&queries, context).unwrap(), length), 16);
        let pieces = attend(&queries, &keys, &values, 1.0, &mut Scores::default()).unwrap();
        let mask = Some(ScaledDotProductAttentionMask::Causal);
        let whole = scaled_dot_product_attention(&queries, &keys, &values, 1.0, mask, None).unwrap();
        let (pieces, whole) = (pieces.contiguous().unwrap(), whole.contiguous().unwrap());
        for (place, (piece, whole)) in
            pieces.as_slice::<f32>().iter().zip(whole.as_slice::<f32>()).enumerate()
        {
            assert!((piece - whole).abs() < 1e-5, "{piece} and {whole} at {place}");
        }
    }

    #[test]
    fn one_token_and_short_prompts_are_never_cut() {
        for (length, context) in [(1, 100_000), (1, 16_000_000), (300, 300), (1000, 1000)] {
            let queries = Array::zeros::<f32>(&[1, 12, length, 64]).unwrap();
            assert_eq!(rows_at_once(row_of_scores(&queries, context).unwrap(), length), length);
        }
    }
}
