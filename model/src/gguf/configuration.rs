//! `config.json` from the metadata of a GGUF file. A key of the architecture that nothing here knows may change what the
//! model computes, so it is refused by name, as fields of `config.json` are.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::{Gguf, metadata::MetaValue, names::Architecture, refuse, rope_factors};
use crate::{
    config::MAX_LAYERS,
    error::{Error, FileError, Unsupported},
};

/// Keys of an architecture that change nothing that is computed.
const HARMLESS: &[&str] = &[
    "mm.tokens_per_image",
    "tensor_data_layout",
    "rope.scaling.finetuned",
    "attention.causal",
    "vocab_size",
];

/// Layers of Gemma 3's largest model, whose queries are scaled by its width.
const GEMMA_3_27B_LAYERS: u64 = 62;

/// The keys of one architecture, and which were asked for.
struct Keys<'g, 'a> {
    gguf: &'g Gguf<'a>,
    read: RefCell<BTreeSet<String>>,
}

impl<'a> Keys<'_, 'a> {
    fn get(&self, key: &str) -> Option<MetaValue<'a>> {
        let full = format!("{}.{key}", self.gguf.architecture.name);
        let value = self.gguf.metadata().get(&full);
        self.read.borrow_mut().insert(full);
        value
    }

    fn bad(&self, key: &str, problem: &str) -> Error {
        let problem = format!("{}.{key} {problem}", self.gguf.architecture.name);
        FileError::BadGguf { file: self.gguf.files[0].0.clone(), problem }.into()
    }

    /// A whole number; of one for each layer, the one that all have.
    fn optional(&self, key: &str) -> Result<Option<u64>, Error> {
        let number = match self.get(key) {
            None => return Ok(None),
            Some(MetaValue::Whole(number)) => u64::try_from(number).ok(),
            Some(MetaValue::List(list)) if (1..=u64::from(MAX_LAYERS)).contains(&list.count) => {
                let numbers: Vec<f64> = list.numbers().collect();
                let first = numbers.first().copied().filter(|first| *first >= 0.0).unwrap_or(f64::NAN);
                if numbers.iter().any(|number| *number != first) {
                    let key = format!("{}.{key}", self.gguf.architecture.name);
                    return Err(refuse(&key, "it differs from layer to layer".to_owned()).into());
                }
                Some(first as u64)
            }
            Some(_) => None,
        };
        number.map(Some).ok_or_else(|| self.bad(key, "is no whole number"))
    }

    fn number(&self, key: &str) -> Result<u64, Error> {
        self.optional(key)?.ok_or_else(|| self.bad(key, "is missing from its metadata"))
    }

    fn float(&self, key: &str) -> Result<Option<f64>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(MetaValue::Float(number)) if number.is_finite() => Ok(Some(number)),
            Some(_) => Err(self.bad(key, "is no finite number")),
        }
    }

    /// That every key of the architecture was asked for, is known to change nothing, or asks for nothing.
    fn check_all_read(&self, architecture: &Architecture) -> Result<(), Unsupported> {
        let read = self.read.borrow();
        for (key, value) in self.gguf.metadata().iter() {
            let Some(own) = key.strip_prefix(architecture.name).and_then(|own| own.strip_prefix('.')) else {
                continue;
            };
            let asks_for_nothing = match value {
                MetaValue::Whole(number) => number == 0,
                MetaValue::Float(number) => number == 0.0,
                MetaValue::Flag(flag) => !flag,
                MetaValue::Text(text) => text.is_empty(),
                MetaValue::List(list) => list.count == 0,
            };
            if !read.contains(key) && !HARMLESS.contains(&own) && !asks_for_nothing {
                let reason =
                    "this release does not know it, and it may change what the model computes".to_owned();
                return Err(refuse(&super::metadata::shorten(key), reason));
            }
        }
        Ok(())
    }
}

