//! Validation: from a spec as written to a deployment that can be planned. Everything that can be wrong with
//! a spec is found here, all of it at once; what comes out needs no second look.

mod adapters;
mod draft_model;
mod split;
mod strategy;
mod tier_terms;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use kube::ResourceExt as _;
use russet_crds::{
    DeploymentEngine, EngineOptions, Fence, KvCacheType, KvCapacity, LocalReference, ModelDeployment,
    ModelDeploymentSpec, Residency, RolloutStrategy, RouterBroadcast, Sharding, Speculation, strip_pattern,
};
use russet_model::adapter::AdapterKind;
use russet_model::config::MAX_LAYERS;
use russet_model::families;
use russet_model::kv_quantization::{KV_GROUPS, kv_group};
use russet_model::shape::ModelShape;

use crate::auto_revert;
use crate::autoscaling::SCALE_DOWN_DELAY;
use crate::demand;
use crate::in_memory;
use crate::memory_model::ServingCapacity;
use crate::note::Note;
use crate::pool::{self, EligibleNodes, LinkDemand};
use crate::snapshot::{ApprovalDecisions, Snapshot};
use crate::tier_info::TierInfo;
pub use crate::valid_deployment::{HybridConstraints, IdleReason, Split, ValidDeployment};

/// Maximum ranks of a group; the schema of ShardGroup says the same.
pub const MAX_RANKS: u32 = 64;

pub use split::shapes;
pub use strategy::{StrategyVerdict, judge_strategy};
use tier_terms::TierTerms;

/// Path of a deployment's own split.
const SHARDING_FIELD: &str = "spec.sharding";

/// Validates a ModelDeployment as the server has it.
pub fn read(view: &Snapshot, deployment: &ModelDeployment) -> Result<ValidDeployment, Vec<Note>> {
    let namespace = deployment.namespace().unwrap_or_default();
    let placed = deployment.status.as_ref().and_then(|status| status.placement.as_ref());
    let ran = placed.filter(|placement| !placement.plan_hash.is_empty()).map_or(0, |placement| {
        // An older release did not store the number.
        if placement.replicas == 0 { i32::MAX } else { placement.replicas }
    });
    let name = deployment.name_any();
    let mut valid = validate(view, &namespace, &name, &deployment.spec)?;
    let known = deployment.status.as_ref().and_then(|status| status.rollout.as_ref());
    if let Some((spec, why)) = auto_revert::rolled_back_spec(&deployment.spec, known, &valid.spec_digest) {
        // The earlier spec may have become invalid; then the requested one is retried.
        if let Ok(before) = validate(view, &namespace, &name, &spec) {
            valid = ValidDeployment { spec_digest: valid.spec_digest, rollback_reason: Some(why), ..before };
        }
    }
    let ApprovalDecisions { approved, denied } =
        view.approval_decisions.get(&valid.key()).cloned().unwrap_or_default();
    let approved_plan = deployment.spec.approved_plan.clone();
    Ok(ValidDeployment { ran_before: ran, approved, approved_plan, denied, ..valid })
}

/// Whether nobody has asked for a deployment lately, and the history of its demand may have started its replicas: those stop no
/// others.
fn is_only_expected(deployment: &ModelDeployment, now: Timestamp) -> bool {
    let autoscaling = deployment.spec.autoscaling.as_ref().filter(|rules| rules.predictive.is_some());
    let Some(rules) = autoscaling.filter(|rules| deployment.spec.replicas > rules.min_replicas) else {
        return false;
    };
    let demand = deployment.status.as_ref().map(|status| status.demand.as_slice()).unwrap_or_default();
    let asked = SCALE_DOWN_DELAY.max(Duration::from_secs(rules.idle_seconds.into()));
    demand::summarize(demand, now).idle_for.is_none_or(|idle_for| idle_for >= asked)
}

