//! Llama 2 and 3 and related architectures, such as Mistral: pre-norm blocks of grouped-query attention and a
//! gated feed-forward.

use mlx_rs::{Array, error::Exception};
use russet_model::partition::RankPart;
use serde::Deserialize;

use super::{Architecture, ConfigError, Configuration, Model, ModelError};
use crate::{
    args::KvCacheType,
    cache::{KvCache, format::KvFormat},
    layers::{
        attention::{Attention, AttentionShape},
        embedding::Embedding,
        linear::Linear,
        mlp::GatedMlp,
        norm::RmsNorm,
        packed_batch::PackedBatch,
        rope::{Rope, RopeScaling},
        tensor_parallel::TpGroup,
    },
    weights::{Checkpoint, Weights, WeightsError},
};

/// Meta's Llama and all models with its `model_type`.
pub const ARCH: Architecture = Architecture { model_type: "llama", configure };
/// Mistral's dense models, with the same graph.
pub const MISTRAL: Architecture = Architecture { model_type: "mistral", configure };

/// Context in tokens if config.json names none.
const DEFAULT_CONTEXT: u32 = 4096;

/// config.json of this architecture, and of those that share its blocks.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct LlamaConfig {
    hidden_size: usize,
    num_hidden_layers: u32,
    intermediate_size: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    pub(super) head_dim: Option<usize>,
    rms_norm_eps: f32,
    vocab_size: usize,
    max_position_embeddings: Option<u32>,
    #[serde(default)]
    pub(super) attention_bias: bool,
    #[serde(default)]
    pub(super) mlp_bias: bool,
    rope_theta: Option<f32>,
    #[serde(default)]
    rope_traditional: bool,
    rope_scaling: Option<RopeScaling>,
    /// Newer files have `rope_theta` and the scaling here.
    rope_parameters: Option<RopeParameters>,
    tie_word_embeddings: Option<bool>,
    layer_types: Option<Vec<String>>,
    /// Whether every head of queries and keys has a norm: a property of the architecture, not a field of the
    /// file.
    #[serde(skip)]
    pub(super) head_norms: bool,
}

#[derive(Clone, Debug, Deserialize)]
struct RopeParameters {
    rope_theta: Option<f32>,
    #[serde(flatten)]
    scaling: RopeScaling,
}

impl LlamaConfig {
    /// Reads the fields without validation.
    pub(super) fn parse(json: &serde_json::Value) -> Result<Self, ConfigError> {
        Self::deserialize(json).map_err(|error| ConfigError::Json(error.to_string()))
    }

    /// Validates the fields.
    pub(super) fn validate(self) -> Result<Box<dyn Configuration>, ConfigError> {
        self.check()?;
        self.rope().map_err(|error| ConfigError::Rope(error.to_string()))?;
        Ok(Box::new(self))
    }

    /// The base of the rotary embedding, if the file names one.
    pub(super) fn theta(&self) -> Option<f32> {
        self.rope_theta.or(self.rope_parameters.as_ref().and_then(|rope| rope.rope_theta))
    }

    fn attention(&self) -> AttentionShape {
        AttentionShape {
            width: self.hidden_size,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads.unwrap_or(self.num_attention_heads),
            head_dim: self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1)),
            bias: self.attention_bias,
            head_norm: self.head_norms.then_some(self.rms_norm_eps),
        }
    }

    fn rope(&self) -> Result<Rope, crate::layers::rope::RopeError> {
        let parameters = self.rope_parameters.as_ref();
        let theta = self.theta().unwrap_or(10_000.0);
        let scaling = self.rope_scaling.as_ref().or(parameters.map(|rope| &rope.scaling));
        Rope::new(self.attention().head_dim, theta, self.rope_traditional, scaling)
    }

    fn check(&self) -> Result<(), ConfigError> {
        let shape = self.attention();
        let field = |field, value: usize, needed: String| {
            Err(ConfigError::Field { field, value: value.to_string(), needed })
        };
        for (name, value) in [
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers as usize),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", shape.kv_heads),
            ("head_dim", shape.head_dim),
            ("vocab_size", self.vocab_size),
        ] {
            // Sizes are passed to MLX as 32-bit integers, and products of two of them as shapes.
            if value == 0 || value > 1 << 24 {
                return field(name, value, "a number from 1 to 16777216 is needed".to_owned());
            }
        }
        if !shape.heads.is_multiple_of(shape.kv_heads) {
            return field(
                "num_key_value_heads",
                shape.kv_heads,
                format!("it has to divide num_attention_heads, {}", shape.heads),
            );
        }
        if !shape.head_dim.is_multiple_of(2) {
            return field("head_dim", shape.head_dim, "rotary positions need an even number".to_owned());
        }
        match self.layer_types.iter().flatten().find(|kind| *kind != "full_attention") {
            Some(kind) => {
                Err(ConfigError::Unsupported(format!("layer type \"{kind}\" (only full_attention)")))
            }
            None => Ok(()),
        }
    }
}

fn configure(json: &serde_json::Value) -> Result<Box<dyn Configuration>, ConfigError> {
    LlamaConfig::parse(json)?.validate()
}

impl Configuration for LlamaConfig {
    fn layers(&self) -> u32 {
        self.num_hidden_layers
    }

    fn width(&self) -> usize {
        self.hidden_size
    }

