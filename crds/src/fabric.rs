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
    /// What the agents at both ends found out about each other over it, seen from this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<LinkMeasured>,
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
    /// Port at which the other node's agent answers over it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub peer_port: Option<u32>,
    /// What the agents at both ends measured, the worse of the two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<LinkMeasured>,
}

/// What two agents found out about a way between them, in steps that hide what changes all the time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LinkMeasured {
    /// Microseconds to the other agent and back, the median of a minute; absent while it does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_trip_microseconds: Option<u32>,
    /// Bits per second that came from the other agent over TLS, when it was last tried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_second: Option<u64>,
}

impl LinkMeasured {
    /// What two ends say together: the slower way of the two, and no answer where one gets none.
    pub fn worse(self, other: Self) -> Self {
        let trips = self.round_trip_microseconds.zip(other.round_trip_microseconds);
        let bits = self.bits_per_second.into_iter().chain(other.bits_per_second).min();
        Self { round_trip_microseconds: trips.map(|(one, other)| one.max(other)), bits_per_second: bits }
    }
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
