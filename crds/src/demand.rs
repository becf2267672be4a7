//! Demand for a ModelDeployment, as its gateways see it. It drives scaling from and to zero and between. Each
//! gateway writes one entry. Not here: the scaling decision (`plan`).

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Interval at which a gateway with requests for a deployment renews its entry. Requests that wait for a
/// deployment that is not ready are written at once.
pub const DEMAND_INTERVAL: std::time::Duration = std::time::Duration::from_secs(15);

/// Demand for a deployment as one gateway sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GatewayDemand {
    /// The gateway: its machine or pod, and its port.
    #[schemars(length(min = 1, max = 63))]
    pub gateway: String,
    /// When the gateway wrote this entry. It does so every 15 s while it has requests: an older entry that
    /// still counts requests belongs to a gateway that is gone.
    pub reported_at: Time,
    /// When the gateway last had a request, waiting or running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_request_time: Option<Time>,
    /// Requests that the gateway holds until a replica is ready.
    #[serde(default)]
    pub waiting: u32,
    /// Requests that are running on replicas.
    #[serde(default)]
    pub active: u32,
    /// Time from dispatch to a replica to the first token, in milliseconds: the 90th percentile of the last
    /// minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_milliseconds: Option<u32>,
    /// How long its callers want the deployment to stay after their last requests. Absent: `idleSeconds` after
    /// `lastRequestTime`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_alive: Option<KeepAliveDemand>,
}

/// How long callers want a deployment to stay that scales to zero: Ollama's `keep_alive`. Of each caller the
/// last request counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KeepAliveDemand {
    /// Until when those want it whose last request has a `keep_alive`; at most `maxIdleSeconds` after the last
    /// request.
    pub until: Time,
    /// When one asked last whose last request has none: `idleSeconds` count from then. Absent: no other asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_request_time: Option<Time>,
}
