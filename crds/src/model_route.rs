//! ModelRoute: model names for clients, the deployments behind them, by rules and shares, and the handling of requests
//! while none is ready.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{FallbackCause, RouteRule, RouteTarget, TargetPick, Zone};

/// Model names for deployments.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "russet.dev",
    version = "v1alpha1",
    kind = "ModelRoute",
    namespaced,
    status = "ModelRouteStatus",
    derive = "PartialEq",
    derive = "Default",
    shortname = "mroute",
    category = "russet",
    printcolumn(name = "Models", type_ = "string", json_path = ".spec.models[*]"),
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
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "!has(self.rules) || self.rules.all(rule, self.rules.exists_one(other, other.name == rule.name))",
     "message": "two rules have one name"},
]))]
pub struct ModelRouteSpec {
    /// Model names that clients may send; `*` matches any run of characters.
    #[schemars(length(min = 1, max = 64))]
    pub models: Vec<String>,
    /// Targets for some of the requests: the first rule that matches decides, and a request whose rule has no target that
    /// can answer goes to no other rule.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub rules: Vec<RouteRule>,
    /// Targets of requests that no rule matches.
    #[schemars(length(min = 1, max = 16))]
    pub targets: Vec<RouteTarget>,
    /// Which of these targets gets a request.
    #[serde(default)]
    pub pick: TargetPick,
    /// How far from home its requests may be answered. Labels `russet.dev/zone` of the AccessKey, of the namespaces of key and
    /// route, and of the header `x-russet-labels` can only narrow it.
    #[serde(default)]
    pub zone: Zone,
    /// Why a request goes from a deployment on to a provider that is named after it; otherwise it waits for the deployment.
    #[serde(default = "fallback_on")]
    #[schemars(length(max = 4), extend("x-kubernetes-list-type" = "set"))]
    pub fallback_on: Vec<FallbackCause>,
    /// With `fallbackOn: [Deadline]`: the longest expected wait for a first token. Absent: the time that the request has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 3600))]
    pub max_wait_seconds: Option<u32>,
    /// Milliseconds without a first token after which another ready replica of the same deployment gets the request too: of the
    /// two the one whose first token comes first answers, and the other one is cancelled. Absent: no other gets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10, max = 600_000))]
    pub hedge_after_milliseconds: Option<u32>,
    /// Keeps answers to requests that have one answer, and gives them to the same caller again. Absent: none is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<RouteCache>,
    /// What the gateway does with a request while no target is ready but one will be.
    #[serde(default)]
    pub on_unavailable: OnUnavailable,
    /// With `onUnavailable: Queue`: how long the gateway holds a request.
    #[serde(default = "deadline_seconds")]
    #[schemars(range(min = 1, max = 3600))]
    pub deadline_seconds: u32,
}

impl ModelRouteSpec {
    /// All targets, those of rules first.
    pub fn all_targets(&self) -> impl Iterator<Item = &RouteTarget> {
        self.rules.iter().flat_map(|rule| &rule.targets).chain(&self.targets)
    }
}

/// Longer than it takes to read a model of hundreds of gigabytes from disk. Half the default timeout of
/// OpenAI's clients, so that they get the error, and so that the response itself still has time.
fn deadline_seconds() -> u32 {
    300
}

fn fallback_on() -> Vec<FallbackCause> {
    use FallbackCause::{Deadline, Error, Overloaded, Unavailable};
    vec![Unavailable, Overloaded, Deadline, Error]
}

impl Default for ModelRouteSpec {
    fn default() -> Self {
        Self {
            models: Vec::new(),
            rules: Vec::new(),
            targets: Vec::new(),
            pick: TargetPick::default(),
            zone: Zone::default(),
            fallback_on: fallback_on(),
            max_wait_seconds: None,
            hedge_after_milliseconds: None,
            cache: None,
            on_unavailable: OnUnavailable::default(),
            deadline_seconds: deadline_seconds(),
        }
    }
}

/// Answers that a route keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouteCache {
    /// Seconds after which an answer is forgotten.
    #[schemars(range(min = 1, max = 604_800))]
    pub ttl_seconds: u32,
}

/// What the gateway does with a request while no target is ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnUnavailable {
    /// The gateway holds the request until a target is ready.
    #[default]
    Queue,
    /// The gateway rejects the request at once and scales nothing up.
    Fail,
    /// A value from a newer release; treated like `Queue`.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Whether the route works.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelRouteStatus {
    /// The generation that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// ResolvedRefs, Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}
