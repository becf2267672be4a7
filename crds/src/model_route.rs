//! ModelRoute: names clients use, and the deployments that answer to them. Rules, weights and
//! policies join later; for now the first target that answers takes the request.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::LocalReference;

/// Names for deployments.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
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
