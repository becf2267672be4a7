//! InferenceNode: one machine that runs ranks. The spec holds the owner's settings; the status holds what the
//! agent measured and the operator's conditions.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{FabricPort, Link, MeasuredPower, NodeEnergy, NodeTransfers};

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
    /// Bounds on the disk space that models may take.
    #[serde(default)]
    pub disk: NodeDiskLimits,
    /// Network settings of the machine, applied by its root helper (`russet fabric apply`); absent: the
    /// network is left as it is without Russet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NodeNetwork>,
    /// When model files may be transferred, and how fast; absent: always and unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfers: Option<NodeTransfers>,
    /// What the machine draws and costs; absent: nothing is said of what requests cost here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy: Option<NodeEnergy>,
}

/// Network settings that a machine's root helper applies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeNetwork {
    /// Ports that get their own address and leave their bridge. Only ports of Thunderbolt cables are changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["interface"]))]
    pub ports: Vec<PortAddress>,
    /// Position of the cables' services in the service order, which macOS follows for internet traffic;
    /// absent: unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_order: Option<ServiceOrder>,
    /// What happens to the settings when the machine restarts.
    #[serde(default)]
    pub after_restart: AfterRestart,
    /// With `Drop`: the boot (`status.bootId`) for which the settings are valid; absent: any.
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
    /// A host address in a private network of four addresses, such as `172.31.240.1/30`.
    #[schemars(regex(pattern = r"^[0-9]{1,3}(\.[0-9]{1,3}){3}/30$"))]
    pub address: String,
}

/// Position of the cables' services in macOS's network service order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ServiceOrder {
    /// After all others, so that internet traffic uses them last.
    CablesLast,
    /// A value from a newer release; not applied, and reported.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// What happens to network settings when the machine restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AfterRestart {
    /// The settings are dropped.
    #[default]
    Drop,
    /// The settings are applied again.
    Keep,
    /// A value from a newer release; treated like Drop.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Whether a node takes new work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Scheduling {
    /// The planner may place new work here.
    #[default]
    Enabled,
    /// Running replicas stay; no new work is placed here.
    Cordoned,
    /// Running replicas move to other nodes.
    Draining,
    /// A value from a newer release; treated like Cordoned, the safe choice.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// The owner's bounds; the agent's own limit applies as well, and the smallest wins.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeMemoryLimits {
    /// Maximum memory that all models together may take, such as `64Gi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"))]
    pub serving_limit: Option<String>,
    /// Memory reserved for the machine's user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"))]
    pub user_reserve: Option<String>,
    /// Memory that the GPU may keep wired, such as `56Gi`. The machine's root helper sets it if its owner
    /// allows that (`--allow-wired-limit`). Absent: the macOS default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"))]
    pub wired_limit: Option<String>,
}

/// The owner's bounds on disk space.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeDiskLimits {
    /// Disk space that models leave free, such as `50Gi`. Absent: a twentieth of the disk, between 1Gi and
    /// 10Gi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"))]
    pub reserve: Option<String>,
}

/// What the agent measured, and the operator's conditions.
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
    /// Boot id of the running system; the holder of the node's Lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_id: Option<String>,
    /// Memory, measured and granted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<NodeMemory>,
    /// Disk under the model store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<NodeDisk>,
    /// Addresses at which other machines reach the node, best first, without ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub addresses: Vec<String>,
    /// Distributed backends that the node's engine supports, such as `ring`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    pub backends: Vec<String>,
    /// Sharding modes that the node's engine supports. A node of an older release reports none and runs
    /// single ranks and pipelines.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub sharding_modes: Vec<String>,
    /// Options of a deployment's `spec.engine` that the node's engine supports, by field; an older release
    /// reports none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub engine_options: Vec<String>,
    /// Ports that cables can connect to other machines, as the agent reports them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub ports: Vec<FabricPort>,
    /// Links to other nodes: a port here and a port there that detect each other (operator).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub links: Vec<Link>,
    /// Port at which the agent serves other agents over mutual TLS, at its address and at those of its ports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub peer_port: Option<u32>,
    /// Version of the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_version: Option<String>,
    /// Build of the engine; all ranks of a group need the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine_build: Option<String>,
    /// Address of the agent's metrics, `ip:port`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics_address: Option<String>,
    /// Power of the machine, where its system tells it. Written when it has moved by a tenth, at most every five minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy: Option<MeasuredPower>,
    /// Ready, Reachable, Drained and FabricHealthy (operator), MemoryPressure, DiskPressure, PortsRead,
    /// NetworkApplied and WiredLimitSet (agent).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Memory of a node. The byte counts are exact; the quantities are for display.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeMemory {
    /// Physical memory, or the size that the agent was configured to simulate.
    pub total_bytes: u64,
    /// Memory that models may take in all: the total minus reserves and limits.
    pub serving_limit_bytes: u64,
    /// Memory that the agent has granted to Shards.
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
    /// Size of the file system that holds the model store.
    pub total_bytes: u64,
    /// Free space there.
    pub free_bytes: u64,
    /// Space that models leave free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserve_bytes: Option<u64>,
    /// Space that models may take in all: what they use plus what is free, minus the reserve.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub models_limit_bytes: Option<u64>,
    /// `freeBytes` as a quantity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free: Option<String>,
    /// `modelsLimitBytes` as a quantity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub models_limit: Option<String>,
}
