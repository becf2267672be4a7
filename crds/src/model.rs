//! Model: where weights come from. What they are is read from their headers by an agent and shown
//! in the status; nothing in a Model says where it runs.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use russet_wire::shape::ModelShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::LocalReference;

/// A model and its source.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "russet.dev",
    version = "v1alpha1",
    kind = "Model",
    namespaced,
    status = "ModelStatus",
    derive = "PartialEq",
    derive = "Default",
    shortname = "mdl",
    category = "russet",
    printcolumn(name = "Source", type_ = "string", json_path = ".spec.source.uri"),
    printcolumn(name = "Architecture", type_ = "string", json_path = ".status.shape.architecture"),
    printcolumn(name = "Size", type_ = "string", json_path = ".status.size"),
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
    printcolumn(name = "Copies", type_ = "integer", json_path = ".status.copies"),
    printcolumn(name = "Preloaded", type_ = "string", json_path = ".status.preloaded"),
    printcolumn(
        name = "Preload",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Preloaded\")].reason",
        priority = 1
    ),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Preloaded\")].message",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ModelSpec {
    /// Where the files come from. Immutable: another source is another Model.
    #[schemars(extend("x-kubernetes-validations" = [{
        "rule": "self == oldSelf",
        "message": "source is immutable; create another Model for another source"
    }]))]
    pub source: ModelSource,
    /// Which nodes hold the files before anybody needs them. Absent: files come with the deployments that
    /// need them, and stay until their room is needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preload: Option<Preload>,
}

/// Which nodes hold a model's files ahead of need.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "self.policy != 'OnDemand' || !(has(self.copies) || has(self.poolRef))",
     "message": "OnDemand preloads nothing: leave poolRef and copies out, or use the policy Always or Pinned"},
]))]
pub struct Preload {
    /// What is promised.
    pub policy: PreloadPolicy,
    /// The NodePool whose nodes hold it; absent: all nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool_ref: Option<LocalReference>,
    /// How many nodes at least hold it; absent: every node of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024))]
    pub copies: Option<u32>,
}

/// What is promised of a model's files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PreloadPolicy {
    /// They come with the deployments that need them, and may go when nobody does and room is needed.
    #[default]
    OnDemand,
    /// They are fetched ahead of need, and never fewer are kept.
    Always,
    /// As `Always`, and no copy at all is removed to make room, wherever it is.
    Pinned,
    /// A word of a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Where a model's files come from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelSource {
    /// `hf://owner/name`, `https://host/folder`, `s3://bucket/folder`, `gs://bucket/folder`, `az://container/folder`,
    /// `oci://registry/name:tag`, `file:///folder` or `builtin://smoke`, which agents carry.
    #[schemars(length(min = 8, max = 2048), regex(pattern = r"^(hf|https|s3|gs|az|oci|file|builtin)://.+"))]
    pub uri: String,
    /// Branch, tag or commit of an `hf://` source, or the tag of an `oci://` one; resolved once, to a commit or to the
    /// digest of a manifest, and kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 255))]
    pub revision: Option<String>,
    /// Secret of the Model's namespace that opens the source: `token` for `hf://` and `https://`; docs/models.md names
    /// the keys of the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<LocalReference>,
    /// SHA-256 of the manifest (the sorted lines `<sha256>  <file>`), when the owner wants to pin bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9a-f]{64}$"))]
    pub sha256: Option<String>,
}

impl ModelSource {
    /// Whether every agent finds the files on its own machine, so that no bytes enter the cluster for them.
    pub fn is_local(&self) -> bool {
        ["file://", "builtin://"].iter().any(|scheme| self.uri.starts_with(scheme))
    }
}

/// What the model is, as read from its headers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelStatus {
    /// Generation this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Commit an `hf://` revision resolved to, or digest of the manifest of an `oci://` one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// Sizes and layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<ModelShape>,
    /// Bytes of all files, as a quantity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<String>,
    /// KV-cache bytes per token of context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_bytes_per_token: Option<u64>,
    /// Nodes that hold every file, verified.
    #[serde(default)]
    pub copies: u32,
    /// Nodes that are to hold every file ahead of need, by `spec.preload`.
    #[serde(default)]
    pub wanted_copies: u32,
    /// For people: how many of the wanted copies are there, such as `1/2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preloaded: Option<String>,
    /// Resolved, Supported, Ready; Preloaded with a `spec.preload`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}
