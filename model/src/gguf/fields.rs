//! Fields of `config.json` and the keys of a GGUF file that they are made of. A key of the architecture that nothing asks
//! for may change what the model computes, so it is refused by name, as fields of `config.json` are.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::{
    Gguf,
    architectures::Architecture,
    metadata::{MetaList, MetaValue},
    refuse,
};
use crate::{
    config::MAX_LAYERS,
    error::{Error, FileError, Unsupported},
    excerpt::excerpt,
};

/// Keys of an architecture that change nothing that is computed.
const HARMLESS: &[&str] = &[
    "mm.tokens_per_image",
    "tensor_data_layout",
    "rope.scaling.finetuned",
    "attention.causal",
    "vocab_size",
    // Of positions in pictures.
    "rope.dimension_sections",
];
/// What `expert_gating_func` says.
pub const SOFTMAX: u64 = 1;
pub const SIGMOID: u64 = 2;

/// A configuration under construction.
pub struct Fields<'g, 'a> {
    gguf: &'g Gguf<'a>,
    /// Keys that were asked for.
    read: BTreeSet<String>,
    map: Map<String, Value>,
    /// Fields of `rope_scaling` that the architecture sets.
    pub(super) rope: Map<String, Value>,
    /// The bytes of [`Gguf::rope_factors`], until something reads them.
    pub(super) factors: Option<&'g [u8]>,
}

impl<'g, 'a> Fields<'g, 'a> {
    pub(super) fn new(gguf: &'g Gguf<'a>) -> Self {
        Self { gguf, read: BTreeSet::new(), map: Map::new(), rope: Map::new(), factors: None }
    }

    /// The configuration, if every key of the architecture was asked for, is known to change nothing, or asks for nothing.
    pub(super) fn finish(self) -> Result<Value, Error> {
        for (key, value) in self.gguf.metadata().iter() {
            let own = key.strip_prefix(self.architecture().name).and_then(|own| own.strip_prefix('.'));
            let Some(own) = own else { continue };
            let asks_for_nothing = match value {
                MetaValue::Whole(number) => number == 0,
                MetaValue::Float(number) => number == 0.0,
                MetaValue::Flag(flag) => !flag,
                MetaValue::Text(text) => text.is_empty(),
                MetaValue::List(list) => list.count == 0,
            };
            if !self.read.contains(key) && !HARMLESS.contains(&own) && !asks_for_nothing {
                let reason =
                    "this release does not know it, and it may change what the model computes".to_owned();
                return Err(refuse(&excerpt(key), reason).into());
            }
        }
        Ok(Value::Object(self.map))
    }

