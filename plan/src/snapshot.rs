//! The planner's view: one immutable snapshot of the cluster, taken by the caller. Not a cache and not a
//! client; the operator, `russet plan` and the tests build it themselves.

use std::collections::{BTreeMap, BTreeSet};

use russet_crds::{Residency, Sharding, TierMode};
use russet_model::shape::ModelShape;

use crate::cow::ArcCow;
use crate::disk_state::DiskState;
pub use crate::group_info::{GroupInfo, ObjectKey};
pub use crate::node_info::{Availability, NodeInfo};
use crate::nodes::Nodes;
use crate::note::Note;
use crate::pool::EligibleNodes;
use crate::tier_info::TierInfo;

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
    /// Approved plans, each with the deployments that the Approval names: who decided may speak for them.
    pub approved: BTreeMap<String, BTreeSet<String>>,
    /// Denied plans.
    pub denied: BTreeSet<String>,
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

    /// Owners of nodes: the tier and the workload group, by node. A tier owns nothing outside its active hours.
    pub fn node_owners(&self) -> BTreeMap<&str, (String, String)> {
        let mut owners = BTreeMap::new();
        let dedicated = |tier: &TierInfo| tier.mode == TierMode::Dedicated && tier.active_hours.open;
        for (name, tier) in self.tiers.iter().filter(|(_, tier)| dedicated(tier)) {
            for (group, nodes) in &tier.owned {
                for node in nodes {
                    // If two claim a node, the first owns it, so that the result is unique.
                    owners.entry(node.as_str()).or_insert_with(|| (name.clone(), group.clone()));
                }
            }
        }
        owners
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
