//! ModelRoute: names clients use, the deployments that answer to them, and what becomes of a request while none
//! does. Rules and weights join later; for now the first target that answers takes the request.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::LocalReference;

/// Names for deployments.
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
    /// Model names clients may send; `*` matches any run of characters.
    #[schemars(length(min = 1, max = 64))]
    pub models: Vec<String>,
    /// Deployments that answer, tried in order.
    #[schemars(length(min = 1, max = 16))]
    pub targets: Vec<RouteTarget>,
    /// What becomes of a request while no target answers, though one will.
    #[serde(default)]
    pub on_unavailable: OnUnavailable,
    /// With `onUnavailable: Queue`: how long a request is held after it came.
    #[serde(default = "deadline_seconds")]
    #[schemars(range(min = 1, max = 3600))]
    pub deadline_seconds: u32,
}

/// Longer than a model of hundreds of gigabytes takes to be read from a disk; half of what OpenAI's clients wait by
/// default, so that they hear why, and the answer itself still has time.
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

/// What becomes of a request that nobody can answer just now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnUnavailable {
    /// The gateway holds it until a target answers.
    #[default]
    Queue,
    /// It is refused at once, and wakes nothing that sleeps.
    Fail,
    /// A word of a newer release; as `Queue`.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Something that answers.
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
    /// Generation this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// ResolvedRefs, Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}