/// The same at `now`, taking demand into account: an OnDemand deployment may be idle then.
pub fn read_at(
    view: &Snapshot,
    deployment: &ModelDeployment,
    now: Timestamp,
) -> Result<ValidDeployment, Vec<Note>> {
    let mut valid = read(view, deployment)?;
    valid.preempts &= !is_only_expected(deployment, now);
    let demand = deployment.status.as_ref().map(|status| status.demand.as_slice()).unwrap_or_default();
    let idle = |tier: &TierInfo| {
        let idle_for = demand::summarize(demand, now).idle_for;
        tier.residency == Residency::OnDemand && idle_for.is_none_or(|idle_for| idle_for >= tier.idle_after)
    };
    match valid
        .tier
        .clone()
        .filter(|name| valid.idle_reason.is_none() && view.tiers.get(name).is_some_and(idle))
    {
        Some(tier) => {
            Ok(ValidDeployment { idle_reason: Some(IdleReason::Idle { tier }), replicas: 0, ..valid })
        }
        None => Ok(valid),
    }
}

/// Time until a deployment becomes idle without further requests; no watch event announces that.
pub fn until_idle(view: &Snapshot, deployment: &ModelDeployment, now: Timestamp) -> Option<Duration> {
    let tier = view.tiers.get(&deployment.spec.tier_ref.as_ref()?.name)?;
    let demand = &deployment.status.as_ref()?.demand;
    let left = tier.idle_after.checked_sub(demand::summarize(demand, now).idle_for?)?;
    // A little more, so that the caller does not wake just before; and requests that no gateway renews
    // expire.
    let stale = demand::until_stale(demand, now);
    let left = left + Duration::from_millis(100);
    (tier.residency == Residency::OnDemand).then(|| stale.map_or(left, |stale| left.min(stale)))
}

/// Validates a spec as written; the notes name everything that is wrong with it.
pub fn validate(
    view: &Snapshot,
    namespace: &str,
    name: &str,
    spec: &ModelDeploymentSpec,
) -> Result<ValidDeployment, Vec<Note>> {
    let ModelDeploymentSpec {
        model_ref: LocalReference { name: model },
        draft_model_ref,
        adapters,
        sharding,
        strategy_ref,
        // Only its options decide about a placement.
        engine:
            DeploymentEngine { options: engine, chat_template_arguments: _, generation_config: _, strip_patterns },
        pool_refs,
        tier_ref,
        workload_group,
        replicas,
        approved_plan: _,
        rollout: how,
        // It decides who writes `replicas`, and nothing about a placement.
        autoscaling: _,
        spread,
    } = spec;
    let Some(shape) = view.models.get(&(namespace.to_owned(), model.clone())) else {
        return Err(vec![Note::ModelUnknown { model: model.clone() }]);
    };
    let mut notes = shape_notes(model, shape);
    for (index, pattern) in strip_patterns.iter().enumerate() {
        if let Err(why) = strip_pattern(pattern) {
            let why = format!("{pattern:?} is no regular expression of use: {why}");
            notes.push(invalid(format!("spec.engine.stripPatterns[{index}]"), why));
        }
    }
    if !notes.is_empty() {
        return Err(notes);
    }
    let promised = TierTerms::for_deployment(view, namespace, tier_ref.as_ref(), workload_group.as_deref())?;
    let asked = requested_split(view, strategy_ref.as_ref(), sharding.as_ref(), &promised)?;
    let draft = draft_model_ref.as_ref().and_then(|draft| {
        draft_model::read(view, (namespace, model, shape), &draft.name, engine, &mut notes)
    });
    let adapters = adapters::read(view, (namespace, model, shape), adapters, &mut notes);
    let options = check_options(engine, shape, &mut notes);
    // What is placed takes what the engine makes of the files.
    let in_memory = in_memory::shape(engine, shape).unwrap_or_else(|why| {
        notes.push(why);
        Cow::Borrowed(shape)
    });
    let shape = in_memory.as_ref();
    let room = asked.capacity(shape, options, &mut notes);
    let split = split::split(&asked, shape, &mut notes);
    let links = asked.link_demand(&mut notes);
    let mut areas = eligible_nodes(view, promised.pools(pool_refs), &mut notes);
    if let Some((demand, who)) = links {
        areas = areas.into_iter().map(|area| area.with_demand(demand, who.clone())).collect();
    }
    if *replicas < 0 {
        notes.push(invalid(
            "spec.replicas".to_owned(),
            format!("{replicas} replicas cannot be; use 0 to stop the deployment"),
        ));
    }
    if !notes.is_empty() {
        return Err(notes);
    }
    let rest = promised.idle_reason();
    let valid = ValidDeployment {
        spec_digest: String::new(),
        rollback_reason: None,
        drain_first: how.as_ref().is_some_and(|how| how.strategy == RolloutStrategy::DrainThenReplace),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        model: model.clone(),
        shape: shape.clone(),
        draft,
        adapters,
        split_source: asked.source,
        split,
        backend: asked.sharding.backend,
        sharding: asked.sharding,
        capacity: room,
        eligible_nodes: areas.into_iter().map(|area| promised.restrict(view, area)).collect(),
        tier: promised.name(),
        priority: promised.priority(),
        preempts: promised.preempts(),
        preempts_everywhere: promised.preempts_everywhere(),
        approved: BTreeMap::new(),
        approved_plan: None,
        denied: BTreeSet::new(),
        ran_before: 0,
        dedicated_group: promised.dedicated_group(),
        replicas: if rest.is_some() { 0 } else { *replicas },
        topology_key: spread.clone().unwrap_or_default().topology_key,
        idle_reason: rest,
    };
    Ok(ValidDeployment { spec_digest: auto_revert::spec_digest(&valid), ..valid })
}

