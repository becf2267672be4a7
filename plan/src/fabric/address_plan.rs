//! Address plan for cables: changes to the machines' networks that let RDMA run over every cable. Each end of
//! a cable leaves its bridge and gets an address in the cable's own network of four addresses. Pure; cables
//! that have what they need are left unchanged, and a plan that was applied plans no further change.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use russet_crds::conditions::{Reason, parse_reason};
use russet_crds::{FabricPort, InferenceNodeStatus};

/// Default range for the cables' networks: private, and rarely used in homes and offices (clouds do use it).
/// Addresses that nodes report are skipped; other networks that they are in are unknown.
pub const DEFAULT_RANGE: Ipv4Addr = Ipv4Addr::new(172, 31, 240, 0);
/// Number of networks of four addresses in a range (`/20`).
const NETWORKS_PER_RANGE: u32 = 1024;
/// The mask of each network.
const MASK: &str = "255.255.255.252";

/// A change on one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetworkChange {
    /// The port leaves its bridge, whose address would not be the port's own.
    LeaveBridge {
        /// Its interface.
        interface: String,
        /// The bridge.
        bridge: String,
    },
    /// An address that is not unique is removed; a self-assigned one may stay beside another.
    RemoveAddress {
        /// Its interface.
        interface: String,
        /// The address.
        address: String,
    },
    /// The port gets an address.
    AddAddress {
        /// Its interface.
        interface: String,
        /// The address.
        address: Ipv4Addr,
    },
}

impl NetworkChange {
    /// The macOS command of the change; it needs root and lasts until the machine restarts.
    pub fn command(&self) -> Vec<String> {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        match self {
            Self::LeaveBridge { interface, bridge } => words(&["ifconfig", bridge, "deletem", interface]),
            Self::RemoveAddress { interface, address } => {
                words(&["ifconfig", interface, "inet", address, "delete"])
            }
            Self::AddAddress { interface, address } => {
                words(&["ifconfig", interface, "inet", &address.to_string(), "netmask", MASK, "alias"])
            }
        }
    }

    /// The command that reverts the change.
    pub fn undo(&self) -> Vec<String> {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        match self {
            Self::LeaveBridge { interface, bridge } => words(&["ifconfig", bridge, "addm", interface]),
            // With the default mask: the original one is not known.
            Self::RemoveAddress { interface, address } => {
                words(&["ifconfig", interface, "inet", address, "alias"])
            }
            Self::AddAddress { interface, address } => {
                words(&["ifconfig", interface, "inet", &address.to_string(), "delete"])
            }
        }
    }
}

/// The range has no free network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{range}/20 has no four free addresses left for the cable between {0} and {1}; choose another range", .ends.0, .ends.1)]
pub struct NoFreeNetwork {
    /// The range.
    range: Ipv4Addr,
    /// The ends of the cable.
    ends: (String, String),
}

/// The changes of each machine, in order; machines without changes are left out.
pub fn changes(
    nodes: &BTreeMap<String, InferenceNodeStatus>,
    range: Ipv4Addr,
) -> Result<BTreeMap<String, Vec<NetworkChange>>, NoFreeNetwork> {
    let used = used_addresses(nodes);
    let mut free = networks(range).filter(|network| (0..4).all(|host| !used.contains(&(network + host))));
    let mut changes: BTreeMap<String, Vec<NetworkChange>> = BTreeMap::new();
    for [near, far] in cables(nodes) {
        let shared = duplicate_address(&nodes[near.0].ports, near.1, far.1).or(duplicate_address(
            &nodes[far.0].ports,
            far.1,
            near.1,
        ));
        if !is_lacking(near.1)
            && !is_lacking(far.1)
            && shared.is_none()
            && !in_different_networks(near.1, far.1)
        {
            continue;
        }
        let full = || NoFreeNetwork { range, ends: (near.0.to_owned(), far.0.to_owned()) };
        let network = free.next().ok_or_else(full)?;
        for (host, (node, port)) in (1..).zip([near, far]) {
            let interface = port.interface.clone();
            let made = changes.entry(node.to_owned()).or_default();
            if let Some(bridge) = &port.bridge {
                made.push(NetworkChange::LeaveBridge {
                    interface: interface.clone(),
                    bridge: bridge.clone(),
                });
            }
            let link_local =
                |address: &&String| address.parse().is_ok_and(|address: Ipv4Addr| address.is_link_local());
            if let Some(address) = port.address.as_ref().filter(|address| !link_local(address)) {
                made.push(NetworkChange::RemoveAddress {
                    interface: interface.clone(),
                    address: address.clone(),
                });
            }
            made.push(NetworkChange::AddAddress { interface, address: Ipv4Addr::from(network + host) });
        }
    }
    Ok(changes)
}

