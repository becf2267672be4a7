//! The status of a deployment, from its plan and its groups' reports.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use kube::ResourceExt as _;
use russet_crds::conditions::{self, Reason, Type, get, is_true};
use russet_crds::{
    GenerationConfig, GroupPlan, MeasuredThroughput, ModelDeploymentStatus, ShardGroup, names,
};
use russet_plan::auto_revert::{MAX_ATTEMPTS, record_outcome};
use russet_plan::placement::{is_current, status_report};
use russet_plan::snapshot::Availability;
use russet_plan::validate::IdleReason;
use russet_plan::{Note, note};

use super::stages::{AppliedDeployment, PlannedDeployment, Resources};

/// Summary of a deployment's readiness.
struct ReadySummary {
    ready: bool,
    stalled: bool,
    reason: Reason,
    message: String,
}

/// The fields of a status that this controller owns: demand belongs to the gateways, its history and
/// ScalingActive to the autoscaler.
pub fn operator_fields(mut status: ModelDeploymentStatus) -> ModelDeploymentStatus {
    status.demand.clear();
    status.demand_history = None;
    status.conditions.retain(|condition| condition.type_ != format!("{:?}", Type::ScalingActive));
    status
}

/// The status; `missing` lists the files that nodes lack.
pub fn status(
    resources: &Resources<AppliedDeployment>,
    missing: &BTreeMap<String, String>,
    now: Timestamp,
) -> ModelDeploymentStatus {
    let Resources { deployment, stage: AppliedDeployment { planned, groups, leaving } } = resources;
    let mut status = deployment.status.clone().map(operator_fields).unwrap_or_default();
    let generation = deployment.metadata.generation;
    let requested = deployment.spec.replicas;
    let idle = planned.valid.as_ref().and_then(|valid| valid.idle_reason.as_ref()).filter(|_| requested > 0);
    let desired = if idle.is_some() { 0 } else { requested };
    let stopped = idle.map_or((Reason::Stopped, "scaled to zero".to_owned()), idle_condition);
    let current: Vec<&ShardGroup> =
        groups.iter().map(AsRef::as_ref).filter(|group| is_new(planned, group)).collect();
    let replicas: BTreeSet<i32> = groups.iter().map(|group| group.spec.replica).collect();
    let answering: BTreeSet<i32> =
        groups.iter().filter(|group| is_ready(group)).map(|group| group.spec.replica).collect();

    status.observed_generation = generation;
    status.replicas = count(replicas.len());
    status.ready_replicas = count(answering.len());
    status.summary = Some(format!("{}/{requested}", status.ready_replicas));
    status.selector =
        Some(format!("{}={}", names::LABEL_DEPLOYMENT, names::label_value(&deployment.name_any())));
    status.nodes =
        nodes(if current.is_empty() { groups.iter().map(AsRef::as_ref).collect() } else { current.clone() });
    let plans: Vec<&GroupPlan> = current.iter().map(|group| &group.spec.plan).collect();
    status.placement = status_report(&planned.placement, &plans, &planned.notes, status.placement);
    if let Some(placement) = &mut status.placement {
        placement.measured = measured(&current);
    }

    if let Some(valid) = &planned.valid {
        let own = deployment.spec.engine.generation_config.unwrap_or_default();
        let both = own.or(valid.shape.generation_config.unwrap_or_default());
        status.generation_config = (both != GenerationConfig::default()).then_some(both);
    }
    let verdict = ready_summary(resources, &current);
    if let Some(valid) = planned.valid.as_ref().filter(|valid| valid.replicas > 0) {
        let failing = current.iter().find(|group| {
            !is_ready(group) && group.status.as_ref().is_some_and(|status| status.restarts >= MAX_ATTEMPTS)
        });
        let why = |group: &ShardGroup| group.status.as_ref()?.last_loss.clone();
        let says = failing
            .map(|group| format!("ShardGroup {}: {}", group.name_any(), why(group).unwrap_or_default()));
        status.rollout = record_outcome(status.rollout, valid, verdict.ready, says.as_deref());
    }
    let has_asked = get(&status.conditions, Type::AwaitingApproval).is_some();
    let mut set = |kind, value, reason, message: &str| {
        conditions::set(&mut status.conditions, kind, value, reason, message, generation, now);
    };
    match (&planned.unmet_precondition, desired) {
        (_, 0) => set(Type::Placed, true, stopped.0, &stopped.1),
        (Some(unmet), _) => set(Type::Placed, false, unmet.reason, &unmet.message),
        (None, _) if planned.placement.waiting.is_empty() => {
            let decision =
                status.placement.as_ref().map(|placement| placement.decision.as_str()).unwrap_or_default();
            let warns = |note: &&Note| matches!(note, Note::OutsidePools { .. } | Note::CableLost { .. });
            let warnings: Vec<Note> = planned.notes.iter().filter(warns).cloned().collect();
            match warnings.first() {
                None => set(Type::Placed, true, Reason::PlanFound, decision),
                Some(first) => {
                    let message = format!("{decision}; {}", note::join(&warnings));
                    set(Type::Placed, true, first.reason(), &message);
                }
            }
        }
        (None, _) => {
            let (reason, _) = waiting_reason(&planned.notes);
            set(Type::Placed, false, reason, &note::join(&planned.notes));
        }
    }
    let lacking: Vec<String> = current
        .iter()
        .flat_map(|group| &group.spec.plan.members)
        .filter_map(|member| Some(format!("node {}: {}", member.node_name, missing.get(&member.node_name)?)))
        .collect();
    match (desired, current.is_empty(), lacking.is_empty()) {
        (0, _, _) => set(Type::CopiesReady, true, stopped.0, &stopped.1),
        (_, true, _) => set(Type::CopiesReady, false, Reason::WaitingForCopies, "no nodes are chosen yet"),
        (_, false, true) => {
            set(Type::CopiesReady, true, Reason::Verified, "every chosen node holds the files")
        }
        (_, false, false) => set(Type::CopiesReady, false, Reason::WaitingForCopies, &lacking.join("; ")),
    }
    let requests: Vec<&str> =
        planned.placement.approval_requests.iter().map(|ask| ask.message.as_str()).collect();
    match requests.first() {
        Some(ask) => set(Type::AwaitingApproval, true, Reason::AwaitingApproval, ask),
        None if has_asked => set(Type::AwaitingApproval, false, Reason::Settled, "no Approval is pending"),
        None => {}
    }
    if answering.is_empty() {
        set(Type::Available, false, verdict.reason, &verdict.message);
    } else {
        set(
            Type::Available,
            true,
            Reason::Serving,
            &format!("{} of {desired} replicas answer", answering.len()),
        );
    }
    // A settled deployment stays settled while its former groups are being deleted.
    let progressing = !verdict.ready && !verdict.stalled;
    let ReadySummary { ready, stalled, reason, message } = verdict;
    set(Type::Progressing, progressing || *leaving > 0, reason, &message);
    set(Type::Ready, ready, reason, &message);
    set(Type::Reconciling, progressing, reason, &message);
    set(Type::Stalled, stalled, reason, if stalled { &message } else { "" });
    status
}