/// The requested split: the deployment's own, its strategy's, or its tier's.
fn requested_split(
    view: &Snapshot,
    strategy_ref: Option<&LocalReference>,
    sharding: Option<&Sharding>,
    promised: &TierTerms<'_>,
) -> Result<RequestedSplit, Vec<Note>> {
    if strategy_ref.is_some() && sharding.is_some() {
        let why = "it and spec.sharding exclude each other; leave one of them out".to_owned();
        return Err(vec![invalid("spec.strategyRef".to_owned(), why)]);
    }
    if let Some(own) = sharding {
        return Ok(RequestedSplit { source: SHARDING_FIELD.to_owned(), sharding: own.clone() });
    }
    let Some(LocalReference { name: strategy }) = strategy_ref.or(promised.strategy()) else {
        return Ok(RequestedSplit { source: SHARDING_FIELD.to_owned(), sharding: Sharding::default() });
    };
    let Some(sharding) = view.strategies.get(strategy) else {
        let known = view.strategies.keys().cloned().collect();
        return Err(vec![Note::StrategyUnknown { strategy: strategy.clone(), known }]);
    };
    Ok(RequestedSplit { source: format!("ShardingStrategy {strategy} spec"), sharding: sharding.clone() })
}

/// The named NodePools, or the whole cluster without any.
pub fn eligible_nodes(view: &Snapshot, refs: &[LocalReference], notes: &mut Vec<Note>) -> Vec<EligibleNodes> {
    if refs.is_empty() {
        return vec![EligibleNodes::default()];
    }
    let named: BTreeSet<&str> = refs.iter().map(|reference| reference.name.as_str()).collect();
    let mut areas = Vec::new();
    for pool in named {
        match view.pools.get(pool) {
            Some(Ok(area)) => areas.push(area.clone()),
            Some(Err(why)) => {
                notes.push(Note::PoolInvalid { pool: pool.to_owned(), why: Box::new(why.clone()) })
            }
            None => {
                let known = view.pools.keys().cloned().collect();
                notes.push(Note::PoolUnknown { pool: pool.to_owned(), known });
            }
        }
    }
    areas
}

