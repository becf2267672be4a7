//! Whether RDMA can run over a port, as far as this end knows, and the remedy if not. Both ends of a link
//! must agree; the operator compares them (`operator/src/node/cables.rs`).

use std::net::Ipv4Addr;

use russet_crds::conditions::Reason;
use russet_plan::fabric::TOO_SLOW_FOR_RDMA as TOO_SLOW;
use thiserror::Error;

use super::PortFacts;
use crate::macos::thunderbolt::{Bus, Plug};

/// Why a port has no RDMA. The text contains the remedy.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum NoRdma {
    /// No cable.
    #[error("nothing is plugged in")]
    NothingPlugged,
    /// A dock or a drive.
    #[error("{0} is plugged in, and no machine is behind it")]
    NoMachine(String),
    /// A cable without anything at its other end.
    #[error(
        "something is plugged in that does not answer; wake the other machine, plug the cable in again, or take another one"
    )]
    PeerUnknown,
    /// Both ends of the cable are in this machine.
    #[error("the cable leads back to {0} of this machine; plug one end into the other machine")]
    Loop(String),
    /// Thunderbolt 4 at this end or the other.
    #[error(
        "the cable runs at {0} Gb/s, as Thunderbolt 4 does; it carries IP, and RDMA needs Thunderbolt 5 at both ends"
    )]
    Thunderbolt4(u64),
    /// Thunderbolt 5 at this end, and a dock, a bad cable, or Thunderbolt 4 at the other.
    #[error(
        "the cable runs at {0} Gb/s; RDMA needs 80, so take a cable certified for Thunderbolt 5 and no dock between, if the other machine has Thunderbolt 5 too"
    )]
    TooSlow(u64),
    /// macOS before 26.2.
    #[error("this macOS has no RDMA over Thunderbolt; update both machines to 26.2 or later")]
    NoSwitch,
    /// RDMA is not enabled on this machine.
    #[error(
        "RDMA is disabled on this machine; start it in Recovery, open Terminal and run `rdma_ctl enable`"
    )]
    Disabled,
    /// RDMA is not enabled on the other machine.
    #[error(
        "{0} offers no RDMA; enable it there too: start it in Recovery, open Terminal and run `rdma_ctl enable`"
    )]
    DisabledThere(String),
    /// The port of a Mac Studio that has no RDMA.
    #[error("{0} is the port of a Mac Studio beside Ethernet, which carries no RDMA; use another port")]
    BesideEthernet(String),
    /// The system created no RDMA device.
    #[error("there is no RDMA device {0}; restart this machine, and if it stays away use another port")]
    NoDevice(String),
    /// The RDMA port is not active, mostly because of the other machine.
    #[error(
        "{device} is {state} though a machine is there; plug the cable in again, or restart the other machine"
    )]
    Down {
        /// The device.
        device: String,
        /// State as printed by the tool.
        state: String,
    },
    /// No IPv4 address because of a bridge. JACCL finds the other end by the port's own IPv4 address.
    #[error(
        "{interface} is a member of {bridge} and has no IPv4 address of its own, by which MLX finds the other end; take it out of {bridge} and give it one"
    )]
    Bridged {
        /// The port's interface.
        interface: String,
        /// The bridge.
        bridge: String,
    },
    /// No IPv4 address, and not in a bridge.
    #[error("{0} has no IPv4 address, by which MLX finds the other end; give it one")]
    NoAddress(String),
    /// The interface has an IPv4 address, and its RDMA device does not know it.
    #[error(
        "{0} has an IPv4 address that its RDMA device lacks, so MLX would end with errno 22 (invalid argument); take the address off the port and give it one again, or plug the cable in again"
    )]
    AddressUnknown(String),
    /// RDMA over Thunderbolt exists on macOS only.
    #[error("Linux carries IP over Thunderbolt, and no RDMA")]
    OnLinux,
}

impl NoRdma {
    /// Reason for conditions.
    pub fn reason(&self) -> Reason {
        match self {
            Self::NothingPlugged => Reason::NothingPlugged,
            Self::NoMachine(_) => Reason::NoMachine,
            Self::PeerUnknown => Reason::CableSilent,
            Self::Loop(_) => Reason::CableLoop,
            Self::Thunderbolt4(_) => Reason::NoThunderbolt5,
            Self::TooSlow(_) => Reason::LinkTooSlow,
            Self::NoSwitch => Reason::RdmaNotInThisSystem,
            Self::Disabled => Reason::RdmaDisabled,
            Self::DisabledThere(_) => Reason::RdmaDisabledThere,
            Self::BesideEthernet(_) => Reason::PortBesideEthernet,
            Self::NoDevice(_) => Reason::NoRdmaDevice,
            Self::Down { .. } => Reason::RdmaPortDown,
            Self::Bridged { .. } => Reason::PortInBridge,
            Self::NoAddress(_) | Self::AddressUnknown(_) => Reason::NoPortAddress,
            Self::OnLinux => Reason::NoRdmaOnLinux,
        }
    }
}

