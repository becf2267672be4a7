//! The links of a node's cables to other nodes, and the problems that limit a cable. Pure.
//!
//! ```text
//! port ─ detects the domain of ─▶ another node's port ─ detects the domain of ─▶ this port   = a link
//! ```
//!
//! Problems at one end are known to the port and reported by its agent. Problems that need both ends are
//! found here: an end that does not respond, another build of macOS, a duplicate address.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt as _;
use russet_crds::conditions::{Reason, Type, get, parse_reason};
use russet_crds::{FabricPort, InferenceNode, Link, LinkKind, PortPeer};
use russet_plan::fabric::address_plan::{duplicate_address, in_different_networks, see_each_other};
use russet_plan::fabric::differing_systems;

/// A port of some node.
#[derive(Clone, Debug)]
pub struct FarEnd {
    /// The node.
    pub node: String,
    /// Its operating system and build.
    pub os: Option<String>,
    /// Its port.
    pub port: FabricPort,
    /// Port on which its agent serves other agents.
    pub peer_port: Option<u32>,
    /// Whether its agent has renewed its Lease for a while.
    pub reachable: bool,
}

/// What is known of the other ends.
#[derive(Clone, Debug, Default)]
pub struct FarEnds {
    /// Ports by domain, as far as this node detects them; two for one domain if two nodes claim it.
    by_domain: BTreeMap<String, Vec<FarEnd>>,
    /// Interfaces of this node that are part of a bridge loop.
    bridge_loop: BTreeSet<String>,
    /// Typical bits per second of cables with the same negotiated speed as the one at an interface of this
    /// node.
    typical_bits: BTreeMap<String, u64>,
    /// Messages about ranks of this node that do not use the cables.
    pub fallbacks: Vec<String>,
}

/// The report on a node's cables.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CableReport {
    /// Links to other nodes.
    pub links: Vec<Link>,
    /// Whether the cables work as they could, the reason and the message; `None` if no port is known.
    pub health: Option<(bool, Reason, String)>,
}

/// The far ends of `node` among all `nodes`.
pub fn ends<'a>(
    node: &InferenceNode,
    nodes: impl Iterator<Item = &'a InferenceNode>,
    now: Timestamp,
) -> FarEnds {
    let peers = ports(node).iter().flat_map(|port| &port.peers);
    let mut seen: BTreeMap<String, Vec<FarEnd>> =
        peers.filter_map(|peer| Some((peer.domain.clone()?, Vec::new()))).collect();
    if seen.is_empty() {
        return FarEnds::default();
    }
    let bridged = ports(node).iter().filter(|port| port.bridge.is_some()).count();
    let mut bridges = Vec::new();
    let all: Vec<&InferenceNode> = nodes.collect();
    for other in all.iter().copied() {
        for port in ports(other) {
            // A loop leaves this node by one port and comes back by another.
            if bridged > 1 && port.bridge.is_some() {
                bridges.push((other.name_any(), port));
            }
            let Some(found) = port.domain.as_deref().and_then(|domain| seen.get_mut(domain)) else {
                continue;
            };
            found.push(FarEnd {
                node: other.name_any(),
                os: os(other).map(str::to_owned),
                port: port.clone(),
                peer_port: peer_port(other),
                reachable: is_long_reachable(other, now),
            });
        }
    }
    let usual = typical_bits(node, &all);
    FarEnds {
        by_domain: seen,
        bridge_loop: bridge_loop(&node.name_any(), &bridges),
        typical_bits: usual,
        fallbacks: Vec::new(),
    }
}

/// A restarted agent is known to others within half a minute.
const MIN_REACHABLE_TIME: SignedDuration = SignedDuration::from_secs(60);
/// Minimum number of comparable other cables for a typical value.
const MIN_COMPARABLE_ENDS: usize = 3;