/// What is wrong with a model regardless of the spec; empty if the engine can run it.
pub fn shape_notes(model: &str, shape: &ModelShape) -> Vec<Note> {
    let mut notes = draft_notes(model, shape);
    if let Some(why) = shape.chat_unsupported.as_ref().filter(|_| notes.is_empty()) {
        notes.push(Note::Unsupported { model: model.to_owned(), why: why.clone() });
    }
    notes
}

/// Why no engine loads an adapter.
pub fn adapter_notes(model: &str, shape: &ModelShape) -> Vec<Note> {
    let why = match (&shape.unsupported, &shape.adapter) {
        (Some(why), _) => why.clone(),
        (None, Some(adapter)) if adapter.kind == AdapterKind::Unknown => {
            "it is of a kind that only newer releases know; update Russet".to_owned()
        }
        (None, _) => return Vec::new(),
    };
    vec![Note::Unsupported { model: model.to_owned(), why }]
}

/// Why the engine does not run a model, not even as a draft model, which needs no chat template.
fn draft_notes(model: &str, shape: &ModelShape) -> Vec<Note> {
    let mut notes = Vec::new();
    if shape.adapter.is_some() {
        let field = format!("Model {model}");
        let why =
            "it is an adapter; name it in spec.adapters of a deployment of the model that it was trained on";
        return vec![invalid(field, why.to_owned())];
    }
    if !families::is_known(&shape.architecture) {
        notes.push(Note::Architecture { model: model.to_owned(), architecture: shape.architecture.clone() });
    }
    if let Some(why) = shape.unsupported.as_ref().filter(|_| notes.is_empty()) {
        notes.push(Note::Unsupported { model: model.to_owned(), why: why.clone() });
    }
    // What is not run is not added up either.
    if shape.unsupported.is_some() {
        return notes;
    }
    // Whoever may write a status may write any number, and planning takes a step for each layer at least.
    if shape.layers > MAX_LAYERS || shape.layer_bytes.len() > MAX_LAYERS as usize {
        let layers = shape.layer_bytes.len().max(shape.layers as usize);
        let why = format!("it has {layers} layers, more than the limit of {MAX_LAYERS}");
        notes.push(Note::Headers { model: model.to_owned(), why });
        return notes;
    }
    if shape.layers == 0 || shape.layer_bytes.len() != shape.layers as usize {
        notes.push(Note::Headers {
            model: model.to_owned(),
            why: format!(
                "config.json names {} layers, the files hold {}",
                shape.layers,
                shape.layer_bytes.len()
            ),
        });
    }
    notes
}

/// The engine options, if this release knows their values and the model supports them.
fn check_options(engine: &EngineOptions, shape: &ModelShape, notes: &mut Vec<Note>) -> EngineOptions {
    let EngineOptions {
        kv_cache,
        quantization: _,
        speculation,
        fence,
        router_broadcast,
        max_waiting_requests: _,
    } = engine;
    if *router_broadcast == RouterBroadcast::Unknown {
        notes.push(Note::Newer { field: "spec.engine.routerBroadcast".to_owned() });
    }
    if *fence == Fence::Unknown {
        notes.push(Note::Newer { field: "spec.engine.fence".to_owned() });
    }
    if *speculation == Speculation::Unknown {
        notes.push(Note::Newer { field: "spec.engine.speculation".to_owned() });
    }
    let field = "spec.engine.kvCache".to_owned();
    match kv_cache {
        KvCacheType::AsComputed => {}
        KvCacheType::Unknown => notes.push(Note::Newer { field }),
        KvCacheType::Int8 | KvCacheType::Int4 if kv_group(shape.head_dim).is_some() => {}
        KvCacheType::Int8 | KvCacheType::Int4 => {
            let groups = KV_GROUPS.map(|group| group.to_string()).join(" or ");
            let why = format!(
                "the model's heads are {} wide, which groups of {groups} do not divide, so its keys and values cannot be quantised; leave it out",
                shape.head_dim
            );
            notes.push(invalid(field, why));
        }
    }
    *engine
}