/// A port's place in the system's network.
pub(super) struct PortInterface<'a> {
    /// `en5`.
    pub interface: &'a str,
    /// Its own address.
    pub address: Option<Ipv4Addr>,
    /// The bridge it is a member of.
    pub bridge: Option<&'a str>,
}

/// The port's RDMA device, if usable. Of several reasons, returns the one to fix first.
pub(super) fn device(facts: &PortFacts, bus: &Bus, place: &PortInterface<'_>) -> Result<String, NoRdma> {
    let interface = place.interface.to_owned();
    if matches!(bus.plug, Plug::Idle { .. }) {
        return Err(NoRdma::NothingPlugged);
    }
    let Some(peer) = bus.peers.first() else {
        return Err(match (bus.devices.first(), bus.plug) {
            (Some(device), _) => NoRdma::NoMachine(device.clone()),
            (None, Plug::Connected { .. }) => NoRdma::PeerUnknown,
            (None, _) => NoRdma::NothingPlugged,
        });
    };
    let own = |other: &&Bus| other.domain.is_some() && other.domain == peer.domain;
    if let Some(other) = facts.buses.iter().find(own) {
        let number = other.receptacle.map_or_else(|| other.name.clone(), |number| format!("port {number}"));
        return Err(NoRdma::Loop(number));
    }
    // Before the switch: Thunderbolt 4 gains nothing from a visit to Recovery (exo-explore/exo#1636).
    if let Some(bits) = peer.bits_per_second.filter(|bits| *bits <= TOO_SLOW) {
        let gigabits = bits / 1_000_000_000;
        return Err(if has_thunderbolt5(facts) {
            NoRdma::TooSlow(gigabits)
        } else {
            NoRdma::Thunderbolt4(gigabits)
        });
    }
    if !facts.rdma_enabled.ok_or(NoRdma::NoSwitch)? {
        return Err(NoRdma::Disabled);
    }
    if facts.machine == "Mac Studio" && interface == "en2" {
        return Err(NoRdma::BesideEthernet(interface));
    }
    let device = facts.devices.iter().find(|device| device.interface() == interface);
    let device = device.ok_or_else(|| NoRdma::NoDevice(format!("rdma_{interface}")))?;
    if !device.is_active {
        // Trusted only if the device is inactive too: Apple does not document this service.
        if peer.offers_rdma == Some(false) {
            return Err(NoRdma::DisabledThere(peer.name.clone()));
        }
        return Err(NoRdma::Down { device: device.name.clone(), state: device.state.clone() });
    }
    match (place.address, place.bridge) {
        (Some(_), _) if device.addresses.as_ref().is_some_and(Vec::is_empty) => {
            Err(NoRdma::AddressUnknown(interface))
        }
        (Some(_), _) => Ok(device.name.clone()),
        (None, Some(bridge)) => Err(NoRdma::Bridged { interface, bridge: bridge.to_owned() }),
        (None, None) => Err(NoRdma::NoAddress(interface)),
    }
}

/// Whether a port of this machine, or a connection to another machine, is faster than Thunderbolt 4.
fn has_thunderbolt5(facts: &PortFacts) -> bool {
    facts.buses.iter().any(|bus| {
        let (Plug::Idle { max_bits_per_second: bits } | Plug::Connected { bits_per_second: bits }) = bus.plug
        else {
            return false;
        };
        bits.is_some_and(|bits| bits > TOO_SLOW)
    })
}

#[cfg(test)]
mod tests {
    use russet_crds::FabricPort;

    use super::*;
    use crate::fabric::{ports, tests::joined};
    use crate::macos::network::Interface;

    /// The cabled port after a change.
    fn port_after(change: impl FnOnce(&mut PortFacts)) -> FabricPort {
        let mut facts = joined();
        change(&mut facts);
        ports(&facts).pop().unwrap()
    }

