//! The planner's view of a cluster, built from its objects: the operator's caches, or the output of `kubectl
//! get … -o yaml`. Not here: a client or a clock; the time is an argument.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::{Timestamp, ToSpan as _};
use kube::ResourceExt as _;
use russet_crds::conditions::{self, Type, is_true};
use russet_crds::{
    Approval, ApprovalDecision, ApprovalSpec, InferenceNode, Model, ModelCopy, NodePool, Scheduling, Shard,
    ShardGroup, ShardingStrategy,
};

use crate::chips;
use crate::disk_state::DiskState;
use crate::nodes::Nodes;
use crate::note::Note;
use crate::pool::{self, EligibleNodes, Labels};
use crate::snapshot::{ApprovalDecisions, Availability, GroupInfo, NodeInfo, ObjectKey, Snapshot};
use crate::tier_info::TierInfo;

/// An unreachable node is lost after this time: engines that no agent adopts exit after 60 seconds.
const LOST_AFTER: Duration = Duration::from_secs(60);

/// Objects that a placement may depend on.
#[derive(Clone, Debug, Default)]
pub struct ClusterObjects {
    /// Machines.
    pub nodes: Vec<Arc<InferenceNode>>,
    /// Models; those of the deployments to place are enough.
    pub models: Vec<Arc<Model>>,
    /// Sharding strategies.
    pub strategies: Vec<Arc<ShardingStrategy>>,
    /// Node pools.
    pub pools: Vec<Arc<NodePool>>,
    /// Tiers.
    pub tiers: Vec<Arc<russet_crds::Tier>>,
    /// Replicas, those being deleted included.
    pub groups: Vec<Arc<ShardGroup>>,
    /// Ranks.
    pub shards: Vec<Arc<Shard>>,
    /// Models on machines; `None` if the cluster is only described: it then has all files it needs.
    pub copies: Option<Vec<Arc<ModelCopy>>>,
    /// Approvals and their decisions.
    pub approvals: Vec<Arc<Approval>>,
}

impl ClusterObjects {
    /// The view at `now`.
    pub fn snapshot(&self, now: Timestamp) -> Snapshot {
        let strategies = self.strategies.iter();
        let shape = |model: &Arc<Model>| model.status.as_ref().and_then(|status| status.shape.clone());
        let key = |model: &Arc<Model>| (model.namespace().unwrap_or_default(), model.name_any());
        let pools = resolve_pools(&self.pools, &self.nodes);
        let disks = self
            .copies
            .as_ref()
            .map(|copies| DiskState::from_objects(copies, &self.nodes, &self.models, &pools));
        Snapshot {
            nodes: self.node_infos(now).into(),
            models: self.models.iter().filter_map(|model| Some((key(model), shape(model)?))).collect(),
            strategies: strategies.map(|one| (one.name_any(), one.spec.sharding.clone())).collect(),
            pools,
            tiers: self.tiers.iter().map(|tier| (tier.name_any(), TierInfo::read(tier, now))).collect(),
            groups: self.groups.iter().map(|group| self.group_info(group, now)).collect(),
            disks: disks.map(Into::into),
            approval_decisions: self.approval_decisions(now),
        }
    }

    /// Until when `view`, taken at `now`, is valid if only time passes; `None` if that is for ever, or beyond
    /// the planning horizon.
    pub fn valid_until(&self, view: &Snapshot, now: Timestamp) -> Option<Timestamp> {
        let losses = self.nodes.iter().filter_map(|node| lost_at(node, now));
        let expiries =
            self.approvals.iter().filter_map(|approval| Some(approval.spec.expires_at.as_ref()?.0));
        let hours = view.tiers.values().filter_map(|tier| tier.active_hours.until);
        let residencies = view.groups.values().filter_map(|group| group.resident_until);
        losses.chain(expiries.filter(|expires| *expires > now)).chain(hours).chain(residencies).min()
    }

