//! Approval: a request for a person's approval and the decision. The operator creates it before an action for which a Tier
//! requires one, a gateway before a step of a Pipeline that wants one. It covers what its hash says; anything else needs
//! another Approval.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::LocalReference;

/// A request for a person's approval of an action that a deployment or the step of a PipelineRun needs. The operator or a
/// gateway creates it; a person sets `decision` and `decidedBy`: `russet approve NAME`.
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
    printcolumn(name = "Run", type_ = "string", json_path = ".spec.pipelineRunRef.name"),
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
    {"rule": "has(self.deploymentRef) != has(self.pipelineRunRef)",
     "message": "an Approval is for a deployment or for a run: set one of deploymentRef and pipelineRunRef"},
]))]
pub struct ApprovalSpec {
    /// The ModelDeployment that needs the action, in the same namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "deploymentRef is immutable; create another Approval for another request"}]))]
    pub deployment_ref: Option<LocalReference>,
    /// The PipelineRun that needs the action, in the same namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "pipelineRunRef is immutable; create another Approval for another request"}]))]
    pub pipeline_run_ref: Option<LocalReference>,
    /// The action to approve.
    #[schemars(extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "action is immutable; create another Approval for another request"}]))]
    pub action: ApprovalAction,
    /// Digest of what will be done: of the plan to run and of the replicas that have to stop for it, or of all that the step of a
    /// PipelineRun sends (SHA-256 of what the gateway shows at `/v1/artifacts`).
    #[schemars(regex(pattern = r"^([0-9a-f]{16}|[0-9a-f]{64})$"), extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "planHash is immutable; create another Approval for another request"}]))]
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
    /// The deployment that needs it.
    pub fn deployment(&self) -> Option<&str> {
        self.deployment_ref.as_ref().map(|deployment| deployment.name.as_str())
    }

    /// The run that needs it.
    pub fn pipeline_run(&self) -> Option<&str> {
        self.pipeline_run_ref.as_ref().map(|run| run.name.as_str())
    }

    /// Kind and name of what needs it.
    pub fn subject(&self) -> String {
        match (self.deployment(), self.pipeline_run()) {
            (Some(deployment), _) => format!("ModelDeployment {deployment}"),
            (None, Some(run)) => format!("PipelineRun {run}"),
            (None, None) => "nothing".to_owned(),
        }
    }

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
    /// Doing a step of a Pipeline.
    Step,
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
