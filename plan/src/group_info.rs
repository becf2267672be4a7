//! A replica as the planner sees it. Not how it was decided.

use jiff::Timestamp;
use russet_crds::{GroupPlan, MeasuredThroughput, names};

/// A namespace and a name.
pub type ObjectKey = (String, String);

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
