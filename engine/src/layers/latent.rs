//! Multi-head latent attention: keys and values of all heads are made of one latent, which is all that is cached, beside a
//! rotated part that the heads share. A single position attends within the latent; several make keys and values of it.
//! With tensor parallelism, each rank computes some of the heads, and all have the whole latent.

use std::rc::Rc;

use mlx_rs::{
    Array,
    error::Exception,
    fast::{ScaledDotProductAttentionMask, scaled_dot_product_attention},
    ops::{concatenate, indexing::TryIndexOp, select},
};
use russet_model::description::{self, QueryScale};

use super::{
    activation::scalar,
    linear::Linear,
    norm::RmsNorm,
    packed_batch::{PackedBatch, SequenceSlice},
    query_scale::sequence_scales,
    rope::Rope,
    sdpa::{ScoreBudget, rows_per_chunk, visible},
    tensor_parallel::TpGroup,
};
use crate::{
    cache::LayerCache,
    weights::{Weight, Weights, WeightsError},
};

/// One layer of latent attention.
#[derive(Debug)]
pub struct LatentAttention {
    /// Heads computed here.
    heads: i32,
    rank: i32,
    rope_dim: i32,
    nope_dim: i32,
    value_dim: i32,
    scale: f32,
    query: QueryProjection,
    latent: Linear,
    latent_norm: RmsNorm,
    /// Queries into the latent, or the latent into keys, `[heads, rank, nope]`.
    embed: Weight,
    /// The latent into values, `[heads, value, rank]`.
    unembed: Weight,
    output: Linear,
    rope: Rc<Rope>,
    query_scale: Option<QueryScale>,
}

#[derive(Debug)]
enum QueryProjection {
    Direct(Linear),
    /// By a latent of their own.
    Latent {
        down: Linear,
        norm: RmsNorm,
        up: Linear,
    },
}

impl LatentAttention {
    /// Loads the projections under `path`.
    pub fn load(
        weights: &mut Weights<'_>,
        path: &str,
        description: &description::Latent,
        rope: Rc<Rope>,
    ) -> Result<Self, WeightsError> {
        let epsilon = description.epsilon;
        let query = match description.query_rank {
            None => QueryProjection::Direct(Linear::load(weights, &format!("{path}.q_proj"))?),
            Some(_) => QueryProjection::Latent {
                down: Linear::load(weights, &format!("{path}.q_a_proj"))?,
                norm: RmsNorm::load(weights, &format!("{path}.q_a_layernorm"), epsilon)?,
                up: Linear::load(weights, &format!("{path}.q_b_proj"))?,
            },
        };
        Ok(Self {
            heads: weights.shard().heads(description.heads),
            rank: description.rank as i32,
            rope_dim: description.rope_dim as i32,
            nope_dim: description.nope_dim as i32,
            value_dim: description.value_dim as i32,
            scale: description.scale,
            query,
            latent: Linear::load(weights, &format!("{path}.kv_a_proj_with_mqa"))?,
            latent_norm: RmsNorm::load(weights, &format!("{path}.kv_a_layernorm"), epsilon)?,
            embed: weights.weight(&format!("{path}.embed_q"))?,
            unembed: weights.weight(&format!("{path}.unembed_out"))?,
            output: Linear::load(weights, &format!("{path}.o_proj"))?,
            rope,
            query_scale: description.query_scale,
        })
    }

