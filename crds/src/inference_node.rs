//! InferenceNode: one machine that runs ranks. The spec is the owner's wishes; the status is what
//! the agent measured, plus the operator's verdict on whether it is reachable.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{FabricPort, Link, NodeTransfers};

/// A machine that runs model ranks.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "russet.dev",
    version = "v1alpha1",
    kind = "InferenceNode",
    status = "InferenceNodeStatus",
    derive = "PartialEq",
    derive = "Default",
    shortname = "inode",
    category = "russet",
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(name = "Chip", type_ = "string", json_path = ".status.chip"),
    printcolumn(name = "Memory", type_ = "string", json_path = ".status.memory.servingLimit"),
    printcolumn(name = "Granted", type_ = "string", json_path = ".status.memory.granted"),
    printcolumn(name = "Address", type_ = "string", json_path = ".status.addresses[0]"),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason"
    ),
    printcolumn(
        name = "Fabric",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"FabricHealthy\")].reason",
        priority = 1
    ),
    printcolumn(name = "Disk Free", type_ = "string", json_path = ".status.disk.free", priority = 1),
    printcolumn(
        name = "Models Limit",
        type_ = "string",
        json_path = ".status.disk.modelsLimit",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct InferenceNodeSpec {
    /// Whether the planner may place new work here.
    #[serde(default)]
    pub scheduling: Scheduling,
    /// Bounds on the memory that models may take.
    #[serde(default)]
    pub memory: NodeMemoryLimits,
    /// Bounds on the disk that models may take.
    #[serde(default)]
    pub disk: NodeDiskLimits,
    /// How the machine's network should be, which its root helper makes so (`russet fabric apply`); absent: as it is
    /// without Russet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NodeNetwork>,
    /// When model files may come, and how fast; absent: always, as fast as it goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfers: Option<NodeTransfers>,
}

/// What a machine's root helper makes of its network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeNetwork {
    /// Ports that get an address of their own and leave their bridge. Only ports of Thunderbolt cables are touched.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["interface"]))]
    pub ports: Vec<PortAddress>,
    /// Where services of cables stand when macOS looks for a way to the internet; absent: where they stand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_order: Option<ServiceOrder>,
    /// What becomes of it when the machine starts anew.
    #[serde(default)]
    pub after_restart: AfterRestart,
    /// With `Drop`, the boot (`status.bootId`) during which it holds; absent: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub boot_id: Option<String>,
}

/// An address for a port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PortAddress {
    /// Its network interface, such as `en5`.
    #[schemars(length(min = 1, max = 64))]
    pub interface: String,
    /// A host in a private network of four, such as `172.31.240.1/30`.
    #[schemars(regex(pattern = r"^[0-9]{1,3}(\.[0-9]{1,3}){3}/30$"))]
    pub address: String,
}

/// Where services of cables stand in the order of macOS's network services.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ServiceOrder {
    /// Behind all others, so that internet traffic goes over them last.
    CablesLast,
    /// A word of a newer release; not done, and said.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// What becomes of a changed network when its machine starts anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AfterRestart {
    /// It is as if nothing had been changed.
    #[default]
    Drop,
    /// It is changed again.
    Keep,
    /// A word of a newer release; treated like Drop.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Whether a node takes new work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Scheduling {
    /// New work may come.
    #[default]
    Enabled,
    /// What runs stays, nothing new comes.
    Cordoned,
    /// What runs moves away.
    Draining,
    /// A word of a newer release; treated like Cordoned, which harms nobody.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// The owner's bounds; the agent's own limit holds as well, the smallest wins.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeMemoryLimits {
    /// Most bytes all models together may take, such as `64Gi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"))]
    pub serving_limit: Option<String>,
    /// Bytes kept for the machine's user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"))]
    pub user_reserve: Option<String>,
    /// Bytes that the GPU may keep wired, such as `56Gi`, which the machine's root helper sets where its owner allows
    /// that (`--allow-wired-limit`); absent: what macOS thinks fit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"))]
    pub wired_limit: Option<String>,
}

/// The owner's bounds on the disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeDiskLimits {
    /// Bytes of disk that models leave free, such as `50Gi`; absent: a twentieth of the disk, between 1Gi
    /// and 10Gi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"))]
    pub reserve: Option<String>,
}

/// What the agent measured and the operator concluded.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InferenceNodeStatus {
    /// Name of the processor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chip: Option<String>,
    /// Logical cores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<u32>,
    /// Operating system and its build.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub os: Option<String>,
    /// Boot id of the running system; the Lease's holder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_id: Option<String>,
    /// Memory, measured and granted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<NodeMemory>,
    /// Disk under the model store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<NodeDisk>,
    /// Addresses other machines reach the node at, best first; no ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub addresses: Vec<String>,
    /// Distributed backends the node's engine offers, such as `ring`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    pub backends: Vec<String>,
    /// Splits the node's engine can run, by their mode; one that an older release reports not at all
    /// runs single ranks and pipelines.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub sharding_modes: Vec<String>,
    /// Options of a deployment's `spec.engine` that the node's engine has, by their field; none from an older release.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub engine_options: Vec<String>,
    /// Ports that cables can join to other machines, as the agent sees them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub ports: Vec<FabricPort>,
    /// Links to other nodes: where a port here and a port there see each other (operator).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub links: Vec<Link>,
    /// Port at which the agent answers other agents, over mutual TLS, at its address and at those of its ports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub peer_port: Option<u32>,
    /// Version of the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_version: Option<String>,
    /// Build of the engine; ranks of one group need equal ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine_build: Option<String>,
    /// Address of the agent's metrics, `ip:port`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics_address: Option<String>,
    /// Ready, Reachable, Drained and FabricHealthy (operator), MemoryPressure, DiskPressure, PortsRead,
    /// NetworkApplied and WiredLimitSet (agent).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Memory of a node. The byte counts are exact; the texts are for people.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeMemory {
    /// Bytes built in, or the size the agent was told to play.
    pub total_bytes: u64,
    /// Bytes models may take in all: total, less reserves and limits.
    pub serving_limit_bytes: u64,
    /// Bytes the agent has granted to Shards.
    pub granted_bytes: u64,
    /// `servingLimitBytes` as a quantity.
    pub serving_limit: String,
    /// `grantedBytes` as a quantity.
    pub granted: String,
}

/// Disk of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeDisk {
    /// Bytes of the file system that holds the model store.
    pub total_bytes: u64,
    /// Bytes free there.
    pub free_bytes: u64,
    /// Bytes that models leave free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserve_bytes: Option<u64>,
    /// Bytes models may take in all: what they have and what is free, less the reserve.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub models_limit_bytes: Option<u64>,
    /// `freeBytes` as a quantity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free: Option<String>,
    /// `modelsLimitBytes` as a quantity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub models_limit: Option<String>,
}
