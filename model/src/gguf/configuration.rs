//! `config.json` from the metadata of a GGUF file: what all architectures have; their own fields are in `architectures`.

use serde_json::{Value, json};

use super::{
    Gguf,
    architectures::{LONG_FACTORS, Rotated},
    fields::Fields,
    metadata::MetaValue,
    rope_factors,
};
use crate::{error::Error, excerpt::excerpt};

/// The configuration of a model; `factors` are the bytes of its [`Gguf::rope_factors`].
pub(super) fn of(gguf: &Gguf<'_>, factors: Option<&[u8]>) -> Result<Value, Error> {
    let mut fields = Fields::new(gguf);
    let architecture = gguf.architecture;
    fields.set("model_type", architecture.model_type);
    for (field, key) in [
        ("hidden_size", "embedding_length"),
        ("num_attention_heads", "attention.head_count"),
        ("max_position_embeddings", "context_length"),
    ] {
        fields.copy(field, key)?;
    }
    let layers = fields.layers()?;
    fields.set("num_hidden_layers", layers);
    if architecture.rotated != Rotated::ByLayer {
        // Of models whose layers are all experts, some files have none.
        if let Some(width) = fields.of_some_layers("feed_forward_length")? {
            fields.set("intermediate_size", width);
        }
        let heads = fields.number("attention.head_count")?;
        let kv_heads = fields.of_some_layers("attention.head_count_kv")?.unwrap_or(heads);
        fields.set("num_key_value_heads", kv_heads);
    }
    const EPSILON: &str = "attention.layer_norm_rms_epsilon";
    fields.copy_float("rms_norm_eps", EPSILON)?;
    let base = fields.float("rope.freq_base")?.unwrap_or(10_000.0);
    fields.set("rope_theta", base);
    fields.set("rope_traditional", architecture.traditional_rope);
    fields.set("vocab_size", vocabulary(gguf));
    fields.set("tie_word_embeddings", gguf.tensor("output.weight").is_none());
    fields.set("eos_token_id", super::tokenizer::end_tokens(gguf.metadata()));
    let rotated = width_of_heads(&mut fields)?;
    fields.factors = factors;
    (architecture.fields)(&mut fields)?;
    if !fields.is_set("rms_norm_eps") {
        return Err(fields.missing(EPSILON));
    }
    let factors = fields.factors.take();
    if let Some(scaling) = scaling(&mut fields, factors, base, rotated)? {
        fields.set("rope_scaling", scaling);
    }
    fields.finish()
}

/// Tokens of the model, by what has a row for each.
fn vocabulary(gguf: &Gguf<'_>) -> u64 {
    gguf.tensor("token_embd.weight").and_then(|tensor| tensor.shape.first().copied()).unwrap_or(0)
}

/// Sets the width of a head and what of it is rotated, where the architecture leaves that; returns the latter.
fn width_of_heads(fields: &mut Fields<'_, '_>) -> Result<u64, Error> {
    let rotated = fields.architecture().rotated;
    if let Rotated::OfLatent | Rotated::ByLayer = rotated {
        return Ok(fields.optional("rope.dimension_count")?.unwrap_or(0));
    }
    let head_dim = fields.head_dim()?;
    fields.set("head_dim", head_dim);
    let width = fields.optional("rope.dimension_count")?.unwrap_or(head_dim);
    let mut has_to_be = vec![("attention.value_length", fields.optional("attention.value_length")?)];
    match rotated {
        Rotated::Share if width < head_dim => {
            fields.set("partial_rotary_factor", width as f64 / head_dim as f64);
        }
        Rotated::Width(field) => fields.set(field, width),
        Rotated::Whole | Rotated::Share | Rotated::OfLatent | Rotated::ByLayer => {
            has_to_be.push(("rope.dimension_count", Some(width)));
        }
    }
    for (key, other) in has_to_be {
        if let Some(other) = other.filter(|other| *other != head_dim) {
            let reason = format!("{other} is not supported for heads of {head_dim}");
            return Err(fields.refuse(key, reason).into());
        }
    }
    Ok(width)
}

/// The scaling of the rotary embedding, whose names are those of `config.json`, or whose factors are a tensor's.
fn scaling(
    fields: &mut Fields<'_, '_>,
    factors: Option<&[u8]>,
    base: f64,
    rotated: u64,
) -> Result<Option<Value>, Error> {
    let is_long = fields.has_tensor(LONG_FACTORS);
    // Then there is nothing else to scale by: what the file says besides is refused.
    if let Some(factors) = factors.filter(|_| !is_long) {
        return Ok(rope_factors::llama3(factors, base as f32, rotated)?);
    }
    let legacy = fields.float("rope.scale_linear")?.filter(|factor| *factor != 1.0 && *factor != 0.0);
    let kind = match fields.get("rope.scaling.type") {
        Some(MetaValue::Text(kind)) => excerpt(kind),
        None => String::new(),
        Some(_) => return Err(fields.bad("rope.scaling.type", "is no text")),
    };
    let factor = fields.float("rope.scaling.factor")?.filter(|factor| *factor != 0.0).or(legacy);
    let original = fields.optional("rope.scaling.original_context_length")?;
    let kind = match (kind.as_str(), factor) {
        _ if is_long => "longrope",
        ("none", _) | ("", None) => return Ok(None),
        ("", Some(_)) => "linear",
        (kind, _) => kind,
    };
    let mut scaling = json!({"rope_type": kind});
    if let Some(factors) = factors {
        scaling["long_factor"] = rope_factors::numbers(factors).into();
    }
    let mut set = |field: &str, number: Option<f64>| {
        if let Some(number) = number {
            scaling[field] = number.into();
        }
    };
    set("factor", factor);
    set("original_max_position_embeddings", original.map(|tokens| tokens as f64));
    let own: &[(&str, &str)] = match kind {
        "yarn" => &[
            ("beta_fast", "rope.scaling.yarn_beta_fast"),
            ("beta_slow", "rope.scaling.yarn_beta_slow"),
            ("attention_factor", "rope.scaling.yarn_attn_factor"),
        ],
        "longrope" => &[("attention_factor", "rope.scaling.attn_factor")],
        _ => &[],
    };
    for (field, key) in own {
        set(field, fields.float(key)?);
    }
    if let Value::Object(scaling) = &mut scaling {
        scaling.append(&mut fields.rope);
    }
    Ok(Some(scaling))
}
