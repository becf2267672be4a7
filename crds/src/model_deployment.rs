//! ModelDeployment: a model to serve. The operator turns it into ShardGroups and explains the placement in
//! the status.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{
    Autoscaling, DemandHistory, EngineOptions, GatewayDemand, GenerationConfig, LocalReference,
    MeasuredThroughput, Rollout, RolloutStatus, Spread,
};

/// A model to serve under this object's name.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "russet.dev",
    version = "v1alpha1",
    kind = "ModelDeployment",
    namespaced,
    status = "ModelDeploymentStatus",
    derive = "PartialEq",
    derive = "Default",
    shortname = "mdeploy",
    category = "russet",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Model", type_ = "string", json_path = ".spec.modelRef.name"),
    printcolumn(name = "Tier", type_ = "string", json_path = ".spec.tierRef.name"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(name = "Replicas", type_ = "string", json_path = ".status.summary"),
    printcolumn(name = "Nodes", type_ = "string", json_path = ".status.nodes"),
    printcolumn(name = "Tok/s", type_ = "string", json_path = ".status.placement.measured.tokensPerSecond"),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason"
    ),
    printcolumn(
        name = "Predicted",
        type_ = "string",
        json_path = ".status.placement.predicted.tokensPerSecond",
        priority = 1
    ),
    printcolumn(name = "Strategy", type_ = "string", json_path = ".spec.strategyRef.name", priority = 1),
    printcolumn(name = "Pools", type_ = "string", json_path = ".spec.poolRefs[*].name", priority = 1),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].message",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "!has(self.sharding) || !has(self.strategyRef)",
     "message": "sharding and strategyRef exclude each other; leave one of them out"},
    {"rule": "!has(self.tierRef) || !has(self.poolRefs) || size(self.poolRefs) == 0",
     "message": "a tier has its own pools; leave poolRefs or tierRef out"},
    {"rule": "!has(self.workloadGroup) || has(self.tierRef)",
     "message": "workloadGroup is one of a tier's; name the tier in tierRef"},
    {"rule": "!has(self.draftModelRef) || self.draftModelRef.name != self.modelRef.name",
     "message": "a model is no draft model for itself; name a smaller one in draftModelRef, or leave it out"},
    {"rule": "!has(self.adapters) || self.adapters.all(a, a.modelRef.name != self.modelRef.name)",
     "message": "a model is no adapter of itself; name the Model of an adapter in adapters[].modelRef"},
]))]
pub struct ModelDeploymentSpec {
    /// The Model, in the same namespace.
    pub model_ref: LocalReference,
    /// Draft model for speculative decoding: a smaller Model of the same namespace with the same tokenizer.
    /// It proposes tokens where `engine.speculation` finds none. The node of rank 0 holds it too. The output
    /// is the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_model_ref: Option<LocalReference>,
    /// Adapters of the model. Requests choose one by `model: <deployment>:<adapter>`; they and those of the model itself
    /// run in the same batches. Every node of a replica holds their files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 16),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"])
    )]
    pub adapters: Vec<Adapter>,
    /// How each replica is split; absent, and without `strategyRef`: the defaults of the fields.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharding: Option<Sharding>,
    /// The ShardingStrategy to use instead of `sharding`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy_ref: Option<LocalReference>,
    /// Engine options; absent: the defaults of the fields.
    #[serde(default, skip_serializing_if = "DeploymentEngine::is_default")]
    pub engine: DeploymentEngine,
    /// NodePools whose nodes may run it; all ranks of a replica are in one pool. Empty: any node that takes
    /// work.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub pool_refs: Vec<LocalReference>,
    /// The Tier that sets its nodes and its priority.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier_ref: Option<LocalReference>,
    /// The workload group of a Dedicated tier whose nodes it shares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub workload_group: Option<String>,
    /// Number of independent replicas; 0 stops the deployment. Leave it out with `autoscaling`, which writes
    /// it through `/scale`.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 64))]
    pub replicas: i32,
    /// The `planHash` of an action that its tier wants approved, for approval in Git: it counts as an
    /// Approval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9a-f]{16}$"))]
    pub approved_plan: Option<String>,
    /// How an edit is rolled out; absent: the defaults of the fields.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<Rollout>,
    /// Bounds for scaling by demand. Absent: `replicas` is fixed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autoscaling: Option<Autoscaling>,
    /// Spread of the replicas over failure domains where that costs little; absent: the defaults of the
    /// fields.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<Spread>,
}

