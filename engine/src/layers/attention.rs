//! Multi-head attention with grouped key/value heads, rotary positions and a KV cache.

use mlx_rs::{
    Array,
    error::Exception,
    fast::{ScaledDotProductAttentionMask, scaled_dot_product_attention},
};

use super::{linear::Linear, rope::Rope};
use crate::{
    cache::KvCache,
    weights::{Weights, WeightsError},
};

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
}

/// One attention layer.
#[derive(Debug)]
pub struct Attention {
    shape: AttentionShape,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
}

impl Attention {
    /// Loads `q_proj`, `k_proj`, `v_proj` and `o_proj` under `path`.
    pub fn load(weights: &mut Weights<'_>, path: &str, shape: AttentionShape) -> Result<Self, WeightsError> {
        let AttentionShape { width, heads, kv_heads, head_dim, bias } = shape;
        let mut linear =
            |name, inputs, outputs| Linear::load(weights, &format!("{path}.{name}"), inputs, outputs, bias);
        Ok(Self {
            shape,
            query: linear("q_proj", width, heads * head_dim)?,
            key: linear("k_proj", width, kv_heads * head_dim)?,
            value: linear("v_proj", width, kv_heads * head_dim)?,
            output: linear("o_proj", heads * head_dim, width)?,
        })
    }

    /// Attends from every position of `x` to itself and all before it.
    pub fn forward(&self, x: &Array, rope: &Rope, cache: &mut KvCache) -> Result<Array, Exception> {
        let (batch, length) = (x.dim(0), x.dim(1));
        let split = |projected: Array, heads: usize| {
            projected
                .reshape(&[batch, length, heads as i32, self.shape.head_dim as i32])?
                .transpose_axes(&[0, 2, 1, 3])
        };
        let queries = split(self.query.forward(x)?, self.shape.heads)?;
        let keys = split(self.key.forward(x)?, self.shape.kv_heads)?;
        let values = split(self.value.forward(x)?, self.shape.kv_heads)?;

        let offset = cache.offset();
        let queries = rope.forward(&queries, offset)?;
        let (keys, values) = cache.append(&rope.forward(&keys, offset)?, &values)?;

        let scale = (self.shape.head_dim as f32).powf(-0.5);
        // A single position may see everything, so it needs no mask.
        let mask = (length > 1).then_some(ScaledDotProductAttentionMask::Causal);
        let attended = scaled_dot_product_attention(queries, keys, values, scale, mask, None)?;
        let joined = attended.transpose_axes(&[0, 2, 1, 3])?.reshape(&[
            batch,
            length,
            (self.shape.heads * self.shape.head_dim) as i32,
        ])?;
        self.output.forward(&joined)
    }
}