/// The median bandwidth of other cables with the same negotiated speed, for each of a node's own.
fn typical_bits(node: &InferenceNode, nodes: &[&InferenceNode]) -> BTreeMap<String, u64> {
    let negotiated = |port: &FabricPort| port.peers.first().and_then(|peer| peer.bits_per_second);
    let of = |own: &FabricPort| {
        let speed = negotiated(own)?;
        own.measured?.bits_per_second?;
        let same = |name: &str, port: &FabricPort| name == node.name_any() && port.interface == own.interface;
        let others = nodes.iter().flat_map(|other| {
            let name = other.name_any();
            let alike =
                ports(other).iter().filter(move |port| negotiated(port) == Some(speed) && !same(&name, port));
            alike.filter_map(|port| port.measured?.bits_per_second)
        });
        let mut others: Vec<u64> = others.collect();
        others.sort_unstable();
        let median = others.get(others.len() / 2).filter(|_| others.len() >= MIN_COMPARABLE_ENDS)?;
        Some((own.interface.clone(), *median))
    };
    ports(node).iter().filter_map(of).collect()
}

/// Interfaces of a node whose cables are part of a bridge loop: the bridge at the other end is reachable
/// without the cable too.
fn bridge_loop(node: &str, ports: &[(String, &FabricPort)]) -> BTreeSet<String> {
    // Bridges by node: a node usually has one, and two bridges of a node are not joined in it.
    let bridge = |index: usize| (ports[index].0.as_str(), ports[index].1.bridge.as_deref());
    let mut cables = Vec::new();
    for near in 0..ports.len() {
        for far in near + 1..ports.len() {
            if see_each_other(ports[near].1, ports[far].1) {
                cables.push((near, far));
            }
        }
    }
    let own = cables.iter().filter(|(near, far)| ports[*near].0 == node || ports[*far].0 == node);
    let round = own.filter(|cable| {
        let others: Vec<_> = cables.iter().filter(|other| other != cable).collect();
        let mut reached = BTreeSet::from([bridge(cable.0)]);
        loop {
            let before = reached.len();
            for (near, far) in others.iter().map(|(near, far)| (bridge(*near), bridge(*far))) {
                if reached.contains(&near) || reached.contains(&far) {
                    reached.extend([near, far]);
                }
            }
            if reached.len() == before {
                return reached.contains(&bridge(cable.1));
            }
        }
    });
    let interface = |index: usize| (ports[index].0 == node).then(|| ports[index].1.interface.clone());
    round.flat_map(|(near, far)| [interface(*near), interface(*far)]).flatten().collect()
}

/// The ports of a node.
pub fn ports(node: &InferenceNode) -> &[FabricPort] {
    node.status.as_ref().map(|status| status.ports.as_slice()).unwrap_or_default()
}

fn conditions(node: &InferenceNode) -> &[Condition] {
    node.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default()
}

/// Port on which the agent of a node serves other agents.
pub fn peer_port(node: &InferenceNode) -> Option<u32> {
    node.status.as_ref()?.peer_port
}

/// Whether the agent of a node has been reachable for so long that other agents must know it.
fn is_long_reachable(node: &InferenceNode, now: Timestamp) -> bool {
    let reached = get(conditions(node), Type::Reachable).filter(|reached| reached.status == "True");
    reached.is_some_and(|reached| now.duration_since(reached.last_transition_time.0) >= MIN_REACHABLE_TIME)
}

/// The operating system of a node, and its build.
pub fn os(node: &InferenceNode) -> Option<&str> {
    node.status.as_ref()?.os.as_deref()
}

/// The report on one port: its link, if any, reason and message.
struct PortReport {
    link: Option<Link>,
    reason: Reason,
    message: String,
}

/// The report on the cables of a node.
pub fn cable_report(node: &InferenceNode, ends: &FarEnds) -> CableReport {
    let unread = get(conditions(node), Type::PortsRead).filter(|read| read.status == "False");
    let ports = ports(node);
    let judged: Vec<PortReport> = ports.iter().map(|port| port_report(node, port, ends)).collect();
    let health = match unread {
        Some(read) => Some((false, Reason::PortsUnreadable, read.message.clone())),
        None => health(&judged),
    };
    let health = match (ends.fallbacks.as_slice(), health) {
        ([], health) => health,
        // Without a report on ports, the state of cables is unknown.
        (_, health) if unread.is_some() => health,
        // Current slowness comes first, and other limits are listed as well.
        (fallbacks, health) => {
            let faults = health.filter(|(healthy, ..)| !healthy).map(|(.., words)| words);
            let words: Vec<String> = fallbacks.iter().cloned().chain(faults).collect();
            Some((false, Reason::PathFallback, words.join("\n")))
        }
    };
    CableReport { links: judged.into_iter().filter_map(|judged| judged.link).collect(), health }
}

