//! BERT and RoBERTa, encoders: every position sees all others, absolute positions and segments are added to the tokens,
//! and norms with means and biases come after the sums. With a classifier they score pairs of texts.

use serde_json::Value;

use super::{
    Family,
    shared::{described, refuse},
};
use crate::{
    config::{Config, MAX_SIZE},
    description::{
        Activation, Attention, Classifier, Dense, Description, Encoder, Layer, Mixer, Mlp, NormKind, Norms,
        Pooling,
    },
    error::{Error, FileError, Unsupported},
    excerpt::excerpt,
};

pub(super) const FAMILY: Family = Family {
    model_types: &["bert", "roberta", "xlm-roberta"],
    fields: &[
        "layer_norm_eps",
        "type_vocab_size",
        "position_embedding_type",
        "sbert_ce_default_activation_function",
        "sentence_transformers",
        "id2label",
        "num_labels",
        "pad_token_id",
        // Of training, and of heads that are not loaded.
        "attention_probs_dropout_prob",
        "directionality",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
    ],
    defaults: &[
        ("vocab_size", 30_522.0),
        ("hidden_size", 768.0),
        ("num_hidden_layers", 12.0),
        ("num_attention_heads", 12.0),
        ("intermediate_size", 3072.0),
        ("max_position_embeddings", 512.0),
        ("type_vocab_size", 2.0),
        ("layer_norm_eps", 1e-12),
    ],
    describe,
};

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    let document = &config.document;
    let is_decoder = document.flag("is_decoder")?;
    refuse(config, "is_decoder", is_decoder)?;
    match document.text("position_embedding_type")? {
        None | Some("absolute") => {}
        Some(other) => {
            let other = excerpt(other);
            let reason = format!("positions {other:?} are not supported; supported are absolute ones");
            let remedy = "use a model with absolute positions";
            return Err(Unsupported::field("position_embedding_type", reason, remedy).into());
        }
    }
    match document.text("hidden_act")? {
        None | Some("gelu") => {}
        Some(other) => {
            let other = excerpt(other);
            let reason = format!("activation {other:?} is not supported in an encoder; supported is gelu");
            return Err(Unsupported::field("hidden_act", reason, "use a model with it").into());
        }
    }
    if !config.hidden_size.is_multiple_of(config.num_attention_heads) {
        let found = format!("{} heads of {} values", config.num_attention_heads, config.hidden_size);
        return Err(FileError::Field { field: "num_attention_heads", found }.into());
    }
    let heads = config.num_attention_heads;
    let mut attention = Attention::new(heads, heads, config.hidden_size / heads, None);
    attention.causal = false;
    (attention.qkv_bias, attention.output_bias) = (true, true);
    let dense = Dense { bias: true, activation: Activation::Gelu, ..Dense::new(config.intermediate_size) };
    let epsilon = document.float("layer_norm_eps")?.unwrap_or(1e-12);
    let norms = Norms { kind: NormKind::Layer, of_sums: true, ..Norms::after(epsilon) };
    let layer = Layer { norms, ..Layer::new(Mixer::Attention(attention), Mlp::Dense(dense), epsilon) };
    let mut description = described(config, true, vec![layer; config.num_hidden_layers as usize]);
    // RoBERTa's positions begin behind that of padding, which has a row of its own.
    let is_roberta = document.text_type != "bert";
    let padding = document.count("pad_token_id", MAX_SIZE)?;
    let padding = if document.value("pad_token_id").is_none() { 1 } else { padding };
    let first_position = if is_roberta { padding.saturating_add(1) } else { 0 };
    let Some(context_length) =
        config.max_position_embeddings.checked_sub(first_position).filter(|&left| left > 0)
    else {
        let found =
            format!("{} positions, of which {first_position} are padding's", config.max_position_embeddings);
        return Err(FileError::Field { field: "max_position_embeddings", found }.into());
    };
    description.context_length = context_length;
    description.tied = true;
    description.norm = None;
    description.norm_epsilon = epsilon;
    description.encoder = Some(Encoder {
        positions: config.max_position_embeddings,
        first_position,
        token_types: document.number("type_vocab_size", MAX_SIZE)?,
        classifier: if has_head { Some(classifier(config)?) } else { None },
    });
    description.pooling = (!has_head).then(Pooling::mean);
    Ok(description)
}

/// The head of a cross-encoder: one score. Its sigmoid may be left out, as sentence-transformers has it.
fn classifier(config: &Config) -> Result<Classifier, Error> {
    let document = &config.document;
    let labels = match document.value("id2label") {
        Some(Value::Object(labels)) => labels.len() as u32,
        _ => document.optional("num_labels", MAX_SIZE)?.unwrap_or(2),
    };
    if labels != 1 {
        let reason = format!("a classifier of {labels} classes is not supported; supported is one score");
        return Err(Unsupported::field("id2label", reason, "use a cross-encoder with one label").into());
    }
    let nested = document.value("sentence_transformers").and_then(|own| own.get("activation_fn"));
    let function = nested.or(document.value("sbert_ce_default_activation_function"));
    let name = function.and_then(Value::as_str).and_then(|class| class.rsplit('.').next());
    match name {
        None | Some("Sigmoid") => Ok(Classifier { sigmoid: true }),
        Some("Identity") => Ok(Classifier { sigmoid: false }),
        Some(other) => {
            let other = excerpt(other);
            let reason = format!("activation {other:?} is not supported; supported are Sigmoid and Identity");
            let field = "sbert_ce_default_activation_function";
            Err(Unsupported::field(field, reason, "use a cross-encoder with one of these").into())
        }
    }
}

#[cfg(test)]
mod tests;
