//! What a model is, layer by layer: the result of reading its configuration. The engine runs it, the planner adds it
//! up, and neither knows which family it is of. No weights and no bytes here.

use crate::error::Unsupported;

/// A model that the engine can run.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    /// `model_type` of config.json.
    pub model_type: &'static str,
    /// Width of the hidden state, which is what travels between stages.
    pub hidden_size: u32,
    /// Tokens of the vocabulary.
    pub vocab_size: u32,
    /// Longest context, tokens.
    pub context_length: u32,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// Epsilon of the norm before the head.
    pub norm_epsilon: f32,
    /// Layers, in order.
    pub layers: Vec<Layer>,
    /// What a person should know though the model runs, such as a context that is bounded by a window.
    pub notes: Vec<String>,
}

/// One layer: what mixes positions, and what follows it.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// What mixes positions.
    pub mixer: Mixer,
    /// What each position passes by itself.
    pub mlp: Mlp,
    /// Where the layer normalises.
    pub norms: Norms,
}

/// Norms of a layer: before the mixer and before the MLP, each with a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norms {
    /// Epsilon of both.
    pub epsilon: f32,
}

/// What mixes positions.
#[derive(Clone, Debug, PartialEq)]
pub enum Mixer {
    /// Attention to keys and values of the positions before.
    Attention(Attention),
    /// Attention to a latent of the positions before (MLA): what is cached is narrower than keys and values, and the
    /// same for all heads, so a tensor group holds it whole on every rank.
    Latent(Latent),
    /// A gated delta net: a state of fixed size instead of a cache.
    DeltaNet(DeltaNet),
}

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
    /// Tokens it looks back, itself included; `None` is all.
    pub window: Option<u32>,
    /// Whether each head has a learned sink.
    pub sinks: bool,
    /// What scores are multiplied by.
    pub scale: f32,
    /// The rotary embedding.
    pub rope: Rope,
    /// Epsilon of the norms that each head of queries and keys passes before it is rotated.
    pub head_norm: Option<f32>,
    /// Whether the projections have biases.
    pub bias: bool,
}

/// Multi-head latent attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Latent {
    /// Query heads.
    pub heads: u32,
    /// Width of the latent.
    pub rank: u32,
    /// Width of the rotated part, which is cached beside it.
    pub rope_dim: u32,
    /// Width of a value.
    pub value_dim: u32,
}

/// A gated delta net.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaNet {
    /// Key heads; a tensor group shares them.
    pub key_heads: u32,
    /// Value heads.
    pub value_heads: u32,
    /// Width of a key.
    pub key_dim: u32,
    /// Width of a value.
    pub value_dim: u32,
    /// Positions that the convolution before it looks back.
    pub conv_kernel: u32,
}

/// A rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Elements of a head that are rotated.
    pub width: u32,
    /// The base.
    pub base: f32,
    /// Whether neighbours are rotated, not halves.
    pub traditional: bool,
    /// The scaling.
    pub scaling: RopeScaling,
}

/// How a rotary embedding is stretched over longer contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    #[default]
    None,
    /// Positions are divided by the factor.
    Linear {
        /// The factor.
        factor: f32,
    },
    /// Long wavelengths are stretched, short ones kept, those between blended.
    Llama3 {
        /// The factor of long ones.
        factor: f32,
        /// The original context over this is the shortest that is stretched whole.
        low: f32,
        /// The original context over this is the longest that is kept.
        high: f32,
        /// The original context, tokens.
        original: f32,
    },
}

/// What each position passes by itself.
#[derive(Clone, Debug, PartialEq)]
pub enum Mlp {
    /// One gated block.
    Dense(Dense),
    /// A few gated blocks of many, chosen for each position.
    Experts(Experts),
}

/// A gated block: `down(silu(gate(x)) · up(x))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dense {
    /// Its width.
    pub intermediate: u32,
    /// Whether its projections have biases.
    pub bias: bool,
}

/// Experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// How many there are.
    pub count: u32,
    /// How many a position passes.
    pub used: u32,
    /// Width of each.
    pub intermediate: u32,
    /// Width of the one that every position passes besides; 0 where there is none.
    pub shared: u32,
}

impl Description {
    /// The first layer's attention, for what is asked of models whose layers are alike.
    pub fn attention(&self) -> Option<&Attention> {
        self.layers.iter().find_map(|layer| match &layer.mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::Latent(_) | Mixer::DeltaNet(_) => None,
        })
    }
}

impl RopeScaling {
    /// The scaling of this name, with its numbers checked.
    pub fn read(fields: &crate::config::RopeFields) -> Result<Self, Unsupported> {
        let kind = fields.rope_type.as_deref().unwrap_or("default");
        let positive = |field: &str, value: Option<f32>| match value {
            Some(number) if number > 0.0 && number.is_finite() => Ok(number),
            value => {
                let shown = value.map_or("absent".to_owned(), |value| value.to_string());
                let reason = format!("rope scaling {kind:?} needs a positive {field}, which is {shown}");
                Err(Unsupported::field(
                    &format!("rope_scaling.{field}"),
                    reason,
                    "take the config.json that belongs to the weights",
                ))
            }
        };
        match kind {
            "default" => Ok(Self::None),
            "linear" => Ok(Self::Linear { factor: positive("factor", fields.factor)? }),
            "llama3" => Ok(Self::Llama3 {
                factor: positive("factor", fields.factor)?,
                low: positive("low_freq_factor", fields.low_freq_factor.or(Some(1.0)))?,
                high: positive("high_freq_factor", fields.high_freq_factor.or(Some(4.0)))?,
                original: positive(
                    "original_max_position_embeddings",
                    fields.original_max_position_embeddings.or(Some(8192.0)),
                )?,
            }),
            other => Err(Unsupported::field(
                "rope_scaling.rope_type",
                format!("rope scaling {other:?} is not supported; supported are default, linear and llama3"),
                "leave it out and use the model's original context, or use a model without it",
            )),
        }
    }
}
