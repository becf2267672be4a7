//! Multi-head attention with grouped key/value heads, rotary positions and a KV cache; of a stage
//! with several members, each computes some of the heads.

use mlx_rs::{
    Array,
    error::Exception,
    fast::{ScaledDotProductAttentionMask, scaled_dot_product_attention},
};

use super::{linear::Linear, norm::RmsNorm, rope::Rope, stage::Stage};
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
        // A single position may see everything, so it needs no mask.
        let mask = (length > 1).then_some(ScaledDotProductAttentionMask::Causal);
        let attended = scaled_dot_product_attention(queries, keys, values, scale, mask, None)?;
        let joined =
            attended.transpose_axes(&[0, 2, 1, 3])?.reshape(&[batch, length, self.heads * self.head_dim])?;
        self.output.forward_summed(&joined, stage)
    }
}
