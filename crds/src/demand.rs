//! Demand for a ModelDeployment, as its gateways see it: what wakes a model that sleeps, lets one that nobody
//! asks for sleep, and makes it many where one is too few. Each gateway writes one entry; what follows from them
//! is the planner's business.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// While a gateway has requests of a deployment, it writes its entry anew this often and no oftener; what waits
/// for a deployment that does not answer is written at once.
pub const DEMAND_INTERVAL: std::time::Duration = std::time::Duration::from_secs(15);

/// What one gateway has to do with a deployment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GatewayDemand {
    /// The gateway: its machine, or its pod, and its port.
    #[schemars(length(min = 1, max = 63))]
    pub gateway: String,
    /// When the gateway wrote this. While it has requests it does so every 15 s: an older entry that still counts
    /// some is of a gateway that is gone.
    pub reported_at: Time,
    /// When it last had a request, be it waiting or being answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_request_time: Option<Time>,
    /// Requests it holds until a replica answers.
    #[serde(default)]
    pub waiting: u32,
    /// Requests that replicas are answering.
    #[serde(default)]
    pub active: u32,
    /// Milliseconds from a replica's getting a request to its first token, which nine of ten did not exceed in the
    /// last minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_milliseconds: Option<u32>,
}