/// Whether an address is all that a port lacks.
pub(super) fn is_lacking(port: &FabricPort) -> bool {
    let reason = port.reason.as_deref().and_then(parse_reason);
    matches!(reason, Some(Reason::PortInBridge | Reason::NoPortAddress))
}

/// Whether a cable joins two ports: each reports the other's domain.
pub fn see_each_other(one: &FabricPort, other: &FabricPort) -> bool {
    let sees = |one: &FabricPort, other: &FabricPort| {
        other.domain.is_some() && one.peers.iter().any(|peer| peer.domain == other.domain)
    };
    sees(one, other) && sees(other, one)
}

/// The port's address, if the other end or another port of its machine has it too.
pub fn duplicate_address<'a>(
    machine: &[FabricPort],
    port: &'a FabricPort,
    theirs: &FabricPort,
) -> Option<&'a str> {
    let own = port.address.as_deref()?;
    let same = |other: &FabricPort| other.address.as_deref() == Some(own);
    let mut others = machine.iter().filter(|other| other.interface != port.interface);
    (same(theirs) || others.any(same)).then_some(own)
}

/// Whether the addresses at both ends of a cable are in different networks; false if unknown.
pub fn in_different_networks(own: &FabricPort, theirs: &FabricPort) -> bool {
    let address = |port: &FabricPort| port.address.as_ref()?.parse::<Ipv4Addr>().ok().map(u32::from);
    let (Some(near), Some(far)) = (address(own), address(theirs)) else { return false };
    let shared = (near ^ far).leading_zeros();
    [own, theirs].iter().any(|port| port.prefix_length.is_some_and(|prefix| shared < prefix))
}

/// Whether a port's names are safe in a command that a person types. Agents report the system's names; a
/// report with anything else gets no command.
fn is_command_safe(port: &FabricPort) -> bool {
    let word = |text: &str| {
        let plain = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '_' | '-');
        !text.is_empty() && !text.starts_with('-') && text.chars().all(plain)
    };
    let address = port.address.as_ref().is_none_or(|address| address.parse::<Ipv4Addr>().is_ok());
    address && word(&port.interface) && port.bridge.as_deref().is_none_or(word)
}

/// A port and its node.
type OwnedPort<'a> = (&'a str, &'a FabricPort);

/// Cables whose ends detect each other and could both run RDMA, in a stable order.
fn cables(nodes: &BTreeMap<String, InferenceNodeStatus>) -> Vec<[OwnedPort<'_>; 2]> {
    let usable =
        |port: &&FabricPort| is_command_safe(port) && (port.rdma_device.is_some() || is_lacking(port));
    let ends: Vec<OwnedPort<'_>> = nodes
        .iter()
        .flat_map(|(name, status)| status.ports.iter().filter(usable).map(|port| (name.as_str(), port)))
        .collect();
    let mut cables = Vec::new();
    for (index, near) in ends.iter().enumerate() {
        let mut far = ends[index + 1..].iter().filter(|far| see_each_other(near.1, far.1));
        // Two candidates for the other end are ambiguous.
        if let (Some(far), None) = (far.next(), far.next())
            && far.0 != near.0
        {
            cables.push([*near, *far]);
        }
    }
    cables
}

/// Networks of four addresses, by their first one.
fn networks(range: Ipv4Addr) -> impl Iterator<Item = u32> {
    let first = u32::from(range) & !(NETWORKS_PER_RANGE * 4 - 1);
    (0..NETWORKS_PER_RANGE).map(move |index| first + index * 4)
}

/// Addresses in use on the machines.
fn used_addresses(nodes: &BTreeMap<String, InferenceNodeStatus>) -> BTreeSet<u32> {
    let ports = nodes.values().flat_map(|status| &status.ports).filter_map(|port| port.address.as_ref());
    let main = nodes.values().flat_map(|status| &status.addresses);
    ports.chain(main).filter_map(|address| address.parse::<Ipv4Addr>().ok().map(u32::from)).collect()
}

#[cfg(test)]
mod tests {
    use russet_crds::PortPeer;

    use super::*;

