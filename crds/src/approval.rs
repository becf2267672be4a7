//! Approval: a request for a person's approval, created by the operator before an action for which a Tier
//! requires one, and the decision. An Approval covers one plan; another plan needs another Approval.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::LocalReference;

/// A request for a person's approval of an action that a deployment needs. The operator creates it; a person
/// sets `decision` and `decidedBy`: `russet approve NAME`.
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
     "message": "a decision names who made it: set decision and decidedBy together, or use `russet approve`"},
]))]
pub struct ApprovalSpec {
    /// The ModelDeployment that needs the action, in the same namespace.
    #[schemars(extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "deploymentRef is immutable; create another Approval for another request"}]))]
    pub deployment_ref: LocalReference,
    /// The action to approve.
    #[schemars(extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "action is immutable; create another Approval for another request"}]))]
    pub action: ApprovalAction,
    /// Digest of the plan to run and of the replicas that have to stop for it.
    #[schemars(regex(pattern = r"^[0-9a-f]{16}$"), extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "planHash is immutable; create another Approval for another request"}]))]
    pub plan_hash: String,
    /// The request as a sentence.
    #[serde(default)]
    #[schemars(length(max = 2048), extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "message is immutable; create another Approval for another request"}]))]
    pub message: String,
    /// Deployments whose replicas would be stopped, as `namespace/name`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "affects is immutable; create another Approval for another request"}]))]
    pub affects: Vec<String>,
    /// From this time on the decision is no longer valid. The operator asks again where approval is still
    /// needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "expiresAt is immutable; create another Approval for another request"}]))]
    pub expires_at: Option<Time>,
    /// The decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<ApprovalDecision>,
    /// The person or client that decided: the user name under which the API server authenticates the request
    /// that sets `decision`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub decided_by: Option<String>,
}

impl ApprovalSpec {
    /// Whether the Approval has expired at `now`, decided or not.
    pub fn is_expired(&self, now: jiff::Timestamp) -> bool {
        self.expires_at.as_ref().is_some_and(|expires| expires.0 <= now)
    }
}

/// An action that may need an Approval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum ApprovalAction {
    /// Stopping replicas of lower priority to make room.
    #[default]
    Preempt,
    /// Replacing a ready replica because its spec was edited.
    Rollout,
    /// A value from a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// A person's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ApprovalDecision {
    /// The action may be done.
    Approved,
    /// The action may not be done.
    Denied,
    /// A value from a newer release; counts as no decision.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Status of an Approval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ApprovalStatus {
    /// The generation that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// When the operator saw the decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decided_at: Option<Time>,
    /// Ready: a decision was made, or is no longer needed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}
