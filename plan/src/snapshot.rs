//! The planner's view: one immutable snapshot of the cluster, taken by the caller. Not a cache and not a
//! client; the operator, `russet plan` and the tests build it themselves.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use russet_crds::{GroupPlan, Link, MeasuredThroughput, Residency, Sharding, names};
use russet_model::shape::ModelShape;

use crate::copies::DiskState;
use crate::cow::ArcCow;
use crate::nodes::Nodes;
use crate::note::Note;
use crate::performance_model::GpuProfile;
use crate::pool::EligibleNodes;
use crate::tier::TierInfo;

/// A namespace and a name.
pub type ObjectKey = (String, String);

/// Everything a placement may depend on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// Machines, by name.
    pub nodes: ArcCow<Nodes>,
    /// Every model whose headers were read.
    pub models: ArcCow<BTreeMap<ObjectKey, ModelShape>>,
    /// ShardingStrategies, by name.
    pub strategies: BTreeMap<String, Sharding>,
    /// Tiers, by name.
    pub tiers: BTreeMap<String, TierInfo>,
    /// NodePools resolved to these machines, by name; or why one is invalid.
    pub pools: BTreeMap<String, Result<EligibleNodes, Note>>,
    /// Every replica of every deployment, including those being deleted: they still hold memory.
    pub groups: BTreeMap<ObjectKey, GroupInfo>,
    /// Files by disk; `None` if unknown: then nothing waits for files.
    pub disks: Option<ArcCow<DiskState>>,
    /// Approval decisions, by deployment.
    pub approval_decisions: BTreeMap<ObjectKey, ApprovalDecisions>,
}

/// Decisions of persons, as hashes of plans.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApprovalDecisions {
    /// Approved plans.
    pub approved: BTreeSet<String>,
    /// Denied plans.
    pub denied: BTreeSet<String>,
}

/// A machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeInfo {
    /// Bytes models may take in all.
    pub serving_limit: u64,
    /// Bytes that the agent still grants to Shards whose group is gone. They are not free until the agent
    /// reports their release, however long that takes.
    pub unreleased: u64,
    /// Whether the node takes new work.
    pub availability: Availability,
    /// Its operating system and build, as reported.
    pub os: Option<String>,
    /// Build of the engine; all ranks of a group need the same.
    pub engine_build: Option<String>,
    /// Distributed backends of the engine; empty if the agent reports none.
    pub backends: Vec<String>,
    /// Whether its engine supports tensor parallelism; that of an older release does not.
    pub supports_tensor: bool,
    /// Options that its engine supports, by their field in `spec.engine`.
    pub engine_options: Vec<String>,
    /// Links to other nodes, as this node reports them.
    pub links: Vec<Link>,
    /// Profile of its GPU, if its chip is in the catalogue.
    pub gpu: Option<GpuProfile>,
    /// Its labels, which determine failure domains.
    pub labels: BTreeMap<String, String>,
}

/// Whether a node takes new work, and what happens to its replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Availability {
    /// It takes new work.
    #[default]
    Open,
    /// Running replicas stay, nothing new is placed.
    Cordoned,
    /// Running replicas move away.
    Draining,
    /// The agent does not renew its Lease; the state of its ranks is unknown.
    Unreachable,
    /// Unreachable for so long that engines without an agent have exited: its replicas move away, and its
    /// memory stays reserved until its agent is back and reports otherwise.
    Lost,
    /// The agent has not measured its memory yet.
    Unmeasured,
}

/// An existing replica.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupInfo {
    /// The ModelDeployment, of the same namespace.
    pub deployment: String,
    /// The Model, of the same namespace.
    pub model: String,
    /// Index of the replica.
    pub replica: i32,
    /// The NodePools that its deployment named when it was created.
    pub pools: Vec<String>,
    /// Its deployment's Tier.
    pub tier: Option<String>,
    /// Until when it may not be preempted; `None` if it has run for its minimum residency.
    pub resident_until: Option<Timestamp>,
    /// The split.
    pub plan: GroupPlan,
    /// Measured speed, once it has handled enough requests.
    pub measured: Option<MeasuredThroughput>,
    /// Whether it is ready.
    pub ready: bool,
    /// Whether it is being deleted.
    pub deleting: bool,
}

impl Snapshot {
    /// Bytes reserved or still held, by node, without the groups for which `without` is true; nodes with none
    /// are left out.
    pub fn committed_bytes(&self, without: impl Fn(&ObjectKey) -> bool) -> BTreeMap<&str, u64> {
        let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
        for (name, node) in self.nodes.iter().filter(|(_, node)| node.unreleased > 0) {
            sums.insert(name, node.unreleased);
        }
        for (_, group) in self.groups.iter().filter(|(key, _)| !without(key)) {
            for member in &group.plan.members {
                let sum = sums.entry(&member.node_name).or_default();
                *sum = sum.saturating_add(member.reserved_bytes());
            }
        }
        sums
    }

    /// Priority of a group, from its tier.
    pub fn priority(&self, group: &GroupInfo) -> i32 {
        self.tier(group).map_or(0, |tier| tier.priority)
    }

    /// Residency of a group, from its tier.
    pub fn residency(&self, group: &GroupInfo) -> Residency {
        self.tier(group).map_or_else(Residency::default, |tier| tier.residency)
    }

    fn tier(&self, group: &GroupInfo) -> Option<&TierInfo> {
        self.tiers.get(group.tier.as_ref()?)
    }

    /// Replicas of a deployment, by name.
    pub fn groups_of<'a>(
        &'a self,
        namespace: &'a str,
        deployment: &'a str,
    ) -> impl Iterator<Item = (&'a ObjectKey, &'a GroupInfo)> {
        self.groups.iter().filter(move |(key, group)| key.0 == namespace && group.deployment == deployment)
    }
}

impl GroupInfo {
    /// The nodes of its ranks.
    pub fn nodes(&self) -> impl Iterator<Item = &str> + Clone {
        self.plan.members.iter().map(|member| member.node_name.as_str())
    }

    /// The Models whose files its ranks read, each with a node that must hold them.
    pub fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.plan.files(&self.model)
    }

    /// Bytes it holds on all its nodes.
    pub fn reserved_bytes(&self) -> u64 {
        self.plan.members.iter().fold(0, |sum, member| sum.saturating_add(member.reserved_bytes()))
    }

    /// The name of its ShardGroup.
    pub fn name(&self) -> String {
        names::shard_group(&self.deployment, self.replica, &self.plan.hash)
    }
}