    fn port(number: u32, own: &str, sees: &str) -> FabricPort {
        FabricPort {
            name: format!("Thunderbolt {number}"),
            interface: format!("en{number}"),
            domain: Some(own.to_owned()),
            peers: vec![PortPeer { domain: Some(sees.to_owned()), ..PortPeer::default() }],
            ..FabricPort::default()
        }
    }

    fn lacking(port: FabricPort, reason: Reason) -> FabricPort {
        let bridge = (reason == Reason::PortInBridge).then(|| "bridge0".to_owned());
        FabricPort { reason: Some(format!("{reason:?}")), bridge, ..port }
    }

    fn usable(port: FabricPort, address: &str) -> FabricPort {
        let rdma_device = Some(format!("rdma_{}", port.interface));
        FabricPort { address: Some(address.to_owned()), rdma_device, ..port }
    }

    fn cluster(nodes: Vec<(&str, Vec<FabricPort>)>) -> BTreeMap<String, InferenceNodeStatus> {
        let status = |ports| InferenceNodeStatus { ports, ..InferenceNodeStatus::default() };
        nodes.into_iter().map(|(name, ports)| (name.to_owned(), status(ports))).collect()
    }

    /// The plan as `node: command`.
    fn planned_commands(nodes: &BTreeMap<String, InferenceNodeStatus>) -> Vec<String> {
        let all = changes(nodes, DEFAULT_RANGE).unwrap();
        let of = |(name, made): (&String, &Vec<NetworkChange>)| {
            made.iter().map(|change| format!("{name}: {}", change.command().join(" "))).collect::<Vec<_>>()
        };
        all.iter().flat_map(of).collect()
    }

    #[test]
    fn every_cable_gets_its_own_network_and_working_ones_stay() {
        let nodes = cluster(vec![
            (
                "a",
                vec![
                    lacking(port(2, "A2", "B2"), Reason::PortInBridge),
                    usable(port(3, "A3", "C3"), "172.31.240.1"),
                ],
            ),
            (
                "b",
                vec![
                    lacking(port(2, "B2", "A2"), Reason::NoPortAddress),
                    usable(port(4, "B4", "C4"), "192.168.1.1"),
                ],
            ),
            (
                "c",
                vec![usable(port(3, "C3", "A3"), "172.31.240.2"), usable(port(4, "C4", "B4"), "192.168.1.1")],
            ),
        ]);
        assert_eq!(
            planned_commands(&nodes),
            [
                "a: ifconfig bridge0 deletem en2",
                "a: ifconfig en2 inet 172.31.240.5 netmask 255.255.255.252 alias",
                "b: ifconfig en2 inet 172.31.240.6 netmask 255.255.255.252 alias",
                "b: ifconfig en4 inet 192.168.1.1 delete",
                "b: ifconfig en4 inet 172.31.240.9 netmask 255.255.255.252 alias",
                "c: ifconfig en4 inet 192.168.1.1 delete",
                "c: ifconfig en4 inet 172.31.240.10 netmask 255.255.255.252 alias",
            ]
        );
    }

    #[test]
    fn applied_network_changes_are_final_and_can_be_undone() {
        let mut nodes = cluster(vec![
            ("a", vec![lacking(port(2, "A", "B"), Reason::PortInBridge)]),
            ("b", vec![lacking(port(5, "B", "A"), Reason::PortInBridge)]),
        ]);
        let planned = changes(&nodes, DEFAULT_RANGE).unwrap();
        let beside = usable(port(5, "B", "A"), "169.254.9.9");
        let with_own = BTreeMap::from([
            ("a".to_owned(), nodes["a"].clone()),
            ("b".to_owned(), InferenceNodeStatus { ports: vec![beside], ..Default::default() }),
        ]);
        assert_eq!(
            changes(&with_own, DEFAULT_RANGE).unwrap()["b"].len(),
            1,
            "an address of the port's own making may stay"
        );
        let undone: Vec<String> = planned["a"].iter().rev().map(|change| change.undo().join(" ")).collect();
        assert_eq!(undone, ["ifconfig en2 inet 172.31.240.1 delete", "ifconfig bridge0 addm en2"]);
        for (name, made) in &planned {
            let port = &mut nodes.get_mut(name).unwrap().ports[0];
            let Some(NetworkChange::AddAddress { address, .. }) = made.last() else { panic!("{made:?}") };
            *port = FabricPort { bridge: None, reason: None, ..usable(port.clone(), &address.to_string()) };
        }
        assert_eq!(planned_commands(&nodes), Vec::<String>::new());
    }

