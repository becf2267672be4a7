//! HTTPEndpoint: an address that steps of Pipelines may call. It is a kind of its own, so that who may write Pipelines does not
//! decide where they reach.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{LocalReference, Zone};

/// An address that steps of the Pipelines of its namespace may call.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "russet.dev",
    version = "v1alpha1",
    kind = "HTTPEndpoint",
    root = "HttpEndpoint",
    plural = "httpendpoints",
    namespaced,
    derive = "PartialEq",
    derive = "Default",
    shortname = "hendpoint",
    category = "russet",
    printcolumn(name = "URL", type_ = "string", json_path = ".spec.url"),
    printcolumn(name = "Zone", type_ = "string", json_path = ".spec.zone"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "!(has(self.zone) && self.zone == 'Cloud') || self.url.startsWith('https://')",
     "message": "an endpoint of the zone Cloud needs https://, or its secret and all that is sent could be read on the way"},
]))]
pub struct HttpEndpointSpec {
    /// Where its paths begin, such as `https://hooks.example.com/team`. Steps may call it and what is below it.
    #[schemars(length(min = 1, max = 1024), regex(pattern = r"^https?://[^/?#@\s]+(/[^?#\s]*)?$"))]
    pub url: String,
    /// Where it is. Gateways hold it to that: with `Local` they connect to loopback addresses alone, with `Lan` to private
    /// ones, whatever its name resolves to.
    #[serde(default)]
    pub zone: Zone,
    /// A Secret of the same namespace whose `token` is sent as `Authorization: Bearer …`; the Role `russet-providers` must
    /// name it, as `russet credentials add NAME --for providers` sees to. Absent: none is sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<LocalReference>,
}
