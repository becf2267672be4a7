//! The status of a tier, from its deployments and the cluster. Pure. Not here: the assignment of nodes
//! (`plan`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use kube::ResourceExt as _;
use russet_crds::active_hours::ActiveHours;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{ModelDeployment, Tier, TierMode, TierStatus, WorkloadGroup};
use russet_plan::tier::{NodeGrant, TierMember, assign, members};
use russet_plan::validate::eligible_nodes;
use russet_plan::{ClusterObjects, Note, Snapshot, note};

use crate::pool::memory;

/// The status of a tier; `deployments` are those that name it.
pub fn status(
    tier: &Tier,
    cluster: &ClusterObjects,
    deployments: &[Arc<ModelDeployment>],
    now: Timestamp,
) -> TierStatus {
    let view = cluster.snapshot(now);
    let generation = tier.metadata.generation;
    let before = tier.status.clone().unwrap_or_default();
    let members = members(&tier.name_any(), deployments.iter().map(AsRef::as_ref));
    let outcome =
        unknown_strategy(tier, &view).map_or_else(|| assign(&view, &tier.name_any(), &members), Err);
    let workload_groups = match &outcome {
        Ok(grants) => {
            tier.spec.workload_groups.iter().filter_map(|name| group_status(name, grants, &members)).collect()
        }
        // A typing error takes no node away.
        Err(_) => before.workload_groups.clone(),
    };
    let used = match tier.spec.mode {
        TierMode::Dedicated => workload_groups.iter().flat_map(|group| group.nodes.iter().cloned()).collect(),
        TierMode::Cluster | TierMode::Unknown => pool_nodes(tier, &view),
    };
    let hours = view.tiers.get(&tier.name_any()).map(|seen| seen.active_hours).unwrap_or_default();
    let (good, stalled, reason, message) = tier_readiness(tier, &outcome, deployments.len(), hours);
    let mut conditions = before.conditions;
    for (kind, value) in
        [(Type::Ready, good), (Type::Reconciling, !good && !stalled), (Type::Stalled, stalled)]
    {
        conditions::set(&mut conditions, kind, value, reason, message.as_str(), generation, now);
    }
    TierStatus {
        observed_generation: generation,
        deployments: count(deployments.len()),
        memory: Some(memory(&view, &used)),
        summary: summary(&workload_groups),
        workload_groups,
        conditions,
    }
}

fn unknown_strategy(tier: &Tier, view: &Snapshot) -> Option<Vec<Note>> {
    let strategy = &tier.spec.default_strategy_ref.as_ref()?.name;
    let known = view.strategies.keys().cloned().collect();
    (!view.strategies.contains_key(strategy))
        .then(|| vec![Note::StrategyUnknown { strategy: strategy.clone(), known }])
}

/// The nodes of its pools.
fn pool_nodes(tier: &Tier, view: &Snapshot) -> BTreeSet<String> {
    let areas = eligible_nodes(view, &tier.spec.pool_refs, &mut Vec::new());
    view.nodes.keys().filter(|node| areas.iter().any(|area| area.contains(node))).cloned().collect()
}

fn group_status(
    name: &str,
    grants: &BTreeMap<String, NodeGrant>,
    members: &BTreeMap<String, Vec<TierMember<'_>>>,
) -> Option<WorkloadGroup> {
    let NodeGrant { nodes, shortage } = grants.get(name)?;
    Some(WorkloadGroup {
        name: name.to_owned(),
        nodes: nodes.iter().cloned().collect(),
        deployments: count(members.get(name).map_or(0, Vec::len)),
        lacks: shortage.clone(),
    })
}

type TierReadiness = (bool, bool, Reason, String);

fn tier_readiness(
    tier: &Tier,
    outcome: &Result<BTreeMap<String, NodeGrant>, Vec<Note>>,
    deployments: usize,
    hours: ActiveHours,
) -> TierReadiness {
    let grants = match outcome {
        _ if tier.spec.mode == TierMode::Unknown => {
            let message = Note::Newer { field: "spec.mode".to_owned() }.to_string();
            return (false, true, Reason::NewerRelease, message);
        }
        Err(notes) => {
            let reason = notes.first().map_or(Reason::InvalidSpec, Note::reason);
            return (false, true, reason, note::join(notes));
        }
        Ok(grants) => grants,
    };
    let used = match deployments {
        0 => "no deployment uses it".to_owned(),
        1 => "1 deployment uses it".to_owned(),
        count => format!("{count} deployments use it"),
    };
    // Deployments that follow the tier's hours are triggered by changes of this text.
    let used = match (tier.spec.schedules.is_empty(), hours.open, hours.until) {
        (true, _, _) => used,
        (_, true, Some(until)) => format!("{used}; they run until {until}"),
        (_, true, None) => format!("{used}; they run"),
        (_, false, Some(until)) => {
            return (true, false, Reason::OutsideSchedule, format!("{used}; they are stopped until {until}"));
        }
        (_, false, None) => {
            let never = format!("{used}; they are stopped, and spec.schedules has no hours within a week");
            return (true, false, Reason::OutsideSchedule, never);
        }
    };
    let shortages: Vec<&str> = grants.values().filter_map(|grant| grant.shortage.as_deref()).collect();
    match shortages.as_slice() {
        [] if tier.spec.mode == TierMode::Dedicated => {
            (true, false, Reason::Settled, format!("{used}; every workload group has its nodes"))
        }
        [] => (true, false, Reason::Settled, used),
        shortages => (false, true, Reason::NodesMissing, shortages.join("; ")),
    }
}

