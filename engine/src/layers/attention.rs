//! Multi-head attention with grouped key/value heads, rotary positions and a KV cache; with tensor
//! parallelism, each rank computes some of the heads.

use mlx_rs::{
    Array,
    error::Exception,
    ops::{concatenate, indexing::TryIndexOp},
};

use russet_model::description;

use super::{
    linear::Linear,
    norm::RmsNorm,
    packed_batch::{PackedBatch, SequenceSlice},
    rope::Rope,
    sdpa::{ScoreBudget, chunked_sdpa},
    tensor_parallel::TpGroup,
};
use crate::{
    cache::LayerCache,
    weights::{Weights, WeightsError},
};

/// One attention layer.
#[derive(Debug)]
pub struct Attention {
    /// Query heads computed here.
    heads: i32,
    /// Key/value heads computed here.
    kv_heads: i32,
    head_dim: i32,
    value_dim: i32,
    /// What scores are multiplied by.
    scale: f32,
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
    pub fn load(
        weights: &mut Weights<'_>,
        path: &str,
        description: &description::Attention,
    ) -> Result<Self, WeightsError> {
        let description::Attention { heads, kv_heads, key_dim, value_dim, scale, head_norm, .. } =
            *description;
        let mut linear = |name| Linear::load(weights, &format!("{path}.{name}"));
        let [query, key, value] = [linear("q_proj")?, linear("k_proj")?, linear("v_proj")?];
        let output = linear("o_proj")?;
        let mut norm = |name| {
            head_norm.map(|epsilon| RmsNorm::load(weights, &format!("{path}.{name}"), epsilon)).transpose()
        };
        let (query_norm, key_norm) = (norm("q_norm")?, norm("k_norm")?);
        let members = weights.shard().count;
        Ok(Self {
            heads: (heads as usize / members) as i32,
            kv_heads: (kv_heads as usize / members) as i32,
            head_dim: key_dim as i32,
            value_dim: value_dim as i32,
            scale,
            query,
            key,
            value,
            output,
            query_norm,
            key_norm,
        })
    }

    /// Causal attention of every position of `x`, `[1, positions, width]`, within its sequence; `layer`
    /// selects this layer's cache among the caches of `batch`.
    pub fn forward(
        &self,
        x: &Array,
        rope: &Rope,
        batch: &mut PackedBatch<'_>,
        layer: usize,
        stage: &TpGroup,
    ) -> Result<Array, Exception> {
        let positions = x.dim(1);
        let split = |projected: Array, heads: i32, norm: Option<&RmsNorm>| {
            let split = projected.reshape(&[1, positions, heads, self.head_dim])?;
            norm.map_or(Ok(split.clone()), |norm| norm.forward(&split))
        };
        let queries = split(self.query.forward(x)?, self.heads, self.query_norm.as_ref())?;
        let keys = split(self.key.forward(x)?, self.kv_heads, self.key_norm.as_ref())?;
        let values = self.value.forward(x)?.reshape(&[1, positions, self.kv_heads, self.value_dim])?;
        let PackedBatch { decode_rows: singles, prefill_rows: longer, positions: offsets } = batch;
        let projected = match offsets {
            Some(offsets) => QkvProjection {
                queries: rotate_each(&queries, rope, offsets)?,
                keys: rotate_each(&keys, rope, offsets)?,
                values,
            },
            None => QkvProjection { queries, keys, values },
        };
        // Positions that are not rotated yet belong to a single row.
        let rope = offsets.is_none().then_some(rope);
        let mut pieces = Vec::new();
        let mut scores = ScoreBudget::default();
        let mut from = singles.len() as i32;
        if from > 0 {
            let caches = singles.iter_mut().map(|row| &mut row.caches[layer]);
            pieces.push(self.attend_decode_rows(&projected.slice(0, from)?, caches, &mut scores)?);
        }
        for SequenceSlice { length, offset, caches } in longer {
            let own = projected.slice(from, *length)?;
            pieces.push(self.attend_sequence(&own, rope, *offset, &mut caches[layer], &mut scores)?);
            from += *length;
        }
        let joined = match pieces.as_slice() {
            [whole] => whole.clone(),
            pieces => concatenate(pieces, 1)?,
        };
        self.output.forward_summed(&joined, stage)
    }

    /// Decode rows, one position each, already rotated: each attends to its own sequence.
    fn attend_decode_rows<'a>(
        &self,
        QkvProjection { queries, keys, values }: &QkvProjection,
        caches: impl Iterator<Item = &'a mut LayerCache>,
        scores: &mut ScoreBudget,
    ) -> Result<Array, Exception> {
        let rows = queries.dim(1);
        // One operation for all rows: with many sequences, launching operations costs more than computing
        // them.
        let each = |all: &Array| all.reshape(&[rows, all.dim(2), 1, all.dim(3)])?.split_equal(rows, 0);
        let each = each(queries)?.into_iter().zip(each(keys)?).zip(each(values)?);
        let mut attended = Vec::with_capacity(rows as usize);
        for (((queries, keys), values), cache) in each.zip(caches) {
            let held = cache.append(&keys, &values)?;
            attended.push(chunked_sdpa(&queries, &held, self.scale, scores)?);
        }
        concatenate(&attended, 0)?.reshape(&[1, rows, self.heads * self.value_dim])
    }

    /// One sequence's positions, starting at `offset`; `rope` rotates them unless they are rotated already.
    fn attend_sequence(
        &self,
        QkvProjection { queries, keys, values }: &QkvProjection,
        rope: Option<&Rope>,
        offset: i32,
        cache: &mut LayerCache,
        scores: &mut ScoreBudget,
    ) -> Result<Array, Exception> {
        let length = queries.dim(1);
        let by_head = |all: &Array| all.transpose_axes(&[0, 2, 1, 3]);
        let rotated = |all: &Array| {
            let all = by_head(all)?;
            rope.map_or(Ok(all.clone()), |rope| rope.forward(&all, offset))
        };
        let held = cache.append(&rotated(keys)?, &by_head(values)?)?;
        let attended = chunked_sdpa(&rotated(queries)?, &held, self.scale, scores)?;
        by_head(&attended)?.reshape(&[1, length, self.heads * self.value_dim])
    }
}

/// Rotates `all`, `[1, positions, heads, width]`, each position by its own offset: with several rows, as many
/// operations as for one row.
fn rotate_each(all: &Array, rope: &Rope, offsets: &Array) -> Result<Array, Exception> {
    let (positions, heads, width) = (all.dim(1), all.dim(2), all.dim(3));
    rope.forward_each(&all.reshape(&[positions, heads, 1, width])?, offsets)?.reshape(all.shape())
}

/// Queries, keys and values, `[1, positions, heads, width]` each.
struct QkvProjection {
    queries: Array,
    keys: Array,
    values: Array,
}

impl QkvProjection {
    /// A range of `length` positions.
    fn slice(&self, from: i32, length: i32) -> Result<Self, Exception> {
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
