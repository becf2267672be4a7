//! Sizes of a model from the few numbers of its `config.json`. Not a file parser: the weights of a Llama are
//! counted, as its headers would give them.

use russet_model::shape::ModelShape;

use super::words::{Fields, LineError};

/// Fields of a model, for error texts.
pub const FIELDS: &str = "layers, hidden, heads, kv-heads, mlp, vocabulary, bits, context, layer";

/// Well-known models: layers, hidden, heads, KV heads, MLP.
const PRESETS: [(&str, [u32; 5]); 4] = [
    ("llama-8b", [32, 4096, 32, 8, 14336]),
    ("llama-70b", [80, 8192, 64, 8, 28672]),
    ("llama-405b", [126, 16384, 128, 8, 53248]),
    // No real model, and easy to add up: `layer=` sets the size of a layer, and everything else has none.
    ("toy", [8, 1024, 16, 8, 4096]),
];

/// The shape of a preset, or `llama`, with these fields.
pub fn shape(preset: &str, mut fields: Fields) -> Result<ModelShape, LineError> {
    let known: Vec<&str> = PRESETS.iter().map(|(name, _)| *name).collect();
    let base = PRESETS.iter().find(|(name, _)| *name == preset).map(|(_, numbers)| *numbers);
    if base.is_none() && preset != "llama" {
        return Err(format!("{}, llama is expected where {preset:?} stands", known.join(", ")));
    }
    let mut sizes = base.unwrap_or_default();
    for (size, key) in sizes.iter_mut().zip(["layers", "hidden", "heads", "kv-heads", "mlp"]) {
        *size = fields.number(key)?.unwrap_or(*size);
        if *size == 0 {
            return Err(format!("{key}= is expected, since llama alone says no size"));
        }
    }
    let [layers, hidden, heads, kv_heads, mlp] = sizes;
    let bits: u64 = fields.number("bits")?.unwrap_or(16);
    let context_length = fields.number("context")?.unwrap_or(131_072);
    let toy = fields.quantity("layer")?;
    let vocabulary = fields.number("vocabulary")?.unwrap_or(if toy.is_some() { 0 } else { 128_256 });
    fields.end(FIELDS)?;
    let head_dim = hidden / heads;
    let [wide, kv, mlp_wide] = [hidden, kv_heads * head_dim, mlp].map(u64::from);
    // Weights quantised in groups of 64 carry a scale and a bias of 16 bits each.
    let bytes = |weights: u64| if bits == 16 { weights * 2 } else { weights * (2 * bits + 1) / 16 };
    let weights = 2 * wide * (wide + kv) + 3 * wide * mlp_wide;
    let norms = 2 * wide * 2;
    let words = wide * u64::from(vocabulary);
    Ok(ModelShape {
        architecture: "llama".to_owned(),
        parameters: weights * u64::from(layers) + 2 * words,
        layers,
        hidden_size: hidden,
        attention_heads: heads,
        key_value_heads: kv_heads,
        head_dim,
        vocabulary,
        context_length,
        embedding_bytes: bytes(words),
        head_bytes: bytes(words) + if toy.is_some() { 0 } else { wide * 2 },
        layer_bytes: vec![toy.unwrap_or(bytes(weights) + norms); layers as usize],
        kv_bytes_per_token_per_layer: 2 * kv * 2,
        intermediate_size: mlp,
        quantization_group_size: if bits == 16 { 0 } else { 64 },
        replicated_layer_bytes: if toy.is_some() { 0 } else { norms },
        ..ModelShape::default()
    })
}
