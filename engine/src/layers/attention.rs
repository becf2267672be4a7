//! Multi-head attention with grouped key/value heads, rotary positions and a KV cache, its own or an earlier layer's; with
//! tensor parallelism, each rank computes some of the heads.

use std::rc::Rc;

use mlx_rs::{
    Array,
    error::Exception,
    fast,
    ops::{concatenate, indexing::TryIndexOp, sigmoid},
};

use russet_model::description::{self, QkNorm, QueryScale};

use super::{
    linear::Linear,
    norm::RmsNorm,
    packed_batch::{PackedBatch, SequenceSlice},
    query_scale::{query_scales, sequence_scales},
    rope::Rope,
    sdpa::{ScoreBudget, Scores, chunked_sdpa, text_sdpa, texts_per_chunk},
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
    query_norm: Option<RmsNorm>,
    /// `None` where the keys and values of an earlier layer are read.
    key_value: Option<KeyValue>,
    /// Whether queries and keys are normalised over all heads of all ranks together, not each head by itself.
    full_norm: bool,
    output: Linear,
    rope: Option<Rc<Rope>>,
    causal: bool,
    window: Option<i32>,
    sinks: Option<Array>,
    output_gate: bool,
    query_scale: Option<QueryScale>,
}

/// What makes keys and values.
#[derive(Debug)]
struct KeyValue {
    key: Linear,
    /// `None` where values are keys.
    value: Option<Linear>,
    key_norm: Option<RmsNorm>,
    /// Epsilon of the norm of values.
    value_norm: Option<f32>,
}

impl Attention {
    /// Loads `q_proj`, `k_proj`, `v_proj` and the output under `path`, and what else the description has.
    pub fn load(
        weights: &mut Weights<'_>,
        path: &str,
        description: &description::Attention,
        rope: Option<Rc<Rope>>,
    ) -> Result<Self, WeightsError> {
        let linear = |weights: &mut _, name| Linear::load(weights, &format!("{path}.{name}"));
        let norm = |weights: &mut _, name| match description.qk_norm {
            None => Ok(None),
            Some(QkNorm::Head { epsilon } | QkNorm::Full { epsilon }) => {
                RmsNorm::load(weights, &format!("{path}.{name}"), epsilon).map(Some)
            }
        };
        let [query_norm, key_norm] = description.qk_norm_names;
        let key_value = match description.shares_cache_of {
            Some(_) => None,
            None => Some(KeyValue {
                key: linear(weights, "k_proj")?,
                value: match description.values_are_keys {
                    true => None,
                    false => Some(linear(weights, "v_proj")?),
                },
                key_norm: norm(weights, key_norm)?,
                value_norm: description.value_norm,
            }),
        };
        let query = linear(weights, "q_proj")?;
        let query_norm = norm(weights, query_norm)?;
        let output = linear(weights, description.output)?;
        let sinks = description.sinks.then(|| weights.tensor(&format!("{path}.sinks"))).transpose()?;
        let shard = weights.shard();
        Ok(Self {
            heads: shard.heads(description.heads),
            kv_heads: shard.heads(description.kv_heads),
            head_dim: description.key_dim as i32,
            value_dim: description.value_dim as i32,
            scale: description.scale,
            query,
            query_norm,
            key_value,
            full_norm: matches!(description.qk_norm, Some(QkNorm::Full { .. })),
            output,
            rope,
            causal: description.causal,
            window: description.window.map(|window| window as i32),
            sinks,
            output_gate: description.output_gate,
            query_scale: description.query_scale,
        })
    }