    pub fn architecture(&self) -> &'static Architecture {
        self.gguf.architecture
    }

    /// Whether the file has this tensor.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.gguf.tensor(name).is_some()
    }

    /// Rows of a tensor, where the file has it.
    pub fn rows(&self, name: &str) -> Option<u64> {
        self.gguf.tensor(name).and_then(|tensor| tensor.shape.first().copied())
    }

    /// How the file's tokenizer splits text.
    pub fn pre_tokenizer(&self) -> Option<&'a str> {
        self.gguf.metadata().text("tokenizer.ggml.pre")
    }

    pub fn set(&mut self, field: &str, value: impl Into<Value>) {
        self.map.insert(field.to_owned(), value.into());
    }

    pub fn is_set(&self, field: &str) -> bool {
        self.map.contains_key(field)
    }

    /// The whole number of a key, which has to be there.
    pub fn copy(&mut self, field: &str, key: &str) -> Result<(), Error> {
        let number = self.number(key)?;
        self.set(field, number);
        Ok(())
    }

    /// The same where it is there.
    pub fn copy_optional(&mut self, field: &str, key: &str) -> Result<(), Error> {
        if let Some(number) = self.optional(key)? {
            self.set(field, number);
        }
        Ok(())
    }

    /// The number of a key with a fraction, where it is there.
    pub fn copy_float(&mut self, field: &str, key: &str) -> Result<(), Error> {
        if let Some(number) = self.float(key)? {
            self.set(field, number);
        }
        Ok(())
    }

    /// Experts of the MLP: how many, how many of them a token passes, and how wide each is.
    pub fn experts(&mut self, [count, used, width]: [&str; 3]) -> Result<(), Error> {
        self.copy(count, "expert_count")?;
        self.copy(used, "expert_used_count")?;
        self.copy(width, "expert_feed_forward_length")
    }

    /// Experts as DeepSeek's configurations have them, chosen by sigmoids or by a softmax, with one that every token passes.
    pub fn grouped_experts(&mut self, scoring: u64) -> Result<(), Error> {
        self.chosen_by(scoring)?;
        self.experts(["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"])?;
        for (field, key, otherwise) in [
            ("n_shared_experts", "expert_shared_count", 0),
            ("n_group", "expert_group_count", 1),
            ("topk_group", "expert_group_used_count", 1),
        ] {
            let number = self.optional(key)?.unwrap_or(otherwise);
            self.set(field, number);
        }
        self.copy_float("routed_scaling_factor", "expert_weights_scale")?;
        let renormalises = self.flag("expert_weights_norm")?;
        self.set("norm_topk_prob", renormalises);
        Ok(())
    }

    /// The same behind some layers without experts.
    pub fn grouped_experts_after_dense(&mut self, scoring: u64) -> Result<(), Error> {
        let dense = self.optional("leading_dense_block_count")?.unwrap_or(0);
        self.set("first_k_dense_replace", dense);
        self.grouped_experts(scoring)
    }

    /// Layers without those that predict further tokens, which the file counts and which are not loaded.
    pub fn layers(&mut self) -> Result<u64, Error> {
        let further = self.optional("nextn_predict_layers")?.unwrap_or(0);
        Ok(self.number("block_count")?.saturating_sub(further))
    }

    /// That scores of experts are made so, or that the file leaves it to the architecture.
    pub fn chosen_by(&mut self, scoring: u64) -> Result<(), Error> {
        match self.optional("expert_gating_func")? {
            None | Some(0) => Ok(()),
            Some(own) if own == scoring => Ok(()),
            Some(other) => {
                let name = if scoring == SIGMOID { "sigmoids" } else { "a softmax" };
                let reason = format!("{other} is not supported; supported is {scoring}, {name}");
                Err(self.refuse("expert_gating_func", reason).into())
            }
        }
    }

    /// Sets the window that layers look back over; whether there is one.
    pub fn set_window(&mut self) -> Result<bool, Error> {
        let window = self.optional("attention.sliding_window")?.filter(|window| *window > 0);
        if let Some(window) = window {
            self.set("sliding_window", window);
        }
        Ok(window.is_some())
    }

    /// Sets the kind of each layer: the first one of two, or the second.
    pub fn set_layer_types(&mut self, is_second: impl IntoIterator<Item = bool>, [first, second]: [&str; 2]) {
        let kinds = is_second.into_iter().map(|is_second| if is_second { second } else { first });
        self.set("layer_types", kinds.map(Value::from).collect::<Vec<_>>());
    }

    /// What grows with the factor of YaRN: one number in a file, which counts it in `unit`, and two in config.json.
    pub fn set_yarn_growth(&mut self, unit: f64) -> Result<(), Error> {
        if let Some(own) = self.float("rope.scaling.yarn_log_multiplier")? {
            for field in ["mscale", "mscale_all_dim"] {
                self.rope.insert(field.to_owned(), (own / unit).into());
            }
        }
        Ok(())
    }

    /// Elements of a head.
    pub fn head_dim(&mut self) -> Result<u64, Error> {
        let (hidden, heads) = (self.number("embedding_length")?, self.number("attention.head_count")?);
        Ok(self.optional("attention.key_length")?.unwrap_or(hidden.checked_div(heads).unwrap_or(0)))
    }

    /// Whether layers have biases of queries, keys and values.
    pub fn set_attention_bias(&mut self) {
        let has_bias = ["attn_q", "attn_qkv"].iter().any(|own| self.has_tensor(&format!("blk.0.{own}.bias")));
        self.set("attention_bias", has_bias);
    }

    pub fn get(&mut self, key: &str) -> Option<MetaValue<'a>> {
        let full = self.full(key);
        let value = self.gguf.metadata().get(&full);
        self.read.insert(full);
        value
    }

    /// A whole number; of one for each layer, the one that all have.
    pub fn optional(&mut self, key: &str) -> Result<Option<u64>, Error> {
        self.common(key, |_| true)
    }

    /// A whole number; of one for each layer, the one that all have that have any.
    pub fn of_some_layers(&mut self, key: &str) -> Result<Option<u64>, Error> {
        self.common(key, |number| number != 0.0)
    }

    fn common(&mut self, key: &str, counts: impl Fn(f64) -> bool) -> Result<Option<u64>, Error> {
        let number = match self.get(key) {
            None => return Ok(None),
            Some(MetaValue::Whole(number)) => u64::try_from(number).ok(),
            Some(MetaValue::List(list)) if is_by_layer(&list) => {
                let numbers: Vec<f64> = list.numbers().filter(|number| counts(*number)).collect();
                let first = numbers.first().copied().filter(|first| *first >= 0.0).unwrap_or(f64::NAN);
                if numbers.iter().any(|number| *number != first) {
                    return Err(self.refuse(key, "it differs from layer to layer".to_owned()).into());
                }
                Some(first as u64)
            }
            Some(_) => None,
        };
        number.map(Some).ok_or_else(|| self.bad(key, "is no whole number"))
    }

    /// A whole number for each layer.
    pub fn by_layer(&mut self, key: &str) -> Result<Vec<u64>, Error> {
        match self.get(key) {
            Some(MetaValue::List(list)) if is_by_layer(&list) => {
                Ok(list.numbers().map(|number| number as u64).collect())
            }
            Some(_) => Err(self.bad(key, "is no list with a number for each layer")),
            None => Err(self.missing(key)),
        }
    }

    /// The whole number that layers of each of two kinds have, the first kind and the second; `None` for a kind that no
    /// layer is of.
    pub fn of_kinds(&mut self, key: &str, is_second: &[bool]) -> Result<[Option<u64>; 2], Error> {
        let numbers = match self.get(key) {
            Some(MetaValue::List(_)) => self.by_layer(key)?,
            _ => vec![self.number(key)?; is_second.len()],
        };
        let mut found = [None; 2];
        for (number, is_second) in numbers.into_iter().zip(is_second) {
            let own = &mut found[usize::from(*is_second)];
            if own.is_some_and(|own| own != number) {
                let reason = "it differs between layers of one kind".to_owned();
                return Err(self.refuse(key, reason).into());
            }
            *own = Some(number);
        }
        Ok(found)
    }

    pub fn number(&mut self, key: &str) -> Result<u64, Error> {
        self.optional(key)?.ok_or_else(|| self.missing(key))
    }

    pub fn float(&mut self, key: &str) -> Result<Option<f64>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(MetaValue::Float(number)) if number.is_finite() => Ok(Some(number)),
            Some(_) => Err(self.bad(key, "is no finite number")),
        }
    }

    /// Yes or no; no where it is not there.
    pub fn flag(&mut self, key: &str) -> Result<bool, Error> {
        match self.get(key) {
            None => Ok(false),
            Some(MetaValue::Flag(flag)) => Ok(flag),
            Some(_) => Err(self.bad(key, "is neither true nor false")),
        }
    }

    /// Yes or no for each layer.
    pub fn flags(&mut self, key: &str) -> Result<Option<Vec<bool>>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(MetaValue::List(list)) if is_by_layer(&list) => Ok(Some(list.flags().collect())),
            Some(_) => Err(self.bad(key, "is no list with one for each layer")),
        }
    }

    pub fn missing(&self, key: &str) -> Error {
        self.bad(key, "is missing from its metadata")
    }

    pub fn bad(&self, key: &str, problem: &str) -> Error {
        let problem = format!("{} {problem}", self.full(key));
        FileError::BadGguf { file: self.gguf.files[0].0.clone(), problem }.into()
    }

    pub fn refuse(&self, key: &str, reason: String) -> Unsupported {
        refuse(&self.full(key), reason)
    }

    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture().name)
    }
}

fn is_by_layer(list: &MetaList<'_>) -> bool {
    (1..=u64::from(MAX_LAYERS)).contains(&list.count)
}
