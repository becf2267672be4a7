//! `config.json`, read once: the fields that more than one family has, by their Hugging Face names, and a way for a
//! family to read its own. What a value means for a model is the family's decision.

mod fields;
mod rope;

use serde_json::{Map, Value};

use crate::{
    error::{Error, FileError, Unsupported},
    excerpt::excerpt,
    json, packings,
};
use fields::Fields;
pub use rope::RopeFields;
use rope::{Rotary, rope};

/// Name of the configuration.
pub const CONFIG: &str = "config.json";
/// Longest configuration read; overrides of the quantisation of ten thousand modules take as much.
pub const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// The text part of a model that sees, too.
const TEXT_CONFIG: &str = "text_config";
/// Fields of a wrapper that its text part takes over where it does not have them itself.
const WRAPPER_FIELDS: &[&str] =
    &["model_type", "quantization", "quantization_config", "tie_word_embeddings", "eos_token_id"];
/// Modes of quantisation that the engine computes with.
const MODES: &[&str] = &["affine", "mxfp4", "mxfp8", "nvfp4"];
/// Longest `model_type`: it goes into the model's status.
const MAX_MODEL_TYPE_BYTES: usize = 64;
/// Tokens of context where config.json says nothing: what Transformers means for a Llama, and on the safe side of
/// what it means for the others.
pub const DEFAULT_CONTEXT_LENGTH: u32 = 2048;
/// Most layers of a model: the deepest published models have about 130.
pub const MAX_LAYERS: u32 = 1000;
/// Largest of most other sizes: they reach MLX as 32-bit numbers, and products of two of them as shapes.
pub const MAX_SIZE: u32 = 1 << 24;
/// Most heads of a layer.
pub const MAX_HEADS: u32 = 1 << 16;
/// `rms_norm_eps` where config.json says nothing, as Transformers has it.
const DEFAULT_NORM_EPSILON: f32 = 1e-6;
/// Base of the rotary embedding where config.json says nothing, as Transformers has it for Llama and Mistral.
pub const DEFAULT_ROPE_THETA: f32 = 10_000.0;

/// A configuration that is JSON and says what kind of model it is. Of a model that sees, it is the text part's.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// `model_type`.
    pub model_type: String,
    /// `model_type` of the text part, where config.json has one; else the same.
    pub text_type: String,
    fields: Map<String, Value>,
}

/// The fields that the families have in common.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Width of the hidden state.
    pub hidden_size: u32,
    /// Layers.
    pub num_hidden_layers: u32,
    /// Width of the MLP.
    pub intermediate_size: u32,
    /// Query heads.
    pub num_attention_heads: u32,
    /// Key/value heads; as many as query heads where the file says nothing. They divide the query heads.
    pub num_key_value_heads: u32,
    /// Width of a head, where the file says it.
    pub head_dim: Option<u32>,
    /// Tokens of the vocabulary.
    pub vocab_size: u32,
    /// Longest context, tokens.
    pub max_position_embeddings: u32,
    /// Epsilon of the norms.
    pub rms_norm_eps: f32,
    /// Whether the projections of attention have biases.
    pub attention_bias: bool,
    /// Whether those of the MLP have.
    pub mlp_bias: bool,
    /// Whether the head is the embedding; the presence of a head decides where the file says nothing.
    pub tie_word_embeddings: Option<bool>,
    /// Kind of each layer; empty where the file says nothing.
    pub layer_types: Vec<String>,
    /// Tokens that windowed layers look back.
    pub sliding_window: Option<u32>,
    /// Base of the rotary embedding, where the file says it.
    pub rope_theta: Option<f32>,
    /// Whether neighbours are rotated, not halves.
    pub rope_traditional: bool,
    /// The scaling of the rotary embedding, as it stands there.
    pub rope_scaling: RopeFields,
    /// Share of a head that is rotated, where the file says it.
    pub partial_rotary_factor: Option<f32>,
    /// The other fields, for a family to read its own.
    pub document: Document,
}

impl Document {
    /// Reads the JSON.
    pub fn parse(bytes: &[u8]) -> Result<Self, FileError> {
        let size = bytes.len() as u64;
        if size > MAX_CONFIG_BYTES {
            return Err(FileError::TooLarge { file: CONFIG.to_owned(), size, limit: MAX_CONFIG_BYTES });
        }
        let Fields(fields) = json::read(CONFIG, bytes)?;
        let mut document = Self { model_type: String::new(), text_type: String::new(), fields };
        let name = |document: &Self| match document.value("model_type") {
            Some(Value::String(name)) if name.len() <= MAX_MODEL_TYPE_BYTES => Ok(name.clone()),
            _ => Err(document.unusable("model_type")),
        };
        document.model_type = name(&document)?;
        document.text_type = document.model_type.clone();
        if let Some(Value::Object(text)) = document.fields.remove(TEXT_CONFIG) {
            let outer = std::mem::replace(&mut document.fields, text);
            for (field, value) in outer {
                // The wrapper's other fields are of its other parts.
                if WRAPPER_FIELDS.contains(&field.as_str()) && document.value(&field).is_none() {
                    document.fields.insert(field, value);
                }
            }
            if document.value("model_type").is_some() {
                document.text_type = name(&document)?;
            }
        }
        if document.value("num_hidden_layers").is_none()
            && let Some(layers) = document.listed_layers()
        {
            document.fields.insert("num_hidden_layers".to_owned(), layers.into());
        }
        Ok(document)
    }

