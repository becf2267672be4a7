//! What joins a machine to others: its ports, as its agent sees them, and the links that two such reports make.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A port that a cable can join to another machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FabricPort {
    /// What is written beside it, such as `Thunderbolt 2`; on Linux the kernel's name of the connection.
    #[schemars(length(max = 128))]
    pub name: String,
    /// Its network interface, such as `en5`.
    #[schemars(length(max = 64))]
    pub interface: String,
    /// What the machine at the other end of a cable sees of this port: a UUID, in upper case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub domain: Option<String>,
    /// Machines at the other end, directly or behind hubs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    pub peers: Vec<PortPeer>,
    /// Its own IPv4 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub address: Option<String>,
    /// How many of its first bits all addresses of its network share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 32))]
    pub prefix_length: Option<u32>,
    /// Whether the machine's internet traffic goes over it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub default_route: bool,
    /// The bridge it is a member of, whose address is not its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub bridge: Option<String>,
    /// RDMA device that can be used over it, such as `rdma_en5`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub rdma_device: Option<String>,
    /// Why RDMA cannot run over it, in a word: one of the reasons of `FabricHealthy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub reason: Option<String>,
    /// The same as a sentence, with what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub message: Option<String>,
}

/// A machine at the other end of a cable, as the port sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PortPeer {
    /// What it calls itself.
    #[schemars(length(max = 128))]
    pub name: String,
    /// Domain of its port, in upper case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub domain: Option<String>,
    /// Bits per second of the slowest part of the way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_second: Option<u64>,
    /// Names of docks and hubs between, the nearest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub through: Vec<String>,
}

/// A way from this node to another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Link {
    /// The other node.
    pub peer: String,
    /// Network interface, such as `en5`.
    pub interface: String,
    /// What carries it.
    #[serde(default)]
    pub kind: LinkKind,
    /// This node's address on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The other node's address on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_address: Option<String>,
    /// RDMA device of this end, such as `rdma_en5`, when it can be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rdma_device: Option<String>,
    /// Bits per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_second: Option<u64>,
}

/// What carries a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum LinkKind {
    /// A Thunderbolt cable between two machines: nobody else is on it.
    Thunderbolt,
    /// Ethernet.
    Ethernet,
    /// A radio network.
    Wifi,
    /// Anything else, or a kind of a newer release.
    #[default]
    #[serde(other)]
    Other,
}
