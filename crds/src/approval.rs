//! Approval: a question to a person, asked by the operator before it does what a Tier wants approved, and the
//! answer. It is about one plan: a plan that asks for anything else is another question.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::LocalReference;

/// Something that a deployment needs and that waits for a person's word. The operator asks, a person sets
/// `decision` and `decidedBy`: `russet approve NAME`.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "russet.dev",
    version = "v1alpha1",
    kind = "Approval",
    namespaced,
    status = "ApprovalStatus",
    derive = "PartialEq",
    derive = "Default",
    shortname = "rapproval",
    category = "russet",
    printcolumn(name = "Deployment", type_ = "string", json_path = ".spec.deploymentRef.name"),
    printcolumn(name = "Action", type_ = "string", json_path = ".spec.action"),
    printcolumn(name = "Decision", type_ = "string", json_path = ".spec.decision"),
    printcolumn(name = "By", type_ = "string", json_path = ".spec.decidedBy"),
    printcolumn(name = "Expires", type_ = "string", json_path = ".spec.expiresAt"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status",
        priority = 1
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        priority = 1
    ),
    printcolumn(name = "Message", type_ = "string", json_path = ".spec.message", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "has(self.decision) == has(self.decidedBy)",
     "message": "a decision is somebody's: set decision and decidedBy together, or use `russet approve`"},
]))]
pub struct ApprovalSpec {
    /// The ModelDeployment it serves, in the same namespace.
    #[schemars(extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "deploymentRef is immutable; another question is another Approval"}]))]
    pub deployment_ref: LocalReference,
    /// What is to be done.
    #[schemars(extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "action is immutable; another question is another Approval"}]))]
    pub action: ApprovalAction,
    /// Digest of what is to run and of who has to stop for it.
    #[schemars(regex(pattern = r"^[0-9a-f]{16}$"), extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "planHash is immutable; another question is another Approval"}]))]
    pub plan_hash: String,
    /// The question, for people.
    #[serde(default)]
    #[schemars(length(max = 2048), extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "message is immutable; another question is another Approval"}]))]
    pub message: String,
    /// Deployments of which replicas would be stopped, as `namespace/name`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "affects is immutable; another question is another Approval"}]))]
    pub affects: Vec<String>,
    /// From then on the answer counts no more, and is asked for again where it is still needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "expiresAt is immutable; another question is another Approval"}]))]
    pub expires_at: Option<Time>,
    /// The answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<ApprovalDecision>,
    /// Who gave it: the user name by which the API server knows whoever sets `decision`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub decided_by: Option<String>,
}

impl ApprovalSpec {
    /// Whether the answer counts no more at `now`, or is no longer waited for.
    pub fn is_expired(&self, now: jiff::Timestamp) -> bool {
        self.expires_at.as_ref().is_some_and(|expires| expires.0 <= now)
    }
}

/// What may wait for an Approval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum ApprovalAction {
    /// Stopping replicas of lower priority to make room.
    #[default]
    Preempt,
    /// Replacing a replica that answers because its spec was edited.
    Rollout,
    /// A word of a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// A person's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ApprovalDecision {
    /// It may be done.
    Approved,
    /// It may not.
    Denied,
    /// A word of a newer release; no answer.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// What became of a question.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ApprovalStatus {
    /// Generation this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// When the operator saw the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decided_at: Option<Time>,
    /// Ready: it was answered, or needs no answer any more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}