/// A split and its source.
struct RequestedSplit {
    source: String,
    sharding: Sharding,
}

impl RequestedSplit {
    fn field(&self, name: &str) -> String {
        format!("{}.{name}", self.source)
    }

    fn capacity(&self, shape: &ModelShape, engine: EngineOptions, notes: &mut Vec<Note>) -> ServingCapacity {
        let KvCapacity { context_tokens, max_sequences, kv_tokens, headroom_percent } = &self.sharding.kv;
        for (field, value) in [("kv.contextTokens", context_tokens), ("kv.maxSequences", max_sequences)] {
            if *value == 0 {
                let why = "0 leaves no room for any conversation; use at least 1".to_owned();
                notes.push(invalid(self.field(field), why));
            }
        }
        if let Some(tokens) = kv_tokens
            && *tokens < u64::from(*context_tokens)
        {
            let why = format!(
                "{tokens} tokens are the room of all conversations together and do not hold one of contextTokens, which is {context_tokens}; use at least as many"
            );
            notes.push(invalid(self.field("kv.kvTokens"), why));
        }
        // For a model without a stated limit the requested length counts.
        let context_tokens = match shape.context_length {
            0 => *context_tokens,
            limit => (*context_tokens).min(limit),
        };
        let most = u64::from(context_tokens) * u64::from(*max_sequences);
        ServingCapacity {
            context_tokens,
            max_sequences: *max_sequences,
            // More than the maximum of all sequences is that maximum.
            kv_tokens: kv_tokens.filter(|tokens| *tokens < most),
            headroom_percent: *headroom_percent,
            engine,
        }
    }

    /// The link requirement and its source.
    fn link_demand(&self, notes: &mut Vec<Note>) -> Option<(LinkDemand, String)> {
        let field = self.field("minBitsPerSecond");
        match pool::parse_rate(self.sharding.min_bits_per_second.as_deref()?, &field) {
            Ok(bits) => Some((LinkDemand { bits, ..LinkDemand::default() }, field)),
            Err(note) => {
                notes.push(note);
                None
            }
        }
    }
}

fn invalid(field: String, why: String) -> Note {
    Note::Invalid { field, why }
}

#[cfg(test)]
mod tests {
    use russet_crds::{ShardingMode, WeightQuantization};
    use russet_model::description::Task;
    use russet_model::load_quantization::LoadQuantization;
    use russet_model::shape::{LayerGroup, QuantizedShape, READER};

    use super::*;

    fn view() -> Snapshot {
        let llama = ModelShape {
            architecture: "llama".to_owned(),
            layers: 4,
            layer_bytes: vec![1; 4],
            context_length: 2048,
            attention_heads: 16,
            key_value_heads: 8,
            head_dim: 8,
            intermediate_size: 256,
            ..ModelShape::default()
        };
        let mut view = Snapshot::default();
        let mut model =
            |name: &str, shape: ModelShape| view.models.insert(("ns".to_owned(), name.to_owned()), shape);
        model("alien", ModelShape { architecture: "mamba".to_owned(), ..llama.clone() });
        model("torn", ModelShape { layer_bytes: vec![1; 3], ..llama.clone() });
        let shared = |layer| LayerGroup {
            count: 1,
            weight_bytes: 1,
            shares_cache_of: (layer > 1).then_some(1),
            ..LayerGroup::default()
        };
        model("shared", ModelShape { layer_groups: (0..4).map(shared).collect(), ..llama.clone() });
        model("llama", llama);
        view
    }

    fn spec(
        model: &str,
        mode: ShardingMode,
        ranks: Option<u32>,
        layers: Option<Vec<u32>>,
    ) -> ModelDeploymentSpec {
        ModelDeploymentSpec {
            model_ref: LocalReference::new(model),
            sharding: Some(Sharding { mode, ranks, layers_per_rank: layers, ..Sharding::default() }),
            replicas: 1,
            ..ModelDeploymentSpec::default()
        }
    }

