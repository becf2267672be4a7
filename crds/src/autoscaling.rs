//! Autoscaling of a ModelDeployment: the bounds and targets, and predictive scaling. Not here: the scaling
//! decision (`plan`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schedule::utc;

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
    /// Replicas that are started before they are needed: in the hours of the week in which they were needed in the last
    /// weeks. They never preempt others. Absent: replicas are started when requests come.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predictive: Option<PredictiveScaling>,
}

/// When replicas are started for demand that the last four weeks let expect, and the ceilings of that.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PredictiveScaling {
    /// In how many of the last four weeks an hour must have needed replicas. As many are started as were needed in each of
    /// so many weeks.
    #[serde(default = "min_weeks")]
    #[schemars(range(min = 1, max = 4))]
    pub min_weeks: u32,
    /// Seconds before the hour begins at which they are started.
    #[serde(default = "lead_seconds")]
    #[schemars(range(min = 0, max = 3600))]
    pub lead_seconds: u32,
    /// Ceiling: maximum number of replicas that are started so. `maxReplicas` holds too.
    #[serde(default = "max_predicted_replicas")]
    #[schemars(range(min = 1, max = 64))]
    pub max_replicas: i32,
    /// Ceiling: maximum number of hours of a day in which replicas are kept so; those that were needed most.
    #[serde(default = "max_hours_per_day")]
    #[schemars(range(min = 1, max = 24))]
    pub max_hours_per_day: u32,
    /// IANA time zone of the hours and days, such as `Europe/Berlin`. Another one begins the history anew.
    #[serde(default = "utc")]
    #[schemars(length(min = 1, max = 64))]
    pub time_zone: String,
}

impl Default for PredictiveScaling {
    fn default() -> Self {
        Self {
            min_weeks: min_weeks(),
            lead_seconds: lead_seconds(),
            max_replicas: max_predicted_replicas(),
            max_hours_per_day: max_hours_per_day(),
            time_zone: utc(),
        }
    }
}

fn min_weeks() -> u32 {
    2
}

fn lead_seconds() -> u32 {
    300
}

fn max_predicted_replicas() -> i32 {
    1
}

fn max_hours_per_day() -> u32 {
    12
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