    /// Approval decisions that are valid at `now`.
    fn approval_decisions(&self, now: Timestamp) -> BTreeMap<ObjectKey, ApprovalDecisions> {
        let mut answers: BTreeMap<ObjectKey, ApprovalDecisions> = BTreeMap::new();
        for approval in &self.approvals {
            if approval.spec.is_expired(now) {
                continue;
            }
            let Some(deployment) = approval.spec.deployment() else { continue };
            let ApprovalSpec { plan_hash, decision, affects, .. } = &approval.spec;
            let key = (approval.namespace().unwrap_or_default(), deployment.to_owned());
            let answers = answers.entry(key).or_default();
            match decision {
                Some(ApprovalDecision::Approved) => {
                    answers.approved.insert(plan_hash.clone(), affects.iter().cloned().collect());
                }
                Some(ApprovalDecision::Denied) => drop(answers.denied.insert(plan_hash.clone())),
                Some(ApprovalDecision::Unknown) | None => {}
            }
        }
        answers
    }

    fn node_infos(&self, now: Timestamp) -> Nodes {
        let living: BTreeSet<String> = self.groups.iter().filter_map(|group| group.uid()).collect();
        // Bytes of claimed Shards whose group exists, and of all Shards whose group is gone, by node.
        let (mut claimed, mut orphaned) = (BTreeMap::<&str, u64>::new(), BTreeMap::<&str, u64>::new());
        for shard in &self.shards {
            let bytes = shard.spec.reserved_bytes();
            let sum = if !living.contains(&shard.spec.group_uid) {
                orphaned.entry(&shard.spec.node_name).or_default()
            } else if shard.status.as_ref().is_some_and(|status| is_true(&status.conditions, Type::Claimed)) {
                claimed.entry(&shard.spec.node_name).or_default()
            } else {
                continue;
            };
            *sum = sum.saturating_add(bytes);
        }
        let of = |sums: &BTreeMap<&str, u64>, name: &str| sums.get(name).copied().unwrap_or(0);
        let seen = |node: &Arc<InferenceNode>| {
            let name = node.name_any();
            let (claimed, orphaned) = (of(&claimed, &name), of(&orphaned, &name));
            (name, node_info(node, claimed, orphaned, now))
        };
        self.nodes.iter().map(seen).collect()
    }

    fn group_info(&self, group: &ShardGroup, now: Timestamp) -> (ObjectKey, GroupInfo) {
        let ready = group.status.as_ref().is_some_and(|status| is_true(&status.conditions, Type::Ready));
        let seen = GroupInfo {
            deployment: group.spec.deployment_ref.name.clone(),
            model: group.spec.model_ref.name.clone(),
            replica: group.spec.replica,
            pools: group.spec.pool_refs.iter().map(|reference| reference.name.clone()).collect(),
            tier: group.spec.tier_ref.as_ref().map(|reference| reference.name.clone()),
            resident_until: self.resident_until(group).filter(|until| *until > now),
            measured: group.status.as_ref().and_then(|status| status.measured.clone()),
            plan: group.spec.plan.clone(),
            ready,
            deleting: group.metadata.deletion_timestamp.is_some(),
        };
        ((group.namespace().unwrap_or_default(), group.name_any()), seen)
    }

    /// Until when a group may not be preempted, according to its tier.
    fn resident_until(&self, group: &ShardGroup) -> Option<Timestamp> {
        let tier = &group.spec.tier_ref.as_ref()?.name;
        let tier = self.tiers.iter().find(|known| known.metadata.name.as_ref() == Some(tier))?;
        let created = group.metadata.creation_timestamp.as_ref()?.0;
        created.checked_add(i64::from(tier.spec.min_residency_seconds).seconds()).ok()
    }
}