    /// Values for fields that the file leaves out.
    pub fn set_defaults(&mut self, defaults: &[(&str, f64)]) {
        for (field, value) in defaults {
            if self.value(field).is_none() {
                self.fields.insert((*field).to_owned(), (*value).into());
            }
        }
    }

    /// A value that is there; null is absent, as Transformers has it.
    pub fn value(&self, field: &str) -> Option<&Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    /// A whole number from 1 to `limit`; a fraction of zero is whole.
    pub fn optional(&self, field: &'static str, limit: u32) -> Result<Option<u32>, FileError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        let number = whole(value).filter(|&number| number > 0 && number <= u64::from(limit));
        number.map(|number| Some(number as u32)).ok_or_else(|| self.unusable(field))
    }

    /// The same where the model cannot do without.
    pub fn number(&self, field: &'static str, limit: u32) -> Result<u32, FileError> {
        self.optional(field, limit)?.ok_or_else(|| self.unusable(field))
    }

    /// A finite number.
    pub fn float(&self, field: &'static str) -> Result<Option<f32>, FileError> {
        float(&self.fields, field).map_err(|()| self.unusable(field))
    }

    /// Yes or no; absent is no.
    pub fn flag(&self, field: &'static str) -> Result<bool, FileError> {
        Ok(self.choice(field)?.unwrap_or(false))
    }

    /// Yes, no or nothing.
    pub fn choice(&self, field: &'static str) -> Result<Option<bool>, FileError> {
        self.value(field).map(|value| value.as_bool().ok_or_else(|| self.unusable(field))).transpose()
    }

    /// A text.
    pub fn text(&self, field: &'static str) -> Result<Option<&str>, FileError> {
        self.value(field).map(|value| value.as_str().ok_or_else(|| self.unusable(field))).transpose()
    }

    /// That the field is absent or invalid.
    pub fn unusable(&self, field: &'static str) -> FileError {
        FileError::Field { field, found: self.fields.get(field).map_or("absent".to_owned(), short) }
    }

    /// The method of a quantisation that is not mlx-lm's own, and its settings.
    pub(crate) fn other_quantisation(&self) -> Option<(&str, &Map<String, Value>)> {
        if self.value("quantization").is_some_and(Value::is_object) {
            return None;
        }
        let settings = self.value("quantization_config")?.as_object()?;
        Some((settings.get("quant_method")?.as_str()?, settings))
    }

    /// Packing is read off the tensors; what the engine does not unpack is named here rather than misread there.
    pub fn check_quantisation(&self) -> Result<(), Unsupported> {
        let remedy = "use the model in 16 bits, or quantised by mlx-lm";
        if let Some((method, _)) = self.other_quantisation()
            && method != "mxfp4"
            && !packings::is_converted(method)
        {
            let reason = format!(
                "quantization method {:?} is not supported; supported are mxfp4, {}",
                excerpt(method),
                packings::list()
            );
            return Err(Unsupported::field("quantization_config.quant_method", reason, remedy));
        }
        let fields = |field| self.value(field).and_then(Value::as_object).map(|fields| (field, fields));
        let Some((field, fields)) = fields("quantization").or_else(|| fields("quantization_config")) else {
            return Ok(());
        };
        let mode = |fields: &Map<String, Value>| {
            fields.get("mode").and_then(Value::as_str).filter(|mode| !MODES.contains(mode)).map(excerpt)
        };
        let modules = fields.iter().filter_map(|(module, own)| Some((Some(module), own.as_object()?)));
        for (module, fields) in std::iter::once((None, fields)).chain(modules) {
            if let Some(mode) = mode(fields) {
                let place =
                    module.map_or(format!("{field}.mode"), |module| format!("{field} {:?}", excerpt(module)));
                return Err(Unsupported::field(
                    &place,
                    format!("quantization mode {mode:?} is not supported"),
                    remedy,
                ));
            }
        }
        Ok(())
    }
}