    /// Causal attention of every position of `x`, `[1, positions, width]`, within its sequence; `layer`
    /// selects this layer's cache among the caches of `batch`, or that of the layer whose keys and values it reads, which
    /// has appended those of these positions before.
    pub fn forward(
        &self,
        x: &Array,
        batch: &mut PackedBatch<'_>,
        layer: usize,
        stage: &TpGroup,
    ) -> Result<Array, Exception> {
        let (projected, gate) = self.project(x, stage)?;
        let PackedBatch { decode_rows: singles, prefill_rows: longer, positions: offsets, texts } = batch;
        let projected = match offsets {
            Some(offsets) => QkvProjection {
                queries: self.scaled_by(&self.rotate_each(&projected.queries, offsets)?, offsets)?,
                key_values: match projected.key_values {
                    None => None,
                    Some((keys, values)) => Some((self.rotate_each(&keys, offsets)?, values)),
                },
            },
            None => projected,
        };
        if !texts.is_empty() {
            let attended = self.attend_texts(&projected, texts)?;
            return self.output.forward_summed(&gated(attended, gate.as_ref())?, stage);
        }
        // Positions that are not rotated yet belong to a single row.
        let rotates = offsets.is_none();
        let mut pieces = Vec::new();
        let mut scores = ScoreBudget::default();
        let mut from = singles.len() as i32;
        if from > 0 {
            let caches = singles.iter_mut().map(|row| &mut row.caches[layer]);
            pieces.push(self.attend_decode_rows(&projected.slice(0, from)?, caches, &mut scores)?);
        }
        for SequenceSlice { length, offset, adapter: _, caches } in longer {
            let own = projected.slice(from, *length)?;
            let rotate_at = rotates.then_some(*offset);
            pieces.push(self.attend_sequence(&own, rotate_at, &mut caches[layer], &mut scores)?);
            from += *length;
        }
        let joined = concatenate(&pieces, 1)?;
        self.output.forward_summed(&gated(joined, gate.as_ref())?, stage)
    }

    /// Texts of these lengths, already rotated, each of which attends to itself: those of equal length together.
    fn attend_texts(
        &self,
        QkvProjection { queries, key_values }: &QkvProjection,
        lengths: &[i32],
    ) -> Result<Array, Exception> {
        let Some((keys, values)) = key_values else {
            return Err(Exception::custom("a layer that makes no keys has no text to attend to"));
        };
        let mut pieces = Vec::new();
        let mut budget = ScoreBudget::default();
        let mut from = 0;
        for run in lengths.chunk_by(|one, other| one == other) {
            let &[length, ..] = run else { continue };
            let most = texts_per_chunk(queries, length);
            for texts in run.chunks(most) {
                let count = texts.len() as i32;
                let by_head = |all: &Array| {
                    let own = all.try_index((.., from..from + count * length, .., ..))?;
                    own.reshape(&[count, length, all.dim(2), all.dim(3)])?.transpose_axes(&[0, 2, 1, 3])
                };
                let [queries, keys, values] = [by_head(queries)?, by_head(keys)?, by_head(values)?];
                let attended = text_sdpa(&queries, &keys, &values, self.scores(), &mut budget)?;
                let flat = &[1, count * length, self.heads * self.value_dim];
                pieces.push(attended.transpose_axes(&[0, 2, 1, 3])?.reshape(flat)?);
                from += count * length;
            }
        }
        concatenate(&pieces, 1)
    }

    /// Queries, and keys and values where it makes them, `[1, positions, heads, width]` each, and the gate of the output
    /// where there is one.
    fn project(&self, x: &Array, stage: &TpGroup) -> Result<(QkvProjection, Option<Array>), Exception> {
        let positions = x.dim(1);
        let mut queries = self.query.forward(x)?;
        if let Some(norm) = self.query_norm.as_ref().filter(|_| self.full_norm) {
            queries = norm.forward_shared(&queries, stage)?;
        }
        let mut gate = None;
        queries = queries.reshape(&[1, positions, self.heads, -1])?;
        if self.output_gate {
            let parts = queries.split_equal(2, -1)?;
            let [own, beside] = parts.as_slice() else {
                return Err(Exception::custom("queries and their gate are not two halves"));
            };
            gate = Some(beside.reshape(&[1, positions, -1])?);
            queries = own.clone();
        }
        if let Some(norm) = self.query_norm.as_ref().filter(|_| !self.full_norm) {
            queries = norm.forward(&queries)?;
        }
        let key_values = self.key_value.as_ref().map(|key_value| self.key_values(key_value, x, stage));
        Ok((QkvProjection { queries, key_values: key_values.transpose()? }, gate))
    }

    /// Keys and values, `[1, positions, heads, width]` each.
    fn key_values(
        &self,
        KeyValue { key, value, key_norm, value_norm }: &KeyValue,
        x: &Array,
        stage: &TpGroup,
    ) -> Result<(Array, Array), Exception> {
        let positions = x.dim(1);
        let mut keys = key.forward(x)?;
        if let Some(norm) = key_norm.as_ref().filter(|_| self.full_norm) {
            keys = norm.forward_shared(&keys, stage)?;
        }
        keys = keys.reshape(&[1, positions, self.kv_heads, self.head_dim])?;
        let mut values = match value {
            Some(value) => value.forward(x)?.reshape(&[1, positions, self.kv_heads, self.value_dim])?,
            None => keys.clone(),
        };
        if let Some(epsilon) = value_norm {
            values = fast::rms_norm(&values, None, *epsilon)?;
        }
        if let Some(norm) = key_norm.as_ref().filter(|_| !self.full_norm) {
            keys = norm.forward(&keys)?;
        }
        Ok((keys, values))
    }