/// The configuration of a model.
pub(super) fn of(gguf: &Gguf<'_>, factors: Option<&[u8]>) -> Result<Value, Error> {
    let architecture = gguf.architecture;
    let keys = Keys { gguf, read: RefCell::default() };
    let heads = keys.number("attention.head_count")?;
    let hidden = keys.number("embedding_length")?;
    let epsilon = keys.float("attention.layer_norm_rms_epsilon")?;
    let missing = || keys.bad("attention.layer_norm_rms_epsilon", "is missing from its metadata");
    let epsilon = epsilon.ok_or_else(missing)?;
    let base = keys.float("rope.freq_base")?.unwrap_or(10_000.0);
    let mut config = json!({
        "model_type": architecture.model_type,
        "num_hidden_layers": keys.number("block_count")?,
        "hidden_size": hidden,
        "intermediate_size": keys.number("feed_forward_length")?,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.optional("attention.head_count_kv")?.unwrap_or(heads),
        "max_position_embeddings": keys.number("context_length")?,
        "rms_norm_eps": epsilon,
        "rope_theta": base,
        "rope_traditional": architecture.traditional_rope,
        "vocab_size": vocabulary(gguf),
        "tie_word_embeddings": gguf.tensor("output.weight").is_none(),
    });
    let Value::Object(fields) = &mut config else { return Ok(config) };
    let own_width = hidden.checked_div(heads).unwrap_or(0);
    let head_dim = keys.optional("attention.key_length")?.unwrap_or(own_width);
    fields.insert("head_dim".to_owned(), head_dim.into());
    for key in ["attention.value_length", "rope.dimension_count"] {
        if let Some(other) = keys.optional(key)?.filter(|other| *other != head_dim) {
            let reason = format!("{other} is not supported for heads of {head_dim}");
            return Err(refuse(&format!("{}.{key}", architecture.name), reason).into());
        }
    }
    if architecture.name == "llama" {
        fields.insert("attention_bias".to_owned(), gguf.tensor("blk.0.attn_q.bias").is_some().into());
        // Mistral's first models, whose layers look back over a window.
        if let Some(window) = keys.optional("attention.sliding_window")?.filter(|window| *window > 0) {
            fields.insert("model_type".to_owned(), "mistral".into());
            fields.insert("sliding_window".to_owned(), window.into());
        }
    }
    if architecture.name == "gemma3" {
        let by_width = keys.number("block_count")? == GEMMA_3_27B_LAYERS;
        let scalar = if by_width { own_width } else { head_dim };
        fields.insert("query_pre_attn_scalar".to_owned(), scalar.into());
        fields.insert("hidden_activation".to_owned(), "gelu_pytorch_tanh".into());
        fields.insert("sliding_window".to_owned(), keys.number("attention.sliding_window")?.into());
        if let Some(cap) = keys.float("final_logit_softcapping")?.filter(|cap| *cap != 0.0) {
            fields.insert("final_logit_softcapping".to_owned(), cap.into());
        }
    }
    if architecture.has_experts {
        experts(&keys, fields)?;
    }
    let scaling = match factors {
        Some(factors) => rope_factors::scaling(factors, base as f32, head_dim)?,
        None => scaling(&keys)?,
    };
    if let Some(scaling) = scaling {
        fields.insert("rope_scaling".to_owned(), scaling);
    }
    fields.insert("eos_token_id".to_owned(), super::tokenizer::end_tokens(gguf.metadata()).into());
    keys.check_all_read(architecture)?;
    Ok(config)
}

/// Tokens of the model, by what has a row for each.
fn vocabulary(gguf: &Gguf<'_>) -> u64 {
    gguf.tensor("token_embd.weight").and_then(|tensor| tensor.shape.first().copied()).unwrap_or(0)
}

fn experts(keys: &Keys<'_, '_>, fields: &mut Map<String, Value>) -> Result<(), Error> {
    for (field, key) in [
        ("num_experts", "expert_count"),
        ("num_experts_per_tok", "expert_used_count"),
        ("moe_intermediate_size", "expert_feed_forward_length"),
    ] {
        fields.insert(field.to_owned(), keys.number(key)?.into());
    }
    // Its graph in llama.cpp always does, and every layer has experts.
    fields.insert("norm_topk_prob".to_owned(), true.into());
    fields.insert("decoder_sparse_step".to_owned(), 1.into());
    fields.insert("mlp_only_layers".to_owned(), json!([]));
    Ok(())
}

/// The scaling of the rotary embedding, whose names are those of `config.json`.
fn scaling(keys: &Keys<'_, '_>) -> Result<Option<Value>, Error> {
    let legacy = keys.float("rope.scale_linear")?.filter(|factor| *factor != 1.0 && *factor != 0.0);
    let kind = match keys.get("rope.scaling.type") {
        Some(MetaValue::Text(kind)) => super::metadata::shorten(kind),
        None => String::new(),
        Some(_) => return Err(keys.bad("rope.scaling.type", "is no text")),
    };
    let factor = keys.float("rope.scaling.factor")?.filter(|factor| *factor != 0.0).or(legacy);
    let original = keys.optional("rope.scaling.original_context_length")?;
    let kind = match (kind.as_str(), factor) {
        ("none", _) | ("", None) => return Ok(None),
        ("", Some(_)) => "linear",
        (kind, _) => kind,
    };
    let mut scaling = json!({"rope_type": kind});
    if let Some(factor) = factor {
        scaling["factor"] = factor.into();
    }
    if let Some(original) = original {
        scaling["original_max_position_embeddings"] = original.into();
    }
    Ok(Some(scaling))
}
