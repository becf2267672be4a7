//! What a model is, layer by layer: the result of reading its configuration. The engine runs it, the planner adds it
//! up, and neither knows which family it is of. No weights and no bytes here.

mod attention;
mod delta_net;
mod mamba2;
mod mlp;
mod per_layer;
mod pooling;
mod rope;
mod short_conv;

use std::ops::Range;

use crate::load_quantization::MatrixQuantization;
use crate::partition::kept_together;
pub use attention::{Attention, Latent, QkNorm, QueryScale};
pub use delta_net::DeltaNet;
pub use mamba2::Mamba2;
pub use mlp::{Activation, Dense, ExpertNorms, Experts, Mlp, Router, RouterNorm, Scoring, SharedExpert};
pub use per_layer::PerLayerInputs;
pub use pooling::{Classifier, DenseModule, Encoder, Pooling, PoolingMode, Task};
pub(crate) use rope::yarn_scale;
pub use rope::{Rope, RopeScaling, Yarn};
pub use short_conv::ShortConv;

/// A model that the engine can run.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    /// `model_type` of config.json.
    pub model_type: String,
    /// Width of the hidden state. Between stages per-layer inputs travel with it ([`Self::stage_width`]).
    pub hidden_size: u32,
    /// Tokens of the vocabulary.
    pub vocab_size: u32,
    /// Longest context, tokens.
    pub context_length: u32,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// The norm behind the last layer, by the name of its weight; `None` where each layer ends with one.
    pub norm: Option<&'static str>,
    /// Its epsilon.
    pub norm_epsilon: f32,
    /// How the weights of norms are stored.
    pub norm_offset: NormOffset,
    /// How projections back to the hidden state, and the head, are packed where matrices are.
    pub projections_back: MatrixQuantization,
    /// What embeddings are multiplied by.
    pub embedding_scale: Option<f32>,
    /// What logits are divided by.
    pub logit_divisor: Option<f32>,
    /// Logits are squeezed between minus this and this, by a hyperbolic tangent.
    pub logit_cap: Option<f32>,
    /// What every layer reads of its own, if they do.
    pub per_layer_inputs: Option<PerLayerInputs>,
    /// What a BERT has besides its layers.
    pub encoder: Option<Encoder>,
    /// What makes a vector of a text, in models that embed.
    pub pooling: Option<Pooling>,
    /// Layers, in order.
    pub layers: Vec<Layer>,
    /// Layers that the weights have behind the last one, which predict further tokens and are not loaded.
    pub unused_layers: u32,
    /// What a person should know though the model runs, such as a context that is bounded by a window.
    pub notes: Vec<String>,
}

/// How the weights of norms are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NormOffset {
    /// As they multiply.
    #[default]
    None,
    /// As the difference from one.
    One,
    /// As the difference from one in the original export, as they multiply where mlx-lm converted it.
    OneInOriginals,
}

/// One layer: what mixes positions, and what follows it; either may be absent.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// What mixes positions; `None` where the layer is an MLP alone.
    pub mixer: Option<Mixer>,
    /// What each position passes by itself; `None` where the layer is a mixer alone.
    pub mlp: Option<Mlp>,
    /// Where the layer normalises.
    pub norms: Norms,
    /// What the results of mixer and MLP are multiplied by before they are added to the hidden state.
    pub residual_scale: Option<f32>,
    /// Where the number is stored that the hidden state is multiplied by after the layer, if there is one.
    pub output_scale: Option<&'static str>,
}

/// Norms of a layer, each by the name of its weight; `None` where the layer has none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norms {
    /// What they are.
    pub kind: NormKind,
    /// Whether those behind mixer and MLP are of the sum with the hidden state, not of what is added to it.
    pub of_sums: bool,
    /// Epsilon of all.
    pub epsilon: f32,
    /// Of what the mixer reads.
    pub before_mixer: Option<&'static str>,
    /// Of what the mixer adds.
    pub after_mixer: Option<&'static str>,
    /// Of what the MLP reads.
    pub before_mlp: Option<&'static str>,
    /// Of what the MLP adds.
    pub after_mlp: Option<&'static str>,
}

/// What a norm is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NormKind {
    /// By the root of the mean square.
    #[default]
    Rms,
    /// By mean and variance, with a bias.
    Layer,
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
    /// A short convolution: what it keeps is its last inputs.
    ShortConv(ShortConv),
    /// A state space (Mamba-2): a state of fixed size instead of a cache.
    Mamba2(Mamba2),
}

impl Norms {
    /// Before the mixer and before the MLP, as in a Llama.
    pub fn before(epsilon: f32) -> Self {
        Self {
            kind: NormKind::Rms,
            of_sums: false,
            epsilon,
            before_mixer: Some("input_layernorm"),
            after_mixer: None,
            before_mlp: Some("post_attention_layernorm"),
            after_mlp: None,
        }
    }

