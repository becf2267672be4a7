//! Proposals: what the planner would do for several deployments. Each is placed on the view left by those
//! before it, with regard to those still pending, in the same way as the operator. Nothing is written here,
//! and every decision comes from `place`; a proposal is complete without another look at the cluster.

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::Timestamp;
use kube::ResourceExt as _;
use russet_crds::conditions::Reason;
use russet_crds::{
    GroupPlan, KvCacheType, Model, ModelDeployment, PlacementReport, Residency, WeightQuantization,
};

use crate::joint_placement::solve;
use crate::memory_model::ServingCapacity;
use crate::note::{Note, draft_share};
use crate::placement::{
    NewGroup, Placement, RemovalReason, RemovedGroup, is_current, place_with, refusal_report, scale_down,
    status_report,
};
use crate::precondition::{UnmetPrecondition, unmet_precondition};
use crate::snapshot::{GroupInfo, ObjectKey, Snapshot};
use crate::tier::{assign, members};
use crate::validate::{IdleReason, ValidDeployment, read, read_at};

/// Remedy for a Model of unknown size.
const UNKNOWN_SIZE_REMEDY: &str = "apply it and let an agent read its headers, or add it with its status.shape to the description of the cluster";

/// Maximum rounds of preempting and draining for one deployment: others' replicas, then its own.
const MAX_STEPS: usize = 4;

/// The proposal for one deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proposal {
    /// Namespace of the ModelDeployment.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Whether every desired replica exists or can be created.
    pub placed: bool,
    /// Memory of a replica; `None` if its model's size is unknown.
    pub needs: Option<String>,
    /// The effect of its tier.
    pub tier: Option<String>,
    /// The decision and its reason, as in the deployment's status.
    pub report: PlacementReport,
    /// Replicas that would be created.
    pub create: Vec<ProposedReplica>,
    /// Replicas that would stay.
    pub keep: Vec<ProposedReplica>,
    /// Replicas that would be deleted.
    pub delete: Vec<RemovedGroup>,
    /// Other deployments whose replicas would be preempted, as `namespace/name`.
    pub preempt: Vec<String>,
    /// Replicas that would wait.
    pub waiting: Vec<i32>,
    /// Further notes, the remedy last.
    pub notes: Vec<String>,
}

/// A replica and its split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProposedReplica {
    /// Name of the ShardGroup.
    pub name: String,
    /// Its index.
    pub replica: i32,
    /// The split.
    pub plan: GroupPlan,
}

/// Plans the deployments one after another, each on the view left by those before it; with the demand at
/// `now`, or as if all deployments had requests.
pub fn propose(
    models: &[Arc<Model>],
    view: &Snapshot,
    deployments: &[Arc<ModelDeployment>],
    now: Option<Timestamp>,
) -> Vec<Proposal> {
    let mut view = view.clone();
    assign_dedicated_nodes(&mut view, deployments);
    let checked: Vec<_> =
        deployments.iter().map(|deployment| check(models, &view, deployment, now)).collect();
    let competitors: Vec<&ValidDeployment> =
        checked.iter().filter_map(|checked| checked.as_ref().ok()).collect();
    let mut proposals = Vec::new();
    for (deployment, checked) in deployments.iter().zip(&checked) {
        let (proposal, after) = propose_one(&view, deployment, checked, &competitors);
        proposals.push(proposal);
        view = after;
    }
    proposals
}

/// Assigns nodes to the workload groups of Dedicated tiers, as the operator does before placement.
fn assign_dedicated_nodes(view: &mut Snapshot, deployments: &[Arc<ModelDeployment>]) {
    let tiers: Vec<String> = view.tiers.keys().cloned().collect();
    for tier in tiers {
        let members = members(&tier, deployments.iter().map(AsRef::as_ref));
        // The errors of a tier are reported for each deployment that names it.
        if let Ok(grants) = assign(view, &tier, &members)
            && let Some(seen) = view.tiers.get_mut(&tier)
        {
            seen.owned = grants.into_iter().map(|(group, grant)| (group, grant.nodes)).collect();
        }
    }
}

