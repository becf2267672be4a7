//! Ports of this machine that cables can join to others, and whether RDMA can run over each. Pure: what tools printed
//! comes in as facts ([`crate::macos`]). Who is at the other end, and which machines make a group, is for those who see
//! more than one machine (`plan/src/fabric.rs`).
//!
//! ```text
//! buses ─ receptacle ─ hardware ports ─ interface ─┬─ addresses, bridges
//!                                                  └─ RDMA devices ─▶ can it, or why not
//! ```

mod rdma;

use std::net::Ipv4Addr;

use crate::macos::network::Interface;
use crate::macos::ports::HardwarePort;
use crate::macos::rdma::Device;
use crate::macos::thunderbolt::{Bus, Peer, Plug};

pub use rdma::NoRdma;

/// What the tools of a Mac said, each read by itself.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// `Mac Studio`.
    pub machine: String,
    /// Its Thunderbolt buses.
    pub buses: Vec<Bus>,
    /// Which interface a port is.
    pub hardware_ports: Vec<HardwarePort>,
    /// All interfaces.
    pub interfaces: Vec<Interface>,
    /// Whether RDMA is enabled; `None` where macOS has no such switch.
    pub rdma_enabled: Option<bool>,
    /// RDMA devices.
    pub devices: Vec<Device>,
}

/// A Thunderbolt port.
#[derive(Clone, Debug, PartialEq)]
pub struct Port {
    /// The number beside it.
    pub receptacle: u32,
    /// `en5`.
    pub interface: String,
    /// What the other end sees of it.
    pub domain: Option<String>,
    /// What is plugged in.
    pub plug: Plug,
    /// Macs at the other end.
    pub peers: Vec<Peer>,
    /// Its own IPv4 address.
    pub address: Option<Ipv4Addr>,
    /// The bridge it is a member of, whose address is not its own.
    pub bridge: Option<String>,
    /// The RDMA device that can be used over it, or why there is none.
    pub rdma: Result<String, NoRdma>,
}

/// The ports, in the order of their numbers. A bus without a number, or whose number no interface has, is no port that
/// anything could be sent over.
pub fn ports(told: &Told) -> Vec<Port> {
    let mut ports: Vec<Port> = told.buses.iter().filter_map(|bus| port(told, bus)).collect();
    ports.sort_by_key(|port| port.receptacle);
    ports
}

fn port(told: &Told, bus: &Bus) -> Option<Port> {
    let receptacle = bus.receptacle?;
    let hardware = told.hardware_ports.iter().find(|port| port.receptacle() == Some(receptacle))?;
    let interface = hardware.device.clone();
    let known = told.interfaces.iter().find(|one| one.name == interface);
    let bridge = told.interfaces.iter().find(|one| one.members.contains(&interface));
    let address = known.and_then(|one| one.addresses.first().copied());
    Some(Port {
        receptacle,
        domain: bus.domain.clone(),
        plug: bus.plug,
        peers: bus.peers.clone(),
        address,
        bridge: bridge.map(|bridge| bridge.name.clone()),
        rdma: rdma::device(told, bus, &interface, address),
        interface,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A Mac Studio whose port 2 (en3) is joined to another Mac at 80 Gb/s, with everything RDMA needs.
    pub(super) fn joined() -> Told {
        let peer = Peer {
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
        let device = |name: &str, is_active| Device {
            name: name.to_owned(),
            is_active,
            state: if is_active { "PORT_ACTIVE (4)" } else { "PORT_DOWN (1)" }.to_owned(),
            addresses: Vec::new(),
        };
        let idle = Plug::Idle { most: Some(120_000_000_000) };
        Told {
            machine: "Mac Studio".to_owned(),
            buses: vec![
                bus(2, Plug::Connected { bits_per_second: Some(80_000_000_000) }, vec![peer]),
                bus(1, idle, Vec::new()),
            ],
            hardware_ports: vec![hardware(1, "en2"), hardware(2, "en3")],
            interfaces: vec![Interface {
                name: "en3".to_owned(),
                addresses: vec![Ipv4Addr::new(192, 0, 2, 5)],
                ..Interface::default()
            }],
            rdma_enabled: Some(true),
            devices: vec![device("rdma_en2", false), device("rdma_en3", true)],
        }
    }

    #[test]
    fn a_port_is_its_bus_its_interface_and_its_device() {
        let found = ports(&joined());
        assert_eq!(found.iter().map(|port| port.receptacle).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(found[0].rdma, Err(NoRdma::NothingPlugged));
        assert_eq!(
            (found[1].interface.as_str(), found[1].address),
            ("en3", Some(Ipv4Addr::new(192, 0, 2, 5)))
        );
        assert_eq!(found[1].rdma.as_deref(), Ok("rdma_en3"));
        assert_eq!((found[1].domain.as_deref(), found[1].peers.len()), (Some("A2"), 1));
    }

    #[test]
    fn members_of_a_bridge_name_it_and_ports_nobody_knows_are_left_out() {
        let mut told = joined();
        let members = vec!["en2".to_owned(), "en3".to_owned()];
        told.interfaces = vec![Interface { name: "bridge0".to_owned(), members, ..Interface::default() }];
        let found = ports(&told);
        assert!(found.iter().all(|port| port.bridge.as_deref() == Some("bridge0")), "{found:?}");
        told.hardware_ports.truncate(1);
        assert_eq!(ports(&told).len(), 1);
    }
}
