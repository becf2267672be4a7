//! How many replicas a ModelDeployment has when nobody says a number. What follows from it is the planner's
//! business.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Between how many replicas, and by what.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "self.minReplicas <= self.maxReplicas",
     "message": "minReplicas must not be above maxReplicas"},
]))]
pub struct Autoscaling {
    /// The fewest replicas. With 0 the model sleeps while nobody asks for it, and the next request, which the
    /// gateway holds, wakes it.
    #[serde(default = "min_replicas")]
    #[schemars(range(min = 0, max = 64))]
    pub min_replicas: i32,
    /// The most replicas; never more than fit.
    #[schemars(range(min = 1, max = 64))]
    pub max_replicas: i32,
    /// Requests, waiting and being answered, that one replica is meant to have.
    #[serde(default = "target_queue")]
    #[schemars(range(min = 1, max = 1024))]
    pub target_queue: u32,
    /// With first tokens slower than this, nine of ten of the last minute's not being so, there is one replica
    /// more. Absent: only requests count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 3_600_000))]
    pub target_ttft_milliseconds: Option<u32>,
    /// With `minReplicas: 0`: the model sleeps after so many seconds without a request.
    #[serde(default = "idle_seconds")]
    #[schemars(range(min = 1, max = 31_536_000))]
    pub idle_seconds: u32,
}

fn min_replicas() -> i32 {
    1
}

/// As many as a replica has room for when nothing is said about it (`kv.maxSequences`).
fn target_queue() -> u32 {
    4
}

fn idle_seconds() -> u32 {
    600
}