/// A deployment that can be planned, or why it cannot.
fn check(
    models: &[Arc<Model>],
    view: &Snapshot,
    deployment: &ModelDeployment,
    now: Option<Timestamp>,
) -> Result<ValidDeployment, Vec<String>> {
    let namespace = deployment.namespace().unwrap_or_default();
    let find = |name: &str| {
        let named = |model: &&Arc<Model>| {
            model.name_any() == name && model.namespace().as_deref() == Some(&namespace)
        };
        models.iter().find(named).map(AsRef::as_ref)
    };
    match unmet_precondition(&namespace, &deployment.spec, find) {
        Some(UnmetPrecondition { reason: Reason::WaitingForModel, message, .. }) => {
            Err(vec![format!("{message}; {UNKNOWN_SIZE_REMEDY}")])
        }
        Some(UnmetPrecondition { message, .. }) => Err(vec![message]),
        None => now
            .map_or_else(|| read(view, deployment), |now| read_at(view, deployment, now))
            .map_err(|notes| texts(&notes)),
    }
}

/// The proposal for one deployment, and the view after it.
fn propose_one(
    view: &Snapshot,
    deployment: &ModelDeployment,
    checked: &Result<ValidDeployment, Vec<String>>,
    competitors: &[&ValidDeployment],
) -> (Proposal, Snapshot) {
    let (namespace, name) = (deployment.namespace().unwrap_or_default(), deployment.name_any());
    let replicas = deployment.spec.replicas;
    let (PlacementResult { placement, view_after: after }, notes, report) = match checked {
        Ok(valid) => {
            let (settled, notes) = settle(view, valid, competitors);
            let before = deployment.status.as_ref().and_then(|status| status.placement.clone());
            let report = report(&settled, valid, &notes, before);
            (settled, texts(&notes), report)
        }
        Err(why) => {
            // Even an invalid deployment may be scaled down.
            let placement = scale_down(view, &namespace, &name, replicas);
            let mut after = view.clone();
            after
                .groups
                .retain(|key, _| key.0 != namespace || !placement.delete.iter().any(|old| old.name == key.1));
            let notes = if replicas == 0 { Vec::new() } else { why.clone() };
            let report = if replicas == 0 { stopped_report(None) } else { refusal_report(notes.clone()) };
            (PlacementResult { placement, view_after: after }, notes, report)
        }
    };
    let Placement { keep, create, delete, preempt, prefetch: _, approval_requests: _, waiting, report: _ } =
        placement;
    let stopped = |(namespace, group): &ObjectKey| {
        Some(format!("{namespace}/{}", view.groups.get(&(namespace.clone(), group.clone()))?.deployment))
    };
    let preempt: BTreeSet<String> = preempt.iter().filter_map(stopped).collect();
    let keep = keep.into_iter().filter_map(|key| {
        let GroupInfo { replica, plan, .. } = after.groups.get(&key)?;
        Some(ProposedReplica { name: key.1, replica: *replica, plan: plan.clone() })
    });
    let created = |NewGroup { name, replica, plan }| ProposedReplica { name, replica, plan };
    let proposal = Proposal {
        namespace,
        name,
        needs: checked.as_ref().ok().map(needs_text),
        tier: checked.as_ref().ok().and_then(|desired| tier_text(view, desired)),
        placed: waiting.is_empty() && (checked.is_ok() || replicas == 0),
        report,
        keep: keep.collect(),
        create: create.into_iter().map(created).collect(),
        delete,
        preempt: preempt.into_iter().collect(),
        waiting,
        notes,
    };
    (proposal, after)
}

/// A placement, and the view after it was applied.
struct PlacementResult {
    placement: Placement,
    view_after: Snapshot,
}

/// Places a deployment. If a replica has to stop before a new one can start, its own or another's, the
/// operator plans again once the memory is released or the files are present, and so does this.
fn settle(
    view: &Snapshot,
    desired: &ValidDeployment,
    competitors: &[&ValidDeployment],
) -> (PlacementResult, Vec<Note>) {
    let (placement, notes) = place_with(view, desired, &solve(view, competitors));
    let after = placement.apply(view, desired);
    let mut preempts = makes_room(&placement) || !placement.prefetch.is_empty();
    let (mut settled, mut notes) = (PlacementResult { placement, view_after: after }, notes);
    for _ in 0..MAX_STEPS {
        if !preempts {
            break;
        }
        let PlacementResult { placement: first, view_after: mut after } = settled;
        if let Some(disks) = &mut after.disks {
            for (model, node) in &first.prefetch {
                disks.mark_present(&desired.namespace, model, std::slice::from_ref(node));
            }
        }
        let (second, more) = place_with(&after, desired, &solve(&after, competitors));
        let after = second.apply(&after, desired);
        preempts = makes_room(&second) || !second.prefetch.is_empty();
        notes.extend(more);
        settled = PlacementResult { placement: merge(first, second, &desired.namespace), view_after: after };
    }
    (settled, notes)
}

