//! Attention of a layer: to keys and values, or to a latent.

use super::Rope;

/// Multi-head attention with grouped key/value heads.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Query heads.
    pub heads: u32,
    /// Key/value heads; they divide the query heads.
    pub kv_heads: u32,
    /// Width of a query and of a key.
    pub key_dim: u32,
    /// Width of a value.
    pub value_dim: u32,
    /// Whether a position sees none of those behind it.
    pub causal: bool,
    /// Tokens it looks back, itself included, and as far ahead where it sees those; `None` is all.
    pub window: Option<u32>,
    /// Whether each head has a learned sink: a score that takes its share of attention and gives nothing.
    pub sinks: bool,
    /// What scores are multiplied by.
    pub scale: f32,
    /// The rotary embedding; `None` where positions are not encoded.
    pub rope: Option<Rope>,
    /// Norms that queries and keys pass before they are rotated.
    pub qk_norm: Option<QkNorm>,
    /// Names of these norms.
    pub qk_norm_names: [&'static str; 2],
    /// Epsilon of the norm, without weights, that each head's values pass; `None` where there is none.
    pub value_norm: Option<f32>,
    /// Whether values are what keys are before their norm, and have no projection.
    pub values_are_keys: bool,
    /// Whether the projections of queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Name of the projection of the output.
    pub output: &'static str,
    /// Whether it has a bias.
    pub output_bias: bool,
    /// Whether the output is multiplied by a gate of the input, which is projected with the queries.
    pub output_gate: bool,
    /// What queries are multiplied by, by their position.
    pub query_scale: Option<QueryScale>,
    /// The earlier layer whose keys and values it reads, of its own shape and window. It then has no projections and no
    /// norm of keys and values.
    pub shares_cache_of: Option<u32>,
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QkNorm {
    /// Of each head by itself, all by the same weights.
    Head {
        /// Epsilon.
        epsilon: f32,
    },
    /// Of all heads together. The ranks of a tensor group add up what each has of the sum of squares.
    Full {
        /// Epsilon.
        epsilon: f32,
    },
}

/// Queries grow with the logarithm of how often their position exceeds the original context:
/// `1 + beta · ln(1 + ⌊position / original⌋)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryScale {
    /// The factor.
    pub beta: f32,
    /// The original context, tokens.
    pub original: f32,
}

impl Attention {
    /// As in a Llama: keys as wide as values, no biases, all of the context.
    pub fn new(heads: u32, kv_heads: u32, head_dim: u32, rope: Option<Rope>) -> Self {
        Self {
            heads,
            kv_heads,
            key_dim: head_dim,
            value_dim: head_dim,
            causal: true,
            window: None,
            sinks: false,
            scale: f64::from(head_dim).powf(-0.5) as f32,
            rope,
            qk_norm: None,
            qk_norm_names: ["q_norm", "k_norm"],
            value_norm: None,
            values_are_keys: false,
            qkv_bias: false,
            output: "o_proj",
            output_bias: false,
            output_gate: false,
            query_scale: None,
            shares_cache_of: None,
        }
    }

    /// Width of what the queries are projected to: a gate comes with them.
    pub fn query_width(&self) -> u64 {
        let gates = 1 + u64::from(self.output_gate);
        u64::from(self.heads) * u64::from(self.key_dim) * gates
    }
}

/// Multi-head latent attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Latent {
    /// Query heads.
    pub heads: u32,
    /// Width of the latent.
    pub rank: u32,
    /// Width of the latent that queries are made of; `None` where they are projected at once.
    pub query_rank: Option<u32>,
    /// Width of the rotated part, which is cached beside the latent.
    pub rope_dim: u32,
    /// Width of the part that is not rotated.
    pub nope_dim: u32,
    /// Width of a value.
    pub value_dim: u32,
    /// What scores are multiplied by.
    pub scale: f32,
    /// The rotary embedding.
    pub rope: Rope,
    /// Epsilon of the norms of both latents.
    pub epsilon: f32,
    /// Whether the projections into latents and of the output have biases.
    pub bias: bool,
    /// What queries are multiplied by, by their position.
    pub query_scale: Option<QueryScale>,
}
