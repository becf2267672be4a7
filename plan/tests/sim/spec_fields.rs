//! The spec of a deployment or tier in a script: the fields of `deploy`, `apply`, `edit`, `strategy` and
//! `tier`.

use russet_crds::{
    ApprovalAction, BackendChoice, Day, LocalReference, ModelDeploymentSpec, Preemption, Residency, Schedule,
    Sharding, ShardingMode, Spread, TierMode, TierSpec,
};

use super::words::{Fields, LineError, Words, number};

/// Fields of a split, for error texts.
pub const SPLIT: &str =
    "mode, ranks, tensor, layers, backend, speed, context, sequences, kv-tokens, headroom";
/// Other fields of a deployment, for error texts.
pub const OWN: &str = "model, replicas, pools, strategy, tier, group, spread, approved";

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

/// Changes a spec by fields; others stay. An empty value resets a field.
pub fn change(mut spec: ModelDeploymentSpec, mut fields: Fields) -> Result<ModelDeploymentSpec, LineError> {
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
    for (key, field) in [("group", &mut spec.workload_group), ("approved", &mut spec.approved_plan)] {
        if let Some(text) = fields.take(key) {
            *field = (!text.is_empty()).then_some(text);
        }
    }
    if let Some(tier) = fields.take("tier") {
        spec.tier_ref = (!tier.is_empty()).then(|| LocalReference::new(tier));
    }
    if let Some(key) = fields.take("spread") {
        spec.spread = (!key.is_empty()).then(|| Spread { topology_key: super::script::label(&key) });
    }
    let before = spec.sharding.clone().unwrap_or_default();
    let after = split(before, &mut fields)?;
    if after != Sharding::default() || spec.sharding.is_some() {
        spec.sharding = Some(after);
    }
    fields.end(&format!("{OWN}, {SPLIT}"))?;
    Ok(spec)
}

/// Changes a split by fields, and removes those it knows.
pub fn split(mut split: Sharding, fields: &mut Fields) -> Result<Sharding, LineError> {
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
    if let Some(tokens) = fields.take("kv-tokens") {
        split.kv.kv_tokens = if tokens.is_empty() { None } else { Some(number(&tokens, "kv-tokens")?) };
    }
    Ok(split)
}

/// Parses a tier, from its mode on.
pub fn tier(words: &mut Words) -> Result<TierSpec, LineError> {
    let mode = words.one_of(&[("dedicated", TierMode::Dedicated), ("cluster", TierMode::Cluster)])?;
    let mut fields = words.fields()?;
    let references = |names: Vec<String>| names.into_iter().map(LocalReference::new).collect();
    let mut spec = TierSpec {
        mode,
        pool_refs: fields.list("pools").map(references).unwrap_or_default(),
        workload_groups: fields.list("groups").unwrap_or_default(),
        priority: fields.number("priority")?.unwrap_or_default(),
        default_strategy_ref: fields.take("strategy").map(LocalReference::new),
        preemption: fields.one_of("preemption", &[("lower", Preemption::LowerPriority)])?.unwrap_or_default(),
        residency: fields
            .one_of(
                "residency",
                &[
                    ("always", Residency::Always),
                    ("sticky", Residency::Sticky),
                    ("ondemand", Residency::OnDemand),
                ],
            )?
            .unwrap_or_default(),
        min_residency_seconds: fields.number("min-residency")?.unwrap_or_default(),
        idle_seconds: fields.number("idle")?.unwrap_or(900),
        ..TierSpec::default()
    };
    for word in fields.list("approvals").unwrap_or_default() {
        spec.approvals.push(match word.as_str() {
            "preempt" => ApprovalAction::Preempt,
            "rollout" => ApprovalAction::Rollout,
            other => return Err(format!("approvals= are preempt and rollout, not {other:?}")),
        });
    }
    let mut days = Vec::new();
    for word in fields.list("days").unwrap_or_default() {
        let day = serde_json::from_value::<Day>(serde_json::Value::String(word.clone()));
        days.push(day.map_err(|_| format!("days= are Mon to Sun, not {word:?}"))?);
    }
    for hours in fields.list("hours").unwrap_or_default() {
        let (from, until) =
            hours.split_once('-').ok_or(format!("hours= are like 08:00-20:00, not {hours:?}"))?;
        spec.schedules.push(Schedule {
            days: days.clone(),
            from: from.to_owned(),
            until: until.to_owned(),
            time_zone: "UTC".to_owned(),
        });
    }
    fields.end("priority, pools, strategy, groups, preemption, residency, min-residency, idle, hours, days, approvals")?;
    Ok(spec)
}