/// Whether a group is deleted to free memory for another.
fn makes_room(placement: &Placement) -> bool {
    !placement.preempt.is_empty() || placement.delete.iter().any(|old| old.reason == RemovalReason::Drained)
}

/// Merges two consecutive placements.
fn merge(first: Placement, second: Placement, namespace: &str) -> Placement {
    let created = |key: &ObjectKey| first.create.iter().any(|new| key.0 == namespace && new.name == key.1);
    let report = match (first.report, second.report) {
        (Some(first), Some(second)) => {
            let decision = format!("{}; {}", first.decision, second.decision);
            Some(PlacementReport { decision, ..second })
        }
        (first, second) => second.or(first),
    };
    Placement {
        keep: second.keep.into_iter().filter(|key| !created(key)).collect(),
        create: first.create.into_iter().chain(second.create).collect(),
        delete: first.delete.into_iter().chain(second.delete).collect(),
        preempt: first.preempt.into_iter().chain(second.preempt).collect(),
        prefetch: second.prefetch,
        approval_requests: second.approval_requests,
        waiting: second.waiting,
        report,
    }
}

/// The report for the status.
fn report(
    settled: &PlacementResult,
    desired: &ValidDeployment,
    notes: &[Note],
    before: Option<PlacementReport>,
) -> PlacementReport {
    let PlacementResult { placement, view_after: after } = settled;
    let mut current: Vec<(&ObjectKey, &GroupInfo)> = after
        .groups_of(&desired.namespace, &desired.name)
        .filter(|(_, group)| !group.deleting && is_current(after, desired, group))
        .collect();
    current.sort_by_key(|(key, group)| (group.replica, *key));
    let plans: Vec<&GroupPlan> = current.iter().map(|(_, group)| &group.plan).collect();
    status_report(placement, &plans, notes, before)
        .unwrap_or_else(|| stopped_report(desired.idle_reason.as_ref()))
}

/// Memory of a replica, as text.
fn needs_text(desired: &ValidDeployment) -> String {
    let ServingCapacity { context_tokens, max_sequences, kv_tokens, headroom_percent: _, engine } =
        desired.capacity;
    let fit = desired.memory_model();
    let (needed, draft) = (fit.whole_model(), draft_share(fit.draft()));
    let adapters = fit.adapter_overhead().share();
    let together = kv_tokens.map(|tokens| format!(", {tokens} of all together")).unwrap_or_default();
    let kv_cache = match engine.kv_cache {
        KvCacheType::AsComputed | KvCacheType::Unknown => "",
        KvCacheType::Int8 => ", kept in 8 bits",
        KvCacheType::Int4 => ", kept in 4 bits",
    };
    let weights = match engine.quantization {
        WeightQuantization::AsStored | WeightQuantization::Unknown => "",
        WeightQuantization::Int8 => "; weights packed in 8 bits",
        WeightQuantization::Int4 => "; weights packed in 4 bits",
    };
    format!(
        "{needed}{draft}{adapters}; room for {max_sequences} conversations of {context_tokens} tokens{together}{kv_cache}{weights}"
    )
}

/// The effect of its tier on a deployment, as text.
fn tier_text(view: &Snapshot, desired: &ValidDeployment) -> Option<String> {
    let name = desired.tier.as_ref()?;
    let tier = view.tiers.get(name)?;
    let own =
        desired.dedicated_group.as_ref().map(|(_, group)| format!("nodes of workload group {group}'s own"));
    let preempts = tier.preempts.then(|| "it preempts others of lower priority".to_owned());
    let residency = match tier.residency {
        Residency::Always => Some("it is never preempted".to_owned()),
        Residency::OnDemand => {
            Some(format!("kept while requests come, and {} s after", tier.idle_after.as_secs()))
        }
        Residency::Sticky | Residency::Unknown => None,
    };
    let parts = [own, preempts, residency].into_iter().flatten();
    let parts: Vec<String> =
        std::iter::once(format!("{name}, priority {}", tier.priority)).chain(parts).collect();
    Some(parts.join("; "))
}

