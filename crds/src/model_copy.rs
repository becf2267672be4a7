//! ModelCopy: one model's headers or files on one node. The operator creates it; the node's agent fetches and
//! verifies the bytes and reports.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use russet_model::shape::ModelShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{ModelSource, NamespacedReference};

/// A model on a node.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "russet.dev",
    version = "v1alpha1",
    kind = "ModelCopy",
    plural = "modelcopies",
    status = "ModelCopyStatus",
    derive = "PartialEq",
    derive = "Default",
    shortname = "mcopy",
    category = "russet",
    selectable = ".spec.nodeName",
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.nodeName"),
    printcolumn(name = "Want", type_ = "string", json_path = ".spec.want"),
    printcolumn(name = "Done", type_ = "string", json_path = ".status.progress"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason"
    ),
    printcolumn(name = "Rate", type_ = "string", json_path = ".status.rate"),
    printcolumn(name = "ETA", type_ = "string", json_path = ".status.eta"),
    printcolumn(name = "From", type_ = "string", json_path = ".status.from"),
    printcolumn(name = "Priority", type_ = "integer", json_path = ".spec.retention.priority", priority = 1),
    printcolumn(name = "Pinned", type_ = "boolean", json_path = ".spec.retention.pinned", priority = 1),
    printcolumn(name = "Last Used", type_ = "date", json_path = ".status.lastUsedTime", priority = 1),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].message",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ModelCopySpec {
    /// The Model this is a copy of.
    #[schemars(extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "modelRef is immutable"}]))]
    pub model_ref: NamespacedReference,
    /// Source, copied from the Model so that the agent needs no other object; its `secretRef` names a Secret
    /// in the Model's namespace.
    #[schemars(extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "source is immutable"}]))]
    pub source: ModelSource,
    /// Commit that all copies must come from, once one agent has resolved it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// The node.
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "nodeName is immutable"}]))]
    pub node_name: String,
    /// How much of the model the node has to hold.
    #[serde(default)]
    pub want: CopyMode,
    /// Eviction priority of the files. Written by the operator; absent means priority 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<Retention>,
    /// Where the bytes come from. Written by the operator, so that the bytes enter the cluster once; absent:
    /// the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub supply: Option<CopySource>,
}

impl ModelCopySpec {
    /// The part of the spec that the node's agent carries out: everything but the retention and the supply.
    /// The three parts have different field managers.
    #[must_use]
    pub fn agent_work(&self) -> Self {
        Self { retention: None, supply: None, ..self.clone() }
    }
}

/// Other nodes to download the files from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CopySource {
    /// Digest that identifies the bytes, as the first node that verified them reported it. Absent while
    /// another node still fetches them from the source: this node waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9a-f]{64}$"))]
    pub content: Option<String>,
    /// Nodes that have all or some of the bytes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub from: Vec<CopyPeer>,
}

/// A node whose agent serves files to other agents.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CopyPeer {
    /// The node.
    #[schemars(length(min = 1, max = 253))]
    pub node_name: String,
    /// `ip:port` of its agent on the network; agents find cables to it themselves.
    #[schemars(length(min = 3, max = 64))]
    pub address: String,
}

/// Eviction priority of files when space is short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Retention {
    /// Priority of the most important Tier whose deployments name the model. Among copies that no deployment
    /// needs, those of the lowest priority are evicted first.
    #[serde(default)]
    pub priority: i32,
    /// Whether the copy is never evicted.
    #[serde(default)]
    pub pinned: bool,
}

/// How much of a model a node has to hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum CopyMode {
    /// Configuration and tensor sizes only.
    #[default]
    Headers,
    /// Every file.
    Files,
    /// A value from a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Progress and result, as the agent reports them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelCopyStatus {
    /// The generation that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Commit that an `hf://` revision resolved to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// SHA-256 of the manifest of all files, once verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Digest that identifies the bytes whatever their source, once verified: the BLAKE3 of the lines
    /// `<sha256> <blake3> <size> <file>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// The model's shape, as read from the headers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<ModelShape>,
    /// Bytes on disk.
    #[serde(default)]
    pub bytes_done: u64,
    /// Bytes wanted; 0 while unknown.
    #[serde(default)]
    pub bytes_total: u64,
    /// Bytes per second over the last seconds.
    #[serde(default)]
    pub bytes_per_second: u64,
    /// Bytes done and total, for display: `1.2Gi / 4.0Gi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<String>,
    /// Transfer rate, for display while bytes arrive: `112Mi/s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<String>,
    /// Remaining time at that rate, for display: `4m10s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta: Option<String>,
    /// Where the bytes come from, for display: `source`, or the nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// When an engine last had the files open, to within ten minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_used_time: Option<Time>,
    /// Resolved, Downloaded, Verified, Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}
