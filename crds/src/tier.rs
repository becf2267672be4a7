//! Tier: a promise to the people who use its deployments. A Dedicated tier gives every workload group nodes
//! of its own, a Cluster tier packs whole replicas on nodes that all of them share. It says where and how
//! important; how a replica is split is a ShardingStrategy's business.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::LocalReference;

/// What deployments that name it in `tierRef` may count on.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "russet.dev",
    version = "v1alpha1",
    kind = "Tier",
    status = "TierStatus",
    derive = "PartialEq",
    derive = "Default",
    shortname = "rtier",
    category = "russet",
    printcolumn(name = "Mode", type_ = "string", json_path = ".spec.mode"),
    printcolumn(name = "Priority", type_ = "integer", json_path = ".spec.priority"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(name = "Deployments", type_ = "integer", json_path = ".status.deployments"),
    printcolumn(name = "Used", type_ = "string", json_path = ".status.memory.committed"),
    printcolumn(name = "Free", type_ = "string", json_path = ".status.memory.free"),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason"
    ),
    printcolumn(name = "Groups", type_ = "string", json_path = ".status.summary", priority = 1),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].message",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "(self.mode == 'Dedicated') == (has(self.workloadGroups) && size(self.workloadGroups) > 0)",
     "message": "a Dedicated tier names its workloadGroups, a Cluster tier has none"},
]))]
pub struct TierSpec {
    /// Whether workload groups have nodes of their own.
    pub mode: TierMode,
    /// NodePools whose nodes it may use; a replica is always in one of them. Empty: any node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub pool_refs: Vec<LocalReference>,
    /// Of a Dedicated tier: groups of deployments that share nodes with nobody else, those that come first
    /// choosing first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")), extend("x-kubernetes-list-type" = "set"))]
    pub workload_groups: Vec<String>,
    /// What its replicas count where room is short: one of priority 100 twice as much as one of 0.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1000))]
    pub priority: i32,
    /// The ShardingStrategy of deployments that say nothing of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_strategy_ref: Option<LocalReference>,
}

/// What a tier promises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TierMode {
    /// Every workload group has nodes of its own, which hold all of its deployments.
    Dedicated,
    /// Whole replicas wherever they fit on nodes that all share.
    #[default]
    Cluster,
    /// A word of a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// What a tier has and gives.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TierStatus {
    /// Generation this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// ModelDeployments that name it, in all namespaces.
    #[serde(default)]
    pub deployments: u32,
    /// Memory of the nodes it may use; of a Dedicated tier, of those its groups have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<crate::PoolMemory>,
    /// For people: `chat: studio-3; coding: studio-4`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<String>,
    /// The nodes of every workload group. They stay theirs while the tier names the group.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub workload_groups: Vec<WorkloadGroup>,
    /// Ready, Reconciling, Stalled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// A workload group and its nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadGroup {
    /// Its name.
    pub name: String,
    /// Its nodes; nobody else's replicas are placed there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub nodes: Vec<String>,
    /// ModelDeployments in it.
    #[serde(default)]
    pub deployments: u32,
    /// Why it has too few nodes; absent when it has enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lacks: Option<String>,
}