    /// Of what mixer and MLP add, as in an OLMo 2.
    pub fn after(epsilon: f32) -> Self {
        Self {
            kind: NormKind::Rms,
            of_sums: false,
            epsilon,
            before_mixer: None,
            after_mixer: Some("post_attention_layernorm"),
            before_mlp: None,
            after_mlp: Some("post_feedforward_layernorm"),
        }
    }

    /// Before and after both, as in a Gemma.
    pub fn around(epsilon: f32) -> Self {
        Self {
            before_mixer: Some("input_layernorm"),
            before_mlp: Some("pre_feedforward_layernorm"),
            ..Self::after(epsilon)
        }
    }

    /// The names, in the order in which a position passes them.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        [self.before_mixer, self.after_mixer, self.before_mlp, self.after_mlp].into_iter().flatten()
    }
}

impl Layer {
    /// A layer that normalises before its mixer and before its MLP.
    pub fn new(mixer: Mixer, mlp: Mlp, epsilon: f32) -> Self {
        let norms = Norms::before(epsilon);
        Self { mixer: Some(mixer), mlp: Some(mlp), norms, residual_scale: None, output_scale: None }
    }
}

impl Mixer {
    /// The earlier layer whose keys and values it reads; `None` where it keeps a state of its own.
    pub fn shares_cache_of(&self) -> Option<u32> {
        match self {
            Self::Attention(attention) => attention.shares_cache_of,
            Self::Latent(_) | Self::DeltaNet(_) | Self::ShortConv(_) | Self::Mamba2(_) => None,
        }
    }

    /// The module of a layer that holds its weights.
    pub fn module(&self) -> &'static str {
        match self {
            Self::Attention(_) | Self::Latent(_) => "self_attn",
            Self::DeltaNet(_) => "linear_attn",
            Self::ShortConv(_) => "conv",
            Self::Mamba2(_) => "mamba",
        }
    }
}

impl Description {
    /// The first layer's attention, for what is asked of models whose layers are alike.
    pub fn attention(&self) -> Option<&Attention> {
        self.mixers().find_map(|mixer| match mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::Latent(_) | Mixer::DeltaNet(_) | Mixer::ShortConv(_) | Mixer::Mamba2(_) => None,
        })
    }

    /// What mixes positions in each layer that does.
    pub fn mixers(&self) -> impl Iterator<Item = &Mixer> {
        self.layers.iter().filter_map(|layer| layer.mixer.as_ref())
    }

    /// What positions pass by themselves in each layer that has it.
    pub fn mlps(&self) -> impl Iterator<Item = &Mlp> {
        self.layers.iter().filter_map(|layer| layer.mlp.as_ref())
    }

    /// Width of what a stage that begins with this layer receives: the hidden state, and the inputs of the layers from
    /// there on.
    pub fn stage_width(&self, first_layer: u32) -> u32 {
        let layers = (self.layers.len() as u32).saturating_sub(first_layer);
        let inputs = self.per_layer_inputs.map_or(0, |inputs| inputs.width.saturating_mul(layers));
        self.hidden_size.saturating_add(inputs)
    }

    /// What it is asked for.
    pub fn task(&self) -> Task {
        match (&self.encoder, &self.pooling) {
            (Some(Encoder { classifier: Some(_), .. }), _) => Task::Rerank,
            (_, Some(_)) => Task::Embed,
            (_, None) => Task::Generate,
        }
    }

    /// Runs of layers that one stage holds, since some read the keys and values of others. A model that does not generate
    /// is held by one rank.
    pub fn kept_together(&self) -> Vec<Range<u32>> {
        let layers = 0..self.layers.len() as u32;
        if !self.task().is_generate() && layers.len() > 1 {
            return vec![layers];
        }
        kept_together(layers.filter_map(|layer| Some((layer, self.shares_cache_of(layer)?))))
    }

    /// The earlier layer whose keys and values a layer reads, where it does.
    pub fn shares_cache_of(&self, layer: u32) -> Option<u32> {
        self.layers.get(layer as usize)?.mixer.as_ref()?.shares_cache_of()
    }

    /// Every attention, to change what is a family's own.
    pub fn attentions_mut(&mut self) -> impl Iterator<Item = &mut Attention> {
        self.layers.iter_mut().filter_map(|layer| match layer.mixer.as_mut()? {
            Mixer::Attention(attention) => Some(attention),
            Mixer::Latent(_) | Mixer::DeltaNet(_) | Mixer::ShortConv(_) | Mixer::Mamba2(_) => None,
        })
    }
}
