//! ShardGroup: one replica of a ModelDeployment as an immutable plan. Only its epoch moves: every
//! loss of a rank starts the group anew under a higher one.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{DRAFT_MODEL, EngineOptions, LocalReference, MeasuredThroughput};

/// One replica: ranks on nodes.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "russet.dev",
    version = "v1alpha1",
    kind = "ShardGroup",
    namespaced,
    status = "ShardGroupStatus",
    derive = "PartialEq",
    derive = "Default",
    shortname = "sgroup",
    category = "russet",
    printcolumn(name = "Deployment", type_ = "string", json_path = ".spec.deploymentRef.name"),
    printcolumn(name = "Epoch", type_ = "integer", json_path = ".spec.epoch"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(name = "Restarts", type_ = "integer", json_path = ".status.restarts"),
    printcolumn(
        name = "Tok/s",
        type_ = "string",
        json_path = ".status.measured.tokensPerSecond",
        priority = 1
    ),
    printcolumn(name = "Endpoint", type_ = "string", json_path = ".status.endpoint.address"),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ShardGroupSpec {
    /// The ModelDeployment this is a replica of; its name is what clients call the model.
    pub deployment_ref: LocalReference,
    /// The Model.
    pub model_ref: LocalReference,
    /// Index of the replica.
    pub replica: i32,
    /// The plan. Immutable: another plan is another group.
    #[schemars(extend("x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "plan is immutable; another plan is another ShardGroup"}]))]
    pub plan: GroupPlan,
    /// NodePools the deployment named when the group was made. A group whose node leaves them stays
    /// where it is; one whose deployment names others moves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub pool_refs: Vec<LocalReference>,
    /// The deployment's Tier, which says how important the replica is and what it may be stopped for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier_ref: Option<LocalReference>,
    /// Incarnation of the group; only grows. Agents stop ranks of older ones.
    #[schemars(range(min = 1), extend("x-kubernetes-validations" = [{"rule": "self >= oldSelf", "message": "epoch only grows"}]))]
    pub epoch: i64,
}

/// A replica's split over nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GroupPlan {
    /// Digest of everything below.
    pub hash: String,
    /// Distributed backend, such as `Ring`; `None` for one rank.
    pub backend: Backend,
    /// Ranks that share every layer of a stage; 1 for a single rank or a pipeline. Rank `r` is member
    /// `r % tensorSize` of stage `r / tensorSize`, and stage 0 holds the last layers.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 64))]
    pub tensor_size: u32,
    /// Ranks in order.
    #[schemars(length(min = 1, max = 64))]
    pub members: Vec<GroupMember>,
    /// Longest conversation, tokens.
    pub context_tokens: u32,
    /// Conversations at once.
    pub max_sequences: u32,
    /// Tokens of all conversations together; absent: as many as all of them may have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_tokens: Option<u64>,
    /// How the engines compute.
    #[serde(default, skip_serializing_if = "EngineOptions::is_default")]
    pub engine: EngineOptions,
    /// The Model that guesses the next tokens, held by rank 0 beside its layers and counted in its bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_model_ref: Option<LocalReference>,
}

impl GroupPlan {
    /// What engines have to know to run it, in the words of `InferenceNode.status.engineOptions`.
    pub fn options(&self) -> impl Iterator<Item = &'static str> {
        self.engine.non_default().chain(self.draft_model_ref.as_ref().map(|_| DRAFT_MODEL))
    }

    /// Which Models' files its ranks read, each with the node that has to hold them, where `model` is the group's own.
    pub fn files<'a>(&'a self, model: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        let own = self.members.iter().map(move |member| (model, member.node_name.as_str()));
        let draft = self.draft_model_ref.iter().zip(self.members.first());
        own.chain(draft.map(|(draft, first)| (draft.name.as_str(), first.node_name.as_str())))
    }
}

fn one() -> u32 {
    1
}

/// How ranks exchange activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Backend {
    /// One rank, nothing to exchange.
    #[default]
    None,
    /// MLX's TCP ring.
    Ring,
    /// MLX's RDMA backend over Thunderbolt 5, every rank cabled to every other.
    Jaccl,
    /// The same with every rank cabled to its two neighbours.
    JacclRing,
    /// A backend of a newer release; nothing here can start it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// One rank of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GroupMember {
    /// Rank; 0 owns the last layers and samples.
    pub rank: u32,
    /// Node that runs it.
    pub node_name: String,
    /// Layers held; ranks of one stage hold the same ones.
    pub layers: u32,
    /// Bytes of weights.
    pub weight_bytes: u64,
    /// Bytes reserved for KV cache.
    pub kv_bytes: u64,
    /// Bytes reserved on top: activations, buffers, headroom.
    pub overhead_bytes: u64,
    /// RDMA devices of this node towards every member of its stage, in member order; an empty cell is
    /// no cable, several names are several cables. For Jaccl and JacclRing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub rdma_devices: Vec<Vec<String>>,
}

impl GroupMember {
    /// Everything the node must grant.
    pub fn reserved_bytes(&self) -> u64 {
        self.weight_bytes + self.kv_bytes + self.overhead_bytes
    }
}

/// Where the replica stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShardGroupStatus {
    /// Generation this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Epoch at which every rank serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served_epoch: Option<i64>,
    /// Times the group was formed anew.
    #[serde(default)]
    pub restarts: u32,
    /// Why it was last formed anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_loss: Option<String>,
    /// Where rank 0 answers; absent unless Ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<Endpoint>,
    /// How fast it answers; that of an earlier epoch until this one has seen enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<MeasuredThroughput>,
    /// Reserved, Formed, Ready, Reconciling, Stalled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Where a gateway finds rank 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Endpoint {
    /// `ip:port` of rank 0's gRPC service.
    pub address: String,
    /// Node of rank 0; its certificate's name.
    pub node_name: String,
}
