//! ModelRoute: model names for clients, the deployments behind them, and the handling of requests while none
//! is ready. There are no rules or weights yet: the first ready target gets the request.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::LocalReference;

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
pub struct ModelRouteSpec {
    /// Model names that clients may send; `*` matches any run of characters.
    #[schemars(length(min = 1, max = 64))]
    pub models: Vec<String>,
    /// Target deployments, tried in order.
    #[schemars(length(min = 1, max = 16))]
    pub targets: Vec<RouteTarget>,
    /// What the gateway does with a request while no target is ready but one will be.
    #[serde(default)]
    pub on_unavailable: OnUnavailable,
    /// With `onUnavailable: Queue`: how long the gateway holds a request.
    #[serde(default = "deadline_seconds")]
    #[schemars(range(min = 1, max = 3600))]
    pub deadline_seconds: u32,
}

/// Longer than it takes to read a model of hundreds of gigabytes from disk. Half the default timeout of
/// OpenAI's clients, so that they get the error, and so that the response itself still has time.
fn deadline_seconds() -> u32 {
    300
}

impl Default for ModelRouteSpec {
    fn default() -> Self {
        Self {
            models: Vec::new(),
            targets: Vec::new(),
            on_unavailable: OnUnavailable::default(),
            deadline_seconds: deadline_seconds(),
        }
    }
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

/// A target of a route.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouteTarget {
    /// A ModelDeployment of the same namespace.
    pub deployment_ref: LocalReference,
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