/// An adapter of a deployment's model: weights that change some of its layers, by LoRA or DoRA.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Adapter {
    /// What requests choose it by, after the name of the deployment and a colon.
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"))]
    pub name: String,
    /// The Model with its files, of the same namespace: an adapter of mlx-lm or PEFT.
    pub model_ref: LocalReference,
}

/// How the engines of a deployment compute, and what they are told where a request says nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeploymentEngine {
    /// Options that are part of the plan: another option replaces the replicas.
    #[serde(flatten)]
    pub options: EngineOptions,
    /// Variables of the chat template, such as `enable_thinking: false`; a request's own ones come before them. An edit
    /// acts at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "template_arguments")]
    pub chat_template_arguments: Option<Map<String, Value>>,
    /// Sampling parameters of requests that name none. They come before those of the model's generation_config.json; the
    /// status has both together. An edit acts at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation_config: Option<GenerationConfig>,
    /// Regular expressions (of Rust's `regex`) whose matches are taken out of what the system and the user say before a
    /// prompt is rendered: dates and ids that a client writes anew into every request, so that no request finds the cached
    /// prefix of the one before it. Of a ModelRoute those of its first target count. An edit acts at once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(min = 1, max = 512)))]
    pub strip_patterns: Vec<String>,
}

impl DeploymentEngine {
    /// Whether it says nothing.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl From<EngineOptions> for DeploymentEngine {
    fn from(options: EngineOptions) -> Self {
        Self { options, ..Self::default() }
    }
}

impl ModelDeploymentSpec {
    /// Names of the Models it needs.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        let adapters = self.adapters.iter().map(|adapter| &adapter.model_ref);
        [&self.model_ref]
            .into_iter()
            .chain(&self.draft_model_ref)
            .chain(adapters)
            .map(|model| model.name.as_str())
    }
}

/// Any object: which variables a template has, the model says.
fn template_arguments(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 64,
        "nullable": true,
        "x-kubernetes-preserve-unknown-fields": true,
    })
}

fn one() -> i32 {
    1
}

/// How a replica is split over nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "!has(self.layersPerRank) || !has(self.ranks) || (self.mode in ['Auto', 'Tensor', 'Hybrid'] ? self.ranks % size(self.layersPerRank) == 0 : size(self.layersPerRank) == self.ranks)",
     "message": "layersPerRank names stages; ranks must be as many, or a multiple where a stage has several"},
    {"rule": "!has(self.tensorSize) || !has(self.ranks) || self.ranks % self.tensorSize == 0",
     "message": "every stage has tensorSize ranks; ranks must be a multiple of it"},
    {"rule": "!(self.mode in ['Single', 'Pipeline']) || !has(self.tensorSize) || self.tensorSize == 1",
     "message": "modes Single and Pipeline cut no layer; leave tensorSize out, or choose Tensor or Hybrid"},
    {"rule": "self.mode != 'Single' || !has(self.ranks) || self.ranks == 1",
     "message": "mode Single runs on one rank; leave ranks out or choose Pipeline"},
]))]
pub struct Sharding {
    /// The kind of split; Auto takes one node if the model fits one.
    #[serde(default)]
    pub mode: ShardingMode,
    /// Number of ranks, one per node; absent: the planner chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub ranks: Option<u32>,
    /// Ranks that share every layer: all ranks for Tensor, the ranks of each stage for Hybrid; absent: the
    /// planner chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub tensor_size: Option<u32>,
    /// Layers per stage, the last stage first; absent: the planner balances them. In a pipeline every stage
    /// is one rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub layers_per_rank: Option<Vec<u32>>,
    /// How the ranks of a tensor group exchange sums; Auto takes the best backend that their links support.
    #[serde(default)]
    pub backend: BackendChoice,
    /// Minimum speed of the link between any two nodes of a replica, such as `60G`, as both report it.
    /// Checked at placement only; a running replica stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9]+(\.[0-9]+)?(k|M|G|T)?$"))]
    pub min_bits_per_second: Option<String>,
    /// KV-cache capacity.
    #[serde(default)]
    pub kv: KvCapacity,
}