fn ready_summary(resources: &Resources<AppliedDeployment>, current: &[&ShardGroup]) -> ReadySummary {
    let Resources { deployment, stage: AppliedDeployment { planned, groups, leaving } } = resources;
    let idle = planned.valid.as_ref().and_then(|valid| valid.idle_reason.as_ref());
    if deployment.spec.replicas <= 0 || idle.is_some() {
        let stopped = groups.is_empty() && *leaving == 0;
        let (reason, message) = match (stopped, idle) {
            (true, None) => (Reason::Stopped, "scaled to zero".to_owned()),
            (true, Some(idle)) => idle_condition(idle),
            (false, _) => (Reason::InProgress, format!("stops {} replicas", groups.len() + leaving)),
        };
        return ReadySummary { ready: stopped, stalled: false, reason, message };
    }
    if let Some(unmet) = &planned.unmet_precondition {
        return ReadySummary {
            ready: false,
            stalled: unmet.stalled,
            reason: unmet.reason,
            message: unmet.message.clone(),
        };
    }
    if !planned.placement.waiting.is_empty() {
        let (reason, stalled) = waiting_reason(&planned.notes);
        return ReadySummary { ready: false, stalled, reason, message: note::join(&planned.notes) };
    }
    if let Some(group) = current.iter().find(|group| !is_ready(group)) {
        let conditions = group.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
        let (reason, message) = readiness(group);
        let name = group.name_any();
        let of = |note: &&Note| matches!(note, Note::CableLost { group, .. } if *group == name);
        let severed = planned.notes.iter().find(of).map(|note| format!("; {note}")).unwrap_or_default();
        return ReadySummary {
            ready: false,
            stalled: is_true(conditions, Type::Stalled),
            reason: reason.unwrap_or(Reason::InProgress),
            message: format!("ShardGroup {name}: {message}{severed}"),
        };
    }
    if let Some(why) = planned.valid.as_ref().and_then(|valid| valid.rollback_reason.as_ref()) {
        return ReadySummary {
            ready: false,
            stalled: true,
            reason: Reason::RolledBack,
            message: format!(
                "the new spec never became ready, so the last known good one runs: {why}; edit the spec to try again"
            ),
        };
    }
    let answers = match current.len() {
        1 => "one replica answers".to_owned(),
        count => format!("all {count} replicas answer"),
    };
    // Its engines go on for a minute without their agent, so Ready stays True until the node is lost.
    let view = &planned.observed.view.nodes;
    let is_silent =
        |node: &&str| view.get(*node).is_some_and(|it| it.availability == Availability::Unreachable);
    let members = current.iter().flat_map(|group| &group.spec.plan.members);
    let silent: BTreeSet<&str> = members.map(|member| member.node_name.as_str()).filter(is_silent).collect();
    let silent = silent.into_iter().collect::<Vec<_>>().join(", ");
    let message = match silent.as_str() {
        "" => answers,
        silent => format!(
            "{answers} as far as is known: node {silent} is unreachable, and lost if that lasts a minute"
        ),
    };
    ReadySummary { ready: true, stalled: false, reason: Reason::Serving, message }
}