fn node_info(node: &InferenceNode, claimed: u64, orphaned: u64, now: Timestamp) -> NodeInfo {
    let (availability, labels) = (availability(node, now), node.labels().clone());
    let Some(status) = &node.status else {
        return NodeInfo { availability, unreleased: orphaned, labels, ..NodeInfo::default() };
    };
    let memory = status.memory.clone().unwrap_or_default();
    let gib = u32::try_from(memory.total_bytes.div_ceil(1 << 30)).ok();
    let chip = status.chip.as_deref().and_then(|chip| chips::find(chip, None, gib));
    NodeInfo {
        serving_limit: memory.serving_limit_bytes,
        unreleased: memory.granted_bytes.saturating_sub(claimed).max(orphaned),
        availability,
        engine_build: status.engine_build.clone(),
        backends: status.backends.clone(),
        supports_tensor: status.sharding_modes.iter().any(|mode| mode == "Tensor"),
        engine_options: status.engine_options.clone(),
        os: status.os.clone(),
        links: status.links.clone(),
        gpu: chip.map(Into::into),
        labels,
    }
}

/// Every pool, resolved to these nodes, or why it is invalid.
pub fn resolve_pools(
    pools: &[Arc<NodePool>],
    nodes: &[Arc<InferenceNode>],
) -> BTreeMap<String, Result<EligibleNodes, Note>> {
    let labels = labels(nodes);
    pools.iter().map(|pool| (pool.name_any(), resolve_pool(pool, &labels))).collect()
}

/// Labels of nodes, by name.
pub fn labels(nodes: &[Arc<InferenceNode>]) -> BTreeMap<&str, &Labels> {
    let named = nodes.iter().filter_map(|node| Some((node.metadata.name.as_deref()?, node.labels())));
    named.collect()
}

/// Resolves a pool to nodes by their labels.
pub fn resolve_pool(pool: &NodePool, labels: &BTreeMap<&str, &Labels>) -> Result<EligibleNodes, Note> {
    pool::resolve(&pool.name_any(), &pool.spec, labels.iter().map(|(name, labels)| (*name, *labels)))
}

/// Whether a placement may use a node.
pub fn availability(node: &InferenceNode, now: Timestamp) -> Availability {
    let conditions = node.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    if !conditions::is_true(conditions, Type::Reachable) {
        let silent = conditions::get(conditions, Type::Reachable)
            .map(|condition| now.duration_since(condition.last_transition_time.0));
        let lost = silent.is_some_and(|silent| silent.unsigned_abs() >= LOST_AFTER && silent.is_positive());
        return if lost { Availability::Lost } else { Availability::Unreachable };
    }
    match node.spec.scheduling {
        Scheduling::Cordoned | Scheduling::Unknown => Availability::Cordoned,
        Scheduling::Draining => Availability::Draining,
        Scheduling::Enabled if node.metadata.deletion_timestamp.is_some() => Availability::Draining,
        Scheduling::Enabled if !conditions::is_true(conditions, Type::Ready) => Availability::Unmeasured,
        Scheduling::Enabled => Availability::Open,
    }
}

/// When an unreachable node counts as lost.
fn lost_at(node: &InferenceNode, now: Timestamp) -> Option<Timestamp> {
    if availability(node, now) != Availability::Unreachable {
        return None;
    }
    let status = node.status.as_ref()?;
    let since = conditions::get(&status.conditions, Type::Reachable)?.last_transition_time.0;
    since.checked_add(LOST_AFTER).ok()
}

/// Time until an unreachable node counts as lost. No watch event announces it.
pub fn until_lost(node: &InferenceNode, now: Timestamp) -> Option<Duration> {
    let silent = Duration::try_from(lost_at(node, now)?.duration_since(now)).unwrap_or_default();
    // A little more, so that the caller does not wake just before.
    Some(silent + Duration::from_millis(100))
}

#[cfg(test)]
mod tests {
    use russet_crds::conditions::Reason;
    use russet_crds::{
        GroupMember, GroupPlan, InferenceNodeSpec, InferenceNodeStatus, NodeMemory, ShardGroupSpec,
        ShardSpec, ShardStatus,
    };

    use super::*;

