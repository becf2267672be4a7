//! The families of models this release runs: one file each, and one line in [`FAMILIES`]. A family turns config.json
//! into a [`Description`] and names the tensors; it touches no arrays. The planner refuses other models before a node
//! is asked, and the engine runs what a family describes.

mod llama;
mod mistral;
mod qwen3;

use crate::{
    config::{Config, DEFAULT_ROPE_THETA, Document},
    description::{Attention, Dense, Description, Layer, Mixer, Mlp, Norms, Rope, RopeScaling},
    error::{Error, Unsupported},
    tensors::Tensor,
};

/// Every family, by the `model_type` of config.json.
pub const FAMILIES: &[Family] = &[llama::FAMILY, mistral::FAMILY, qwen3::FAMILY];

/// How one family's configuration is read and its tensors are named.
#[derive(Debug)]
pub struct Family {
    /// `model_type` of config.json.
    pub model_type: &'static str,
    /// Describes the model; `has_head` says whether there are weights of a head.
    pub describe: fn(config: &Config, has_head: bool) -> Result<Description, Error>,
    /// The tensors that a description calls for.
    pub tensors: fn(&Description) -> Vec<Tensor>,
}

/// Every supported `model_type`.
pub fn model_types() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|family| family.model_type)
}

/// Whether models of this `model_type` are supported.
pub fn is_known(model_type: &str) -> bool {
    model_types().any(|known| known == model_type)
}

/// The supported `model_type`s, for messages.
pub fn list() -> String {
    model_types().collect::<Vec<_>>().join(", ")
}

/// The family of a configuration.
pub fn family(document: &Document) -> Result<&'static Family, Unsupported> {
    let found = &document.model_type;
    FAMILIES.iter().find(|family| family.model_type == found).ok_or_else(|| {
        let reason = format!("model_type {found:?} is not supported; supported are {}", list());
        Unsupported::field("model_type", reason, "use a model of one of these")
    })
}

/// The description of a Llama-shaped dense model: all layers alike, each with grouped-query attention to the whole
/// context and a gated MLP, normalised before both. A family changes what is its own.
fn dense(model_type: &'static str, config: &Config, has_head: bool) -> Result<Description, Error> {
    let head_dim = config.head_dim.unwrap_or(config.hidden_size / config.num_attention_heads);
    if head_dim == 0 || !head_dim.is_multiple_of(2) {
        let reason = format!("head_dim is {head_dim}, but rotary positions need an even number");
        return Err(Unsupported::field("head_dim", reason, "use a model with heads of an even width").into());
    }
    if let Some(kind) = config.layer_types.iter().find(|kind| *kind != "full_attention") {
        let reason = format!("layer type {kind:?} is not supported; supported is full_attention");
        return Err(Unsupported::field(
            "layer_types",
            reason,
            "use a model whose layers all see the whole context",
        )
        .into());
    }
    if let Some(activation) =
        config.document.text("hidden_act")?.filter(|name| !matches!(*name, "silu" | "swish"))
    {
        let activation: String = activation.chars().take(60).collect();
        let reason = format!("activation {activation:?} is not supported; supported is silu");
        return Err(Unsupported::field("hidden_act", reason, "use a model with silu").into());
    }
    let layer = Layer {
        mixer: Mixer::Attention(Attention {
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            key_dim: head_dim,
            value_dim: head_dim,
            window: None,
            sinks: false,
            scale: (head_dim as f32).powf(-0.5),
            rope: Rope {
                width: head_dim,
                base: config.rope_theta.unwrap_or(DEFAULT_ROPE_THETA),
                traditional: config.rope_traditional,
                scaling: RopeScaling::read(&config.rope_scaling)?,
            },
            head_norm: None,
            bias: config.attention_bias,
        }),
        mlp: Mlp::Dense(Dense { intermediate: config.intermediate_size, bias: config.mlp_bias }),
        norms: Norms { epsilon: config.rms_norm_eps },
    };
    Ok(Description {
        model_type,
        hidden_size: config.hidden_size,
        vocab_size: config.vocab_size,
        context_length: config.max_position_embeddings,
        tied: config.tied(has_head),
        norm_epsilon: config.rms_norm_eps,
        layers: vec![layer; config.num_hidden_layers as usize],
        notes: Vec::new(),
    })
}

/// Bounds the context to a window that some layers have. Up to as many tokens a windowed layer sees the whole context,
/// so the answers are exactly the model's; beyond, the engine would need a rotating cache.
fn bound_to_window(description: &mut Description, window: u32) {
    if window < description.context_length {
        description.notes.push(format!(
            "contexts are bounded to sliding_window, {window} tokens, of max_position_embeddings, {}",
            description.context_length
        ));
        description.context_length = window;
    }
}

#[cfg(test)]
mod tests;
