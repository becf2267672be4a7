//! Model: the source of a model's weights. An agent reads the headers; the status shows the shape. Not here:
//! where the model runs.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use russet_model::shape::ModelShape;
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
    /// Where the files come from. Immutable; for another source, create another Model.
    #[schemars(extend("x-kubernetes-validations" = [{
        "rule": "self == oldSelf",
        "message": "source is immutable; create another Model for another source"
    }]))]
    pub source: ModelSource,
    /// Nodes that hold the files before a deployment needs them. Absent: files are fetched for the
    /// deployments that need them, and are evicted when their space is needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preload: Option<Preload>,
}

/// Nodes that hold a model's files before a deployment needs them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "self.policy != 'OnDemand' || !(has(self.copies) || has(self.poolRef))",
     "message": "OnDemand preloads nothing: leave poolRef and copies out, or use the policy Always or Pinned"},
]))]
pub struct Preload {
    /// How the files are fetched and kept.
    pub policy: PreloadPolicy,
    /// The NodePool whose nodes hold the files; absent: all nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool_ref: Option<LocalReference>,
    /// Minimum number of nodes that hold the files; absent: every node of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024))]
    pub copies: Option<u32>,
}

/// How a model's files are fetched and kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PreloadPolicy {
    /// The files are fetched for the deployments that need them, and may be evicted when none does and space
    /// is needed.
    #[default]
    OnDemand,
    /// The files are fetched before they are needed, and never fewer copies are kept.
    Always,
    /// As `Always`, and no copy on any node is ever evicted.
    Pinned,
    /// A value from a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Where a model's files come from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelSource {
    /// One of `hf://owner/name`, `https://host/folder`, `s3://bucket/folder`, `gs://bucket/folder`,
    /// `az://container/folder`, `oci://registry/name:tag`, `file:///folder` or `builtin://smoke`, a model
    /// built into agents. An `hf://`, `https://` or `file://` source may end in the name of a GGUF file.
    #[schemars(length(min = 8, max = 2048), regex(pattern = r"^(hf|https|s3|gs|az|oci|file|builtin)://.+"))]
    pub uri: String,
    /// Branch, tag or commit of an `hf://` source, or the tag of an `oci://` one. Resolved once, to a commit
    /// or to a manifest digest, and kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 255))]
    pub revision: Option<String>,
    /// Secret in the Model's namespace with the source's credentials: `token` for `hf://` and `https://`;
    /// docs/models.md names the keys of the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<LocalReference>,
    /// SHA-256 of the manifest (the sorted lines `<sha256>  <file>`), to pin the bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9a-f]{64}$"))]
    pub sha256: Option<String>,
}

impl ModelSource {
    /// Whether every agent has the files on its own machine, so that no bytes are transferred for them.
    pub fn is_local(&self) -> bool {
        ["file://", "builtin://"].iter().any(|scheme| self.uri.starts_with(scheme))
    }
}

/// The model's properties, as read from its headers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelStatus {
    /// The generation that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Commit that an `hf://` revision resolved to, or manifest digest of an `oci://` one.
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
    /// Nodes that have to hold every file in advance, by `spec.preload`.
    #[serde(default)]
    pub wanted_copies: u32,
    /// Present and wanted preloaded copies, for display, such as `1/2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preloaded: Option<String>,
    /// Resolved, Supported, Ready; Preloaded with a `spec.preload`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}