/// Whether the reason is a fault that a person can fix.
fn is_fault(reason: Reason) -> bool {
    !matches!(
        reason,
        Reason::RdmaReady
            | Reason::NothingPlugged
            | Reason::NoMachine
            | Reason::PeerNotJoined
            | Reason::NoThunderbolt5
            | Reason::NoRdmaOnLinux
    )
}

/// All faults are listed, one line per port, and the first gives the reason.
fn health(judged: &[PortReport]) -> Option<(bool, Reason, String)> {
    let messages_where = |predicate: &dyn Fn(&&PortReport) -> bool| {
        let of: Vec<&PortReport> = judged.iter().filter(predicate).collect();
        let words: Vec<&str> = of.iter().map(|judged| judged.message.as_str()).collect();
        Some((of.first()?.reason, words.join("\n")))
    };
    if judged.is_empty() {
        return None;
    }
    if let Some((reason, words)) = messages_where(&|judged| is_fault(judged.reason)) {
        return Some((false, reason, words));
    }
    let plugged = |judged: &&PortReport| judged.link.is_some() || judged.reason == Reason::PeerNotJoined;
    // IP without RDMA is no fault, but worth knowing.
    let limited = messages_where(&|judged| plugged(judged) && judged.reason != Reason::RdmaReady);
    let (reason, words) = limited
        .or_else(|| messages_where(&plugged))
        .unwrap_or_else(|| (Reason::NoCables, "no cable leads to another machine".to_owned()));
    Some((true, reason, words))
}

fn port_report(node: &InferenceNode, port: &FabricPort, ends: &FarEnds) -> PortReport {
    let label = format!("{} ({})", port.name, port.interface);
    let report =
        |link, reason, words: String| PortReport { link, reason, message: format!("{label}: {words}") };
    let own = || {
        let words = port.message.clone().unwrap_or_else(|| "RDMA can run over it".to_owned());
        let reason = match (&port.reason, &port.rdma_device) {
            (Some(reason), _) => parse_reason(reason).unwrap_or(Reason::NewerRelease),
            (None, Some(_)) => Reason::RdmaReady,
            (None, None) => Reason::NoRdmaDevice,
        };
        (reason, words)
    };
    let Some(peer) = port.peers.first() else {
        let (reason, words) = own();
        return report(None, reason, words);
    };
    let name = node.name_any();
    let found = peer
        .domain
        .as_ref()
        .and_then(|domain| ends.by_domain.get(domain))
        .map(Vec::as_slice)
        .unwrap_or_default();
    let far = match found {
        [far] => far,
        [] => {
            let machine = &peer.name;
            let words = format!(
                "{machine} at the other end is not a node of this cluster; add it with `russet join`"
            );
            // A fault at this end counts whatever is at the other.
            let (reason, own) = own();
            let mine = is_fault(reason);
            return if mine { report(None, reason, own) } else { report(None, Reason::PeerNotJoined, words) };
        }
        [one, other, ..] => {
            let words = format!(
                "nodes {} and {} both report the port {}; one machine may have joined twice, or its disk was copied to the other",
                one.node,
                other.node,
                peer.domain.as_deref().unwrap_or_default()
            );
            return report(None, Reason::DomainTwice, words);
        }
    };
    if far.node == name {
        let words = format!(
            "the cable leads back to {} of this machine; plug one end into the other machine",
            far.port.name
        );
        return report(None, Reason::CableLoop, words);
    }
    let theirs = &far.port;
    let seen = far_peer(port, theirs);
    let Some(seen) = seen else {
        let words = format!(
            "node {} is at the other end and does not see this one over its {}; plug the cable in again",
            far.node, theirs.name
        );
        return report(None, Reason::CableOneSided, words);
    };
    let link = Link {
        peer: far.node.clone(),
        interface: port.interface.clone(),
        kind: LinkKind::Thunderbolt,
        address: port.address.clone(),
        peer_address: theirs.address.clone(),
        rdma_device: port.rdma_device.clone(),
        bits_per_second: peer.bits_per_second.into_iter().chain(seen.bits_per_second).min(),
        peer_port: far.peer_port,
        measured: port.measured.map(|own| theirs.measured.map_or(own, |other| own.worse(other))),
    };
    let (reason, words) = own();
    let (reason, words) = if port.bridge.is_some() && ends.bridge_loop.contains(&port.interface) {
        let words = format!(
            "it is one of several cables that join bridges in a loop, here to node {}; take it out of {}, or broadcasts loop",
            far.node,
            port.bridge.as_deref().unwrap_or_default()
        );
        (Reason::BridgeLoop, words)
    } else if port.default_route {
        let words = format!(
            "this machine's internet traffic goes over the cable to node {}; order its network services so that another one comes first",
            far.node
        );
        (Reason::DefaultRouteOverCable, words)
    } else if let Some((reason, words)) = peer_limitation(theirs) {
        (reason, format!("at the other end, {} of node {}: {words}", theirs.name, far.node))
    } else if reason != Reason::RdmaReady {
        (reason, format!("to node {}: {words}", far.node))
    } else if let Some((own, other)) = differing_systems(os(node), far.os.as_deref()) {
        let words = format!(
            "node {} has {other} and this machine {own}; RDMA needs the same build on both",
            far.node
        );
        (Reason::SystemsDiffer, words)
    } else if let Some(address) = duplicate_address(ports(node), port, theirs) {
        (
            Reason::AddressTwice,
            format!("{address} is the address of another end of a cable too; give each its own"),
        )
    } else if in_different_networks(port, theirs) {
        let address = |port: &FabricPort| port.address.clone().unwrap_or_default();
        let words = format!(
            "{} here and {} at node {} are of different networks; give both ends addresses out of one",
            address(port),
            address(theirs),
            far.node
        );
        (Reason::AddressesApart, words)
    } else {
        match theirs.reason.as_deref().map(|reason| parse_reason(reason).unwrap_or(Reason::NewerRelease)) {
            Some(reason) => {
                let words = theirs.message.as_deref().unwrap_or_default();
                (reason, format!("at the other end, {} of node {}: {words}", theirs.name, far.node))
            }
            None => (Reason::RdmaReady, format!("RDMA to node {}", far.node)),
        }
    };
    let (reason, words) =
        if is_fault(reason) { None } else { degradation(&link, port, far, ends) }.unwrap_or((reason, words));
    // The planner uses links only.
    let unfit = matches!(reason, Reason::SystemsDiffer | Reason::AddressTwice | Reason::AddressesApart);
    let rdma_device = link.rdma_device.filter(|_| !unfit);
    report(Some(Link { rdma_device, ..link }), reason, words)
}