/// The reason why a replica waits, and whether only a person can fix it.
fn waiting_reason(notes: &[Note]) -> (Reason, bool) {
    let has = |reason| notes.iter().any(|note| note.reason() == reason);
    let fits_nowhere = notes.iter().any(|note| matches!(note, Note::NothingFits { .. }));
    match fits_nowhere {
        true if has(Reason::Denied) => (Reason::Denied, true),
        true if has(Reason::AwaitingApproval) => (Reason::AwaitingApproval, true),
        true if has(Reason::Resident) => (Reason::Resident, false),
        true if has(Reason::NoNodes) => (Reason::NoNodes, true),
        true => (Reason::NothingFits, true),
        false if has(Reason::Denied) => (Reason::Denied, true),
        false if has(Reason::AwaitingApproval) => (Reason::AwaitingApproval, true),
        false if has(Reason::Preempting) => (Reason::Preempting, false),
        false if has(Reason::WaitingForCopies) => (Reason::WaitingForCopies, false),
        false if has(Reason::Outweighed) => (Reason::Outweighed, false),
        false if has(Reason::WaitingForAgent) => (Reason::WaitingForAgent, false),
        false => (Reason::InProgress, false),
    }
}

/// A group's Ready condition.
fn readiness(group: &ShardGroup) -> (Option<Reason>, &str) {
    let conditions = group.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let ready = get(conditions, Type::Ready);
    (
        ready.and_then(conditions::reason),
        ready.map_or("its Shards are created", |ready| ready.message.as_str()),
    )
}

/// Why no replica runs although some are requested.
fn idle_condition(idle: &IdleReason) -> (Reason, String) {
    let reason = match idle {
        IdleReason::Schedule { .. } => Reason::OutsideSchedule,
        IdleReason::Idle { .. } => Reason::Idle,
    };
    (reason, idle.to_string())
}

fn is_new(planned: &PlannedDeployment, group: &ShardGroup) -> bool {
    let key = (group.namespace().unwrap_or_default(), group.name_any());
    if planned.placement.create.iter().any(|new| new.name == key.1) {
        return true;
    }
    match (&planned.valid, planned.observed.view.groups.get(&key)) {
        (Some(valid), Some(seen)) => is_current(&planned.observed.view, valid, seen),
        _ => false,
    }
}

fn is_ready(group: &ShardGroup) -> bool {
    group.status.as_ref().is_some_and(|status| is_true(&status.conditions, Type::Ready))
}

/// The measurement of the slowest group.
fn measured(groups: &[&ShardGroup]) -> Option<MeasuredThroughput> {
    let measured = groups.iter().filter_map(|group| group.status.as_ref()?.measured.as_ref());
    let rate = |measured: &MeasuredThroughput| measured.tokens_per_second.parse().unwrap_or(f64::INFINITY);
    measured.min_by(|a, b| rate(a).total_cmp(&rate(b))).cloned()
}

fn nodes(groups: Vec<&ShardGroup>) -> Option<String> {
    let mut names: Vec<&str> = Vec::new();
    for member in groups.iter().flat_map(|group| &group.spec.plan.members) {
        if !names.contains(&member.node_name.as_str()) {
            names.push(&member.node_name);
        }
    }
    (!names.is_empty()).then(|| names.join(","))
}