    fn vocabulary(&self) -> usize {
        self.vocab_size
    }

    fn context(&self) -> u32 {
        self.max_position_embeddings.unwrap_or(DEFAULT_CONTEXT)
    }

    fn check_tensor_size(&self, members: u32) -> Result<(), ConfigError> {
        let shape = self.attention();
        for (field, value) in [
            ("num_attention_heads", shape.heads),
            ("num_key_value_heads", shape.kv_heads),
            ("intermediate_size", self.intermediate_size),
        ] {
            if !value.is_multiple_of(members as usize) {
                return Err(ConfigError::Members { field, value, members });
            }
        }
        Ok(())
    }

    fn kv_format(&self, asked: KvCacheType) -> Result<KvFormat, ConfigError> {
        let head_dim = self.attention().head_dim;
        KvFormat::new(asked, head_dim).ok_or(ConfigError::Cache { head_dim })
    }

    /// Without the field, the embedding is tied exactly if the file has no head.
    fn tied(&self, checkpoint: &mut Checkpoint) -> Result<bool, WeightsError> {
        match self.tie_word_embeddings {
            Some(tied) => Ok(tied),
            None => Ok(!checkpoint.contains("lm_head.weight")?),
        }
    }

    fn load(
        &self,
        part: &RankPart,
        tied: bool,
        weights: &mut Weights<'_>,
    ) -> Result<Box<dyn Model>, ModelError> {
        let embedding = if part.embedding || (tied && part.head) {
            Some(Embedding::load(weights, "model.embed_tokens", self.vocab_size, self.hidden_size)?)
        } else {
            None
        };
        let blocks = part
            .layers
            .clone()
            .map(|index| Block::load(weights, &format!("model.layers.{index}"), self))
            .collect::<Result<Vec<_>, _>>()?;
        let head = if part.head { Some(OutputHead::load(weights, self, tied)?) } else { None };
        Ok(Box::new(Llama { embedding, blocks, head, rope: self.rope()? }))
    }
}

struct Llama {
    embedding: Option<Embedding>,
    blocks: Vec<Block>,
    head: Option<OutputHead>,
    rope: Rope,
}

struct OutputHead {
    norm: RmsNorm,
    /// `None` if the embedding serves as head.
    projection: Option<Linear>,
}

impl OutputHead {
    fn load(weights: &mut Weights<'_>, config: &LlamaConfig, tied: bool) -> Result<Self, WeightsError> {
        let norm = RmsNorm::load(weights, "model.norm", config.hidden_size, config.rms_norm_eps)?;
        let projection = if tied {
            None
        } else {
            Some(Linear::load(weights, "lm_head", config.hidden_size, config.vocab_size, false)?)
        };
        Ok(Self { norm, projection })
    }
}

struct Block {
    input_norm: RmsNorm,
    attention: Attention,
    post_norm: RmsNorm,
    mlp: GatedMlp,
}

impl Block {
    fn load(weights: &mut Weights<'_>, path: &str, config: &LlamaConfig) -> Result<Self, WeightsError> {
        let (width, epsilon) = (config.hidden_size, config.rms_norm_eps);
        Ok(Self {
            input_norm: RmsNorm::load(weights, &format!("{path}.input_layernorm"), width, epsilon)?,
            attention: Attention::load(weights, &format!("{path}.self_attn"), config.attention())?,
            post_norm: RmsNorm::load(weights, &format!("{path}.post_attention_layernorm"), width, epsilon)?,
            mlp: GatedMlp::load(
                weights,
                &format!("{path}.mlp"),
                width,
                config.intermediate_size,
                config.mlp_bias,
            )?,
        })
    }

    fn forward(
        &self,
        x: &Array,
        rope: &Rope,
        batch: &mut PackedBatch<'_>,
        layer: usize,
        stage: &TpGroup,
    ) -> Result<Array, Exception> {
        let attended = self.attention.forward(&self.input_norm.forward(x)?, rope, batch, layer, stage)?;
        let x = x.add(attended)?;
        x.add(self.mlp.forward(&self.post_norm.forward(&x)?, stage)?)
    }
}

impl Model for Llama {
    fn new_cache(&self, form: KvFormat) -> Vec<KvCache> {
        self.blocks.iter().map(|_| KvCache::new(form)).collect()
    }

    fn embed(&self, tokens: &Array) -> Result<Array, ModelError> {
        let embedding = self.embedding.as_ref().ok_or(ModelError::NotOnThisRank("embedding"))?;
        Ok(embedding.forward(tokens)?)
    }

    fn forward(
        &self,
        hidden: Array,
        batch: &mut PackedBatch<'_>,
        stage: &TpGroup,
    ) -> Result<Array, Exception> {
        self.blocks.iter().enumerate().try_fold(hidden, |hidden, (layer, block)| {
            block.forward(&hidden, &self.rope, batch, layer, stage)
        })
    }

    fn logits(&self, hidden: &Array) -> Result<Array, ModelError> {
        let head = self.head.as_ref().ok_or(ModelError::NotOnThisRank("head"))?;
        let hidden = head.norm.forward(hidden)?;
        match (&head.projection, &self.embedding) {
            (Some(projection), _) => Ok(projection.forward(&hidden)?),
            (None, Some(embedding)) => Ok(embedding.as_head(&hidden)?),
            (None, None) => Err(ModelError::NotOnThisRank("head")),
        }
    }
}
