//! Tier: a promise to the people who use its deployments. A Dedicated tier gives every workload group nodes
//! of its own, a Cluster tier packs whole replicas on nodes that all of them share. It says where and how
//! important; how a replica is split is a ShardingStrategy's business.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{ApprovalAction, LocalReference};

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
    /// What a replica that fits nowhere may do to those of lower priority.
    #[serde(default)]
    pub preemption: Preemption,
    /// How long what runs goes on.
    #[serde(default)]
    pub residency: Residency,
    /// For so long after its start a replica makes no room for others.
    #[serde(default = "min_residency")]
    #[schemars(range(min = 0, max = 604_800))]
    pub min_residency_seconds: u32,
    /// OnDemand: what nobody asked for so long is unloaded.
    #[serde(default = "idle")]
    #[schemars(range(min = 10, max = 604_800))]
    pub idle_seconds: u32,
    /// When its deployments run; left out: always. Outside of all of these times they are stopped and give their
    /// memory back.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub schedules: Vec<Schedule>,
    /// What waits for an Approval, where it serves a deployment of this tier or stops one of its replicas.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "set"))]
    pub approvals: Vec<ApprovalAction>,
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
    /// Nothing: it waits.
    #[default]
    Never,
    /// Have whole replicas of lower priority make room.
    LowerPriority,
    /// A word of a newer release; it waits.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// How long what runs goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Residency {
    /// It never makes room for others.
    Always,
    /// Until something of higher priority needs its room.
    #[default]
    Sticky,
    /// As Sticky, and only while somebody asks for it: it starts with the first request and ends `idleSeconds`
    /// after the last.
    OnDemand,
    /// A word of a newer release; it goes on.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// A time of the day at which a tier's deployments run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Schedule {
    /// Days on which it begins; left out: every day.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 7), extend("x-kubernetes-list-type" = "set"))]
    pub days: Vec<Day>,
    /// When it begins, such as `08:00`.
    #[schemars(regex(pattern = r"^([01][0-9]|2[0-3]):[0-5][0-9]$"))]
    pub from: String,
    /// When it ends, such as `20:30`; at or before `from`: on the next day.
    #[schemars(regex(pattern = r"^([01][0-9]|2[0-3]):[0-5][0-9]$"))]
    pub until: String,
    /// IANA time zone of both, such as `Europe/Berlin`.
    #[serde(default = "utc")]
    #[schemars(length(min = 1, max = 64))]
    pub time_zone: String,
}

fn utc() -> String {
    "UTC".to_owned()
}

/// A day of the week.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Day {
    /// Monday.
    Mon,
    /// Tuesday.
    Tue,
    /// Wednesday.
    Wed,
    /// Thursday.
    Thu,
    /// Friday.
    Fri,
    /// Saturday.
    Sat,
    /// Sunday.
    Sun,
    /// A word of a newer release; no day.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
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
