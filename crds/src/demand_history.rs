//! Demand history of a ModelDeployment: the replicas that each hour of the last weeks needed. Predictive
//! scaling goes by it. Not here: how it is counted and what follows from it (`plan`).

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Day;

/// Replicas that were needed, by hour of the week.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DemandHistory {
    /// IANA time zone of the hours and days.
    pub time_zone: String,
    /// Start of the hour that is counted now. It stays behind while nothing changes, for hours that need none.
    pub hour: Time,
    /// Most replicas that were needed at once in that hour so far.
    #[serde(default)]
    pub replicas: i32,
    /// The days with hours that needed any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 7),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["day"])
    )]
    pub days: Vec<DayDemand>,
}

impl DemandHistory {
    /// An empty one, whose first hour begins then.
    pub fn new(time_zone: &str, hour: jiff::Timestamp) -> Self {
        Self { time_zone: time_zone.to_owned(), hour: Time(hour), replicas: 0, days: Vec::new() }
    }
}

/// The hours of a day of the week.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DayDemand {
    /// The day.
    pub day: Day,
    /// Its hours the last time that they were there, the time before and so on, five times: a digit for each of the 24 hours
    /// from midnight on, the most replicas that were needed at once; 9 stands for more too. Four count; the fifth is for the
    /// hours of today that are over, whose first one is today's.
    #[serde(default)]
    #[schemars(length(max = 5), inner(length(max = 24)))]
    pub weeks: Vec<String>,
}