fn stopped_report(rest: Option<&IdleReason>) -> PlacementReport {
    PlacementReport {
        decision: "nothing runs".to_owned(),
        reason: rest.map_or_else(|| "scaled to zero".to_owned(), ToString::to_string),
        ..PlacementReport::default()
    }
}

/// Notes as text, without those of placed replicas, which the report covers.
fn texts(notes: &[Note]) -> Vec<String> {
    notes.iter().filter(|note| !matches!(note, Note::Placed { .. })).map(ToString::to_string).collect()
}

#[cfg(test)]
mod tests {
    use russet_crds::conditions::Type;
    use russet_crds::{
        InferenceNode, InferenceNodeSpec, InferenceNodeStatus, KvCapacity, LocalReference,
        ModelDeploymentSpec, ModelSpec, ModelStatus, NodeMemory, Sharding, conditions,
    };
    use russet_model::shape::ModelShape;

    use super::*;
    use crate::cluster::ClusterObjects;
    use crate::tier_info::TierInfo;

    const GIB: u64 = 1 << 30;

    /// Nodes of so many GiB, and the models `small` (about 4 GiB), `large` (about 16 GiB) and `unread`.
    fn cluster(nodes: &[(&str, u64)]) -> ClusterObjects {
        let node = |(name, gib): &(&str, u64)| {
            let mut node = InferenceNode::new(name, InferenceNodeSpec::default());
            let memory = NodeMemory { serving_limit_bytes: gib * GIB, ..NodeMemory::default() };
            let mut status = InferenceNodeStatus { memory: Some(memory), ..InferenceNodeStatus::default() };
            for kind in [Type::Reachable, Type::Ready] {
                let reason = conditions::Reason::Settled;
                conditions::set(
                    &mut status.conditions,
                    kind,
                    true,
                    reason,
                    "",
                    None,
                    jiff::Timestamp::UNIX_EPOCH,
                );
            }
            node.status = Some(status);
            Arc::new(node)
        };
        let model = |(name, gib): (&str, u64)| {
            let mut model = Model::new(name, ModelSpec::default());
            model.metadata.namespace = Some("ns".to_owned());
            let shape = ModelShape {
                architecture: "llama".to_owned(),
                layers: 4,
                layer_bytes: vec![gib * GIB / 4; 4],
                ..ModelShape::default()
            };
            let shape = (gib > 0).then_some(shape);
            model.status = Some(ModelStatus { shape, ..ModelStatus::default() });
            Arc::new(model)
        };
        ClusterObjects {
            nodes: nodes.iter().map(node).collect(),
            models: [("small", 4), ("large", 16), ("unread", 0)].map(model).to_vec(),
            ..ClusterObjects::default()
        }
    }

    fn deployment(name: &str, model: &str, replicas: i32, headroom_percent: u32) -> Arc<ModelDeployment> {
        let kv = KvCapacity { headroom_percent, ..KvCapacity::default() };
        let spec = ModelDeploymentSpec {
            model_ref: LocalReference::new(model),
            sharding: Some(Sharding { kv, ..Sharding::default() }),
            replicas,
            ..ModelDeploymentSpec::default()
        };
        let mut deployment = ModelDeployment::new(name, spec);
        deployment.metadata.namespace = Some("ns".to_owned());
        Arc::new(deployment)
    }

    /// `name: created kept deleted waiting, decision` of every proposal.
    fn summaries(proposals: &[Proposal]) -> Vec<String> {
        let line = |proposal: &Proposal| {
            let Proposal { name, create, keep, delete, waiting, report, placed, .. } = proposal;
            assert_eq!(*placed, waiting.is_empty() && report.decision != "not placed", "{name}");
            let counts =
                [create.len(), keep.len(), delete.len(), waiting.len()].map(|count| count.to_string());
            format!("{name}: {}, {}", counts.join(" "), report.decision)
        };
        proposals.iter().map(line).collect()
    }

