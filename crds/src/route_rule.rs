//! Rules of a ModelRoute: which requests of a name go to which of its targets.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{LocalReference, OnUnavailable, Schedule, Zone};

/// Targets for the requests that match.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouteRule {
    /// Its name, by which `russet why` and `russet explain route` show it.
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub name: String,
    /// Which requests; all that is named must hold. Empty: every request.
    #[serde(default)]
    pub r#match: RouteMatch,
    /// Where they go.
    #[schemars(length(min = 1, max = 16))]
    pub targets: Vec<RouteTarget>,
    /// Which target gets a request.
    #[serde(default)]
    pub pick: TargetPick,
    /// How far from home its requests may be answered; it can only narrow the route's own. Absent: as far as the route's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<Zone>,
    /// What the gateway does with its requests while no target is ready but one will be. Absent: as the route says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_unavailable: Option<OnUnavailable>,
    /// How long the gateway holds them then. Absent: as the route says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 3600))]
    pub deadline_seconds: Option<u32>,
    /// Why its requests go from a deployment on to a provider that is named after it; `[]`: for no cause. Absent: as the route
    /// says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4), extend("x-kubernetes-list-type" = "set"))]
    pub fallback_on: Option<Vec<FallbackCause>>,
    /// The longest expected wait for a first token that is no such cause. Absent: as the route says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 3600))]
    pub max_wait_seconds: Option<u32>,
    /// Milliseconds without a first token after which another replica gets the request too. Absent: as the route says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10, max = 600_000))]
    pub hedge_after_milliseconds: Option<u32>,
    /// The highest priority of its requests; those of a key with a lower one keep that. Absent: the key's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = -100, max = 100))]
    pub max_priority: Option<i32>,
}

/// What a request must be to match.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "!has(self.minPromptTokens) || !has(self.maxPromptTokens) || self.minPromptTokens <= self.maxPromptTokens",
     "message": "minPromptTokens is above maxPromptTokens: no request can match"},
]))]
pub struct RouteMatch {
    /// One of these tasks. The header `x-russet-task` names the task, or a suffix of the model's name such as `auto:code`;
    /// else the gateway tells it from the request.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4), extend("x-kubernetes-list-type" = "set"))]
    pub tasks: Vec<RouteTask>,
    /// A complexity above this. It has 0 to 100 percent, by features that the gateway counts, and never falls while a
    /// conversation goes on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 99))]
    pub complexity_above_percent: Option<u32>,
    /// At least so many tokens of prompt, tools and history included; the gateway estimates 4 bytes a token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 16_777_216))]
    pub min_prompt_tokens: Option<u32>,
    /// At most so many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 16_777_216))]
    pub max_prompt_tokens: Option<u32>,
    /// Whether it offers tools.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tools: Option<Presence>,
    /// These labels: those of its AccessKey, and those of the header `x-russet-labels`, such as `team=blue,urgent=yes`,
    /// which change none of the key's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16))]
    pub labels: BTreeMap<String, String>,
    /// An AccessKey with one of these names; `*` matches any run of characters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 253)), extend("x-kubernetes-list-type" = "set"))]
    pub keys: Vec<String>,
    /// One of these times of the day.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub schedules: Vec<Schedule>,
}

/// What a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum RouteTask {
    /// A conversation.
    Chat,
    /// It has code, or tools that change files.
    Code,
    /// It asks for much thinking.
    Reasoning,
    /// It asks for vectors or scores.
    Embed,
    /// A value from a newer release; no request matches it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Whether a request has something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Presence {
    /// It has some.
    Present,
    /// It has none.
    Absent,
    /// A value from a newer release; no request matches it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Which of several targets gets a request. The others take it where that one is not ready, full or lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TargetPick {
    /// The first; with weights, a share of the conversations for each.
    #[default]
    InOrder,
    /// The one expected to answer first: by its queues, its rates, and what it has cached of the prompt.
    Fastest,
    /// The one whose model has the most parameters.
    Largest,
    /// The one that costs least: deployments cost nothing, providers what their prices say, and one without a price comes last.
    Cheapest,
    /// A value from a newer release; treated like `InOrder`.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// A target of a route: a deployment, a model of a provider, or a Pipeline.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "[has(self.deploymentRef), has(self.providerRef), has(self.pipelineRef)].exists_one(is, is)",
     "message": "a target has one of deploymentRef, providerRef and pipelineRef"},
    {"rule": "has(self.pipelineRef) || !has(self.parameter)",
     "message": "parameter is one of the Pipeline of a target with a pipelineRef"},
    {"rule": "has(self.providerRef) == has(self.model)",
     "message": "a target with a providerRef names one of its models, and no other target does"},
]))]
pub struct RouteTarget {
    /// A ModelDeployment of the same namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deployment_ref: Option<LocalReference>,
    /// A ModelProvider of the same namespace, in a zone that the route allows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider_ref: Option<LocalReference>,
    /// The model, as the provider names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub model: Option<String>,
    /// A Pipeline of the same namespace: each request starts a run of it as the holder of its AccessKey, which is of the same
    /// namespace, and what the last step made is the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pipeline_ref: Option<LocalReference>,
    /// The parameter of the Pipeline that gets the text of the last message; all others have defaults. Absent: `prompt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63), regex(pattern = r"^[a-z][a-z0-9_]{0,62}$"))]
    pub parameter: Option<String>,
    /// With `pick: InOrder`: its share of the conversations, by the sum of all weights. A conversation stays where it began.
    /// 0: it only takes what the others cannot. Absent everywhere: the first target takes all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1000))]
    pub weight: Option<u32>,
}

impl RouteTarget {
    /// A deployment, without a weight.
    pub fn deployment(name: impl Into<String>) -> Self {
        Self { deployment_ref: Some(LocalReference::new(name)), ..Self::default() }
    }

    /// A model of a provider, without a weight.
    pub fn provider(name: impl Into<String>, model: impl Into<String>) -> Self {
        Self { provider_ref: Some(LocalReference::new(name)), model: Some(model.into()), ..Self::default() }
    }

    /// Name of the deployment, if it is one.
    pub fn deployment_name(&self) -> Option<&str> {
        self.deployment_ref.as_ref().map(|reference| reference.name.as_str())
    }

    /// Name of the provider, if it is a model of one.
    pub fn provider_name(&self) -> Option<&str> {
        self.provider_ref.as_ref().map(|reference| reference.name.as_str())
    }

    /// Name of the Pipeline, if it is one.
    pub fn pipeline_name(&self) -> Option<&str> {
        self.pipeline_ref.as_ref().map(|reference| reference.name.as_str())
    }

    /// The parameter of the Pipeline that gets the text of the last message.
    pub fn parameter_name(&self) -> &str {
        self.parameter.as_deref().unwrap_or("prompt")
    }
}

/// Why a request goes from a deployment on to a provider that is named after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum FallbackCause {
    /// No replica is ready.
    Unavailable,
    /// All replicas are full.
    Overloaded,
    /// It would have to wait longer than `maxWaitSeconds`, or than the request has time.
    Deadline,
    /// An engine failed with it.
    Error,
    /// A value from a newer release; it is never the cause.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}