    #[test]
    fn memory_is_free_only_when_the_agent_has_released_it() {
        let group = |uid: &str| {
            let member =
                GroupMember { node_name: "a".to_owned(), weight_bytes: 100, ..GroupMember::default() };
            let plan = GroupPlan { members: vec![member], ..GroupPlan::default() };
            let mut group = ShardGroup::new(uid, ShardGroupSpec { plan, ..ShardGroupSpec::default() });
            group.metadata.uid = Some(uid.to_owned());
            Arc::new(group)
        };
        let shard = |uid: &str, claimed: bool| {
            let spec = ShardSpec {
                group_uid: uid.to_owned(),
                node_name: "a".to_owned(),
                weight_bytes: 100,
                ..ShardSpec::default()
            };
            let mut shard = Shard::new(uid, spec);
            let mut status = ShardStatus::default();
            let reason = Reason::MemoryGranted;
            conditions::set(
                &mut status.conditions,
                Type::Claimed,
                claimed,
                reason,
                "",
                None,
                Timestamp::UNIX_EPOCH,
            );
            shard.status = Some(status);
            Arc::new(shard)
        };
        for (story, granted, groups, shards, unreleased) in [
            ("nothing runs", 0, vec![], vec![], 0),
            ("created, not granted yet", 0, vec![group("g")], vec![shard("g", false)], 0),
            ("granted and claimed", 100, vec![group("g")], vec![shard("g", true)], 0),
            ("claimed, the node not reported yet", 0, vec![group("g")], vec![shard("g", true)], 0),
            ("group gone, Shard still there", 100, vec![], vec![shard("g", true)], 100),
            ("group gone, Shard not granted yet but might be", 0, vec![], vec![shard("g", false)], 100),
            ("group and Shard gone, not released", 100, vec![], vec![], 100),
            ("one gone and unreleased, another claimed", 200, vec![group("g")], vec![shard("g", true)], 100),
        ] {
            let mut node = InferenceNode::new("a", InferenceNodeSpec::default());
            let memory = NodeMemory { granted_bytes: granted, ..NodeMemory::default() };
            node.status =
                Some(InferenceNodeStatus { memory: Some(memory), ..InferenceNodeStatus::default() });
            let cluster =
                ClusterObjects { nodes: vec![Arc::new(node)], groups, shards, ..ClusterObjects::default() };
            let view = cluster.snapshot(Timestamp::UNIX_EPOCH);
            assert_eq!(view.nodes["a"].unreleased, unreleased, "{story}");
        }
    }

    fn named(name: &str) -> InferenceNode {
        InferenceNode::new(name, InferenceNodeSpec::default())
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + second).unwrap()
    }

    #[test]
    fn a_silent_node_is_unreachable_first_and_lost_later() {
        for (reachable, since, scheduling, expected) in [
            (true, 0, Scheduling::Enabled, Availability::Open),
            (true, 0, Scheduling::Cordoned, Availability::Cordoned),
            (true, 0, Scheduling::Draining, Availability::Draining),
            (false, 59, Scheduling::Enabled, Availability::Unreachable),
            (false, 60, Scheduling::Enabled, Availability::Lost),
            (false, -90, Scheduling::Enabled, Availability::Unreachable),
        ] {
            let mut node = named("a");
            node.status = Some(InferenceNodeStatus::default());
            node.spec.scheduling = scheduling;
            let conditions = &mut node.status.as_mut().unwrap().conditions;
            conditions::set(conditions, Type::Reachable, reachable, Reason::LeaseRenewed, "", None, at(0));
            conditions::set(conditions, Type::Ready, reachable, Reason::Settled, "", None, at(0));
            assert_eq!(availability(&node, at(since)), expected, "{reachable} {since} {scheduling:?}");
            let unreachable = expected == Availability::Unreachable;
            assert_eq!(until_lost(&node, at(since)).is_some(), unreachable);
            let cluster = ClusterObjects { nodes: vec![Arc::new(node)], ..ClusterObjects::default() };
            let holds = cluster.valid_until(&cluster.snapshot(at(since)), at(since));
            assert_eq!(holds, unreachable.then(|| at(60)));
        }
        assert_eq!(availability(&named("new"), at(0)), Availability::Unreachable);
    }
}
