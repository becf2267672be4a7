//! When model files may be transferred to a machine, and how fast.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Limits on transfers of model files to a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeTransfers {
    /// From hubs, buckets and other sources outside the cluster; headers are always transferred.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_sources: Option<TransferLimits>,
    /// From other nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_nodes: Option<TransferLimits>,
}

/// Limits on transfers of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TransferLimits {
    /// Maximum bits per second for all of the machine's transfers of this kind together, such as `200M`; less
    /// than `1M` counts as `1M`. Absent: unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9]+(\.[0-9]+)?(k|M|G|T)?$"))]
    pub max_bits_per_second: Option<String>,
    /// Hours in which nothing is transferred; a running transfer pauses and continues afterwards.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub quiet_hours: Vec<QuietHours>,
}

/// A part of the day, by the machine's own clock and time zone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct QuietHours {
    /// Start time, such as `08:00`.
    #[schemars(regex(pattern = r"^([01][0-9]|2[0-3]):[0-5][0-9]$"))]
    pub from: String,
    /// End time, such as `18:00`; at or before `from`: on the next day.
    #[schemars(regex(pattern = r"^([01][0-9]|2[0-3]):[0-5][0-9]$"))]
    pub until: String,
    /// Days on which it starts; empty: every day.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 7))]
    pub days: Vec<Weekday>,
}

/// A day of the week.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Weekday {
    /// Monday.
    Mon,
    /// Tuesday.
    Tue,
    /// Wednesday.
    Wed,
    /// Thursday.
    Thu,
    /// Friday.
    Fri,
    /// Saturday.
    Sat,
    /// Sunday.
    Sun,
    /// A value from a newer release; counts as no day.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}
