//! Runs a [`Description`]: one graph for every family, layer by layer, of the part that one rank holds. It knows its
//! layers, not its neighbours, and no `model_type`.

use std::rc::Rc;

use mlx_rs::{Array, error::Exception};
use russet_model::{
    description::{self, Description, Mixer, Mlp},
    partition::RankPart,
    state::StateKind,
};
use thiserror::Error;

use crate::{
    cache::{LayerCache, format::KvFormat},
    layers::{
        attention::Attention,
        embedding::Embedding,
        linear::Linear,
        mlp::GatedMlp,
        norm::RmsNorm,
        packed_batch::PackedBatch,
        rope::{Rope, RopeError},
        tensor_parallel::TpGroup,
    },
    weights::{Weights, WeightsError},
};

/// A model that cannot be built or used.
#[derive(Debug, Error)]
pub enum DecoderError {
    /// The weights.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The rotary embedding.
    #[error(transparent)]
    Rope(#[from] RopeError),
    /// MLX.
    #[error("MLX failed: {0}")]
    Mlx(#[from] Exception),
    /// A part asked for what another rank holds.
    #[error("this rank holds no {0}; the step belongs to another rank")]
    NotOnThisRank(&'static str),
    /// A kind of layer that no supported family has.
    #[error("layer {layer} has {kind}, for which this engine has no layer; a family that uses it brings one")]
    NoLayer {
        /// Which.
        layer: u32,
        /// What it has.
        kind: &'static str,
    },
}

/// One rank's part of a model.
#[derive(Debug)]
pub struct Decoder {
    embedding: Option<Embedding>,
    layers: Vec<DecoderLayer>,
    head: Option<Head>,
}

/// Final norm and head.
#[derive(Debug)]
struct Head {
    norm: RmsNorm,
    /// `None` when the embedding serves as head.
    projection: Option<Linear>,
}

/// A layer that normalises before its mixer and before its MLP.
#[derive(Debug)]
struct DecoderLayer {
    input_norm: RmsNorm,
    attention: Attention,
    rope: Rc<Rope>,
    post_norm: RmsNorm,
    mlp: GatedMlp,
    /// What it remembers of a sequence.
    state: StateKind,
}

impl Decoder {
    /// Loads the layers of `part`.
    pub fn load(
        description: &Description,
        part: &RankPart,
        weights: &mut Weights<'_>,
    ) -> Result<Self, DecoderError> {
        let tied = description.tied;
        let embedding = if part.embedding || (tied && part.head) {
            Some(Embedding::load(weights, "model.embed_tokens")?)
        } else {
            None
        };
        let mut ropes = Ropes::default();
        let mut layers = Vec::with_capacity(part.layers.len());
        for index in part.layers.clone() {
            let Some(layer) = description.layers.get(index as usize) else { break };
            layers.push(DecoderLayer::load(weights, index, layer, &mut ropes)?);
        }
        let head = if part.head {
            let norm = RmsNorm::load(weights, "model.norm", description.norm_epsilon)?;
            let projection = if tied { None } else { Some(Linear::load(weights, "lm_head")?) };
            Some(Head { norm, projection })
        } else {
            None
        };
        Ok(Self { embedding, layers, head })
    }

    /// An empty cache for each layer held.
    pub fn new_cache(&self, format: KvFormat) -> Vec<LayerCache> {
        self.layers.iter().map(|layer| LayerCache::new(layer.state, format)).collect()
    }

    /// Hidden states of `tokens` (`[batch, length]`); only on the rank with the embedding.
    pub fn embed(&self, tokens: &Array) -> Result<Array, DecoderError> {
        let embedding = self.embedding.as_ref().ok_or(DecoderError::NotOnThisRank("embedding"))?;
        Ok(embedding.forward(tokens)?)
    }

    /// Runs the layers held over the positions of `batch`, together with the other members of `stage`.
    pub fn forward(
        &self,
        hidden: Array,
        batch: &mut PackedBatch<'_>,
        stage: &TpGroup,
    ) -> Result<Array, Exception> {
        self.layers
            .iter()
            .enumerate()
            .try_fold(hidden, |hidden, (index, layer)| layer.forward(&hidden, batch, index, stage))
    }

    /// Logits of hidden states; only on the rank with the head.
    pub fn logits(&self, hidden: &Array) -> Result<Array, DecoderError> {
        let head = self.head.as_ref().ok_or(DecoderError::NotOnThisRank("head"))?;
        let hidden = head.norm.forward(hidden)?;
        match (&head.projection, &self.embedding) {
            (Some(projection), _) => Ok(projection.forward(&hidden)?),
            (None, Some(embedding)) => Ok(embedding.as_head(&hidden)?),
            (None, None) => Err(DecoderError::NotOnThisRank("head")),
        }
    }
}

impl DecoderLayer {
    fn load(
        weights: &mut Weights<'_>,
        index: u32,
        layer: &description::Layer,
        ropes: &mut Ropes,
    ) -> Result<Self, DecoderError> {
        let path = format!("model.layers.{index}");
        let missing = |kind| DecoderError::NoLayer { layer: index, kind };
        let epsilon = layer.norms.epsilon;
        let input_norm = RmsNorm::load(weights, &format!("{path}.input_layernorm"), epsilon)?;
        let (attention, rope) = match &layer.mixer {
            Mixer::Attention(attention) if attention.window.is_some() => return Err(missing("a window")),
            Mixer::Attention(attention) if attention.sinks => return Err(missing("attention sinks")),
            Mixer::Attention(attention) => (
                Attention::load(weights, &format!("{path}.self_attn"), attention)?,
                ropes.get(&attention.rope)?,
            ),
            Mixer::Latent(_) => return Err(missing("latent attention")),
            Mixer::DeltaNet(_) => return Err(missing("a delta net")),
        };
        let post_norm = RmsNorm::load(weights, &format!("{path}.post_attention_layernorm"), epsilon)?;
        let mlp = match layer.mlp {
            Mlp::Dense(_) => GatedMlp::load(weights, &format!("{path}.mlp"))?,
            Mlp::Experts(_) => return Err(missing("experts")),
        };
        let state = StateKind::of(&layer.mixer);
        Ok(Self { input_norm, attention, rope, post_norm, mlp, state })
    }

    fn forward(
        &self,
        x: &Array,
        batch: &mut PackedBatch<'_>,
        index: usize,
        stage: &TpGroup,
    ) -> Result<Array, Exception> {
        let attended =
            self.attention.forward(&self.input_norm.forward(x)?, &self.rope, batch, index, stage)?;
        let x = x.add(attended)?;
        x.add(self.mlp.forward(&self.post_norm.forward(&x)?, stage)?)
    }
}

/// Rotary embeddings, each made once for all the layers that have it.
#[derive(Default)]
struct Ropes(Vec<(description::Rope, Rc<Rope>)>);

impl Ropes {
    fn get(&mut self, requested: &description::Rope) -> Result<Rc<Rope>, RopeError> {
        if let Some((_, rope)) = self.0.iter().find(|(known, _)| known == requested) {
            return Ok(Rc::clone(rope));
        }
        let rope = Rc::new(Rope::new(requested)?);
        self.0.push((*requested, Rc::clone(&rope)));
        Ok(rope)
    }
}