fn count(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use russet_crds::{
        InferenceNode, InferenceNodeSpec, InferenceNodeStatus, LocalReference, Model, ModelDeployment,
        ModelDeploymentSpec, ModelSpec, ModelStatus, NodeMemory, ShardGroupSpec, ShardGroupStatus,
    };
    use russet_model::shape::ModelShape;
    use russet_plan::ClusterObjects;
    use russet_plan::placement::RemovalReason;

    use super::*;
    use crate::deployment::decide::decide;
    use crate::deployment::stages::ObservedDeployment;

    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    fn deployment(replicas: i32) -> Arc<ModelDeployment> {
        let spec = ModelDeploymentSpec {
            model_ref: LocalReference::new("m"),
            replicas,
            ..ModelDeploymentSpec::default()
        };
        let mut deployment = ModelDeployment::new("chat", spec);
        deployment.metadata.namespace = Some("ns".to_owned());
        deployment.metadata.generation = Some(7);
        Arc::new(deployment)
    }

    fn model() -> Arc<Model> {
        let mut model = Model::new("m", ModelSpec::default());
        model.metadata.namespace = Some("ns".to_owned());
        let shape = ModelShape {
            architecture: "llama".to_owned(),
            layers: 2,
            layer_bytes: vec![1 << 30; 2],
            ..ModelShape::default()
        };
        model.status = Some(ModelStatus { shape: Some(shape), ..ModelStatus::default() });
        Arc::new(model)
    }

    fn node(gib: u64) -> Arc<InferenceNode> {
        let mut node = InferenceNode::new("a", InferenceNodeSpec::default());
        let memory = NodeMemory { serving_limit_bytes: gib << 30, ..NodeMemory::default() };
        let mut status = InferenceNodeStatus { memory: Some(memory), ..InferenceNodeStatus::default() };
        for kind in [Type::Reachable, Type::Ready] {
            conditions::set(&mut status.conditions, kind, true, Reason::Settled, "", None, NOW);
        }
        node.status = Some(status);
        Arc::new(node)
    }

    fn plan(
        replicas: i32,
        model: Option<Arc<Model>>,
        gib: u64,
        groups: Vec<Arc<ShardGroup>>,
    ) -> Resources<PlannedDeployment> {
        let cluster = ClusterObjects {
            nodes: vec![node(gib)],
            models: model.iter().cloned().collect(),
            groups: groups.clone(),
            ..ClusterObjects::default()
        };
        let view = Arc::new(cluster.snapshot(NOW));
        decide(Resources {
            deployment: deployment(replicas),
            stage: ObservedDeployment {
                now: NOW,
                models: model.into_iter().collect(),
                view,
                competitors: Vec::new(),
                groups,
            },
        })
    }

    /// The groups that the planner creates, with this status.
    fn groups(
        planned: &Resources<PlannedDeployment>,
        ready: bool,
        reason: Reason,
        message: &str,
    ) -> Vec<Arc<ShardGroup>> {
        let create = |new: &russet_plan::placement::NewGroup| {
            let spec = ShardGroupSpec {
                deployment_ref: LocalReference::new("chat"),
                model_ref: LocalReference::new("m"),
                replica: new.replica,
                pool_refs: Vec::new(),
                tier_ref: None,
                plan: new.plan.clone(),
                epoch: 1,
            };
            let mut group = ShardGroup::new(&new.name, spec);
            group.metadata.namespace = Some("ns".to_owned());
            let mut status = ShardGroupStatus::default();
            conditions::set(&mut status.conditions, Type::Ready, ready, reason, message, None, NOW);
            group.status = Some(status);
            Arc::new(group)
        };
        planned.stage.placement.create.iter().map(create).collect()
    }

    fn shown(
        planned: Resources<PlannedDeployment>,
        groups: Vec<Arc<ShardGroup>>,
        leaving: usize,
    ) -> ModelDeploymentStatus {
        let Resources { deployment, stage: planned } = planned;
        let applied = Resources { deployment, stage: AppliedDeployment { planned, groups, leaving } };
        status(&applied, &BTreeMap::new(), NOW)
    }

    fn line(status: &ModelDeploymentStatus) -> String {
        let value = |kind| get(&status.conditions, kind).map_or("?", |it| it.status.as_str()).to_owned();
        let ready = get(&status.conditions, Type::Ready).unwrap();
        let kinds = [Type::Ready, Type::Reconciling, Type::Stalled, Type::Available, Type::Placed];
        format!(
            "{} {} {}",
            kinds.map(value).join(" "),
            ready.reason,
            status.summary.clone().unwrap_or_default()
        )
    }

    #[test]
    fn lost_cable_of_a_group_shows_in_placed_and_ready() {
        let made =
            groups(&plan(1, Some(model()), 8, vec![]), false, Reason::WaitingForRanks, "waits for rank 1");
        let mut planned = plan(1, Some(model()), 8, made.clone());
        let why = "a and b have no RDMA link".to_owned();
        planned.stage.notes.push(Note::CableLost { group: made[0].name_any(), why });
        let status = shown(planned, made, 0);
        for (kind, reason) in [(Type::Placed, "CableLost"), (Type::Ready, "WaitingForRanks")] {
            let condition = get(&status.conditions, kind).unwrap();
            assert_eq!(condition.reason, reason);
            assert!(condition.message.contains("a and b have no RDMA link"), "{condition:?}");
        }
    }

    #[test]
    fn ready_says_which_node_cannot_be_reached() {
        let made = groups(&plan(1, Some(model()), 8, vec![]), true, Reason::Serving, "");
        for (reachable, says) in [
            (true, "one replica answers"),
            (
                false,
                "one replica answers as far as is known: node a is unreachable, and lost if that lasts a minute",
            ),
        ] {
            let mut silent = InferenceNode::clone(&node(8));
            let conditions = &mut silent.status.as_mut().unwrap().conditions;
            conditions::set(conditions, Type::Reachable, reachable, Reason::Settled, "", None, NOW);
            let cluster = ClusterObjects {
                nodes: vec![Arc::new(silent)],
                models: vec![model()],
                groups: made.clone(),
                ..ClusterObjects::default()
            };
            let view = Arc::new(cluster.snapshot(NOW));
            let stage = ObservedDeployment {
                now: NOW,
                models: vec![model()],
                view,
                competitors: Vec::new(),
                groups: made.clone(),
            };
            let planned = decide(Resources { deployment: deployment(1), stage });
            let status = shown(planned, made.clone(), 0);
            let ready = get(&status.conditions, Type::Ready).unwrap();
            assert_eq!((ready.status.as_str(), ready.message.as_str()), ("True", says));
        }
    }

    #[test]
    fn every_situation_reads_right_at_a_glance() {
        let first = || plan(1, Some(model()), 8, vec![]);
        let with = |ready, reason| {
            let made = groups(&first(), ready, reason, "rank 0 on a: 1.0 GiB of 2.0 GiB");
            shown(plan(1, Some(model()), 8, made.clone()), made, 0)
        };
        let stopping = {
            let made = groups(&first(), true, Reason::Serving, "");
            plan(0, Some(model()), 8, made)
        };
        assert_eq!(stopping.stage.placement.delete[0].reason, RemovalReason::ScaledDown);
        let gone = plan(0, None, 8, groups(&first(), true, Reason::Serving, ""));
        assert_eq!(gone.stage.placement.delete.len(), 1, "what makes no sense may still be stopped");
        for (story, status, expected) in [
            //                                                        Ready Reconciling Stalled Available Placed
            (
                "just created",
                shown(first(), groups(&first(), false, Reason::InProgress, ""), 0),
                "False True False False True InProgress 0/1",
            ),
            ("loading", with(false, Reason::Loading), "False True False False True Loading 0/1"),
            ("serving", with(true, Reason::Serving), "True False False True True Serving 1/1"),
            (
                "no model",
                shown(plan(1, None, 8, vec![]), vec![], 0),
                "False False True False False ModelNotFound 0/1",
            ),
            (
                "too large",
                shown(plan(1, Some(model()), 1, vec![]), vec![], 0),
                "False False True False False NothingFits 0/1",
            ),
            ("stopping", shown(stopping, vec![], 1), "False True False False True InProgress 0/0"),
            (
                "stopped",
                shown(plan(0, Some(model()), 8, vec![]), vec![], 0),
                "True False False False True Stopped 0/0",
            ),
            (
                "stopped, its model gone",
                shown(plan(0, None, 8, vec![]), vec![], 0),
                "True False False False True Stopped 0/0",
            ),
        ] {
            assert_eq!(line(&status), expected, "{story}");
            assert!(
                status.conditions.iter().all(|condition| condition.observed_generation == Some(7)),
                "{story}"
            );
        }
    }

    #[test]
    fn the_report_of_a_plan_stays_while_the_plan_does() {
        let planned = plan(1, Some(model()), 8, vec![]);
        let made = groups(&planned, true, Reason::Serving, "");
        let first = shown(planned, made.clone(), 0);
        let report = first.placement.clone().unwrap();
        assert_eq!(
            (report.decision.as_str(), report.plan_hash.as_str()),
            ("1 rank on a", made[0].spec.plan.hash.as_str())
        );

        let mut later = plan(1, Some(model()), 64, made.clone());
        Arc::make_mut(&mut later.deployment).status = Some(first.clone());
        assert_eq!(shown(later, made.clone(), 0), first, "looking again changes nothing");
    }
}
