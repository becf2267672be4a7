//! ModelCopy: one model's headers or files on one node. The operator asks for it, the node's agent
//! carries it out and reports.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use russet_wire::shape::ModelShape;
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
    /// Source, copied from the Model so that the agent needs no other object; its `secretRef` is of
    /// the Model's namespace.
    #[schemars(extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "source is immutable"}]))]
    pub source: ModelSource,
    /// Commit all copies must come from, once one agent has resolved it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// The node.
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "nodeName is immutable"}]))]
    pub node_name: String,
    /// How much of the model is wanted there.
    #[serde(default)]
    pub want: CopyMode,
    /// What may become of the files where room is short. The operator's; absent means priority 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<Retention>,
    /// Where the bytes come from. The operator's, so that they enter the cluster once; absent: from the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub supply: Option<CopySource>,
}

impl ModelCopySpec {
    /// All but the retention and the supply: what the node's agent has to do. Who asks for files, who says how
    /// long they are kept and who says where they come from write different fields.
    #[must_use]
    pub fn agent_work(&self) -> Self {
        Self { retention: None, supply: None, ..self.clone() }
    }
}

/// The other nodes that files come from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CopySource {
    /// What names the bytes, as the first node that verified them reported it. Absent while another node still
    /// fetches them from the source: this one waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9a-f]{64}$"))]
    pub content: Option<String>,
    /// Nodes that have them, or some of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub from: Vec<CopyPeer>,
}

/// A node whose agent gives files to others.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CopyPeer {
    /// The node.
    #[schemars(length(min = 1, max = 253))]
    pub node_name: String,
    /// `ip:port` at which its agent answers others over the network; cables to it are found by the agents.
    #[schemars(length(min = 3, max = 64))]
    pub address: String,
}

/// What may become of files where room is short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Retention {
    /// That of the most important Tier whose deployments name the model. Of copies that nobody needs, those
    /// of the lowest priority go first.
    #[serde(default)]
    pub priority: i32,
    /// Whether it is never removed to make room.
    #[serde(default)]
    pub pinned: bool,
}

/// How much of a model is wanted on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum CopyMode {
    /// Configuration and tensor sizes only.
    #[default]
    Headers,
    /// Every file.
    Files,
    /// A word of a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// What the agent has done.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelCopyStatus {
    /// Generation this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Commit an `hf://` revision resolved to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// SHA-256 of the manifest of all files, once verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// What names the bytes, wherever they came from, once verified: the BLAKE3 of the lines
    /// `<sha256> <blake3> <size> <file>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// What the headers say.
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
    /// For people: `1.2Gi / 4.0Gi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<String>,
    /// For people: `112Mi/s`, while bytes flow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<String>,
    /// For people: `4m10s`, the time left at that rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta: Option<String>,
    /// For people: `source`, or the nodes that files come from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// When an engine last had the files open, within ten minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_used_time: Option<Time>,
    /// Resolved, Downloaded, Verified, Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}