/// What limits a cable that has a link.
fn degradation(link: &Link, port: &FabricPort, far: &FarEnd, ends: &FarEnds) -> Option<(Reason, String)> {
    let measured = port.measured?;
    if measured.round_trip_microseconds.is_none() && far.reachable {
        let end = |address: &Option<String>| address.clone().unwrap_or_default();
        let words = format!(
            "the agent of node {} runs and does not answer over this cable, from {} to {} port {}; a firewall may block it there, or another network on that machine uses these addresses",
            far.node,
            end(&link.address),
            end(&link.peer_address),
            far.peer_port.unwrap_or_default()
        );
        return Some((Reason::LinkUnanswered, words));
    }
    let (bits, usual) = (measured.bits_per_second?, *ends.typical_bits.get(&port.interface)?);
    (bits < usual / 2).then(|| {
        let gigabits = |bits: u64| format!("{:.1} Gbit/s", bits as f64 / 1e9);
        let words = format!(
            "node {} sends {} over this cable, and cables negotiated at the same speed carry {}; try another cable, and check what else uses it",
            far.node,
            gigabits(bits),
            gigabits(usual)
        );
        (Reason::LinkDegraded, words)
    })
}

/// What the machine at the other end does not support, which explains more than that this end waits for it.
fn peer_limitation(theirs: &FabricPort) -> Option<(Reason, &str)> {
    let reason = theirs.reason.as_deref().and_then(parse_reason)?;
    let never = matches!(reason, Reason::NoThunderbolt5 | Reason::NoRdmaOnLinux);
    never.then(|| (reason, theirs.message.as_deref().unwrap_or_default()))
}

/// How the port at the other end reports this one.
fn far_peer<'a>(port: &FabricPort, theirs: &'a FabricPort) -> Option<&'a PortPeer> {
    let own = port.domain.as_ref()?;
    theirs.peers.iter().find(|peer| peer.domain.as_ref() == Some(own))
}

#[cfg(test)]
mod tests;