/// The kinds of split.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ShardingMode {
    /// One node if the model fits one; else a tensor group if the links support RDMA, else a pipeline.
    #[default]
    Auto,
    /// One rank on one node.
    Single,
    /// Consecutive layers on each rank.
    Pipeline,
    /// Tensor parallelism: every layer split over all ranks.
    Tensor,
    /// A pipeline of tensor groups.
    Hybrid,
    /// A value from a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Transport for the sums of a tensor group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum BackendChoice {
    /// RDMA if the links of the chosen nodes support it, else TCP.
    #[default]
    Auto,
    /// RDMA, every rank cabled to every other rank.
    Jaccl,
    /// RDMA, every rank cabled to its two neighbours.
    JacclRing,
    /// TCP.
    Ring,
    /// A value from a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// KV-cache capacity to reserve: `contextTokens × maxSequences` tokens, or `kvTokens`, plus headroom.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "!has(self.kvTokens) || self.kvTokens >= self.contextTokens",
     "message": "all conversations share kvTokens; it must be at least contextTokens"},
]))]
pub struct KvCapacity {
    /// Maximum context length in tokens; the model's own limit if that is smaller.
    #[serde(default = "context_tokens")]
    #[schemars(range(min = 16, max = 16777216))]
    pub context_tokens: u32,
    /// Maximum number of concurrent sequences.
    #[serde(default = "max_sequences")]
    #[schemars(range(min = 1, max = 1024))]
    pub max_sequences: u32,
    /// KV-cache tokens of all sequences together, for workloads whose sequences are rarely all at full
    /// length. Sequences that do not fit wait or are preempted and resumed. Absent: `contextTokens ×
    /// maxSequences`, so that all fit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 16, max = 17_179_869_184_u64))]
    pub kv_tokens: Option<u64>,
    /// Additional reserve, in percent of weights and KV cache.
    #[serde(default = "headroom_percent")]
    #[schemars(range(min = 0, max = 100))]
    pub headroom_percent: u32,
}

fn context_tokens() -> u32 {
    8192
}

fn max_sequences() -> u32 {
    4
}

fn headroom_percent() -> u32 {
    5
}

impl Default for KvCapacity {
    fn default() -> Self {
        Self {
            context_tokens: context_tokens(),
            max_sequences: max_sequences(),
            kv_tokens: None,
            headroom_percent: headroom_percent(),
        }
    }
}

/// Replicas, placement and conditions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelDeploymentStatus {
    /// The generation that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Replicas that exist.
    #[serde(default)]
    pub replicas: i32,
    /// Replicas that are ready.
    #[serde(default)]
    pub ready_replicas: i32,
    /// Ready and existing replicas, for display: `1/1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<String>,
    /// Label selector of the Shards, for `/scale`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// Nodes in use, comma-separated, in rank order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<String>,
    /// The planner's decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<PlacementReport>,
    /// History of plans that were tried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutStatus>,
    /// Sampling parameters of requests that name none: the spec's, then those of the model's generation_config.json.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation_config: Option<GenerationConfig>,
    /// Placed, CopiesReady, Available, Progressing, Ready, Reconciling, Stalled; with `autoscaling` ScalingActive;
    /// where its tier wants approvals AwaitingApproval.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// Demand, one entry per gateway.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["gateway"])
    )]
    pub demand: Vec<GatewayDemand>,
    /// With `autoscaling.predictive`: what the hours of the last four weeks needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub demand_history: Option<DemandHistory>,
}

/// The placement and its reasons.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PlacementReport {
    /// The placement in one line: split and nodes.
    pub decision: String,
    /// Why the planner chose it.
    pub reason: String,
    /// Digest of the plan; of the last one while nothing is placed.
    pub plan_hash: String,
    /// How many replicas were placed; kept while some wait. That many are placed again before other
    /// deployments.
    #[serde(default)]
    pub replicas: i32,
    /// Predicted speed of a replica; absent if a node's chip is not in the catalogue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<PredictedThroughput>,
    /// Measured speed of the replicas, once there were enough requests; of the slowest one where they differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<MeasuredThroughput>,
    /// Alternatives that were considered, best first, with the numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 5))]
    pub candidates: Vec<String>,
}

/// The performance model's prediction for a replica; for the slowest one where they differ.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PredictedThroughput {
    /// Tokens per second of a single stream without other load, such as `41.3`.
    pub tokens_per_second: String,
    /// Tokens per second of all streams together, at the maximum number of sequences.
    pub total_tokens_per_second: String,
    /// Time to first token of a prompt of 1,024 tokens, in milliseconds.
    pub ttft_milliseconds: u32,
    /// Tokens of reserved KV cache, all sequences together.
    pub kv_tokens: u64,
}