    #[test]
    fn each_deployment_is_planned_on_what_those_before_it_leave() {
        let cluster = cluster(&[("a", 18), ("b", 6)]);
        let view = cluster.snapshot(jiff::Timestamp::MIN);
        let (small, large) = (deployment("s", "small", 2, 5), deployment("l", "large", 1, 5));
        let alone = propose(&cluster.models, &view, std::slice::from_ref(&small), None);
        assert_eq!(summaries(&alone), ["s: 2 0 0 0, replica 0: 1 rank on b; replica 1: 1 rank on a"]);
        // In any order: a second replica has a lower score than the first of another model.
        let (one, other) = ("s: 1 0 0 1, 1 rank on b", "l: 1 0 0 0, 1 rank on a");
        let first = propose(&cluster.models, &view, &[small.clone(), large.clone()], None);
        assert_eq!(summaries(&first), [one, other]);
        let first = propose(&cluster.models, &view, &[large, small], None);
        assert_eq!(summaries(&first), [other, one]);
        assert!(
            first[1].notes.iter().any(|note| note.contains("node a: the whole model needs")),
            "{first:?}"
        );
    }

    /// The view after one deployment was placed.
    fn after(cluster: &ClusterObjects, view: &Snapshot, deployment: &ModelDeployment) -> Snapshot {
        let checked = check(&cluster.models, view, deployment, None);
        propose_one(view, deployment, &checked, &checked.iter().collect::<Vec<_>>()).1
    }

    #[test]
    fn proposal_keeps_removes_and_preempts_like_the_operator() {
        let cluster = cluster(&[("a", 6)]);
        let view = cluster.snapshot(jiff::Timestamp::MIN);
        let mut settled = after(&cluster, &view, &deployment("s", "small", 1, 5));
        settled.groups.values_mut().for_each(|group| group.ready = true);
        for (story, view, desired, expected) in [
            ("the same again", &settled, deployment("s", "small", 1, 5), "s: 0 1 0 0, 1 rank on a"),
            ("stopped", &settled, deployment("s", "small", 0, 5), "s: 0 0 1 0, nothing runs"),
            ("stopped, its model gone", &settled, deployment("s", "ghost", 0, 5), "s: 0 0 1 0, nothing runs"),
            // The node has no memory for 4 GiB twice, so the old one stops first.
            ("another room", &settled, deployment("s", "small", 1, 20), "s: 1 0 1 0, 1 rank on a"),
            ("too large", &settled, deployment("s", "large", 1, 5), "s: 0 1 0 1, not placed"),
        ] {
            let proposals = propose(&cluster.models, view, std::slice::from_ref(&desired), None);
            assert_eq!(summaries(&proposals), [expected], "{story}: {proposals:?}");
            let again = propose(&cluster.models, &after(&cluster, view, &desired), &[desired], None);
            assert!(
                again[0].create.is_empty() && again[0].delete.is_empty(),
                "{story}: planned again {again:?}"
            );
        }
    }

    #[test]
    fn idle_deployment_is_stopped_but_planned_before_apply() {
        let cluster = cluster(&[("a", 6)]);
        let mut view = cluster.snapshot(Timestamp::MIN);
        let seldom = TierInfo { residency: Residency::OnDemand, ..TierInfo::default() };
        view.tiers.insert("seldom".to_owned(), seldom);
        let mut idle = deployment("d", "small", 1, 5);
        Arc::make_mut(&mut idle).spec.tier_ref = Some(LocalReference::new("seldom"));
        let proposals = propose(&cluster.models, &view, std::slice::from_ref(&idle), Some(Timestamp::MIN));
        assert_eq!(summaries(&proposals), ["d: 0 0 0 0, nothing runs"]);
        assert!(
            proposals[0].report.reason.starts_with("it has no requests, so Tier seldom"),
            "{proposals:?}"
        );
        let applied = propose(&cluster.models, &view, &[idle], None);
        assert_eq!(summaries(&applied), ["d: 1 0 0 0, 1 rank on a"]);
    }

    #[test]
    fn unplannable_deployment_gives_a_remedy() {
        let cluster = cluster(&[("a", 6)]);
        let view = cluster.snapshot(jiff::Timestamp::MIN);
        for (model, replicas, expected) in [
            ("ghost", 1, "Model \"ghost\" does not exist in namespace ns; create it"),
            ("unread", 1, "Model unread: its headers are not read yet; apply it"),
            ("small", -1, "-1 replicas cannot be"),
        ] {
            let proposal = &propose(&cluster.models, &view, &[deployment("d", model, replicas, 5)], None)[0];
            assert!(!proposal.placed && proposal.report.reason.contains(expected), "{proposal:?}");
        }
    }
}