fn summary(groups: &[WorkloadGroup]) -> Option<String> {
    let words = groups.iter().map(|group| match group.nodes.as_slice() {
        [] => format!("{}: none", group.name),
        nodes => format!("{}: {}", group.name, nodes.join(" ")),
    });
    (!groups.is_empty()).then(|| words.collect::<Vec<_>>().join("; "))
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use russet_crds::{
        InferenceNode, InferenceNodeSpec, InferenceNodeStatus, LocalReference, Model, ModelDeploymentSpec,
        ModelSpec, ModelStatus, NodeMemory, TierSpec,
    };
    use russet_model::shape::ModelShape;

    use super::*;

    const GIB: u64 = 1 << 30;
    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    fn node(name: &str, gib: u64) -> Arc<InferenceNode> {
        let mut node = InferenceNode::new(name, InferenceNodeSpec::default());
        let memory = NodeMemory { serving_limit_bytes: gib * GIB, ..NodeMemory::default() };
        let mut status = InferenceNodeStatus { memory: Some(memory), ..InferenceNodeStatus::default() };
        for kind in [Type::Reachable, Type::Ready] {
            conditions::set(&mut status.conditions, kind, true, Reason::Settled, "", None, NOW);
        }
        node.status = Some(status);
        Arc::new(node)
    }

    fn cluster() -> ClusterObjects {
        let shape = ModelShape {
            architecture: "llama".to_owned(),
            layers: 4,
            layer_bytes: vec![GIB; 4],
            ..ModelShape::default()
        };
        let mut model = Model::new("m", ModelSpec::default());
        model.metadata.namespace = Some("ns".to_owned());
        model.status = Some(ModelStatus { shape: Some(shape), ..ModelStatus::default() });
        ClusterObjects {
            nodes: vec![node("a", 8), node("b", 16)],
            models: vec![Arc::new(model)],
            ..ClusterObjects::default()
        }
    }

    fn deployment(name: &str, group: &str, replicas: i32) -> Arc<ModelDeployment> {
        let spec = ModelDeploymentSpec {
            model_ref: LocalReference::new("m"),
            tier_ref: Some(LocalReference::new("daily")),
            workload_group: Some(group.to_owned()),
            replicas,
            ..ModelDeploymentSpec::default()
        };
        let mut deployment = ModelDeployment::new(name, spec);
        deployment.metadata.namespace = Some("ns".to_owned());
        Arc::new(deployment)
    }

    fn tier(mode: TierMode, groups: &[&str]) -> Tier {
        let workload_groups = groups.iter().map(|group| (*group).to_owned()).collect();
        let mut tier = Tier::new("daily", TierSpec { mode, workload_groups, ..TierSpec::default() });
        tier.metadata.generation = Some(3);
        tier
    }

    /// The status of a tier in this cluster, as the server would hold the tier.
    fn status_of(tier: &Tier, deployments: &[Arc<ModelDeployment>]) -> (TierStatus, String) {
        let cluster = ClusterObjects { tiers: vec![Arc::new(tier.clone())], ..cluster() };
        let status = status(tier, &cluster, deployments, NOW);
        let ready = conditions::get(&status.conditions, Type::Ready).unwrap();
        let line = format!("{} {}: {}", ready.status, ready.reason, ready.message);
        assert_eq!(ready.observed_generation, Some(3));
        (status, line)
    }

    #[test]
    fn tier_status_shows_group_nodes_and_shortages() {
        let both = tier(TierMode::Dedicated, &["chat", "code"]);
        for (story, tier, deployments, summary, line) in [
            (
                "nobody yet",
                both.clone(),
                vec![],
                Some("chat: a; code: b"),
                "True Settled: no deployment uses it; every workload group has its nodes",
            ),
            (
                "one uses it",
                both.clone(),
                vec![deployment("x", "code", 1)],
                Some("chat: b; code: a"),
                "True Settled: 1 deployment uses it; every workload group has its nodes",
            ),
            (
                "more than there is",
                both,
                vec![deployment("x", "code", 9)],
                Some("chat: a; code: b"),
                "False NodesMissing: workload group code: x needs 9 × ",
            ),
            ("for all", tier(TierMode::Cluster, &[]), vec![], None, "True Settled: no deployment uses it"),
            (
                "a mode of a newer release",
                tier(TierMode::Unknown, &["chat"]),
                vec![],
                None,
                "False NewerRelease: spec.mode is a word of a newer release",
            ),
        ] {
            let (status, said) = status_of(&tier, &deployments);
            assert_eq!(status.summary.as_deref(), summary, "{story}: {said}");
            assert!(said.starts_with(line), "{story}: {said}");
        }
    }

    #[test]
    fn misspelt_reference_in_a_tier_takes_no_nodes_away() {
        let mut tier = tier(TierMode::Dedicated, &["chat"]);
        let (status, _) = status_of(&tier, &[]);
        assert_eq!(status.memory.as_ref().unwrap().serving_limit_bytes, 8 * GIB);
        tier.status = Some(status.clone());
        tier.spec.pool_refs = vec![LocalReference::new("nosuch")];
        let (broken, said) = status_of(&tier, &[]);
        assert!(said.starts_with("False PoolNotFound: NodePool \"nosuch\" does not exist"), "{said}");
        assert_eq!(broken.workload_groups, status.workload_groups);
        tier.spec.pool_refs.clear();
        tier.spec.default_strategy_ref = Some(LocalReference::new("nosuch"));
        let (broken, said) = status_of(&tier, &[]);
        assert!(said.starts_with("False StrategyNotFound"), "{said}");
        assert_eq!(broken.workload_groups, status.workload_groups);
    }
}
