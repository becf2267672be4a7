//! Ports of this machine that can be cabled to other machines, and whether RDMA can run over each. Pure
//! except for [`probe`]: tool output arrives as facts ([`crate::macos`], [`crate::linux`]). The operator
//! finds the node at the other end from all nodes' reports (`operator/src/node/cables.rs`); the planner
//! decides which machines form a group.
//!
//! ```text
//! buses ─ receptacle ─ hardware ports ─ interface ─┬─ addresses, bridges
//!                                                  └─ RDMA devices ─▶ usable, or why not
//! ```

pub(crate) mod measure;
pub mod probe;
mod rdma;

use russet_crds::{FabricPort, PortPeer};

use crate::linux::thunderbolt::Host;
use crate::macos::network::{Address, Interface};
use crate::macos::ports::HardwarePort;
use crate::macos::rdma::RdmaDevice;
use crate::macos::thunderbolt::Bus;

pub use rdma::NoRdma;

/// Facts from a Mac's tools, each parsed independently.
#[derive(Clone, Debug, Default)]
pub struct PortFacts {
    /// `Mac Studio`.
    pub machine: String,
    /// Its Thunderbolt buses.
    pub buses: Vec<Bus>,
    /// The interface of each hardware port.
    pub hardware_ports: Vec<HardwarePort>,
    /// All interfaces.
    pub interfaces: Vec<Interface>,
    /// Whether RDMA is enabled; `None` where macOS has no such switch.
    pub rdma_enabled: Option<bool>,
    /// RDMA devices.
    pub devices: Vec<RdmaDevice>,
    /// Interfaces with a default route, the preferred one first.
    pub default_routes: Vec<String>,
}

/// Maximum number of reported peers per port, and of characters of a name: machine names are free text, and
/// the API rejects longer ones.
const MAX_PEERS: usize = 8;
const MAX_NAME_CHARS: usize = 100;

fn truncated(name: &str) -> String {
    name.chars().take(MAX_NAME_CHARS).collect()
}

/// The Thunderbolt ports of a Mac, by number. A bus without a number, or with one that no interface has,
/// cannot carry traffic.
pub fn ports(facts: &PortFacts) -> Vec<FabricPort> {
    let mut ports: Vec<(u32, FabricPort)> =
        facts.buses.iter().filter_map(|bus| Some((bus.receptacle?, port(facts, bus)?))).collect();
    ports.sort_by_key(|(receptacle, _)| *receptacle);
    ports.into_iter().map(|(_, port)| port).collect()
}

fn port(facts: &PortFacts, bus: &Bus) -> Option<FabricPort> {
    let hardware = facts.hardware_ports.iter().find(|port| port.receptacle() == bus.receptacle)?;
    let interface = &hardware.device;
    let known = facts.interfaces.iter().find(|one| one.name == *interface);
    let bridge = facts.interfaces.iter().find(|one| one.members.contains(interface));
    let bridge = bridge.map(|bridge| bridge.name.as_str());
    // A configured address takes precedence over a link-local one.
    let given = |addresses: &[Address]| addresses.iter().find(|address| !address.ip.is_link_local()).copied();
    let address = known.and_then(|one| given(&one.addresses).or_else(|| one.addresses.first().copied()));
    let rdma = rdma::device(
        facts,
        bus,
        &rdma::PortInterface { interface, address: address.map(|address| address.ip), bridge },
    );
    let peers = bus.peers.iter().take(MAX_PEERS).map(|peer| PortPeer {
        name: truncated(&peer.name),
        domain: peer.domain.clone(),
        bits_per_second: peer.bits_per_second,
        through: peer.through.iter().map(|name| truncated(name)).collect(),
    });
    Some(FabricPort {
        name: hardware.name.clone(),
        interface: interface.clone(),
        domain: bus.domain.clone(),
        peers: peers.collect(),
        address: address.map(|address| address.ip.to_string()),
        prefix_length: address.and_then(|address| address.prefix),
        // Only the first default route is used; a bridge's route may use any of its members.
        default_route: facts
            .default_routes
            .first()
            .is_some_and(|first| first == interface || Some(first.as_str()) == bridge),
        bridge: bridge.map(str::to_owned),
        ..port_with_rdma(rdma)
    })
}

/// The Thunderbolt connections of a Linux machine; `addresses` are those of its interfaces. The kernel does
/// not list ports without a cable.
pub fn connections(hosts: &[Host], addresses: &[(String, Address)]) -> Vec<FabricPort> {
    let port = |host: &Host| {
        let interface = host.interface.clone()?;
        let address = addresses.iter().find(|(name, _)| *name == interface);
        let peer = PortPeer {
            name: host.device.as_deref().map_or_else(|| "a machine without a name".to_owned(), truncated),
            domain: Some(host.domain.clone()),
            bits_per_second: host.bits_per_second,
            through: Vec::new(),
        };
        Some(FabricPort {
            name: format!("Thunderbolt {}", host.name),
            domain: host.own_domain.clone(),
            peers: vec![peer],
            address: address.map(|(_, address)| address.ip.to_string()),
            prefix_length: address.and_then(|(_, address)| address.prefix),
            interface,
            ..port_with_rdma(Err(NoRdma::OnLinux))
        })
    };
    hosts.iter().filter_map(port).collect()
}

