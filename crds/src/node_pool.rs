//! NodePool: machines of one kind, chosen by their labels, and what must join those that share a
//! model. It owns no machine: a node may be in several pools, or in none.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Machines that deployments may be bound to by `poolRefs`.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "russet.dev",
    version = "v1alpha1",
    kind = "NodePool",
    status = "NodePoolStatus",
    derive = "PartialEq",
    derive = "Default",
    shortname = "npool",
    category = "russet",
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(name = "Nodes", type_ = "string", json_path = ".status.summary"),
    printcolumn(name = "Free", type_ = "string", json_path = ".status.memory.free"),
    printcolumn(name = "Committed", type_ = "string", json_path = ".status.memory.committed"),
    printcolumn(name = "Fabric", type_ = "string", json_path = ".spec.fabric.kind"),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason"
    ),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].message",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct NodePoolSpec {
    /// Labels of the InferenceNodes that belong to the pool; `{}` takes every node.
    pub selector: NodeSelector,
    /// What must join every two nodes of a group of several ranks. Absent: nothing in particular.
    /// It counts when a group is placed; a link that fails later moves nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<FabricDemand>,
}

/// A label selector; a node must meet all of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeSelector {
    /// Labels with exactly these values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16))]
    pub match_labels: BTreeMap<String, String>,
    /// Rules about labels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub match_expressions: Vec<LabelRule>,
}

/// A rule about one label.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
     "message": "In and NotIn need values; Exists and DoesNotExist have none"},
]))]
pub struct LabelRule {
    /// The label.
    #[schemars(length(min = 1, max = 317))]
    pub key: String,
    /// What is asked of it.
    pub operator: LabelOperator,
    /// Values, for In and NotIn.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 63)))]
    pub values: Vec<String>,
}

/// What a rule asks of a label.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum LabelOperator {
    /// Its value is one of the rule's.
    #[default]
    In,
    /// It has none of the rule's values, or is not there.
    NotIn,
    /// It is there.
    Exists,
    /// It is not there.
    DoesNotExist,
    /// A word of a newer release; no node meets it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// What must join every two nodes of a group of several ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FabricDemand {
    /// The least link.
    #[serde(default)]
    pub kind: FabricKind,
    /// The least speed both ends report, such as `60G`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9]+(\.[0-9]+)?(k|M|G|T)?$"))]
    pub min_bits_per_second: Option<String>,
}

/// Links, each better than those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum FabricKind {
    /// Any link that both nodes report.
    #[default]
    Any,
    /// A Thunderbolt cable.
    Thunderbolt,
    /// A Thunderbolt cable over which both nodes offer RDMA.
    ThunderboltRdma,
    /// A word of a newer release; nothing meets it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// What the pool has.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodePoolStatus {
    /// Generation this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// InferenceNodes the selector takes.
    #[serde(default)]
    pub nodes: u32,
    /// Those among them that take new work.
    #[serde(default)]
    pub ready_nodes: u32,
    /// For people: `3/4` nodes take new work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<String>,
    /// Memory of all of them together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<PoolMemory>,
    /// Nodes of which every two are joined as `spec.fabric` asks, or by anything where it asks for
    /// nothing; the largest first. A node may be in several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub fabric_domains: Vec<FabricDomain>,
    /// Ready, Reconciling, Stalled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Memory of a pool. The byte counts are exact; the texts are for people.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoolMemory {
    /// Bytes models may take on all nodes.
    pub serving_limit_bytes: u64,
    /// Bytes promised to groups or still held by engines, on all nodes.
    pub committed_bytes: u64,
    /// Bytes free on the nodes that take new work.
    pub free_bytes: u64,
    /// `committedBytes` as a quantity.
    pub committed: String,
    /// `freeBytes` as a quantity.
    pub free: String,
}

/// Nodes of which every two are joined.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FabricDomain {
    /// The nodes.
    #[schemars(length(min = 2, max = 65))]
    pub nodes: Vec<String>,
    /// The least link among them.
    pub kind: FabricKind,
    /// Speed of the slowest link among them; absent while a link's speed is not reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_bits_per_second: Option<u64>,
}
