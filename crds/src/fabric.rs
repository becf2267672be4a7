//! The fabric: ports of a machine, as its agent reports them, and the links that two such reports make.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A port that a cable can connect to another machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FabricPort {
    /// Label of the port, such as `Thunderbolt 2`; on Linux the kernel's name of the connection.
    #[schemars(length(max = 128))]
    pub name: String,
    /// Its network interface, such as `en5`.
    #[schemars(length(max = 64))]
    pub interface: String,
    /// Identifier of this port that the machine at the other end of a cable sees: a UUID, in upper case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub domain: Option<String>,
    /// What the agents at both ends measured over the port, seen from this end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<LinkMeasured>,
    /// Machines at the other end, connected directly or through hubs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    pub peers: Vec<PortPeer>,
    /// Its own IPv4 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub address: Option<String>,
    /// Prefix length of its network, in bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 32))]
    pub prefix_length: Option<u32>,
    /// Whether the machine's default route uses the port.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub default_route: bool,
    /// The bridge that the port is a member of; the address is then the bridge's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub bridge: Option<String>,
    /// RDMA device that is usable over the port, such as `rdma_en5`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub rdma_device: Option<String>,
    /// Why RDMA cannot run over the port: one of the reasons of `FabricHealthy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub reason: Option<String>,
    /// The same as a sentence, with the remedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub message: Option<String>,
}

/// A machine at the other end of a cable, as the port detects it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PortPeer {
    /// Name that the machine reports.
    #[schemars(length(max = 128))]
    pub name: String,
    /// Identifier (domain UUID) of its port, in upper case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub domain: Option<String>,
    /// Bits per second of the slowest part of the path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_second: Option<u64>,
    /// Names of docks and hubs on the path, the nearest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub through: Vec<String>,
}

/// A network path from this node to another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Link {
    /// The other node.
    pub peer: String,
    /// Network interface, such as `en5`.
    pub interface: String,
    /// Kind of network.
    #[serde(default)]
    pub kind: LinkKind,
    /// This node's address on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The other node's address on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_address: Option<String>,
    /// RDMA device of this end, such as `rdma_en5`, if usable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rdma_device: Option<String>,
    /// Bits per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_second: Option<u64>,
    /// Port of the other node's agent on this link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub peer_port: Option<u32>,
    /// What the agents at both ends measured, the worse of the two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<LinkMeasured>,
}

/// What two agents measured over a link, rounded so that the value does not change all the time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LinkMeasured {
    /// Round-trip time to the other agent in microseconds, median of a minute; absent while the agent does
    /// not respond.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_trip_microseconds: Option<u32>,
    /// Bits per second received from the other agent over TLS in the last test.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_second: Option<u64>,
}

impl LinkMeasured {
    /// Combines the reports of both ends: the slower of the two, and no response if one end gets none.
    pub fn worse(self, other: Self) -> Self {
        let trips = self.round_trip_microseconds.zip(other.round_trip_microseconds);
        let bits = self.bits_per_second.into_iter().chain(other.bits_per_second).min();
        Self { round_trip_microseconds: trips.map(|(one, other)| one.max(other)), bits_per_second: bits }
    }
}

/// Kind of network of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum LinkKind {
    /// A Thunderbolt cable between two machines, with no other machine on it.
    Thunderbolt,
    /// Ethernet.
    Ethernet,
    /// Wi-Fi.
    Wifi,
    /// Anything else, or a kind from a newer release.
    #[default]
    #[serde(other)]
    Other,
}
