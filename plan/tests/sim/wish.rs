//! What a deployment asks for, as a script writes it: the fields of `deploy`, `apply`, `edit` and `strategy`.

use russet_crds::{BackendChoice, LocalReference, ModelDeploymentSpec, Sharding, ShardingMode};

use super::words::{Fields, Wrong, number};

/// Fields of a split, for people.
pub const SPLIT: &str = "mode, ranks, tensor, layers, backend, speed, context, sequences, headroom";
/// Fields of a deployment beside those of its split, for people.
pub const OWN: &str = "model, replicas, pools, strategy";

const MODES: [(&str, ShardingMode); 5] = [
    ("auto", ShardingMode::Auto),
    ("single", ShardingMode::Single),
    ("pipeline", ShardingMode::Pipeline),
    ("tensor", ShardingMode::Tensor),
    ("hybrid", ShardingMode::Hybrid),
];
const BACKENDS: [(&str, BackendChoice); 4] = [
    ("auto", BackendChoice::Auto),
    ("jaccl", BackendChoice::Jaccl),
    ("jaccl-ring", BackendChoice::JacclRing),
    ("ring", BackendChoice::Ring),
];

/// Changes a spec as the fields say; what they do not name stays. An empty value takes a field back.
pub fn change(mut spec: ModelDeploymentSpec, mut fields: Fields) -> Result<ModelDeploymentSpec, Wrong> {
    if let Some(model) = fields.take("model") {
        spec.model_ref = LocalReference::new(model);
    }
    if let Some(replicas) = fields.number("replicas")? {
        spec.replicas = replicas;
    }
    if let Some(pools) = fields.list("pools") {
        spec.pool_refs = pools.into_iter().map(LocalReference::new).collect();
    }
    if let Some(strategy) = fields.take("strategy") {
        spec.strategy_ref = (!strategy.is_empty()).then(|| LocalReference::new(strategy));
    }
    let before = spec.sharding.clone().unwrap_or_default();
    let after = split(before, &mut fields)?;
    if after != Sharding::default() || spec.sharding.is_some() {
        spec.sharding = Some(after);
    }
    fields.end(&format!("{OWN}, {SPLIT}"))?;
    Ok(spec)
}

/// Changes a split as the fields say, and takes those it knows.
pub fn split(mut split: Sharding, fields: &mut Fields) -> Result<Sharding, Wrong> {
    if let Some(mode) = fields.one_of("mode", &MODES)? {
        split.mode = mode;
    }
    if let Some(backend) = fields.one_of("backend", &BACKENDS)? {
        split.backend = backend;
    }
    for (key, field) in [("ranks", &mut split.ranks), ("tensor", &mut split.tensor_size)] {
        if let Some(text) = fields.take(key) {
            *field = if text.is_empty() { None } else { Some(number(&text, key)?) };
        }
    }
    if let Some(text) = fields.take("layers") {
        let layers = text.split('+').filter(|part| !part.is_empty()).map(|part| number(part, "layers"));
        let layers = layers.collect::<Result<Vec<u32>, _>>()?;
        split.layers_per_rank = (!layers.is_empty()).then_some(layers);
    }
    if let Some(speed) = fields.take("speed") {
        split.min_bits_per_second = (!speed.is_empty()).then_some(speed);
    }
    for (key, field) in [
        ("context", &mut split.kv.context_tokens),
        ("sequences", &mut split.kv.max_sequences),
        ("headroom", &mut split.kv.headroom_percent),
    ] {
        if let Some(value) = fields.number(key)? {
            *field = value;
        }
    }
    Ok(split)
}