    fn scores(&self) -> Scores<'_> {
        Scores { scale: self.scale, causal: self.causal, window: self.window, sinks: self.sinks.as_ref() }
    }

    /// Decode rows, one position each, already rotated: each attends to its own sequence.
    fn attend_decode_rows<'a>(
        &self,
        QkvProjection { queries, key_values }: &QkvProjection,
        caches: impl Iterator<Item = &'a mut LayerCache>,
        scores: &mut ScoreBudget,
    ) -> Result<Array, Exception> {
        let rows = queries.dim(1);
        // One operation for all rows: with many sequences, launching operations costs more than computing
        // them.
        let each = |all: &Array| all.reshape(&[rows, all.dim(2), 1, all.dim(3)])?.split_equal(rows, 0);
        let mut key_values = match key_values {
            None => Vec::new(),
            Some((keys, values)) => each(keys)?.into_iter().zip(each(values)?).collect(),
        }
        .into_iter();
        let mut attended = Vec::with_capacity(rows as usize);
        for (queries, cache) in each(queries)?.into_iter().zip(caches) {
            let held = match key_values.next() {
                Some((keys, values)) => cache.append(&keys, &values)?,
                None => cache.last_view(1)?,
            };
            attended.push(chunked_sdpa(&queries, &held, self.scores(), scores)?);
        }
        concatenate(&attended, 0)?.reshape(&[1, rows, self.heads * self.value_dim])
    }

    /// One sequence's positions; where they are not rotated yet, the offset of the first.
    fn attend_sequence(
        &self,
        QkvProjection { queries, key_values }: &QkvProjection,
        rotate_at: Option<i32>,
        cache: &mut LayerCache,
        scores: &mut ScoreBudget,
    ) -> Result<Array, Exception> {
        let length = queries.dim(1);
        let by_head = |all: &Array| all.transpose_axes(&[0, 2, 1, 3]);
        let rotated = |all: &Array| match (rotate_at, &self.rope) {
            (Some(offset), Some(rope)) => rope.forward(&by_head(all)?, offset),
            _ => by_head(all),
        };
        let held = match key_values {
            Some((keys, values)) => cache.append(&rotated(keys)?, &by_head(values)?)?,
            None => cache.last_view(length)?,
        };
        let mut queries = rotated(queries)?;
        if let (Some(offset), Some(scale)) = (rotate_at, self.query_scale) {
            queries = queries.multiply(sequence_scales(scale, offset, &queries)?)?;
        }
        let attended = chunked_sdpa(&queries, &held, self.scores(), scores)?;
        by_head(&attended)?.reshape(&[1, length, self.heads * self.value_dim])
    }

    /// Rotates `all`, `[1, positions, heads, width]`, each position by its own offset: with several rows, as many
    /// operations as for one row.
    fn rotate_each(&self, all: &Array, offsets: &Array) -> Result<Array, Exception> {
        let Some(rope) = &self.rope else { return Ok(all.clone()) };
        let (positions, heads, width) = (all.dim(1), all.dim(2), all.dim(3));
        rope.forward_each(&all.reshape(&[positions, heads, 1, width])?, offsets)?.reshape(all.shape())
    }

    /// Queries, `[1, positions, heads, width]`, scaled by their positions.
    fn scaled_by(&self, queries: &Array, positions: &Array) -> Result<Array, Exception> {
        let Some(scale) = self.query_scale else { return Ok(queries.clone()) };
        let scale = query_scales(scale, positions, queries)?;
        queries.multiply(scale.reshape(&[1, -1, 1, 1])?)
    }
}

/// What was attended, times its gate where there is one.
fn gated(attended: Array, gate: Option<&Array>) -> Result<Array, Exception> {
    match gate {
        None => Ok(attended),
        Some(gate) => attended.multiply(sigmoid(gate)?),
    }
}

/// Queries, and keys and values where the layer makes them, `[1, positions, heads, width]` each.
struct QkvProjection {
    queries: Array,
    key_values: Option<(Array, Array)>,
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
        let key_values = match &self.key_values {
            None => None,
            Some((keys, values)) => Some((span(keys)?, span(values)?)),
        };
        Ok(Self { queries: span(&self.queries)?, key_values })
    }
}
