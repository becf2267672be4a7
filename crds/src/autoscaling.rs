//! Autoscaling of a ModelDeployment: the bounds and targets. Not here: the scaling decision (`plan`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Bounds and targets for the number of replicas.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "self.minReplicas <= self.maxReplicas",
     "message": "minReplicas must not be above maxReplicas"},
    {"rule": "!has(self.maxIdleSeconds) || self.maxIdleSeconds >= self.idleSeconds",
     "message": "maxIdleSeconds must not be below idleSeconds"},
]))]
pub struct Autoscaling {
    /// Minimum number of replicas. With 0 the deployment scales to zero while it gets no requests. The
    /// gateway holds the next request, which scales it up again.
    #[serde(default = "min_replicas")]
    #[schemars(range(min = 0, max = 64))]
    pub min_replicas: i32,
    /// Maximum number of replicas; never more than fit.
    #[schemars(range(min = 1, max = 64))]
    pub max_replicas: i32,
    /// Target number of requests, waiting and running, per replica.
    #[serde(default = "target_queue")]
    #[schemars(range(min = 1, max = 1024))]
    pub target_queue: u32,
    /// Target time to first token. A replica is added while the 90th percentile of the last minute is above
    /// it. Absent: only the number of requests counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 3_600_000))]
    pub target_ttft_milliseconds: Option<u32>,
    /// With `minReplicas: 0`: seconds without a request after which the deployment scales to zero.
    #[serde(default = "idle_seconds")]
    #[schemars(range(min = 1, max = 31_536_000))]
    pub idle_seconds: u32,
    /// With `minReplicas: 0`: the most seconds without a request for which a request's own `keep_alive`
    /// (Ollama's API) keeps the deployment. Absent: `idleSeconds`, so requests can shorten the time alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 31_536_000))]
    pub max_idle_seconds: Option<u32>,
}

fn min_replicas() -> i32 {
    1
}

/// The default of `kv.maxSequences`, the number of sequences that a replica has capacity for.
fn target_queue() -> u32 {
    4
}

fn idle_seconds() -> u32 {
    600
}
