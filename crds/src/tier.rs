//! Tier: a service class of deployments. A Dedicated tier gives every workload group its own nodes; a Cluster
//! tier packs whole replicas on shared nodes. It sets nodes and priority. Not here: how a replica is split
//! (ShardingStrategy).

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{ApprovalAction, LocalReference, Schedule};

/// A service class for the deployments that name it in `tierRef`.
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
    printcolumn(name = "Residency", type_ = "string", json_path = ".spec.residency", priority = 1),
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
    /// Whether workload groups have their own nodes.
    pub mode: TierMode,
    /// Namespaces whose deployments may use the tier. Empty: all; but then a replica of another namespace is
    /// preempted only with an Approval.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), inner(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")), extend("x-kubernetes-list-type" = "set"))]
    pub namespaces: Vec<String>,
    /// NodePools whose nodes the tier may use; a replica is always in one of them. Empty: any node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub pool_refs: Vec<LocalReference>,
    /// Workload groups of a Dedicated tier: sets of deployments that share nodes with no other deployment.
    /// Earlier groups choose their nodes first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")), extend("x-kubernetes-list-type" = "set"))]
    pub workload_groups: Vec<String>,
    /// Weight of its replicas when memory is short: priority 100 counts twice as much as 0.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1000))]
    pub priority: i32,
    /// The ShardingStrategy of deployments that set none of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_strategy_ref: Option<LocalReference>,
    /// Whether a replica that fits nowhere may preempt those of lower priority.
    #[serde(default)]
    pub preemption: Preemption,
    /// How long a running replica stays.
    #[serde(default)]
    pub residency: Residency,
    /// Seconds after its start during which a replica is not preempted.
    #[serde(default = "min_residency")]
    #[schemars(range(min = 0, max = 604_800))]
    pub min_residency_seconds: u32,
    /// With OnDemand: seconds without a request after which a deployment is unloaded.
    #[serde(default = "idle")]
    #[schemars(range(min = 10, max = 604_800))]
    pub idle_seconds: u32,
    /// When its deployments run; absent: always. Outside all of these times they are stopped and free their
    /// memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub schedules: Vec<Schedule>,
    /// Actions that need an Approval when they are for a deployment of this tier or stop one of its replicas.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), extend(
        "x-kubernetes-list-type" = "set",
        "x-kubernetes-validations" = [{"rule": "!('Step' in self)", "message": "Step is for Pipelines: `approval` of a step"}]
    ))]
    pub approvals: Vec<ApprovalAction>,
}

impl TierSpec {
    /// Whether deployments of this namespace may use the tier.
    pub fn allows(&self, namespace: &str) -> bool {
        self.namespaces.is_empty() || self.namespaces.iter().any(|allowed| allowed == namespace)
    }
}

fn min_residency() -> u32 {
    300
}

fn idle() -> u32 {
    900
}

/// What a replica that fits nowhere may do to others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Preemption {
    /// Nothing: the replica waits.
    #[default]
    Never,
    /// It may preempt whole replicas of lower priority.
    LowerPriority,
    /// A value from a newer release; the replica waits.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// How long a running replica stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Residency {
    /// The replica is never preempted.
    Always,
    /// Until a replica of higher priority needs its memory.
    #[default]
    Sticky,
    /// As Sticky, and only while there are requests: the replica starts with the first request and stops
    /// `idleSeconds` after the last.
    OnDemand,
    /// A value from a newer release; the replica stays.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// How a tier shares nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TierMode {
    /// Every workload group has its own nodes, which hold all of its deployments.
    Dedicated,
    /// Whole replicas wherever they fit on shared nodes.
    #[default]
    Cluster,
    /// A value from a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Deployments, memory and nodes of the tier.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TierStatus {
    /// The generation that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// ModelDeployments that name it, in all namespaces.
    #[serde(default)]
    pub deployments: u32,
    /// Memory of the nodes that the tier may use; of a Dedicated tier, of the nodes of its groups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<crate::PoolMemory>,
    /// Groups and their nodes, for display: `chat: studio-3; coding: studio-4`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<String>,
    /// The nodes of every workload group. A group keeps its nodes while the tier names it.
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
    /// Its nodes; no other replicas are placed there.
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