    #[test]
    fn every_spec_becomes_a_split_or_explains_the_fault() {
        use ShardingMode::*;
        for (model, mode, ranks, layers, expected) in [
            ("llama", Auto, None, None, Ok(Split::Auto)),
            ("llama", Auto, Some(1), None, Ok(Split::Single)),
            ("llama", Auto, Some(2), None, Ok(Split::Ranks(2))),
            ("llama", Single, None, None, Ok(Split::Single)),
            ("llama", Pipeline, None, None, Ok(Split::Pipeline)),
            ("llama", Pipeline, Some(1), None, Ok(Split::Single)),
            ("llama", Pipeline, Some(4), None, Ok(Split::Ranks(4))),
            ("llama", Auto, None, Some(vec![3, 1]), Ok(Split::Layers(vec![3, 1]))),
            ("llama", Auto, None, Some(vec![4]), Ok(Split::Single)),
            ("llama", Single, Some(2), None, Err("Single runs on one rank, not 2")),
            ("llama", Pipeline, Some(5), None, Err("5 ranks cannot share 4 layers")),
            ("llama", Pipeline, Some(0), None, Err("0 ranks cannot be")),
            ("llama", Auto, Some(3), Some(vec![2, 2]), Err("names 2 ranks, ranks says 3")),
            ("llama", Auto, None, Some(vec![2, 1]), Err("adds up to 3 layers, but the model has 4")),
            ("llama", Auto, None, Some(vec![4, 0]), Err("rank 1 would hold no layers")),
            ("shared", Pipeline, Some(2), None, Ok(Split::Ranks(2))),
            ("shared", Auto, None, Some(vec![3, 1]), Ok(Split::Layers(vec![3, 1]))),
            (
                "shared",
                Pipeline,
                Some(3),
                None,
                Err("layers 1 to 3 share keys and values and stay together, so ask for at most 2"),
            ),
            ("shared", Auto, None, Some(vec![2, 2]), Err("the split begins a stage with layer 2")),
            ("shared", Hybrid, Some(6), None, Err("6 ranks do not make two or more stages")),
            ("llama", Tensor, Some(2), None, Ok(Split::Tensor(Some(2)))),
            ("llama", Tensor, None, Some(vec![4]), Ok(Split::Tensor(None))),
            ("llama", Tensor, Some(3), None, Err("8 KV heads cannot be cut into 3; use 1, 2, 4 or 8")),
            ("llama", Tensor, Some(1), None, Ok(Split::Single)),
            ("llama", Tensor, Some(2), Some(vec![2, 2]), Err("use mode Hybrid for several stages")),
            ("llama", Hybrid, None, None, Ok(Split::Hybrid(Default::default()))),
            ("llama", Hybrid, Some(5), None, Err("5 ranks do not make two or more stages of equal size")),
            ("llama", Unknown, None, None, Err("is a word of a newer release")),
            (
                "alien",
                Auto,
                None,
                None,
                Err(
                    "architecture \"mamba\", which this engine does not know; it knows bert, deepseek_v3, gemma3",
                ),
            ),
            ("torn", Auto, None, None, Err("config.json names 4 layers, the files hold 3")),
            ("ghost", Auto, None, None, Err("Model \"ghost\" does not exist")),
        ] {
            let got = validate(&view(), "ns", "chat", &spec(model, mode, ranks, layers.clone()));
            match (got, expected) {
                (Ok(valid), Ok(split)) => assert_eq!(valid.split, split),
                (Err(notes), Err(text)) => {
                    assert!(crate::note::join(&notes).contains(text), "{notes:?} lacks {text:?}")
                }
                (got, expected) => {
                    panic!("{model} {mode:?} {ranks:?} {layers:?}: {got:?}, wanted {expected:?}")
                }
            }
        }
    }

