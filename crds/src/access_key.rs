//! AccessKey: an API key of a namespace: its models, rate limit, priority and per-request limits. The object
//! holds the SHA-256 of the key, never the key. A key has 256 random bits, so a fast, unsalted hash is
//! enough: the key can be neither guessed nor found in a table. A slow, salted hash would add no protection
//! and would cost time on every request.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An API key for the models of this namespace. While any AccessKey exists, in any namespace and any state,
/// the gateway rejects requests without a key.
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
    /// SHA-256 of the whole key as clients send it, in hexadecimal. Immutable, so that a name in logs and
    /// metrics always means one secret. For another secret, create another AccessKey.
    #[schemars(regex(pattern = r"^[0-9a-f]{64}$"), extend("x-kubernetes-validations" = [{
        "rule": "self == oldSelf",
        "message": "secretSha256 is immutable; create another AccessKey for another secret"
    }]))]
    pub secret_sha256: String,
    /// The holder of the key, for information only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub owner: Option<String>,
    /// Model names that the key may use, as its holder writes them: deployments and names of ModelRoutes of
    /// this namespace; `*` matches any run of characters. Empty: all models of this namespace. The key never
    /// grants access to models of other namespaces.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 253)))]
    pub models: Vec<String>,
    /// Rate limit, in requests per minute: a burst of that many, then one more every 60 s divided by this
    /// number. Each replica of the gateway counts separately. Absent: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub requests_per_minute: Option<u32>,
    /// Scheduling priority of the key's requests; engines answer higher ones first. Ten seconds of waiting
    /// count as one level. A request may ask for a lower priority than its key's, never for a higher one.
    #[serde(default)]
    #[schemars(range(min = -100, max = 100))]
    pub priority: i32,
    /// Maximum output tokens of one request: the limit of a request that names none. A request that names
    /// more is rejected. Absent: up to the context length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16_777_216))]
    pub max_tokens_per_request: Option<u32>,
    /// Maximum time from a request's arrival to the end of its response. A request that asks for more gets
    /// this. Absent: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86_400))]
    pub max_request_seconds: Option<u32>,
    /// From this time on the gateway rejects the key. Absent: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Time>,
    /// Addresses from which the gateway accepts the key, such as `192.168.0.0/16` or `fd00::/8`. Behind a reverse proxy it sees
    /// the proxy's. Empty: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        inner(length(min = 1, max = 64), regex(pattern = r"^[0-9A-Fa-f:.]+(/[0-9]{1,3})?$"))
    )]
    pub source_ranges: Vec<String>,
    /// Whether the gateway accepts the key. A disabled key still counts: while it exists, clients without a
    /// key are rejected on loopback too.
    #[serde(default)]
    pub state: KeyState,
    /// Whether the key may pull, copy and delete models of this namespace by Ollama's API. The gateway must have that right
    /// itself (`--model-management`), and it deletes only what it created for clients.
    #[serde(default)]
    pub model_management: ModelManagement,
}

/// Whether the gateway accepts a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum KeyState {
    /// The key is accepted.
    #[default]
    Enabled,
    /// The key is rejected, like an unknown one.
    Disabled,
    /// A value from a newer release; the key is rejected.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Whether a key may change which models a namespace has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ModelManagement {
    /// The key only uses models.
    #[default]
    Denied,
    /// The key also pulls, copies and deletes models.
    Allowed,
    /// A value from a newer release; treated like `Denied`.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Status of a key, as the gateway reports it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AccessKeyStatus {
    /// The generation that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// When the key was last accepted; updated at most once a minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_used: Option<Time>,
    /// Ready: whether the gateway accepts the key.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}