impl Config {
    /// Reads the common fields.
    pub fn read(document: &Document) -> Result<Self, Error> {
        let heads = document.number("num_attention_heads", MAX_HEADS)?;
        let kv_heads = document.optional("num_key_value_heads", MAX_HEADS)?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let found = format!(
                "num_key_value_heads is {kv_heads}, which has to divide num_attention_heads, {heads}"
            );
            return Err(FileError::Field { field: "num_key_value_heads", found }.into());
        }
        let norm = document.float("rms_norm_eps")?.unwrap_or(DEFAULT_NORM_EPSILON);
        let Rotary { fields: rope_scaling, theta: rope_theta, share } = rope(document)?;
        Ok(Self {
            hidden_size: document.number("hidden_size", MAX_SIZE)?,
            num_hidden_layers: document.number("num_hidden_layers", MAX_LAYERS)?,
            intermediate_size: document.number("intermediate_size", MAX_SIZE)?,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim: document.optional("head_dim", MAX_HEADS)?,
            vocab_size: document.number("vocab_size", MAX_SIZE)?,
            max_position_embeddings: document
                .optional("max_position_embeddings", 1 << 29)?
                .unwrap_or(DEFAULT_CONTEXT_LENGTH),
            rms_norm_eps: norm,
            attention_bias: document.flag("attention_bias")?,
            mlp_bias: document.flag("mlp_bias")?,
            tie_word_embeddings: document.choice("tie_word_embeddings")?,
            layer_types: document.texts("layer_types")?,
            sliding_window: document.optional("sliding_window", 1 << 29)?,
            rope_theta,
            rope_traditional: document.flag("rope_traditional")?,
            rope_scaling,
            partial_rotary_factor: share,
            document: document.clone(),
        })
    }

    /// Whether the head is the embedding. `true` wins over a head among the weights, which is then not loaded, as
    /// mlx-lm has it; a file that says nothing is tied exactly if it brings no head, as Transformers has it.
    pub fn tied(&self, has_head: bool) -> bool {
        self.tie_word_embeddings.unwrap_or(!has_head)
    }
}

impl Document {
    /// A list of texts, one for each layer; absent is empty.
    pub(crate) fn texts(&self, field: &'static str) -> Result<Vec<String>, FileError> {
        let Some(value) = self.value(field) else { return Ok(Vec::new()) };
        let list = value.as_array().filter(|list| list.len() <= MAX_LAYERS as usize);
        let texts = list.and_then(|list| list.iter().map(|kind| kind.as_str().map(excerpt)).collect());
        texts.ok_or_else(|| self.unusable(field))
    }

    /// The same where one text has a letter for each layer.
    pub(crate) fn letters(&self, field: &'static str) -> Result<Vec<String>, FileError> {
        match self.value(field).and_then(Value::as_str) {
            None => self.texts(field),
            Some(text) if text.len() <= MAX_LAYERS as usize => Ok(text.chars().map(String::from).collect()),
            Some(_) => Err(self.unusable(field)),
        }
    }

    /// How many layers a list of them has. Transformers leaves out their number where it has one.
    fn listed_layers(&self) -> Option<usize> {
        let count = |field| self.letters(field).ok().map(|kinds| kinds.len()).filter(|&count| count > 0);
        ["hybrid_override_pattern", "layers_block_type", "layer_types"].into_iter().find_map(count)
    }

    /// A list of whole numbers, none beyond `limit`; absent is empty.
    pub(crate) fn numbers(&self, field: &'static str, limit: u32) -> Result<Vec<u32>, FileError> {
        let Some(value) = self.value(field) else { return Ok(Vec::new()) };
        let list = value.as_array().filter(|list| list.len() <= MAX_LAYERS as usize);
        let number =
            |value| whole(value).filter(|&number| number <= u64::from(limit)).map(|number| number as u32);
        let numbers: Option<Vec<u32>> = list.and_then(|list| list.iter().map(number).collect());
        numbers.ok_or_else(|| self.unusable(field))
    }

    /// A whole number up to `limit`, where 0 says that there is none of it; absent is 0.
    pub(crate) fn count(&self, field: &'static str, limit: u32) -> Result<u32, FileError> {
        match self.value(field).map(whole) {
            None => Ok(0),
            Some(Some(number)) if number <= u64::from(limit) => Ok(number as u32),
            Some(_) => Err(self.unusable(field)),
        }
    }
}

fn float(fields: &Map<String, Value>, field: &str) -> Result<Option<f32>, ()> {
    match fields.get(field).filter(|value| !value.is_null()) {
        None => Ok(None),
        Some(value) => {
            let number = value.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
            number.map(Some).ok_or(())
        }
    }
}

/// A whole number; one with a fraction of zero is one.
pub fn whole(value: &Value) -> Option<u64> {
    let fraction =
        |number: f64| (number.fract() == 0.0 && (0.0..=9e15).contains(&number)).then_some(number as u64);
    value.as_u64().or_else(|| value.as_f64().and_then(fraction))
}

/// A value for a message: never the whole of a file.
fn short(value: &Value) -> String {
    match value {
        Value::Array(list) if list.len() > MAX_LAYERS as usize => format!("a list of more than {MAX_LAYERS}"),
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::Object(fields) => format!("an object of {}", fields.len()),
        other => excerpt(&other.to_string()),
    }
}

#[cfg(test)]
mod tests;