/// A port with only its RDMA state filled in.
fn port_with_rdma(rdma: Result<String, NoRdma>) -> FabricPort {
    match rdma {
        Ok(device) => FabricPort { rdma_device: Some(device), ..FabricPort::default() },
        Err(why) => FabricPort {
            reason: Some(format!("{:?}", why.reason())),
            message: Some(why.to_string().chars().take(5 * MAX_NAME_CHARS).collect()),
            ..FabricPort::default()
        },
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::macos::thunderbolt::{Plug, ThunderboltPeer};

    fn at(ip: [u8; 4]) -> Address {
        Address { ip: Ipv4Addr::from(ip), prefix: Some(30) }
    }

    /// A Mac Studio whose port 2 (en3) is cabled to another Mac at 80 Gb/s, with everything that RDMA needs.
    pub(super) fn joined() -> PortFacts {
        let peer = ThunderboltPeer {
            name: "studio-b".to_owned(),
            model: "Mac15,14".to_owned(),
            domain: Some("B".to_owned()),
            offers_rdma: Some(true),
            through: Vec::new(),
            bits_per_second: Some(80_000_000_000),
        };
        let bus = |number: u32, plug, peers| Bus {
            name: format!("thunderboltusb4_bus_{}", number - 1),
            domain: Some(format!("A{number}")),
            receptacle: Some(number),
            plug,
            peers,
            devices: Vec::new(),
        };
        let hardware = |number: u32, device: &str| HardwarePort {
            name: format!("Thunderbolt {number}"),
            device: device.to_owned(),
            address: None,
        };
        let device = |name: &str, is_active| RdmaDevice {
            name: name.to_owned(),
            is_active,
            state: if is_active { "PORT_ACTIVE (4)" } else { "PORT_DOWN (1)" }.to_owned(),
            addresses: None,
        };
        let idle = Plug::Idle { max_bits_per_second: Some(120_000_000_000) };
        PortFacts {
            machine: "Mac Studio".to_owned(),
            buses: vec![
                bus(2, Plug::Connected { bits_per_second: Some(80_000_000_000) }, vec![peer]),
                bus(1, idle, Vec::new()),
            ],
            hardware_ports: vec![hardware(1, "en2"), hardware(2, "en3")],
            interfaces: vec![Interface {
                name: "en3".to_owned(),
                addresses: vec![at([192, 0, 2, 5])],
                ..Interface::default()
            }],
            rdma_enabled: Some(true),
            devices: vec![device("rdma_en2", false), device("rdma_en3", true)],
            default_routes: vec!["en0".to_owned(), "en3".to_owned()],
        }
    }

    #[test]
    fn a_port_is_its_bus_its_interface_and_its_device() {
        let found = ports(&joined());
        assert_eq!(
            found.iter().map(|port| port.name.as_str()).collect::<Vec<_>>(),
            ["Thunderbolt 1", "Thunderbolt 2"]
        );
        assert_eq!(found[0].reason.as_deref(), Some("NothingPlugged"));
        assert_eq!((found[1].interface.as_str(), found[1].address.as_deref()), ("en3", Some("192.0.2.5")));
        assert_eq!((found[1].rdma_device.as_deref(), &found[1].reason), (Some("rdma_en3"), &None));
        assert_eq!((found[1].prefix_length, found[1].default_route), (Some(30), false));
        let mut facts = joined();
        facts.default_routes.remove(0);
        assert!(ports(&facts)[1].default_route);
        facts.default_routes = vec!["bridge0".to_owned()];
        facts.interfaces.push(Interface {
            name: "bridge0".to_owned(),
            members: vec!["en3".to_owned()],
            ..Interface::default()
        });
        assert_eq!(ports(&facts).iter().map(|port| port.default_route).collect::<Vec<_>>(), [false, true]);
        facts.interfaces.pop();
        facts.interfaces[0].addresses.insert(0, at([169, 254, 3, 4]));
        assert_eq!(ports(&facts)[1].address.as_deref(), Some("192.0.2.5"), "given before taken by itself");
        assert_eq!((found[1].domain.as_deref(), found[1].peers.len()), (Some("A2"), 1));
    }

    #[test]
    fn ports_name_their_bridge_and_unknown_ports_are_omitted() {
        let mut facts = joined();
        let members = vec!["en2".to_owned(), "en3".to_owned()];
        facts.interfaces = vec![Interface { name: "bridge0".to_owned(), members, ..Interface::default() }];
        let found = ports(&facts);
        assert!(found.iter().all(|port| port.bridge.as_deref() == Some("bridge0")), "{found:?}");
        facts.hardware_ports.truncate(1);
        assert_eq!(ports(&facts).len(), 1);
    }

    #[test]
    fn linux_link_carries_ip_once_its_interface_exists() {
        let host = Host {
            name: "0-1".to_owned(),
            own_domain: Some("A".to_owned()),
            domain: "B".to_owned(),
            device: Some("studio".to_owned()),
            bits_per_second: Some(40_000_000_000),
            interface: Some("thunderbolt0".to_owned()),
        };
        let bare = Host { interface: None, ..host.clone() };
        let addresses = [("thunderbolt0".to_owned(), at([192, 0, 2, 9]))];
        let found = connections(&[host, bare], &addresses);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(
            (found[0].name.as_str(), found[0].address.as_deref()),
            ("Thunderbolt 0-1", Some("192.0.2.9"))
        );
        assert_eq!(
            (found[0].reason.as_deref(), found[0].peers[0].domain.as_deref()),
            (Some("NoRdmaOnLinux"), Some("B"))
        );
    }
}
