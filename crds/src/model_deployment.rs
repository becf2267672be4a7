//! ModelDeployment: a model that should answer. People write it; the operator turns it into
//! ShardGroups and explains the placement in the status.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Autoscaling, GatewayDemand, EngineOptions, LocalReference, MeasuredThroughput, Rollout, RolloutStatus, Spread};

/// A model that should answer under this object's name.
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
     "message": "a model that guesses for itself saves nothing; name a smaller one in draftModelRef, or leave it out"},
]))]
pub struct ModelDeploymentSpec {
    /// The Model, in the same namespace.
    pub model_ref: LocalReference,
    /// A Model of the same namespace that guesses the next tokens of answers where `engine.speculation` finds none: a
    /// smaller one with the same tokenizer. The node of rank 0 holds it too. The answers are the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_model_ref: Option<LocalReference>,
    /// How each replica is split; absent, with no `strategyRef` either: as its fields' defaults say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharding: Option<Sharding>,
    /// The ShardingStrategy that says it instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy_ref: Option<LocalReference>,
    /// How its engines compute; left out: as its fields' defaults say.
    #[serde(default, skip_serializing_if = "EngineOptions::is_default")]
    pub engine: EngineOptions,
    /// NodePools whose nodes it may run on; the ranks of one replica are always of one pool. Empty:
    /// any node that takes work.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub pool_refs: Vec<LocalReference>,
    /// The Tier that says where it runs and how important it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier_ref: Option<LocalReference>,
    /// The workload group of a Dedicated tier whose nodes it shares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub workload_group: Option<String>,
    /// Independent copies that answer side by side; 0 stops the deployment. With `autoscaling` leave it out: it is
    /// written then, through `/scale`.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 64))]
    pub replicas: i32,
    /// The `planHash` of what its tier wants approved, for those who approve in Git: it counts as an Approval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9a-f]{16}$"))]
    pub approved_plan: Option<String>,
    /// How an edit is carried out; absent: as its fields' defaults say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<Rollout>,
    /// How many replicas there are when demand decides. Absent: as many as `replicas` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autoscaling: Option<Autoscaling>,
    /// What its replicas keep apart by, where that costs little; absent: as its fields' defaults say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<Spread>,
}

impl ModelDeploymentSpec {
    /// Names of the Models it needs.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        [Some(&self.model_ref), self.draft_model_ref.as_ref()]
            .into_iter()
            .flatten()
            .map(|model| model.name.as_str())
    }
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
    /// The kind of split; Auto takes one node when the model fits one.
    #[serde(default)]
    pub mode: ShardingMode,
    /// Ranks in all, one a node; the planner chooses when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub ranks: Option<u32>,
    /// Ranks that share every layer: all of them for Tensor, of each stage for Hybrid; the planner
    /// chooses when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub tensor_size: Option<u32>,
    /// Layers per stage, the last stage first; the planner balances when absent. Stages of a
    /// pipeline are ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub layers_per_rank: Option<Vec<u32>>,
    /// How the ranks of a tensor group exchange sums; Auto takes the best their links offer.
    #[serde(default)]
    pub backend: BackendChoice,
    /// The least speed of a link between any two nodes of a replica, such as `60G`, as both report it.
    /// It counts when a replica is placed; one that runs stays where it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9]+(\.[0-9]+)?(k|M|G|T)?$"))]
    pub min_bits_per_second: Option<String>,
    /// Room for conversations.
    #[serde(default)]
    pub kv: KvCapacity,
}

/// The kinds of split.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ShardingMode {
    /// One node when the model fits one; else a tensor group where links offer RDMA, else a pipeline.
    #[default]
    Auto,
    /// One rank on one node.
    Single,
    /// Consecutive layers on each rank.
    Pipeline,
    /// Every layer cut over all ranks.
    Tensor,
    /// A pipeline of tensor groups.
    Hybrid,
    /// A word of a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// What may carry the sums of a tensor group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum BackendChoice {
    /// RDMA where the links of the chosen nodes allow it, else TCP.
    #[default]
    Auto,
    /// RDMA, every rank cabled to every other.
    Jaccl,
    /// RDMA, every rank cabled to its two neighbours.
    JacclRing,
    /// TCP.
    Ring,
    /// A word of a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Room reserved for conversations: `contextTokens × maxSequences` tokens of KV cache, or `kvTokens`, plus headroom.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {"rule": "!has(self.kvTokens) || self.kvTokens >= self.contextTokens",
     "message": "kvTokens is the room of all conversations together; it must hold one of contextTokens"},
]))]
pub struct KvCapacity {
    /// Longest conversation, tokens; the model's own limit when that is smaller.
    #[serde(default = "context_tokens")]
    #[schemars(range(min = 16, max = 16777216))]
    pub context_tokens: u32,
    /// Conversations at once.
    #[serde(default = "max_sequences")]
    #[schemars(range(min = 1, max = 1024))]
    pub max_sequences: u32,
    /// Tokens of all conversations together, where they are hardly ever all as long as they may be: those that do not
    /// fit wait, or make room and come back. Absent: `contextTokens × maxSequences`, so that all always fit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 16, max = 17_179_869_184_u64))]
    pub kv_tokens: Option<u64>,
    /// Reserved on top, percent of weights and KV cache.
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

/// What runs, where and why.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelDeploymentStatus {
    /// Generation this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Replicas that exist.
    #[serde(default)]
    pub replicas: i32,
    /// Replicas that answer.
    #[serde(default)]
    pub ready_replicas: i32,
    /// For people: `1/1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<String>,
    /// Label selector of the Shards, for `/scale`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// Nodes in use, comma separated, rank order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<String>,
    /// The planner's decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<PlacementReport>,
    /// What is known of plans that were tried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutStatus>,
    /// Placed, CopiesReady, Available, Progressing, Ready, Reconciling, Stalled; with `autoscaling` ScalingActive;
    /// where its tier wants approvals AwaitingApproval.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// What gateways have to do with it, an entry each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["gateway"])
    )]
    pub demand: Vec<GatewayDemand>,
}

/// Why the replicas are where they are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PlacementReport {
    /// In one line: split and nodes.
    pub decision: String,
    /// Why this one.
    pub reason: String,
    /// Digest of the plan; of the last one while nothing is placed.
    pub plan_hash: String,
    /// How many replicas had a place; of the last time while some wait. So many come back before others come.
    #[serde(default)]
    pub replicas: i32,
    /// How fast each replica should answer; absent where a node's chip is not in the catalogue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<PredictedThroughput>,
    /// How fast the replicas do answer, once enough was asked; of the slowest one where they differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<MeasuredThroughput>,
    /// What else was looked at, best first, with the numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 5))]
    pub candidates: Vec<String>,
}

/// What the performance model expects of a replica; of the slowest one where they differ.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PredictedThroughput {
    /// Tokens a second of one stream that nobody else disturbs, such as `41.3`.
    pub tokens_per_second: String,
    /// Tokens a second of all streams together, as many as there is room for.
    pub total_tokens_per_second: String,
    /// Milliseconds from a prompt of 1,024 tokens to its first token.
    pub ttft_milliseconds: u32,
    /// Tokens for which KV cache is reserved, all conversations together.
    pub kv_tokens: u64,
}
