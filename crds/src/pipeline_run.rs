//! PipelineRun: one run of a Pipeline, like a Job. A gateway does its steps, keeps what they make, and writes here how far it
//! is; a run that failed goes on with the failed step once `attempt` is raised.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{LocalReference, Money, Zone};

/// One run of a Pipeline. The steps are those that the Pipeline has when the run starts.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "russet.dev",
    version = "v1alpha1",
    kind = "PipelineRun",
    namespaced,
    status = "PipelineRunStatus",
    derive = "PartialEq",
    derive = "Default",
    shortname = "pplrun",
    category = "russet",
    printcolumn(name = "Pipeline", type_ = "string", json_path = ".spec.pipelineRef.name"),
    printcolumn(name = "Steps", type_ = "string", json_path = ".status.progress"),
    printcolumn(name = "At", type_ = "string", json_path = ".status.step"),
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
    printcolumn(
        name = "Tokens",
        type_ = "integer",
        json_path = ".status.usage.completionTokens",
        priority = 1
    ),
    printcolumn(name = "Cost", type_ = "string", json_path = ".status.usage.cost", priority = 1),
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
    {"rule": "self.pipelineRef == oldSelf.pipelineRef && has(self.keyRef) == has(oldSelf.keyRef) && (!has(self.keyRef) || self.keyRef == oldSelf.keyRef) && has(self.parameters) == has(oldSelf.parameters) && (!has(self.parameters) || self.parameters == oldSelf.parameters) && has(self.zone) == has(oldSelf.zone) && (!has(self.zone) || self.zone == oldSelf.zone)",
     "message": "a PipelineRun runs as it was written; of what it does, only attempt may be raised; create another one"},
    {"rule": "self.attempt >= oldSelf.attempt", "message": "attempt can only be raised: it resumes a run that failed"},
]))]
pub struct PipelineRunSpec {
    /// The Pipeline, in the same namespace.
    pub pipeline_ref: LocalReference,
    /// The AccessKey of the same namespace as whose holder it asks models: with its models, budgets, zone and limits. Who may
    /// create PipelineRuns may so use the keys of the namespace. Absent: nobody's, while no AccessKey exists at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_ref: Option<LocalReference>,
    /// What the Pipeline is given.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub parameters: Vec<ParameterValue>,
    /// How far from home anything of this run may go; it can only narrow the Pipeline's zone. Absent: as far as that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<Zone>,
    /// Seconds after its end at which the run is deleted, with what it made. Absent: it stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 31_536_000))]
    pub ttl_seconds_after_finished: Option<u32>,
    /// Raise it to resume a run that failed, at the step that failed: `russet pipeline resume`.
    #[serde(default = "first")]
    #[schemars(range(min = 1, max = 1000))]
    pub attempt: u32,
}

/// The value of a parameter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ParameterValue {
    /// Its name.
    #[schemars(length(max = 63), regex(pattern = r"^[a-z][a-z0-9_]{0,62}$"))]
    pub name: String,
    /// The text, or the id of a file.
    #[schemars(length(max = 65536))]
    pub value: String,
    /// SHA-256 of the file; the run fails where the file is another one. Absent: it is not looked at. Of a text that is empty
    /// here: that of the text, which the gateway of a request has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9a-f]{64}$"))]
    pub sha256: Option<String>,
}

fn first() -> u32 {
    1
}

/// How far a run is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PipelineRunStatus {
    /// The generation that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The gateway that runs it and keeps what the steps made. Another one begins anew when this one no longer renews
    /// `renewedAt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runner: Option<String>,
    /// When that gateway last renewed its claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renewed_at: Option<Time>,
    /// The attempt that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// When the run started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Time>,
    /// When it ended, successful or not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<Time>,
    /// Steps that are done or skipped, and all of them, for display: `2/4`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<String>,
    /// The step that it is at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// The steps, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub steps: Vec<StepStatus>,
    /// What all steps used, as far as it was counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<StepUsage>,
    /// Ready, Reconciling, Stalled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// How far a step is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StepStatus {
    /// Its name.
    pub name: String,
    /// How far it is.
    pub state: StepState,
    /// With `forEach` the values that are done, and all of them: `3/10`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub items: Option<String>,
    /// When it began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Time>,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<Time>,
    /// Digest of what it does, `sha256:…`, where a person must approve that: the gateway shows it at `/v1/artifacts/DIGEST`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub action: Option<String>,
    /// Digest of its output, `sha256:…`: the gateway has it at `/v1/artifacts/DIGEST`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<String>,
    /// Bytes of its output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_bytes: Option<u64>,
    /// The Approval that it waits for, or that allowed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub approval: Option<String>,
    /// Who decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decided_by: Option<String>,
    /// What it used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<StepUsage>,
    /// Why it failed, was skipped or could not be undone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// The state of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum StepState {
    /// Steps before it are not done yet.
    #[default]
    Pending,
    /// It is being done.
    Running,
    /// It waits for a person.
    AwaitingApproval,
    /// It is done.
    Done,
    /// Its conditions do not hold.
    Skipped,
    /// It failed for good.
    Failed,
    /// It was done, and undone because a later one failed.
    Compensated,
    /// A value from a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// What was used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StepUsage {
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Tokens of answers.
    pub completion_tokens: u64,
    /// What providers cost. Absent where none answered, or nobody knows its price.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Money>,
    /// Thousandths of a joule that machines of this cluster drew, of the requests of which that is known; absent where of
    /// none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub millijoules: Option<u64>,
    /// What that electricity cost, where it has a price.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub electricity: Option<Money>,
}
