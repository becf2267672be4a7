//! Runs a [`Description`]: one graph for every family, layer by layer, of the part that one rank holds. It knows its
//! layers, not its neighbours, and no `model_type`.

use std::{path::Path, rc::Rc};

use mlx_rs::{
    Array,
    error::Exception,
    ops::{concatenate, tanh},
};
use russet_model::{
    description::{self, Description, Encoder, Mixer, Mlp, NormKind, PerLayerInputs},
    partition::RankPart,
    state::StateKind,
};
use thiserror::Error;

use crate::{
    adapters::ActiveAdapters,
    cache::{LayerCache, format::KvFormat},
    layers::{
        activation::scalar,
        attention::Attention,
        delta_net::DeltaNet,
        embedding::Embedding,
        encoder_embedding::EncoderEmbedding,
        experts::MixtureOfExperts,
        latent::LatentAttention,
        linear::Linear,
        mamba2::Mamba2,
        mlp::FeedForward,
        norm::Norm,
        packed_batch::PackedBatch,
        per_layer_input::{InputsAhead, PerLayerEmbedding, PerLayerGate},
        pooler::Pooler,
        rope::{Rope, RopeError},
        short_conv::ShortConv,
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
}

/// One rank's part of a model.
#[derive(Debug)]
pub struct Decoder {
    embedding: Option<Embedding>,
    /// What embeddings are multiplied by.
    embedding_scale: Option<f32>,
    /// What a BERT adds to the embedding of its tokens.
    encoder: Option<EncoderEmbedding>,
    /// What makes the per-layer inputs; only on ranks that embed.
    per_layer: Option<PerLayerEmbedding>,
    /// Width of the hidden state and of each layer's input, where layers have inputs of their own.
    input_widths: Option<(i32, u32)>,
    layers: Vec<DecoderLayer>,
    adapters: Rc<ActiveAdapters>,
    head: Option<Head>,
    /// The norm behind the last layer and what makes vectors or scores, in a model that does not generate.
    pooler: Option<(Option<Norm>, Pooler)>,
}

/// Final norm and head.
#[derive(Debug)]
struct Head {
    norm: Norm,
    /// `None` when the embedding serves as head.
    projection: Option<Linear>,
    /// What logits are divided by.
    divisor: Option<f32>,
    /// Where logits are capped.
    cap: Option<f32>,
}

/// A layer: mixer and MLP, of those it has, each added to the hidden state, and then its own input, where it has one.
#[derive(Debug)]
struct DecoderLayer {
    mixer: Option<MixerLayer>,
    mlp: Option<MlpLayer>,
    per_layer: Option<PerLayerGate>,
    norms: Norms,
    /// Whether the norms behind mixer and MLP are of the sums.
    norms_sums: bool,
    residual_scale: Option<f32>,
    /// What the hidden state is multiplied by after it.
    output_scale: Option<Array>,
    /// What its mixer remembers of a sequence; `None` where it reads what another layer's does.
    state: Option<StateKind>,
    /// Where among the caches of this rank the one lies that its mixer reads.
    cache: usize,
}

#[derive(Debug)]
enum MixerLayer {
    Attention(Attention),
    Latent(LatentAttention),
    DeltaNet(DeltaNet),
    ShortConv(ShortConv),
    Mamba2(Mamba2),
}

#[derive(Debug)]
enum MlpLayer {
    Dense(Box<FeedForward>),
    Experts(Box<MixtureOfExperts>),
}

/// Norms of a layer, those that it has.
#[derive(Debug)]
struct Norms {
    before_mixer: Option<Norm>,
    after_mixer: Option<Norm>,
    before_mlp: Option<Norm>,
    after_mlp: Option<Norm>,
}

impl Decoder {
    /// Loads the layers of `part`; `folder` is the model's, where its modules have files of their own.
    pub fn load(
        description: &Description,
        part: &RankPart,
        weights: &mut Weights<'_>,
        folder: &Path,
    ) -> Result<Self, DecoderError> {
        let tied = description.tied;
        let embedding = if part.embedding || (tied && part.head) {
            Some(Embedding::load(weights, "model.embed_tokens")?)
        } else {
            None
        };
        let inputs = description.per_layer_inputs;
        let per_layer =
            inputs.filter(|_| part.embedding).map(|inputs| PerLayerEmbedding::load(weights, inputs));
        let mut ropes = Ropes::default();
        let mut layers: Vec<DecoderLayer> = Vec::with_capacity(part.layers.len());
        let mut caches = 0;
        for index in part.layers.clone() {
            let Some(layer) = description.layers.get(index as usize) else { break };
            let mut loaded = DecoderLayer::load(weights, index, layer, inputs.as_ref(), &mut ropes)?;
            loaded.cache = match description.shares_cache_of(index) {
                None => caches,
                Some(owner) => {
                    let held =
                        owner.checked_sub(part.layers.start).and_then(|held| layers.get(held as usize));
                    held.ok_or(DecoderError::NotOnThisRank("layer whose keys and values another one reads"))?
                        .cache
                }
            };
            caches += usize::from(loaded.state.is_some());
            layers.push(loaded);
        }
        let epsilon = description.norm_epsilon;
        let norm = description
            .norm
            .filter(|_| part.head)
            .map(|norm| Norm::load(weights, &format!("model.{norm}"), NormKind::Rms, epsilon));
        let mut norm = norm.transpose()?;
        let encoder = description.encoder.map(|Encoder { first_position, .. }| {
            EncoderEmbedding::load(weights, "model", first_position, epsilon)
        });
        let pooler = match (description.encoder.and_then(|encoder| encoder.classifier), &description.pooling)
        {
            (Some(classifier), _) => Some(Pooler::score(weights, classifier)?),
            (None, Some(pooling)) => Some(Pooler::embed(folder, pooling)?),
            (None, None) => None,
        };
        let pooler = pooler.map(|pooler| (norm.take(), pooler));
        let head = if let Some(norm) = norm {
            let projection = if tied { None } else { Some(Linear::load(weights, "lm_head")?) };
            let Description { logit_divisor: divisor, logit_cap: cap, .. } = *description;
            Some(Head { norm, projection, divisor, cap })
        } else {
            None
        };
        Ok(Self {
            embedding,
            embedding_scale: description.embedding_scale,
            encoder: encoder.transpose()?,
            per_layer: per_layer.transpose()?,
            input_widths: inputs.map(|inputs| (description.hidden_size as i32, inputs.width)),
            layers,
            adapters: weights.active_adapters(),
            head,
            pooler,
        })
    }

    /// An empty cache for each layer held that has one of its own.
    pub fn new_cache(&self, format: KvFormat) -> Vec<LayerCache> {
        let kinds = self.layers.iter().filter_map(|layer| layer.state);
        kinds.map(|kind| LayerCache::new(kind, format)).collect()
    }

    /// Hidden states of `tokens` (`[batch, length]`), with the inputs of all layers where they have their own; only on
    /// the rank with the embedding.
    pub fn embed(&self, tokens: &Array) -> Result<Array, DecoderError> {
        let embedding = self.embedding.as_ref().ok_or(DecoderError::NotOnThisRank("embedding"))?;
        let embedded = embedding.forward(tokens)?;
        let embedded = match self.embedding_scale {
            None => embedded,
            Some(scale) => embedded.multiply(scalar(scale, &embedded)?)?,
        };
        match &self.per_layer {
            None => Ok(embedded),
            Some(per_layer) => {
                let inputs = per_layer.forward(tokens, &embedded)?;
                Ok(concatenate(&[embedded, inputs], -1)?)
            }
        }
    }

    /// Runs the layers held over the positions of `batch`, together with the other members of `stage`. What it is given
    /// and what it returns is `Description::stage_width` wide.
    pub fn forward(
        &self,
        hidden: Array,
        batch: &mut PackedBatch<'_>,
        stage: &TpGroup,
    ) -> Result<Array, Exception> {
        self.adapters.select(batch.adapters());
        let Some((hidden_size, width)) = self.input_widths else {
            let mut layers = self.layers.iter();
            return layers.try_fold(hidden, |hidden, layer| layer.forward(&hidden, None, batch, stage));
        };
        let (mut hidden, inputs) = InputsAhead::split(&hidden, hidden_size, width)?;
        for (layer, index) in self.layers.iter().zip(0..) {
            hidden = layer.forward(&hidden, Some(&inputs.of(index)?), batch, stage)?;
        }
        inputs.join(hidden, self.layers.len() as i32)
    }

    /// A vector or a score of each text, `[texts, width]` in 32 bits: of all their tokens, `[1, positions]`, and the
    /// segment of each, `[positions]`, where the texts have so many, the shortest first.
    pub fn pool(&self, tokens: &Array, token_types: &Array, lengths: &[i32]) -> Result<Array, DecoderError> {
        let (norm, pooler) = self.pooler.as_ref().ok_or(DecoderError::NotOnThisRank("pooler"))?;
        let mut batch = PackedBatch::of_texts(lengths.to_vec());
        let mut hidden = self.embed(tokens)?;
        if let (Some(encoder), Some(positions)) = (&self.encoder, &batch.positions) {
            hidden = encoder.forward(&hidden, positions, token_types)?;
        }
        let hidden = self.forward(hidden, &mut batch, &TpGroup::default())?;
        Ok(pooler.forward(&normed(&hidden, norm.as_ref())?, lengths)?)
    }

    /// Logits of hidden states; only on the rank with the head.
    pub fn logits(&self, hidden: &Array) -> Result<Array, DecoderError> {
        let head = self.head.as_ref().ok_or(DecoderError::NotOnThisRank("head"))?;
        let hidden = head.norm.forward(hidden)?;
        let mut logits = match (&head.projection, &self.embedding) {
            (Some(projection), _) => projection.forward(&hidden)?,
            (None, Some(embedding)) => embedding.as_head(&hidden)?,
            (None, None) => return Err(DecoderError::NotOnThisRank("head")),
        };
        if let Some(divisor) = head.divisor {
            logits = logits.divide(scalar(divisor, &logits)?)?;
        }
        if let Some(cap) = head.cap {
            let cap = scalar(cap, &logits)?;
            logits = tanh(logits.divide(&cap)?)?.multiply(cap)?;
        }
        Ok(logits)
    }
}

impl DecoderLayer {
    fn load(
        weights: &mut Weights<'_>,
        index: u32,
        layer: &description::Layer,
        inputs: Option<&PerLayerInputs>,
        ropes: &mut Ropes,
    ) -> Result<Self, DecoderError> {
        let path = format!("model.layers.{index}");
        let mixer = layer.mixer.as_ref().map(|mixer| MixerLayer::load(weights, &path, mixer, ropes));
        let mlp = layer.mlp.as_ref().map(|mlp| MlpLayer::load(weights, &path, mlp));
        let (mixer, mlp) = (mixer.transpose()?, mlp.transpose()?);
        let description::Norms { kind, of_sums, epsilon, before_mixer, after_mixer, before_mlp, after_mlp } =
            layer.norms;
        let mut norm = |name: Option<&str>| {
            name.map(|name| Norm::load(weights, &format!("{path}.{name}"), kind, epsilon)).transpose()
        };
        let norms = Norms {
            before_mixer: norm(before_mixer)?,
            after_mixer: norm(after_mixer)?,
            before_mlp: norm(before_mlp)?,
            after_mlp: norm(after_mlp)?,
        };
        let per_layer = inputs.map(|inputs| PerLayerGate::load(weights, &path, inputs, epsilon));
        let output_scale = layer.output_scale.map(|field| weights.tensor(&format!("{path}.{field}")));
        Ok(Self {
            mixer,
            mlp,
            per_layer: per_layer.transpose()?,
            norms,
            norms_sums: of_sums,
            residual_scale: layer.residual_scale,
            output_scale: output_scale.transpose()?,
            state: layer.mixer.as_ref().filter(|mixer| mixer.shares_cache_of().is_none()).map(StateKind::of),
            cache: 0,
        })
    }

    fn forward(
        &self,
        x: &Array,
        input: Option<&Array>,
        batch: &mut PackedBatch<'_>,
        stage: &TpGroup,
    ) -> Result<Array, Exception> {
        let (norms, cache) = (&self.norms, self.cache);
        let mut x = x.clone();
        if let Some(mixer) = &self.mixer {
            let read = normed(&x, norms.before_mixer.as_ref())?;
            let mixed = match mixer {
                MixerLayer::Attention(attention) => attention.forward(&read, batch, cache, stage)?,
                MixerLayer::Latent(latent) => latent.forward(&read, batch, cache, stage)?,
                MixerLayer::DeltaNet(delta) => delta.forward(&read, batch, cache, stage)?,
                MixerLayer::ShortConv(conv) => conv.forward(&read, batch, cache, stage)?,
                MixerLayer::Mamba2(mamba) => mamba.forward(&read, batch, cache, stage)?,
            };
            x = self.add(&x, &mixed, norms.after_mixer.as_ref())?;
        }
        if let Some(mlp) = &self.mlp {
            let read = normed(&x, norms.before_mlp.as_ref())?;
            let passed = match mlp {
                MlpLayer::Dense(dense) => dense.forward(&read, stage)?,
                MlpLayer::Experts(experts) => experts.forward(&read, stage)?,
            };
            x = self.add(&x, &passed, norms.after_mlp.as_ref())?;
        }
        if let (Some(gate), Some(input)) = (&self.per_layer, input) {
            x = x.add(gate.forward(&x, input)?)?;
        }
        match &self.output_scale {
            None => Ok(x),
            Some(scale) => x.multiply(scale),
        }
    }

    /// The hidden state with what mixer or MLP adds, where the norm behind it is of what is added or of the sum.
    fn add(&self, x: &Array, result: &Array, norm: Option<&Norm>) -> Result<Array, Exception> {
        if self.norms_sums {
            return normed(&x.add(result)?, norm);
        }
        let result = normed(result, norm)?;
        match self.residual_scale {
            None => x.add(result),
            Some(scale) => x.add(result.multiply(scalar(scale, &result)?)?),
        }
    }
}

impl MixerLayer {
    fn load(
        weights: &mut Weights<'_>,
        layer: &str,
        mixer: &Mixer,
        ropes: &mut Ropes,
    ) -> Result<Self, DecoderError> {
        let path = format!("{layer}.{}", mixer.module());
        Ok(match mixer {
            Mixer::Attention(attention) => {
                let rope = attention.rope.as_ref().map(|rope| ropes.get(rope)).transpose()?;
                Self::Attention(Attention::load(weights, &path, attention, rope)?)
            }
            Mixer::Latent(latent) => {
                let rope = ropes.get(&latent.rope)?;
                Self::Latent(LatentAttention::load(weights, &path, latent, rope)?)
            }
            Mixer::DeltaNet(delta) => Self::DeltaNet(DeltaNet::load(weights, &path, delta)?),
            Mixer::ShortConv(conv) => Self::ShortConv(ShortConv::load(weights, &path, conv)?),
            Mixer::Mamba2(mamba) => Self::Mamba2(Mamba2::load(weights, &path, mamba)?),
        })
    }
}

impl MlpLayer {
    fn load(weights: &mut Weights<'_>, layer: &str, mlp: &Mlp) -> Result<Self, DecoderError> {
        let path = mlp.path(layer);
        Ok(match mlp {
            Mlp::Dense(dense) => Self::Dense(Box::new(FeedForward::load(weights, &path, dense.activation)?)),
            Mlp::Experts(experts) => {
                Self::Experts(Box::new(MixtureOfExperts::load(weights, &path, experts)?))
            }
        })
    }
}

fn normed(x: &Array, norm: Option<&Norm>) -> Result<Array, Exception> {
    norm.map_or_else(|| Ok(x.clone()), |norm| norm.forward(x))
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
        self.0.push((requested.clone(), Rc::clone(&rope)));
        Ok(rope)
    }
}
