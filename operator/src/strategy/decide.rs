//! The status of a strategy, from the deployments that name it and their models. Pure.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use kube::ResourceExt as _;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{Model, ModelDeployment, ShardingStrategy, ShardingStrategyStatus};
use russet_model::shape::ModelShape;
use russet_plan::in_memory;
use russet_plan::note;
use russet_plan::validate::{StrategyVerdict, judge_strategy};

/// The status of a strategy.
pub fn status(
    strategy: &ShardingStrategy,
    deployments: &[Arc<ModelDeployment>],
    models: &[Arc<Model>],
    now: Timestamp,
) -> ShardingStrategyStatus {
    let generation = strategy.metadata.generation;
    let name = strategy.name_any();
    let uses = |deployment: &ModelDeployment| {
        deployment.spec.strategy_ref.as_ref().is_some_and(|reference| reference.name == name)
            && deployment.metadata.deletion_timestamp.is_none()
    };
    let mut users: Vec<&ModelDeployment> =
        deployments.iter().map(AsRef::as_ref).filter(|deployment| uses(deployment)).collect();
    users.sort_by_key(|deployment| (deployment.namespace(), deployment.name_any()));
    let shapes: BTreeMap<(String, String), &ModelShape> = models
        .iter()
        .filter_map(|model| {
            let key = (model.namespace().unwrap_or_default(), model.name_any());
            Some((key, model.status.as_ref()?.shape.as_ref()?))
        })
        .collect();
    let known = users.iter().filter_map(|deployment| {
        let (namespace, model) =
            (deployment.namespace().unwrap_or_default(), &deployment.spec.model_ref.name);
        let stored = *shapes.get(&(namespace.clone(), model.clone()))?;
        // One that cannot be loaded as its options say has that in a condition of its own.
        let shape =
            in_memory::shape(&deployment.spec.engine.options, stored).unwrap_or(Cow::Borrowed(stored));
        Some((format!("{namespace}/{}", deployment.name_any()), model.as_str(), shape))
    });
    let (good, reason, message) = match judge_strategy(&strategy.spec.sharding, known) {
        StrategyVerdict::Never(notes) => {
            let reason = notes.first().map_or(Reason::InvalidSpec, note::Note::reason);
            (false, reason, note::join(&notes))
        }
        StrategyVerdict::WorksForNone(refused) => {
            (false, Reason::InvalidSpec, format!("no deployment can use it: {}", refused.join("; ")))
        }
        StrategyVerdict::Works(refused) => {
            let used = match users.len() {
                0 => "no deployment uses it".to_owned(),
                1 => "1 deployment uses it".to_owned(),
                count => format!("{count} deployments use it"),
            };
            let but =
                if refused.is_empty() { String::new() } else { format!(", but {}", refused.join("; ")) };
            (true, Reason::Settled, used + &but)
        }
    };
    let mut conditions = strategy.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default();
    for (kind, value) in
        [(Type::Valid, good), (Type::Ready, good), (Type::Reconciling, false), (Type::Stalled, !good)]
    {
        conditions::set(&mut conditions, kind, value, reason, message.as_str(), generation, now);
    }
    ShardingStrategyStatus {
        observed_generation: generation,
        deployments: u32::try_from(users.len()).unwrap_or(u32::MAX),
        conditions,
    }
}

#[cfg(test)]
mod tests {
    use russet_crds::{
        LocalReference, ModelDeploymentSpec, ModelSpec, ModelStatus, Sharding, ShardingMode,
        ShardingStrategySpec,
    };

    use super::*;

    fn strategy(ranks: u32, tensor_size: Option<u32>) -> ShardingStrategy {
        let sharding =
            Sharding { mode: ShardingMode::Tensor, ranks: Some(ranks), tensor_size, ..Sharding::default() };
        let mut strategy = ShardingStrategy::new("s", ShardingStrategySpec { sharding });
        strategy.metadata.generation = Some(2);
        strategy
    }

    fn deployment(name: &str, model: &str, strategy: &str) -> Arc<ModelDeployment> {
        let spec = ModelDeploymentSpec {
            model_ref: LocalReference::new(model),
            strategy_ref: Some(LocalReference::new(strategy)),
            ..ModelDeploymentSpec::default()
        };
        let mut deployment = ModelDeployment::new(name, spec);
        deployment.metadata.namespace = Some("ns".to_owned());
        Arc::new(deployment)
    }

    fn model(name: &str, heads: u32) -> Arc<Model> {
        let mut model = Model::new(name, ModelSpec::default());
        model.metadata.namespace = Some("ns".to_owned());
        let shape = ModelShape {
            architecture: "llama".to_owned(),
            layers: 1,
            layer_bytes: vec![1],
            attention_heads: heads,
            key_value_heads: heads,
            head_dim: 1,
            intermediate_size: 120,
            ..ModelShape::default()
        };
        let shape = (heads > 0).then_some(shape);
        model.status = Some(ModelStatus { shape, ..ModelStatus::default() });
        Arc::new(model)
    }

    #[test]
    fn strategy_status_counts_users_and_says_if_it_can_work() {
        let models = [model("six", 6), model("eight", 8), model("unread", 0)];
        let users = |names: &[&str]| -> Vec<Arc<ModelDeployment>> {
            let mut all = vec![deployment("elsewhere", "eight", "other")];
            all.extend(names.iter().map(|model| deployment(&format!("d-{model}"), model, "s")));
            all
        };
        let eight =
            "ModelDeployment ns/d-eight: spec.ranks: 8 KV heads cannot be cut into 3; use 1, 2, 4 or 8";
        for (strategy, names, used, expected) in [
            (strategy(3, None), vec![], 0, "True False Settled no deployment uses it".to_owned()),
            (strategy(3, None), vec!["unread"], 1, "True False Settled 1 deployment uses it".to_owned()),
            (
                strategy(3, None),
                vec!["six", "eight"],
                2,
                format!("True False Settled 2 deployments use it, but {eight}"),
            ),
            (
                strategy(3, None),
                vec!["eight", "unread"],
                2,
                format!("False True InvalidSpec no deployment can use it: {eight}"),
            ),
            (
                strategy(4, Some(2)),
                vec!["six"],
                1,
                "False True InvalidSpec spec.tensorSize: 2 differs from the 4 of ranks, but in mode Tensor all ranks share every layer; make them equal, or use mode Hybrid"
                    .to_owned(),
            ),
        ] {
            let status = status(&strategy, &users(&names), &models, Timestamp::UNIX_EPOCH);
            let ready = conditions::get(&status.conditions, Type::Ready).unwrap();
            let value = |kind| conditions::get(&status.conditions, kind).unwrap().status.as_str();
            assert_eq!(
                format!("{} {} {} {}", ready.status, value(Type::Stalled), ready.reason, ready.message),
                expected
            );
            assert_eq!((status.deployments, value(Type::Valid)), (used, ready.status.as_str()));
            assert!(status.conditions.iter().all(|it| it.observed_generation == Some(2)));
        }
    }
}
