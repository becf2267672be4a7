//! NodePool: machines selected by their labels, and the links required between nodes that share a model. A
//! pool owns no machine: a node may be in several pools, or in none.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A set of machines that deployments select with `poolRefs`.
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
    /// Labels of the InferenceNodes in the pool; `{}` selects every node.
    pub selector: NodeSelector,
    /// Links required between any two nodes of a group of several ranks. Absent: no requirement. Checked at
    /// placement only; a link that fails later moves no replica.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<FabricDemand>,
}

/// A label selector; a node must match all of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeSelector {
    /// Labels with exactly these values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16))]
    pub match_labels: BTreeMap<String, String>,
    /// Requirements on labels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub match_expressions: Vec<LabelRule>,
}

/// A requirement on one label.
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
    /// How the label's value relates to `values`.
    pub operator: LabelOperator,
    /// Values, for In and NotIn.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 63)))]
    pub values: Vec<String>,
}

/// How a label's value relates to the values of a requirement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum LabelOperator {
    /// The label has one of the values.
    #[default]
    In,
    /// The label has none of the values, or does not exist.
    NotIn,
    /// The label exists.
    Exists,
    /// The label does not exist.
    DoesNotExist,
    /// A value from a newer release; no node matches.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Links required between any two nodes of a group of several ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FabricDemand {
    /// Minimum kind of link.
    #[serde(default)]
    pub kind: FabricKind,
    /// Minimum speed that both ends report, such as `60G`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9]+(\.[0-9]+)?(k|M|G|T)?$"))]
    pub min_bits_per_second: Option<String>,
}

/// Kinds of links, each better than those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum FabricKind {
    /// Any link that both nodes report.
    #[default]
    Any,
    /// A Thunderbolt cable.
    Thunderbolt,
    /// A Thunderbolt cable with RDMA usable at both ends.
    ThunderboltRdma,
    /// A value from a newer release; no link satisfies it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Nodes, memory and links of the pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodePoolStatus {
    /// The generation that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// InferenceNodes that the selector matches.
    #[serde(default)]
    pub nodes: u32,
    /// Nodes of the pool that take new work.
    #[serde(default)]
    pub ready_nodes: u32,
    /// Nodes that take new work and all nodes, for display: `3/4`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<String>,
    /// Total memory of the pool's nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<PoolMemory>,
    /// Sets of nodes that are pairwise linked as `spec.fabric` requires, or by any link if it requires
    /// nothing; the largest first. A node may be in several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub fabric_domains: Vec<FabricDomain>,
    /// Ready, Reconciling, Stalled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Memory of a pool. The byte counts are exact; the quantities are for display.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoolMemory {
    /// Memory that models may take on all nodes.
    pub serving_limit_bytes: u64,
    /// Memory reserved for groups or still held by engines, on all nodes.
    pub committed_bytes: u64,
    /// Free memory on the nodes that take new work.
    pub free_bytes: u64,
    /// `committedBytes` as a quantity.
    pub committed: String,
    /// `freeBytes` as a quantity.
    pub free: String,
}

/// A set of nodes that are pairwise linked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FabricDomain {
    /// The nodes.
    #[schemars(length(min = 2, max = 65))]
    pub nodes: Vec<String>,
    /// The worst kind of link among them.
    pub kind: FabricKind,
    /// Speed of the slowest link among them; absent if the speed of a link is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_bits_per_second: Option<u64>,
}
