//! AccessKey: who may ask the models of a namespace, how often, how soon and for how much. It holds the hash of a key,
//! never the key. A key has 256 random bits, so its hash can be neither guessed nor looked up in a
//! table: a slow, salted hash would protect nothing and cost every request.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A key that opens the models of this namespace. While any AccessKey exists, in any namespace and
/// in any state, the gateway answers nobody without a key.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "russet.dev",
    version = "v1alpha1",
    kind = "AccessKey",
    namespaced,
    status = "AccessKeyStatus",
    derive = "PartialEq",
    derive = "Default",
    shortname = "akey",
    category = "russet",
    printcolumn(name = "Owner", type_ = "string", json_path = ".spec.owner"),
    printcolumn(name = "Models", type_ = "string", json_path = ".spec.models[*]"),
    printcolumn(name = "Per Minute", type_ = "integer", json_path = ".spec.requestsPerMinute"),
    printcolumn(name = "Priority", type_ = "integer", json_path = ".spec.priority"),
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
    printcolumn(name = "Expires", type_ = "string", json_path = ".spec.expiresAt"),
    printcolumn(name = "Last Used", type_ = "date", json_path = ".status.lastUsed"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct AccessKeySpec {
    /// SHA-256 of the whole key as clients send it, in hexadecimal. Immutable, so that a name in logs
    /// and metrics always means one secret: another secret is another AccessKey.
    #[schemars(regex(pattern = r"^[0-9a-f]{64}$"), extend("x-kubernetes-validations" = [{
        "rule": "self == oldSelf",
        "message": "secretSha256 is immutable; create another AccessKey for another secret"
    }]))]
    pub secret_sha256: String,
    /// Who holds the key, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub owner: Option<String>,
    /// Names of models the key may ask, as its holder writes them: deployments and names of
    /// ModelRoutes of this namespace; `*` matches any run of characters. Empty: all of this namespace.
    /// Models of other namespaces are never open to it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 253)))]
    pub models: Vec<String>,
    /// Requests for an answer in a minute: that many at once, then one more every 60 s divided by this
    /// number. Each replica of the gateway counts for itself. Absent: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub requests_per_minute: Option<u32>,
    /// Whose requests an engine answers first where it cannot answer all: higher first. To have waited ten seconds
    /// is worth one level. A request may ask to come later than its key says, never earlier.
    #[serde(default)]
    #[schemars(range(min = -100, max = 100))]
    pub priority: i32,
    /// Most tokens of one answer: what a request that names no number gets at most, and one that names more is
    /// refused. Absent: what the context holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16_777_216))]
    pub max_tokens_per_request: Option<u32>,
    /// Longest time from a request's arrival to the end of its answer; one that asks for more gets this. Absent: no
    /// limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86_400))]
    pub max_request_seconds: Option<u32>,
    /// From then on the key is refused. Absent: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Time>,
    /// Whether the key is taken. A disabled key still counts: it keeps loopback closed to clients
    /// without keys.
    #[serde(default)]
    pub state: KeyState,
}

/// Whether a key is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum KeyState {
    /// It is.
    #[default]
    Enabled,
    /// It is refused, like one nobody knows.
    Disabled,
    /// A word of a newer release; refused as well.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// What the gateway made of the key.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AccessKeyStatus {
    /// Generation this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// When the key was last accepted; written once a minute at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_used: Option<Time>,
    /// Ready: whether the gateway takes the key.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}