    #[test]
    fn every_missing_rdma_reason_has_a_remedy() {
        type Edit = fn(&mut PortFacts);
        const CONNECTED: Plug = Plug::Connected { bits_per_second: Some(TOO_SLOW) };
        let faults: [(&str, Edit, &str); 15] = [
            (
                "NothingPlugged",
                |facts| facts.buses[0].plug = Plug::Idle { max_bits_per_second: None },
                "nothing is plugged in",
            ),
            (
                "NoMachine",
                |facts| {
                    facts.buses[0].peers.clear();
                    facts.buses[0].devices = vec!["TS5 Dock".to_owned()];
                },
                "TS5 Dock is plugged in, and no machine",
            ),
            ("CableSilent", |facts| facts.buses[0].peers.clear(), "wake the other machine"),
            (
                "CableLoop",
                |facts| facts.buses[0].peers[0].domain = Some("A1".to_owned()),
                "leads back to port 1",
            ),
            (
                "NoThunderbolt5",
                |facts| {
                    facts.buses[0].plug = CONNECTED;
                    facts.buses[0].peers[0].bits_per_second = Some(TOO_SLOW);
                    facts.buses[1].plug = Plug::Idle { max_bits_per_second: Some(TOO_SLOW) };
                    facts.rdma_enabled = Some(false);
                },
                "runs at 40 Gb/s, as Thunderbolt 4 does; it carries IP",
            ),
            (
                "LinkTooSlow",
                |facts| facts.buses[0].peers[0].bits_per_second = Some(TOO_SLOW),
                "runs at 40 Gb/s; RDMA needs 80",
            ),
            ("RdmaNotInThisSystem", |facts| facts.rdma_enabled = None, "update both machines to 26.2"),
            ("RdmaDisabled", |facts| facts.rdma_enabled = Some(false), "disabled on this machine"),
            (
                "RdmaDisabledThere",
                |facts| {
                    facts.buses[0].peers[0].offers_rdma = Some(false);
                    facts.devices[1].is_active = false;
                },
                "studio-b offers no RDMA; enable it there",
            ),
            (
                "PortBesideEthernet",
                |facts| facts.hardware_ports[1].device = "en2".to_owned(),
                "use another port",
            ),
            ("NoRdmaDevice", |facts| facts.devices.clear(), "no RDMA device rdma_en3"),
            (
                "RdmaPortDown",
                |facts| {
                    facts.devices[1].is_active = false;
                    facts.devices[1].state = "PORT_DOWN (1)".to_owned();
                },
                "rdma_en3 is PORT_DOWN (1) though a machine is there",
            ),
            (
                "PortInBridge",
                |facts| {
                    let members = vec!["en3".to_owned()];
                    facts.interfaces =
                        vec![Interface { name: "bridge0".to_owned(), members, ..Interface::default() }];
                },
                "take it out of bridge0",
            ),
            ("NoPortAddress", |facts| facts.interfaces.clear(), "en3 has no IPv4 address, by which"),
            (
                "NoPortAddress",
                // A table of link-local IPv6 entries alone.
                |facts| facts.devices[1].addresses = Some(Vec::new()),
                "en3 has an IPv4 address that its RDMA device lacks",
            ),
        ];
        for (reason, change, words) in faults {
            let port = port_after(change);
            let message = port.message.unwrap_or_default();
            assert_eq!((port.reason.as_deref(), port.rdma_device), (Some(reason), None), "{message}");
            assert!(message.contains(words), "{reason}: {message}");
        }
        assert_eq!(port_after(|_| ()).rdma_device.as_deref(), Some("rdma_en3"));
        let known =
            |facts: &mut PortFacts| facts.devices[1].addresses = Some(vec![(1, [192, 0, 2, 5].into())]);
        assert_eq!(port_after(known).rdma_device.as_deref(), Some("rdma_en3"));
    }

    #[test]
    fn missing_facts_keep_rdma_and_port_matters_on_studio_only() {
        let usable = |port: FabricPort| port.rdma_device.is_some();
        assert!(usable(port_after(|facts| facts.buses[0].peers[0].bits_per_second = None)));
        assert!(
            usable(port_after(|facts| facts.buses[0].peers[0].offers_rdma = Some(false))),
            "the device knows better"
        );
        assert!(usable(port_after(|facts| facts.buses[0].plug = Plug::Unknown)));
        let mini = port_after(|facts| {
            facts.machine = "Mac mini".to_owned();
            facts.hardware_ports[1].device = "en2".to_owned();
            facts.interfaces[0].name = "en2".to_owned();
            facts.devices[0].is_active = true;
        });
        assert_eq!(mini.rdma_device.as_deref(), Some("rdma_en2"));
    }
}
