//! Budget: how many requests, tokens and joules, and how much money the keys, owners and routes of a namespace may use in a
//! minute, an hour, a day and a month.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Money;
use crate::schedule::utc;

/// What requests of a namespace may use. The gateways reserve what a request may need before it is answered, and settle what
/// it used; together they never grant more than the limits.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "russet.dev",
    version = "v1alpha1",
    kind = "Budget",
    namespaced,
    status = "BudgetStatus",
    derive = "PartialEq",
    derive = "Default",
    category = "russet",
    printcolumn(name = "Used", type_ = "string", json_path = ".status.used"),
    printcolumn(
        name = "Exhausted",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Exhausted\")].status"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct BudgetSpec {
    /// Which requests count. Absent: all that models of this namespace answer.
    #[serde(default)]
    pub scope: BudgetScope,
    /// What they may use, one limit for each length of time.
    #[schemars(length(min = 1, max = 4), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["per"]))]
    pub limits: Vec<BudgetLimit>,
    /// IANA time zone in which days and months begin, such as `Europe/Berlin`.
    #[serde(default = "utc")]
    #[schemars(length(min = 1, max = 64))]
    pub time_zone: String,
    /// Maximum output tokens of a request that names none, where tokens or money are limited: so many are reserved. Where
    /// less is left, such a request gets that.
    #[serde(default = "default_max_tokens")]
    #[schemars(range(min = 1, max = 16_777_216))]
    pub default_max_tokens: u32,
}

impl Default for BudgetSpec {
    fn default() -> Self {
        Self {
            scope: BudgetScope::default(),
            limits: Vec::new(),
            time_zone: utc(),
            default_max_tokens: default_max_tokens(),
        }
    }
}

fn default_max_tokens() -> u32 {
    8192
}

/// Which requests count: those that match every list that is there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BudgetScope {
    /// Names of AccessKeys of this namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), inner(length(min = 1, max = 253)))]
    pub keys: Vec<String>,
    /// Owners of AccessKeys, as their `spec.owner` says.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), inner(length(min = 1, max = 253)))]
    pub owners: Vec<String>,
    /// Names of ModelRoutes of this namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), inner(length(min = 1, max = 253)))]
    pub routes: Vec<String>,
}

/// What may be used in one length of time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "has(self.requests) || has(self.tokens) || has(self.money) || has(self.joules)",
    "message": "a limit needs requests, tokens, money or joules"
}]))]
pub struct BudgetLimit {
    /// The length of time, by the calendar: a day begins at midnight.
    pub per: BudgetPeriod,
    /// Requests that are answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000_000_i64))]
    pub requests: Option<i64>,
    /// Tokens of prompts and answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000_000_i64))]
    pub tokens: Option<i64>,
    /// Money for ModelProviders with prices, in the currency of these, such as `"5.00"`. What this cluster answers costs none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub money: Option<Money>,
    /// Joules that engines of this cluster draw for requests; a kilowatt-hour is 3,600,000. Known once an engine is done, so
    /// requests that run together may go beyond it by what they take. Machines whose watts nobody knows count nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000_000_000_i64))]
    pub joules: Option<i64>,
}

/// A length of time.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
pub enum BudgetPeriod {
    /// A minute of the clock.
    Minute,
    /// An hour of the clock.
    Hour,
    /// A day of the calendar.
    #[default]
    Day,
    /// A month of the calendar.
    Month,
    /// A value from a newer release; nothing may be used.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

impl BudgetPeriod {
    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Minute => "Minute",
            Self::Hour => "Hour",
            Self::Day => "Day",
            Self::Month => "Month",
            Self::Unknown => "Unknown",
        }
    }
}

/// Status of a budget, as the gateways write it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BudgetStatus {
    /// The generation that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// What is used now, for people: of each limit the part that is nearest to its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<String>,
    /// The minutes, hours, days and months in which something was used, the latest of each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<BudgetWindow>,
    /// Ready: a gateway counts. NearLimit: of a limit four fifths are used. Exhausted: all of one is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// One minute, hour, day or month.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BudgetWindow {
    /// Its length.
    pub per: BudgetPeriod,
    /// When it began.
    pub starts_at: Time,
    /// When it ends, and the whole limit is there again.
    pub ends_at: Time,
    /// What was used in it.
    pub used: BudgetUsage,
    /// The share of each gateway.
    #[serde(default)]
    pub gateways: Vec<GatewayUsage>,
}

/// The share of one gateway.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GatewayUsage {
    /// Which one: the name that it gave itself when it first counted.
    pub gateway: String,
    /// What its requests used.
    pub used: BudgetUsage,
    /// What they may use before it has to ask again, what they used included. All grants together stay within the limit.
    pub granted: BudgetUsage,
}

/// An amount of each thing that a budget limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BudgetUsage {
    /// Requests.
    #[serde(default)]
    pub requests: i64,
    /// Tokens.
    #[serde(default)]
    pub tokens: i64,
    /// Money.
    #[serde(default)]
    pub money: Money,
    /// Thousandths of a joule.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub millijoules: i64,
}

/// Statuses say nothing of what nobody limits.
fn is_zero(millijoules: &i64) -> bool {
    *millijoules == 0
}