    #[test]
    fn the_context_is_never_longer_than_the_models_own() {
        let valid = validate(&view(), "ns", "chat", &spec("llama", ShardingMode::Auto, None, None)).unwrap();
        assert_eq!(
            valid.capacity,
            ServingCapacity {
                context_tokens: 2048,
                max_sequences: 4,
                headroom_percent: 5,
                ..ServingCapacity::default()
            }
        );
    }

    #[test]
    fn kv_tokens_hold_one_context_and_at_most_all_of_them() {
        // The model's own limit is 2,048 tokens, and there are four sequences.
        for (context, asked, expected) in [
            (1024, None, Ok(None)),
            (1024, Some(1024), Ok(Some(1024))),
            (1024, Some(4095), Ok(Some(4095))),
            (1024, Some(4096), Ok(None)),
            (1024, Some(1 << 34), Ok(None)),
            (8192, Some(8192), Ok(None)),
            (1024, Some(1023), Err("1023 tokens are the room of all conversations together")),
            (8192, Some(2048), Err("do not hold one of contextTokens, which is 8192")),
        ] {
            let mut spec = spec("llama", ShardingMode::Auto, None, None);
            let kv = &mut spec.sharding.as_mut().unwrap().kv;
            (kv.context_tokens, kv.kv_tokens) = (context, asked);
            match (validate(&view(), "ns", "chat", &spec), expected) {
                (Ok(valid), Ok(expected)) => {
                    assert_eq!(valid.capacity.kv_tokens, expected, "{context} {asked:?}")
                }
                (Err(notes), Err(words)) => {
                    let message = crate::note::join(&notes);
                    assert!(message.contains(words) && message.contains("kv.kvTokens"), "{message}");
                }
                (got, _) => panic!("{context} {asked:?}: {got:?}"),
            }
        }
    }

    #[test]
    fn engine_options_are_applied_or_explain_what_is_invalid() {
        let quantised = Err("the model's heads are 80 wide, which groups of 64 or 32 do not divide");
        for (kv_cache, head_dim, expected) in [
            (KvCacheType::AsComputed, 80, Ok(())),
            (KvCacheType::Int8, 64, Ok(())),
            (KvCacheType::Int4, 96, Ok(())),
            (KvCacheType::Int8, 80, quantised),
            (KvCacheType::Int4, 80, quantised),
            (KvCacheType::Unknown, 64, Err("spec.engine.kvCache is a word of a newer release")),
        ] {
            let mut view = view();
            view.models.values_mut().for_each(|shape| shape.head_dim = head_dim);
            let engine = EngineOptions { kv_cache, ..EngineOptions::default() };
            let spec = ModelDeploymentSpec {
                engine: engine.into(),
                ..spec("llama", ShardingMode::Auto, None, None)
            };
            match (validate(&view, "ns", "chat", &spec), expected) {
                (Ok(valid), Ok(())) => assert_eq!(valid.capacity.engine, engine),
                (Err(notes), Err(text)) => {
                    assert!(crate::note::join(&notes).contains(text), "{notes:?} lacks {text:?}")
                }
                (got, expected) => panic!("{kv_cache:?}, {head_dim}: {got:?}, wanted {expected:?}"),
            }
        }
        let engine = EngineOptions { speculation: Speculation::Unknown, ..EngineOptions::default() };
        let spec =
            ModelDeploymentSpec { engine: engine.into(), ..spec("llama", ShardingMode::Auto, None, None) };
        let notes = validate(&view(), "ns", "chat", &spec).unwrap_err();
        assert!(crate::note::join(&notes).contains("spec.engine.speculation is a word of a newer release"));
    }

