//! The fields of config.json: what is kept of them, and which are known. A field that this release does not know may
//! change what the model computes, as `attn_logit_softcapping` or `no_rope_layers` do, so it is refused by name and not
//! passed over.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::{Document, MAX_LAYERS, short};
use crate::{error::Unsupported, excerpt::excerpt};

/// Most fields of config.json; published ones have up to 60.
const MAX_FIELDS: usize = 1000;
/// Most entries of an object in it; overrides of the quantisation name a few thousand modules.
const MAX_ENTRIES: usize = 20_000;
/// Objects within objects that are kept though nothing of them is: their names are for messages.
const MAX_EMPTY: usize = 8;

/// Fields that every family or the tokenizer reads; what a family reads besides, it names itself.
const READ: &[&str] = &[
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
    "tie_word_embeddings",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "rope_theta",
    "rope_traditional",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "quantization",
    "quantization_config",
    "eos_token_id",
];
/// Fields that change nothing that is computed for a prompt: who wrote the file with what, how the model was trained,
/// defaults of sampling, and what Transformers has for tasks and training.
const HARMLESS: &[&str] = &[
    "architectures",
    "attention_dropout",
    // Training of routers.
    "aux_loss_alpha",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "seq_aux",
    "initial_context_length",
    "attn_implementation",
    "attn_pdrop",
    "auto_map",
    "bad_words_ids",
    "base_model_name_or_path",
    "begin_suppress_tokens",
    "bos_token",
    "bos_token_id",
    "chat_template",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "context_length",
    "cross_attention_hidden_size",
    "custom_pipelines",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "encoder_no_repeat_ngram_size",
    "eos_token",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "generation_config",
    "gradient_checkpointing",
    "hidden_dropout",
    "hidden_dropout_prob",
    "id2label",
    "init_std",
    "initializer_factor",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "language",
    "length_penalty",
    "license",
    "max_length",
    "max_new_tokens",
    "max_sequence_length",
    "min_length",
    "model_max_length",
    "model_name",
    "name",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_router_logits",
    "output_scores",
    "pad_token",
    "pad_token_id",
    "prefix",
    // Splits products into parts whose sum is the same.
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "residual_dropout",
    "resid_pdrop",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "use_bfloat16",
    "use_cache",
    "use_flash_attention",
    "use_flash_attention_2",
    "use_return_dict",
];
/// How names of fields begin that a tool keeps its own notes under.
const HARMLESS_PREFIXES: &[&str] = &["_", "unsloth_", "mergekit_", "mlx_"];
/// Fields of `rope_scaling` that its kinds have, and `finetuned`, which says how the model was trained.
const ROPE: &[&str] = &[
    "type",
    "rope_type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "finetuned",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
    "long_factor",
    "short_factor",
    // Places in pictures, which a text has not.
    "mrope_section",
    "mrope_interleaved",
    "llama_4_scaling_beta",
    "max_position_embeddings",
];

impl Document {
    /// That every field is known to be read or to change nothing. One that is null, false, 0 or empty asks for nothing.
    pub(crate) fn check_fields(&self, own: &[&str]) -> Result<(), Unsupported> {
        let is_known = |name: &str| {
            READ.contains(&name)
                || own.contains(&name)
                || HARMLESS.contains(&name)
                || HARMLESS_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        };
        let unknown = self.fields.iter().find(|(name, value)| !is_known(name) && !asks_for_nothing(value));
        if let Some((name, value)) = unknown {
            return Err(refusal(&excerpt(name), value));
        }
        for field in ["rope_scaling", "rope_parameters"] {
            let Some(own) = self.value(field).and_then(Value::as_object) else { continue };
            for own in std::iter::once(own).chain(own.values().filter_map(Value::as_object)) {
                let unknown = own.iter().find(|(name, value)| {
                    !ROPE.contains(&name.as_str()) && !value.is_object() && !asks_for_nothing(value)
                });
                if let Some((name, value)) = unknown {
                    return Err(refusal(&format!("{field}.{}", excerpt(name)), value));
                }
            }
        }
        Ok(())
    }
}

fn refusal(field: &str, value: &Value) -> Unsupported {
    let reason = format!(
        "this release does not know the field, which may change what the model computes (it is {})",
        short(value)
    );
    let remedy = "use another model, or a copy of this one without the field if it changes nothing";
    Unsupported::field(field, reason, remedy)
}

fn asks_for_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

/// The fields of config.json, without what no reader asks for: a file of a stranger takes no more than some 16 bytes of
/// memory for each of its own.
pub(super) struct Fields(pub(super) Map<String, Value>);

impl<'de> serde::Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
        let mut fields = Map::new();
        while let Some(name) = map.next_key::<String>()? {
            if fields.len() >= MAX_FIELDS {
                return Err(A::Error::custom(format!("it has more than {MAX_FIELDS} fields, the limit")));
            }
            let value = map.next_value_seed(BoundedValue { levels: levels(&name, 1) })?;
            fields.insert(name, value);
        }
        Ok(Fields(fields))
    }
}

/// Keeps of a value what readers ask for: of a list as many elements as a model has layers and one more, of an object
/// its entries, and of objects below its levels the mode of a quantisation.
#[derive(Clone, Copy)]
struct BoundedValue {
    /// Levels of lists and objects that are kept.
    levels: u8,
}

/// Levels that readers ask for of a field, which is in an object of so many.
fn levels(field: &str, levels: u8) -> u8 {
    match field {
        // Its fields are those of config.json.
        "text_config" => 2,
        // Bits of the weights of each group of modules, and sizes of blocks.
        "config_groups" => 3,
        "weight_block_size" => levels.max(1),
        // By kind of layer, and lists of factors.
        "rope_scaling" | "rope_parameters" if levels > 0 => 3,
        _ => levels,
    }
}

impl<'de> DeserializeSeed<'de> for BoundedValue {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for BoundedValue {
    type Value = Value;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut kept = Vec::new();
        if self.levels == 0 {
            // Whether it is empty is all that is asked.
            if list.next_element::<IgnoredAny>()?.is_some() {
                kept.push(Value::Null);
            }
        }
        while self.levels > 0 && kept.len() <= MAX_LAYERS as usize {
            match list.next_element_seed(BoundedValue { levels: 0 })? {
                Some(value) => kept.push(value),
                None => return Ok(kept.into()),
            }
        }
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(kept.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut kept = Map::new();
        let mut empty = 0;
        while let Some(name) = map.next_key::<String>()? {
            if self.levels == 0 && name != "mode" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let below = levels(&name, self.levels.saturating_sub(1));
            let value = map.next_value_seed(BoundedValue { levels: below })?;
            let is_empty = value.as_object().is_some_and(Map::is_empty);
            empty += usize::from(is_empty);
            if is_empty && empty > MAX_EMPTY {
                continue;
            }
            if kept.len() >= MAX_ENTRIES {
                return Err(A::Error::custom(format!(
                    "an object has more than {MAX_ENTRIES} entries, the limit"
                )));
            }
            kept.insert(name, value);
        }
        Ok(kept.into())
    }
}