    #[test]
    fn cables_with_other_faults_or_one_visible_end_are_skipped() {
        let off = lacking(port(2, "A", "B"), Reason::RdmaDisabled);
        let bridged = |own, sees| lacking(port(2, own, sees), Reason::PortInBridge);
        for nodes in [
            cluster(vec![("a", vec![off]), ("b", vec![bridged("B", "A")])]),
            cluster(vec![("a", vec![bridged("A", "B")]), ("b", vec![bridged("B", "X")])]),
            cluster(vec![("a", vec![bridged("A", "B"), bridged("B", "A")])]),
            cluster(vec![
                ("a", vec![bridged("A", "B")]),
                ("b", vec![bridged("B", "A")]),
                ("c", vec![bridged("B", "A")]),
            ]),
        ] {
            assert_eq!(planned_commands(&nodes), Vec::<String>::new(), "{nodes:?}");
        }
    }

    #[test]
    fn cable_ends_in_different_networks_are_detected() {
        let at =
            |address: &str, prefix_length| FabricPort { prefix_length, ..usable(port(1, "A", "B"), address) };
        for (own, theirs, is) in [
            (at("192.0.2.1", Some(30)), at("192.0.2.2", Some(30)), false),
            (at("192.0.2.1", Some(30)), at("192.0.2.5", Some(24)), true),
            (at("192.0.2.5", Some(24)), at("192.0.2.1", Some(30)), true),
            (at("169.254.1.1", Some(16)), at("192.0.2.1", None), true),
            (at("192.0.2.1", None), at("198.51.100.1", None), false),
            (FabricPort { address: None, ..at("0.0.0.0", Some(30)) }, at("192.0.2.1", Some(30)), false),
        ] {
            assert_eq!(in_different_networks(&own, &theirs), is, "{own:?} {theirs:?}");
        }
        let nodes = cluster(vec![
            ("a", vec![at("192.0.2.1", Some(30))]),
            ("b", vec![FabricPort { prefix_length: Some(16), ..usable(port(1, "B", "A"), "169.254.1.1") }]),
        ]);
        assert_eq!(planned_commands(&nodes).len(), 3, "{:?}", planned_commands(&nodes));
    }

    #[test]
    fn unsafe_port_names_never_reach_a_command() {
        for (interface, bridge, address) in [
            ("en2; reboot", None, None),
            ("-a", None, None),
            ("en2\n  sudo reboot", None, None),
            ("en2", Some("bridge0 destroy"), None),
            ("en2", None, Some("$(reboot)")),
        ] {
            let port = lacking(port(2, "A", "B"), Reason::NoPortAddress);
            let (bridge, address) = (bridge.map(str::to_owned), address.map(str::to_owned));
            let port = FabricPort { interface: interface.to_owned(), bridge, address, ..port };
            let nodes = cluster(vec![
                ("a", vec![port]),
                ("b", vec![lacking(self::port(2, "B", "A"), Reason::PortInBridge)]),
            ]);
            assert_eq!(planned_commands(&nodes), Vec::<String>::new(), "{interface:?}");
        }
    }

    #[test]
    fn duplicate_port_address_is_replaced_on_both_ports() {
        let nodes = cluster(vec![
            ("a", vec![usable(port(2, "A2", "B"), "10.0.0.1"), usable(port(3, "A3", "C"), "10.0.0.1")]),
            ("b", vec![usable(port(2, "B", "A2"), "10.0.0.2")]),
            ("c", vec![usable(port(2, "C", "A3"), "10.0.0.3")]),
        ]);
        assert_eq!(
            planned_commands(&nodes).iter().filter(|line| line.ends_with("alias")).count(),
            4,
            "{:?}",
            planned_commands(&nodes)
        );
    }

    #[test]
    fn exhausted_address_range_is_an_error() {
        let mut nodes = cluster(vec![
            ("a", vec![lacking(port(2, "A", "B"), Reason::PortInBridge)]),
            ("b", vec![lacking(port(2, "B", "A"), Reason::PortInBridge)]),
        ]);
        let taken = networks(DEFAULT_RANGE).map(|network| Ipv4Addr::from(network + 3).to_string());
        nodes.get_mut("a").unwrap().addresses = taken.collect();
        let error = changes(&nodes, DEFAULT_RANGE).unwrap_err().to_string();
        assert!(error.starts_with("172.31.240.0/20 has no four free addresses"), "{error}");
    }
}
