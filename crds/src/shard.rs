//! Shard: one rank on one node. The operator writes the spec, peers included; the node's agent claims it,
//! runs one engine process for it and reports.
//!
//! ```text
//! created (epoch 1) ─▶ agent: Claimed + rendezvous ─▶ operator: peers ─▶ agent: engine starts
//!   ─▶ Loaded ─▶ Joined ─▶ Serving          any loss ─▶ operator: epoch + 1, peers cleared ─▶ Claimed again
//! ```

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Adapter, Backend, EngineOptions, LocalReference, Transport};

/// One rank on one node.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "russet.dev",
    version = "v1alpha1",
    kind = "Shard",
    namespaced,
    status = "ShardStatus",
    derive = "PartialEq",
    derive = "Default",
    category = "russet",
    selectable = ".spec.nodeName",
    printcolumn(name = "Group", type_ = "string", json_path = ".spec.groupRef.name"),
    printcolumn(name = "Rank", type_ = "integer", json_path = ".spec.rank"),
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.nodeName"),
    printcolumn(name = "Layers", type_ = "string", json_path = ".status.layers"),
    printcolumn(name = "Epoch", type_ = "integer", json_path = ".spec.epoch"),
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
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ShardSpec {
    /// The ShardGroup.
    #[schemars(extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "groupRef is immutable"}]))]
    pub group_ref: LocalReference,
    /// UID of the ShardGroup; all engines of a group have the same.
    pub group_uid: String,
    /// Name clients call the model by.
    pub served_model_name: String,
    /// The Model, in the same namespace; its ModelCopy on the node holds the files.
    pub model_ref: LocalReference,
    /// The node. The operator sets it at creation.
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "nodeName is immutable"}]))]
    pub node_name: String,
    /// Rank; 0 owns the last layers and samples.
    pub rank: u32,
    /// Layers of every rank of the group, in rank order; the length is the size of the group.
    #[schemars(length(min = 1, max = 64))]
    pub layers_per_rank: Vec<u32>,
    /// Ranks that share every layer of a stage; 1 for a single rank or a pipeline. Rank `r` is member `r %
    /// tensorSize` of stage `r / tensorSize`; stage 0 holds the last layers.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 64))]
    pub tensor_size: u32,
    /// How the ranks of a tensor group exchange sums; stages always use MLX's TCP ring.
    #[serde(default)]
    pub backend: Backend,
    /// Whether TCP between ranks is tunnelled over mutual TLS.
    #[serde(default)]
    pub transport: Transport,
    /// RDMA devices between the members of this rank's tensor group: rows are members, columns their peers.
    /// An empty cell is no cable, several names are several cables. For Jaccl and JacclRing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub rdma_devices: Vec<Vec<Vec<String>>>,
    /// Bytes of weights.
    pub weight_bytes: u64,
    /// Bytes reserved for KV cache.
    pub kv_bytes: u64,
    /// Bytes of additional reserve.
    pub overhead_bytes: u64,
    /// Maximum context length, tokens.
    pub context_tokens: u32,
    /// Maximum number of concurrent sequences.
    pub max_sequences: u32,
    /// KV-cache tokens of all sequences together; absent: `contextTokens × maxSequences`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_tokens: Option<u64>,
    /// Engine options.
    #[serde(default, skip_serializing_if = "EngineOptions::is_default")]
    pub engine: EngineOptions,
    /// The draft model, for rank 0 only; its ModelCopy on the node holds the files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_model_ref: Option<LocalReference>,
    /// Adapters of the model; their ModelCopies on the node hold the files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub adapters: Vec<Adapter>,
    /// Incarnation of the group; the agent stops engines of older ones.
    #[schemars(range(min = 1), extend("x-kubernetes-validations" = [{"rule": "self >= oldSelf", "message": "epoch only grows"}]))]
    pub epoch: i64,
    /// The rendezvous of every rank at this epoch, in rank order; empty until all ranks have claimed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub peers: Vec<Peer>,
}

impl ShardSpec {
    /// Memory that the node must grant.
    pub fn reserved_bytes(&self) -> u64 {
        self.weight_bytes + self.kv_bytes + self.overhead_bytes
    }

    /// Names of the Models whose files the rank reads: its own first, then the draft model and the adapters.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        let adapters = self.adapters.iter().map(|adapter| &adapter.model_ref);
        [&self.model_ref]
            .into_iter()
            .chain(&self.draft_model_ref)
            .chain(adapters)
            .map(|model| model.name.as_str())
    }
}

/// Addresses of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Peer {
    /// Rank.
    pub rank: u32,
    /// Node; the name in its certificate.
    pub node_name: String,
    /// `ip:port` of the rank's gRPC service.
    pub rpc: String,
    /// `ip:port` for the pipeline stages before and after the rank.
    pub ring: String,
    /// `ip:port` for the other members of the rank's stage; for Jaccl, member 0's is the coordinator.
    #[serde(default)]
    pub tensor: String,
}

fn one() -> u32 {
    1
}

/// State of the rank, as its agent reports it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShardStatus {
    /// The epoch that this status describes; everything below belongs to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_epoch: Option<i64>,
    /// Addresses of this rank at the observed epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rendezvous: Option<Rendezvous>,
    /// Layers of the rank, for display: `3-4 of 5`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<String>,
    /// Process id of the engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine_pid: Option<i64>,
    /// Bytes of weights loaded so far.
    #[serde(default)]
    pub loaded_bytes: u64,
    /// Bytes of weights to load.
    #[serde(default)]
    pub total_bytes: u64,
    /// Memory that the engine uses.
    #[serde(default)]
    pub memory_bytes: u64,
    /// Address of the engine's metrics, `ip:port`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics_address: Option<String>,
    /// Measured speed of the group, reported by rank 0 once there were enough requests; updated rarely.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<MeasuredThroughput>,
    /// Set when the rank has failed at the observed epoch; the operator then raises the epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Claimed, Loaded, Joined, Serving, Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Speed of a group, measured over real requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MeasuredThroughput {
    /// Decode tokens per second of each stream, such as `41.3`.
    pub tokens_per_second: String,
    /// Number of concurrent streams of the measurement: the fewest for which there are enough tokens.
    pub streams: u32,
    /// Average context length of a stream during it, in tokens, as a power of two.
    pub context_tokens: u32,
    /// Prefill tokens per second for prompts of 256 tokens and more without other load; absent until there
    /// were enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_per_second: Option<String>,
}

/// Addresses that a rank listens on, allocated by its agent for one epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Rendezvous {
    /// `ip:port` of the gRPC service.
    pub rpc: String,
    /// `ip:port` for the pipeline stages before and after the rank.
    pub ring: String,
    /// `ip:port` for the other members of the rank's stage.
    #[serde(default)]
    pub tensor: String,
}