    #[test]
    fn weights_packed_on_loading_have_sizes_or_explain_why_not() {
        let group = |weight_bytes| LayerGroup { count: 4, weight_bytes, ..LayerGroup::default() };
        let packed = |quantization, weight_bytes| QuantizedShape {
            quantization,
            embedding_bytes: 7,
            head_bytes: 8,
            per_layer_input_bytes: 9,
            quantization_group_size: 64,
            layer_groups: vec![group(weight_bytes)],
            shard_units: Vec::new(),
        };
        let quantized = vec![packed(LoadQuantization::Int8, 500), packed(LoadQuantization::Int4, 250)];
        let no_words = "cannot be packed as Int4: its files are packed already";
        for (quantization, quantized, expected) in [
            (WeightQuantization::AsStored, quantized.clone(), Ok(None)),
            (WeightQuantization::Int8, quantized.clone(), Ok(Some(500))),
            (WeightQuantization::Int4, quantized.clone(), Ok(Some(250))),
            (WeightQuantization::Int4, Vec::new(), Err(no_words)),
            (WeightQuantization::Unknown, quantized, Err("is a word of a newer release")),
        ] {
            let mut view = view();
            view.models.values_mut().for_each(|shape| {
                shape.reader = READER;
                shape.quantized.clone_from(&quantized);
            });
            let stored = view.models[&("ns".to_owned(), "llama".to_owned())].clone();
            let engine = EngineOptions { quantization, ..EngineOptions::default() };
            let spec = ModelDeploymentSpec {
                engine: engine.into(),
                ..spec("llama", ShardingMode::Auto, None, None)
            };
            match (validate(&view, "ns", "chat", &spec), expected) {
                (Ok(valid), Ok(None)) => assert_eq!(valid.shape, stored),
                (Ok(valid), Ok(Some(bytes))) => {
                    assert_eq!(valid.shape.layer_bytes, vec![bytes; stored.layers as usize]);
                    let ModelShape { embedding_bytes, head_bytes, per_layer_input_bytes, .. } = valid.shape;
                    assert_eq!((embedding_bytes, head_bytes, per_layer_input_bytes), (7, 8, 9));
                    assert_eq!(valid.capacity.engine.quantization, quantization);
                }
                (Err(notes), Err(text)) => {
                    let said = crate::note::join(&notes);
                    assert!(said.contains("spec.engine.quantization") && said.contains(text), "{said}");
                }
                (got, expected) => panic!("{quantization:?}: {got:?}, wanted {expected:?}"),
            }
        }
    }

    #[test]
    fn model_that_embeds_has_one_rank_whatever_is_asked() {
        let mut view = view();
        view.models.values_mut().for_each(|shape| shape.task = Task::Embed);
        for (mode, ranks, said) in [
            (ShardingMode::Auto, None, None),
            (ShardingMode::Single, None, None),
            (ShardingMode::Auto, Some(1), None),
            (ShardingMode::Auto, Some(2), Some("spec.sharding.ranks: it is 2, but the model embeds")),
            (ShardingMode::Tensor, Some(2), Some("spec.sharding.ranks: it is 2")),
            (ShardingMode::Pipeline, None, Some("spec.sharding.mode: it is Pipeline")),
        ] {
            match (validate(&view, "ns", "chat", &spec("llama", mode, ranks, None)), said) {
                (Ok(valid), None) => assert_eq!(valid.split, Split::Single, "{mode:?} {ranks:?}"),
                (Err(notes), Some(said)) => {
                    let text = crate::note::join(&notes);
                    assert!(text.contains(said) && text.contains("one rank computes whole"), "{text}");
                }
                (got, said) => panic!("{mode:?} {ranks:?}: {got:?}, wanted {said:?}"),
            }
        }
        let draft = ModelDeploymentSpec {
            draft_model_ref: Some(LocalReference::new("other")),
            ..spec("llama", ShardingMode::Auto, None, None)
        };
        let text = crate::note::join(&validate(&view, "ns", "chat", &draft).unwrap_err());
        assert!(text.contains("generates none"), "{text}");
    }

    #[test]
    fn all_mistakes_are_named_at_once() {
        let mut spec = spec("llama", ShardingMode::Tensor, Some(9), None);
        spec.replicas = -1;
        spec.sharding.as_mut().unwrap().kv.context_tokens = 0;
        assert_eq!(validate(&view(), "ns", "chat", &spec).unwrap_err().len(), 3);
    }
}
