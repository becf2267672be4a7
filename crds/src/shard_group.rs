//! ShardGroup: one replica of a ModelDeployment as an immutable plan. Only its epoch changes: every loss of a
//! rank re-forms the group at a higher epoch.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    ADAPTERS, Adapter, Backend, DRAFT_MODEL, EngineOptions, GroupEnergy, LocalReference, MeasuredThroughput,
};

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
    /// NodePools of the deployment when the group was created. A group whose node leaves a pool stays; one
    /// whose deployment names other pools moves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub pool_refs: Vec<LocalReference>,
    /// The deployment's Tier, which sets the replica's priority and whether it may be preempted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier_ref: Option<LocalReference>,
    /// Incarnation of the group; only increases. Agents stop ranks of older ones.
    #[schemars(range(min = 1), extend("x-kubernetes-validations" = [{"rule": "self >= oldSelf", "message": "epoch only grows"}]))]
    pub epoch: i64,
}

/// The split of a replica over nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GroupPlan {
    /// Digest of everything below.
    pub hash: String,
    /// Distributed backend, such as `Ring`; `None` for one rank.
    pub backend: Backend,
    /// Ranks that share every layer of a stage; 1 for a single rank or a pipeline. Rank `r` is member `r %
    /// tensorSize` of stage `r / tensorSize`; stage 0 holds the last layers.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 64))]
    pub tensor_size: u32,
    /// Ranks in order.
    #[schemars(length(min = 1, max = 64))]
    pub members: Vec<GroupMember>,
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
    /// The draft model, loaded by rank 0 beside its layers and counted in its bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_model_ref: Option<LocalReference>,
    /// Adapters of the model, of which every rank loads its part; counted in its bytes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub adapters: Vec<Adapter>,
}

impl GroupPlan {
    /// Options that engines must support to run the plan, named as in `InferenceNode.status.engineOptions`.
    pub fn options(&self) -> impl Iterator<Item = &'static str> {
        let draft = self.draft_model_ref.as_ref().map(|_| DRAFT_MODEL);
        let adapters = (!self.adapters.is_empty()).then_some(ADAPTERS);
        self.engine.non_default().chain(draft).chain(adapters)
    }

    /// The Models whose files the ranks read, each with the node that must hold them; `model` is the group's
    /// own.
    pub fn files<'a>(&'a self, model: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        let models = self.adapters.iter().map(|adapter| adapter.model_ref.name.as_str());
        let own = std::iter::once(model)
            .chain(models)
            .flat_map(|model| self.members.iter().map(move |member| (model, member.node_name.as_str())));
        let draft = self.draft_model_ref.iter().zip(self.members.first());
        own.chain(draft.map(|(draft, first)| (draft.name.as_str(), first.node_name.as_str())))
    }
}

fn one() -> u32 {
    1
}

/// One rank of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GroupMember {
    /// Rank; 0 owns the last layers and samples.
    pub rank: u32,
    /// Node that runs it.
    pub node_name: String,
    /// Layers of the rank; ranks of one stage hold the same ones.
    pub layers: u32,
    /// Bytes of weights.
    pub weight_bytes: u64,
    /// Bytes reserved for KV cache.
    pub kv_bytes: u64,
    /// Bytes of additional reserve: activations, buffers, headroom.
    pub overhead_bytes: u64,
    /// RDMA devices of this node towards every member of its stage, in member order. An empty cell is no
    /// cable, several names are several cables. For Jaccl and JacclRing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub rdma_devices: Vec<Vec<String>>,
}

impl GroupMember {
    /// Memory that the node must grant.
    pub fn reserved_bytes(&self) -> u64 {
        self.weight_bytes + self.kv_bytes + self.overhead_bytes
    }
}

impl ShardGroup {
    /// Whether the operator has written its status; the API server fills in one that describes no generation.
    pub fn is_reported(&self) -> bool {
        let observed = self.status.as_ref().and_then(|status| status.observed_generation);
        observed.is_some_and(|generation| generation != crate::NOT_OBSERVED)
    }
}

/// State of the replica.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShardGroupStatus {
    /// The generation that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Epoch at which every rank is serving.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served_epoch: Option<i64>,
    /// How often the group was re-formed.
    #[serde(default)]
    pub restarts: u32,
    /// Why it was last re-formed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_loss: Option<String>,
    /// Address of rank 0; absent unless Ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<Endpoint>,
    /// Measured speed; that of an earlier epoch until there are enough requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<MeasuredThroughput>,
    /// Power of its nodes while they compute; absent where one of them has no figure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy: Option<GroupEnergy>,
    /// Reserved, Formed, Ready, Reconciling, Stalled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Address of rank 0, for gateways.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Endpoint {
    /// `ip:port` of rank 0's gRPC service.
    pub address: String,
    /// Node of rank 0; the name in its certificate.
    pub node_name: String,
}
