//! The rotary embedding of config.json, which stands in `rope_scaling`, in `rope_parameters` or at the top.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::{Document, MAX_LAYERS, float};
use crate::{
    error::{Error, FileError, Unsupported},
    excerpt::excerpt,
};

/// `rope_scaling`, or `rope_parameters` of newer files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RopeFields {
    /// `rope_type`, or `type` of older files; absent is `default`.
    pub rope_type: Option<String>,
    /// `factor`.
    pub factor: Option<f32>,
    /// `low_freq_factor`.
    pub low_freq_factor: Option<f32>,
    /// `high_freq_factor`.
    pub high_freq_factor: Option<f32>,
    /// `original_max_position_embeddings`.
    pub original_max_position_embeddings: Option<f32>,
    /// `beta_fast`.
    pub beta_fast: Option<f32>,
    /// `beta_slow`.
    pub beta_slow: Option<f32>,
    /// `mscale`.
    pub mscale: Option<f32>,
    /// `mscale_all_dim`.
    pub mscale_all_dim: Option<f32>,
    /// `attention_factor`.
    pub attention_factor: Option<f32>,
    /// `long_factor`.
    pub long_factor: Vec<f32>,
    /// `llama_4_scaling_beta`.
    pub llama_4_scaling_beta: Option<f32>,
}

/// What a configuration says of its rotary embedding.
#[derive(Debug, Default)]
pub(crate) struct Rotary {
    pub fields: RopeFields,
    pub theta: Option<f32>,
    pub share: Option<f32>,
}

/// The scaling, the base and the share, which stand in one of three places; what they say has to agree.
pub(super) fn rope(document: &Document) -> Result<Rotary, Error> {
    let mut fields = RopeFields::default();
    let (mut bases, mut shares, mut kinds) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    bases.extend(document.float("rope_theta")?.map(f32::to_bits));
    shares.extend(document.float("partial_rotary_factor")?.map(f32::to_bits));
    let disagree = |field: &str, what: &str| {
        let remedy = "leave only the one that the model was trained with";
        Unsupported::field(field, format!("{what} is said twice, and differently"), remedy)
    };
    for field in ["rope_scaling", "rope_parameters"] {
        let Some(value) = document.value(field) else { continue };
        let own = value.as_object().ok_or_else(|| document.unusable(field))?;
        // By kind of layer: a family that has such asks for each itself.
        if own.iter().any(|(_, value)| value.is_object()) {
            continue;
        }
        let (read, base, share, kind) = rope_fields(document, field, own)?;
        bases.extend(base.map(f32::to_bits));
        shares.extend(share.map(f32::to_bits));
        kinds.extend(kind);
        fields = fields.or(read);
    }
    if bases.len() > 1 {
        return Err(disagree("rope_theta", "the base of the rotary embedding").into());
    }
    if shares.len() > 1 {
        return Err(disagree("partial_rotary_factor", "the share of a head that is rotated").into());
    }
    if kinds.len() > 1 {
        return Err(disagree("rope_scaling", "its type").into());
    }
    fields.rope_type = kinds.pop_first();
    let only = |set: BTreeSet<u32>| set.first().copied().map(f32::from_bits);
    Ok(Rotary { fields, theta: only(bases), share: only(shares) })
}

type RopeObject = (RopeFields, Option<f32>, Option<f32>, BTreeSet<String>);

/// One object of a rotary embedding: its scaling, base, share, and the types it names.
fn rope_fields(
    document: &Document,
    field: &'static str,
    own: &Map<String, Value>,
) -> Result<RopeObject, FileError> {
    let number = |name| float(own, name).map_err(|()| document.unusable(field));
    let mut kinds = BTreeSet::new();
    for name in ["type", "rope_type"] {
        if let Some(kind) = own.get(name).filter(|kind| !kind.is_null()) {
            kinds.insert(excerpt(kind.as_str().ok_or_else(|| document.unusable(field))?));
        }
    }
    let long_factor = match own.get("long_factor").filter(|value| !value.is_null()) {
        None => Vec::new(),
        Some(list) => {
            let numbers = list.as_array().filter(|list| list.len() <= MAX_LAYERS as usize);
            let numbers: Option<Vec<f32>> = numbers.and_then(|list| {
                list.iter().map(|number| number.as_f64().map(|number| number as f32)).collect()
            });
            numbers.ok_or_else(|| document.unusable(field))?
        }
    };
    let fields = RopeFields {
        rope_type: kinds.first().cloned(),
        factor: number("factor")?,
        low_freq_factor: number("low_freq_factor")?,
        high_freq_factor: number("high_freq_factor")?,
        original_max_position_embeddings: number("original_max_position_embeddings")?,
        beta_fast: number("beta_fast")?,
        beta_slow: number("beta_slow")?,
        mscale: number("mscale")?,
        mscale_all_dim: number("mscale_all_dim")?,
        attention_factor: number("attention_factor")?,
        long_factor,
        llama_4_scaling_beta: number("llama_4_scaling_beta")?,
    };
    Ok((fields, number("rope_theta")?, number("partial_rotary_factor")?, kinds))
}

impl RopeFields {
    /// What this lacks, from the other.
    fn or(self, other: Self) -> Self {
        Self {
            rope_type: self.rope_type.or(other.rope_type),
            factor: self.factor.or(other.factor),
            low_freq_factor: self.low_freq_factor.or(other.low_freq_factor),
            high_freq_factor: self.high_freq_factor.or(other.high_freq_factor),
            original_max_position_embeddings: self
                .original_max_position_embeddings
                .or(other.original_max_position_embeddings),
            beta_fast: self.beta_fast.or(other.beta_fast),
            beta_slow: self.beta_slow.or(other.beta_slow),
            mscale: self.mscale.or(other.mscale),
            mscale_all_dim: self.mscale_all_dim.or(other.mscale_all_dim),
            attention_factor: self.attention_factor.or(other.attention_factor),
            long_factor: if self.long_factor.is_empty() { other.long_factor } else { self.long_factor },
            llama_4_scaling_beta: self.llama_4_scaling_beta.or(other.llama_4_scaling_beta),
        }
    }
}

impl Document {
    /// The rotary embedding of one kind of layer, `full_attention` or `sliding_attention`, where the file has one for
    /// each.
    pub(crate) fn rope_of(&self, kind: &str) -> Result<Option<Rotary>, FileError> {
        for field in ["rope_scaling", "rope_parameters"] {
            let own = self.value(field).and_then(Value::as_object).and_then(|kinds| kinds.get(kind));
            if let Some(own) = own.and_then(Value::as_object) {
                let (fields, theta, share, _) = rope_fields(self, field, own)?;
                return Ok(Some(Rotary { fields, theta, share }));
            }
        }
        Ok(None)
    }

    /// Whether the file has a rotary embedding for each kind of layer.
    pub(crate) fn has_rope_by_kind(&self) -> bool {
        ["rope_scaling", "rope_parameters"].iter().any(|field| {
            let own = self.value(field).and_then(Value::as_object);
            own.is_some_and(|own| own.values().any(Value::is_object))
        })
    }
}
