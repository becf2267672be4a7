//! The cluster as the planner sees it: one immutable view, taken by whoever calls. Not a cache and
//! not a client; the operator, `russet plan` and the tests all build it themselves.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use russet_crds::{GroupPlan, Link, MeasuredThroughput, Residency, Sharding, names};
use russet_wire::shape::ModelShape;

use crate::copies::DiskState;
use crate::nodes::Nodes;
use crate::note::Note;
use crate::pool::EligibleNodes;
use crate::cow::ArcCow;
use crate::performance_model::GpuProfile;
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
    /// NodePools among these machines, by name; with what makes one none.
    pub pools: BTreeMap<String, Result<EligibleNodes, Note>>,
    /// Every replica of every deployment, those being deleted included: they still hold memory.
    pub groups: BTreeMap<ObjectKey, GroupInfo>,
    /// Which files are on which disk; nothing where nobody says, and then nothing waits for them.
    pub disks: Option<ArcCow<DiskState>>,
    /// What persons answered, by the deployment it serves.
    pub approval_decisions: BTreeMap<ObjectKey, ApprovalDecisions>,
}

/// What persons said to the operator's questions, as hashes of plans.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApprovalDecisions {
    /// Yes.
    pub approved: BTreeSet<String>,
    /// No.
    pub denied: BTreeSet<String>,
}

/// A machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeInfo {
    /// Bytes models may take in all.
    pub serving_limit: u64,
    /// Bytes the agent still grants to Shards whose group is gone. They are not free until the
    /// agent says so, however long that takes.
    pub unreleased: u64,
    /// Whether new work may come.
    pub availability: Availability,
    /// Its operating system and the build of it, as it names them.
    pub os: Option<String>,
    /// Build of the engine; ranks of one group need equal ones.
    pub engine_build: Option<String>,
    /// Distributed backends the engine offers; empty when the agent does not say.
    pub backends: Vec<String>,
    /// Whether its engine can hold parts of layers; that of an older release cannot.
    pub supports_tensor: bool,
    /// Options that its engine has, by their field in `spec.engine`.
    pub engine_options: Vec<String>,
    /// Links to other nodes, as this node reports them.
    pub links: Vec<Link>,
    /// What its GPU can do, where its chip is in the catalogue.
    pub gpu: Option<GpuProfile>,
    /// Its labels, by which failure domains are told apart.
    pub labels: BTreeMap<String, String>,
}

/// Whether a node takes new work, and what becomes of the work it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Availability {
    /// New work may come.
    #[default]
    Open,
    /// What runs stays, nothing new comes.
    Cordoned,
    /// What runs moves away.
    Draining,
    /// The agent does not renew its Lease; nobody knows what runs there.
    Unreachable,
    /// Unreachable for so long that engines without an agent have ended: its work moves away, and
    /// its memory stays taken until its agent is back and says otherwise.
    Lost,
    /// The agent has not measured its memory yet.
    Unmeasured,
}

/// A replica that exists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupInfo {
    /// The ModelDeployment, of the same namespace.
    pub deployment: String,
    /// The Model, of the same namespace.
    pub model: String,
    /// Index of the replica.
    pub replica: i32,
    /// The NodePools its deployment named when it was made.
    pub pools: Vec<String>,
    /// Its deployment's Tier.
    pub tier: Option<String>,
    /// Until then it makes no room for others; nothing when it has run for long enough.
    pub resident_until: Option<Timestamp>,
    /// The split.
    pub plan: GroupPlan,
    /// How fast it answers, once it has seen enough requests.
    pub measured: Option<MeasuredThroughput>,
    /// Whether it answers.
    pub ready: bool,
    /// Whether it is being deleted.
    pub deleting: bool,
}

impl Snapshot {
    /// Bytes promised or still held, by node, leaving out the groups for which `without` is true; nodes with
    /// nothing are left out.
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

    /// What a group counts, by its tier.
    pub fn priority(&self, group: &GroupInfo) -> i32 {
        self.tier(group).map_or(0, |tier| tier.priority)
    }

    /// How long a group goes on, by its tier.
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

    /// The Models whose files its ranks read, each with a node that has to hold them.
    pub fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.plan.files(&self.model)
    }

    /// Bytes it holds on all its nodes.
    pub fn reserved_bytes(&self) -> u64 {
        self.plan.members.iter().fold(0, |sum, member| sum.saturating_add(member.reserved_bytes()))
    }

    /// The name its ShardGroup has.
    pub fn name(&self) -> String {
        names::shard_group(&self.deployment, self.replica, &self.plan.hash)
    }
}