    /// Causal attention of every position of `x`, `[1, positions, width]`, within its sequence; `layer` selects this
    /// layer's cache among the caches of `batch`.
    pub fn forward(
        &self,
        x: &Array,
        batch: &mut PackedBatch<'_>,
        layer: usize,
        stage: &TpGroup,
    ) -> Result<Array, Exception> {
        let positions = x.dim(1);
        let queries = match &self.query {
            QueryProjection::Direct(linear) => linear.forward(x)?,
            QueryProjection::Latent { down, norm, up } => up.forward(&norm.forward(&down.forward(x)?)?)?,
        };
        let queries = queries.reshape(&[1, positions, self.heads, self.nope_dim + self.rope_dim])?;
        let plain = queries.try_index((.., .., .., ..self.nope_dim))?;
        let turned = queries.try_index((.., .., .., self.nope_dim..))?;
        let compressed = self.latent.forward(x)?;
        let latent = self.latent_norm.forward(&compressed.try_index((.., .., ..self.rank))?)?;
        let shared =
            compressed.try_index((.., .., self.rank..))?.reshape(&[1, positions, 1, self.rope_dim])?;
        let mut rows = Vec::new();
        let mut scores = ScoreBudget::default();
        for (positions, SequenceSlice { offset, caches, .. }) in batch.sequences() {
            let own = |all: &Array| {
                let own = all.try_index((.., positions.clone(), .., ..))?;
                own.transpose_axes(&[0, 2, 1, 3])
            };
            let latent = latent.try_index((.., positions.clone(), ..))?.expand_dims(1)?;
            let rotated = self.rope.forward(&own(&shared)?, *offset)?;
            let LayerCache::Latent(cache) = &mut caches[layer] else {
                return Err(Exception::custom(
                    "latent attention was given the cache of another kind of layer",
                ));
            };
            let held = cache.append(&latent, &rotated)?;
            let (mut plain, mut turned) = (own(&plain)?, self.rope.forward(&own(&turned)?, *offset)?);
            if let Some(scale) = self.query_scale {
                let scale = sequence_scales(scale, *offset, &plain)?;
                (plain, turned) = (plain.multiply(&scale)?, turned.multiply(&scale)?);
            }
            let turned = turned.multiply(scalar(self.scale, &turned)?)?;
            rows.push(self.attend(&plain, &turned, &held, &mut scores)?);
        }
        self.output.forward_summed(&concatenate(&rows, 1)?, stage)
    }

    /// Attention of the last positions of a sequence; `plain` and `turned` are the parts of their queries, `[1, heads,
    /// positions, width]`, the turned one rotated and scaled, and `held` is the cache, `[1, 1, context, width]` each.
    fn attend(
        &self,
        plain: &Array,
        turned: &Array,
        [latent, shared]: &[Array; 2],
        scores: &mut ScoreBudget,
    ) -> Result<Array, Exception> {
        let (length, context) = (plain.dim(2), latent.dim(2));
        let shared = shared.swap_axes(-1, -2)?;
        let attended = if length == 1 {
            // All heads see the same: as rows of one head they take one product, not one each.
            let rows = |all: &Array| all.swap_axes(1, 2);
            let queries = rows(&self.embed.apply(plain)?)?;
            let mask = rows(turned)?.matmul(&shared)?;
            let attended = self.scored(&queries, latent, latent, &mask)?;
            self.unembed.apply(&rows(&attended)?)?
        } else {
            let (keys, values) = (self.embed.apply_reversed(latent)?, self.unembed.apply(latent)?);
            // The turned part's scores are written down beside the mask.
            let row = 2 * self.heads as usize * context as usize * plain.item_size();
            let rows = rows_per_chunk(row, length);
            let mut pieces = Vec::new();
            for from in (0..length).step_by(rows as usize) {
                let to = length.min(from + rows);
                let seen = context - length + to;
                let part = |all: &Array| all.try_index((.., .., from..to, ..));
                let mask = part(turned)?.matmul(shared.try_index((.., .., .., ..seen))?)?;
                let mask = select(visible(to - from, seen, None)?, &mask, least(&mask)?)?;
                let [keys, values] = [&keys, &values].map(|all| all.try_index((.., .., ..seen, ..)));
                let piece = self.scored(&part(plain)?, &keys?, &values?, &mask)?;
                if rows < length {
                    // Evaluated now: MLX would allocate the scores of several chunks before it frees the first's.
                    piece.eval()?;
                }
                pieces.push(piece);
            }
            match pieces.as_slice() {
                [whole] => {
                    scores.reserve(row * length as usize, whole)?;
                    whole.clone()
                }
                pieces => concatenate(pieces, 2)?,
            }
        };
        attended.transpose_axes(&[0, 2, 1, 3])?.reshape(&[1, length, self.heads * self.value_dim])
    }

    fn scored(
        &self,
        queries: &Array,
        keys: &Array,
        values: &Array,
        mask: &Array,
    ) -> Result<Array, Exception> {
        let mask = Some(ScaledDotProductAttentionMask::Array(mask));
        scaled_dot_product_attention(queries, keys, values, self.scale, mask, None)
    }
}

/// The least number of an array's type.
fn least(like: &Array) -> Result<Array, Exception> {
    let least = match like.dtype() {
        mlx_rs::Dtype::Float16 => -65504.0,
        // The greatest that is a bfloat16.
        mlx_rs::Dtype::Bfloat16 => f32::from_bits(0xff7f_0000),
        _ => f32::MIN,
    };
    scalar(least, like)
}
