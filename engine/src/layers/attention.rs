//! Multi-head attention with grouped key/value heads, rotary positions and a KV cache; of a stage
//! with several members, each computes some of the heads.

use mlx_rs::{
    Array, Device, DeviceType,
    error::Exception,
    fast::{ScaledDotProductAttentionMask, scaled_dot_product_attention},
    ops::{concatenate, indexing::TryIndexOp},
};

use super::{linear::Linear, norm::RmsNorm, rope::Rope, stage::Stage};
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

    /// Attends from every position of `x` to itself and all before it.
    pub fn forward(
        &self,
        x: &Array,
        rope: &Rope,
        cache: &mut KvCache,
        stage: &Stage,
    ) -> Result<Array, Exception> {
        let (batch, length) = (x.dim(0), x.dim(1));
        let split = |projected: Array, heads: i32, norm: Option<&RmsNorm>| {
            let split = projected.reshape(&[batch, length, heads, self.head_dim])?;
            let split = norm.map_or(Ok(split.clone()), |norm| norm.forward(&split))?;
            split.transpose_axes(&[0, 2, 1, 3])
        };
        let queries = split(self.query.forward(x)?, self.heads, self.query_norm.as_ref())?;
        let keys = split(self.key.forward(x)?, self.kv_heads, self.key_norm.as_ref())?;
        let values = split(self.value.forward(x)?, self.kv_heads, None)?;

        let offset = cache.offset();
        let queries = rope.forward(&queries, offset)?;
        let (keys, values) = cache.append(&rope.forward(&keys, offset)?, &values)?;

        let scale = (self.head_dim as f32).powf(-0.5);
        let attended = attend(&queries, &keys, &values, scale)?;
        let joined =
            attended.transpose_axes(&[0, 2, 1, 3])?.reshape(&[batch, length, self.heads * self.head_dim])?;
        self.output.forward_summed(&joined, stage)
    }
}

/// What the queries, the last positions of the sequence, see of it: as many of them at once as [`SCORES`]
/// allows. A row of the result depends on no other, so the pieces are what the whole would be.
fn attend(queries: &Array, keys: &Array, values: &Array, scale: f32) -> Result<Array, Exception> {
    let (length, context) = (queries.dim(2), keys.dim(2));
    // A single position may see everything, so it needs no mask.
    let causal = || (length > 1).then_some(ScaledDotProductAttentionMask::Causal);
    let rows = rows_at_once(queries, context)?;
    if rows >= length {
        return scaled_dot_product_attention(queries, keys, values, scale, causal(), None);
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

/// How many queries are attended at once.
fn rows_at_once(queries: &Array, context: i32) -> Result<i32, Exception> {
    let (heads, length, width) = (queries.dim(1), queries.dim(2), queries.dim(3));
    let on_gpu = matches!(Device::try_default()?.get_type()?, DeviceType::Gpu);
    // The widths MLX's kernel for prompts is built for.
    if on_gpu && matches!(width, 64 | 80 | 128) {
        return Ok(length);
    }
    let row = heads as usize * context as usize * queries.item_size();
    Ok((SCORES / row.max(1)).clamp(1, length.max(1) as usize) as i32)
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
        let rows = rows_at_once(&queries, context).unwrap();
        assert_eq!(rows, 16);
        let pieces = attend(&queries, &keys, &values, 1.0).unwrap();
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
            assert_eq!(
                rows_at_once(&Array::zeros::<f32>(&[1, 12, length, 64]).unwrap(), context).unwrap(),
                length
            );
        }
    }
}
