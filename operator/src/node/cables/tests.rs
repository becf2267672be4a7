//! Two Macs with a cable between them, and its possible faults. Synthetic.

use jiff::Timestamp;
use russet_crds::conditions;
use russet_crds::{InferenceNodeSpec, InferenceNodeStatus, LinkMeasured};

use super::*;

const FAST: u64 = 80_000_000_000;

fn port(number: u32, domain: &str, sees: &str, address: &str) -> FabricPort {
    let peer = PortPeer {
        name: "Mac".to_owned(),
        domain: Some(sees.to_owned()),
        bits_per_second: Some(FAST),
        through: Vec::new(),
    };
    FabricPort {
        name: format!("Thunderbolt {number}"),
        interface: format!("en{}", number + 1),
        domain: Some(domain.to_owned()),
        peers: vec![peer],
        address: Some(address.to_owned()),
        rdma_device: Some(format!("rdma_en{}", number + 1)),
        ..FabricPort::default()
    }
}

fn node(name: &str, ports: Vec<FabricPort>) -> InferenceNode {
    let mut node = InferenceNode::new(name, InferenceNodeSpec::default());
    let os = Some("macOS 26.5 (25F71)".to_owned());
    node.status = Some(InferenceNodeStatus { os, ports, ..InferenceNodeStatus::default() });
    node
}

/// `a`'s port 2 to `b`'s port 1.
fn pair() -> Vec<InferenceNode> {
    vec![node("a", vec![port(2, "A2", "B1", "192.0.2.1")]), node("b", vec![port(1, "B1", "A2", "192.0.2.2")])]
}

fn now() -> Timestamp {
    Timestamp::UNIX_EPOCH + SignedDuration::from_hours(1)
}

fn of(name: &str, nodes: &[InferenceNode]) -> CableReport {
    let node = nodes.iter().find(|node| node.name_any() == name).unwrap();
    cable_report(node, &ends(node, nodes.iter(), now()))
}

fn status(node: &mut InferenceNode) -> &mut InferenceNodeStatus {
    node.status.as_mut().unwrap()
}

/// An agent's report on a port without RDMA.
fn fault(port: &mut FabricPort, reason: &str, message: &str) {
    port.rdma_device = None;
    (port.reason, port.message) = (Some(reason.to_owned()), Some(message.to_owned()));
}

#[test]
fn two_ports_that_see_each_other_are_a_link_of_each_node() {
    let mut nodes = pair();
    status(&mut nodes[1]).ports[0].peers[0].bits_per_second = Some(FAST / 2);
    status(&mut nodes[1]).peer_port = Some(20_001);
    let found = of("a", &nodes);
    let link = Link {
        peer: "b".to_owned(),
        interface: "en3".to_owned(),
        kind: LinkKind::Thunderbolt,
        address: Some("192.0.2.1".to_owned()),
        peer_address: Some("192.0.2.2".to_owned()),
        rdma_device: Some("rdma_en3".to_owned()),
        bits_per_second: Some(FAST / 2),
        peer_port: Some(20_001),
        measured: None,
    };
    assert_eq!(found.links, [link]);
    let words = "Thunderbolt 2 (en3): RDMA to node b".to_owned();
    assert_eq!(found.health, Some((true, Reason::RdmaReady, words)));
    let other = of("b", &nodes);
    assert_eq!((other.links[0].peer.as_str(), other.links[0].address.as_deref()), ("a", Some("192.0.2.2")));
}

#[test]
fn cable_fault_gives_its_reason_and_remedy() {
    type Change = fn(&mut Vec<InferenceNode>);
    // The change, whether it is a fault of a's, whether a link is left, the reason and some words.
    let faults: [(Change, bool, bool, &str, &str); 20] = [
        (|_| (), true, true, "RdmaReady", "RDMA to node b"),
        (|nodes| status(&mut nodes[0]).ports[0].peers.clear(), true, false, "NoCables", "no cable"),
        (
            |nodes| drop(nodes.pop()),
            true,
            false,
            "PeerNotJoined",
            "Mac at the other end is not a node of this cluster",
        ),
        (
            |nodes| {
                nodes.pop();
                fault(&mut status(&mut nodes[0]).ports[0], "RdmaDisabled", "start it in Recovery");
            },
            false,
            false,
            "RdmaDisabled",
            "start it in Recovery",
        ),
        (
            |nodes| status(&mut nodes[1]).ports[0].peers.clear(),
            false,
            false,
            "CableOneSided",
            "node b is at the other end and does not see this one over its Thunderbolt 1; plug",
        ),
        (
            |nodes| {
                status(&mut nodes[0]).ports[0].peers[0].domain = Some("A3".to_owned());
                status(&mut nodes[0]).ports.push(port(3, "A3", "A2", "192.0.2.9"));
            },
            false,
            false,
            "CableLoop",
            "leads back to Thunderbolt 3",
        ),
        (
            |nodes| {
                let twin = node("c", status(&mut nodes[1]).ports.clone());
                nodes.push(twin);
            },
            false,
            false,
            "DomainTwice",
            "nodes b and c both report the port B1",
        ),
        (
            |nodes| status(&mut nodes[1]).os = Some("macOS 26.4 (25E246)".to_owned()),
            false,
            true,
            "SystemsDiffer",
            "node b has macOS 26.4 (25E246) and this machine macOS 26.5 (25F71)",
        ),
        (|nodes| status(&mut nodes[1]).os = None, true, true, "RdmaReady", "RDMA to node b"),
        (
            |nodes| status(&mut nodes[1]).ports[0].address = Some("192.0.2.1".to_owned()),
            false,
            true,
            "AddressTwice",
            "192.0.2.1 is the address of another end",
        ),
        (
            |nodes| status(&mut nodes[0]).ports.push(port(4, "A4", "nobody", "192.0.2.1")),
            false,
            true,
            "AddressTwice",
            "give each its own",
        ),
        (
            |nodes| {
                status(&mut nodes[0]).ports[0].prefix_length = Some(30);
                let theirs = &mut status(&mut nodes[1]).ports[0];
                (theirs.address, theirs.prefix_length) = (Some("192.0.2.5".to_owned()), Some(24));
            },
            false,
            true,
            "AddressesApart",
            "192.0.2.1 here and 192.0.2.5 at node b are of different networks",
        ),
        (
            |nodes| {
                fault(&mut status(&mut nodes[0]).ports[0], "LinkTooSlow", "take another cable");
                fault(&mut status(&mut nodes[1]).ports[0], "NoThunderbolt5", "it carries IP");
            },
            true,
            true,
            "NoThunderbolt5",
            "at the other end, Thunderbolt 1 of node b: it carries IP",
        ),
        (
            |nodes| nodes.iter_mut().for_each(|node| status(node).ports[0].prefix_length = Some(30)),
            true,
            true,
            "RdmaReady",
            "RDMA to node b",
        ),
        (
            |nodes| status(&mut nodes[0]).ports[0].default_route = true,
            false,
            true,
            "DefaultRouteOverCable",
            "internet traffic goes over the cable to node b",
        ),
        (
            |nodes| fault(&mut status(&mut nodes[0]).ports[0], "PortInBridge", "take it out of bridge0"),
            false,
            true,
            "PortInBridge",
            "to node b: take it out of bridge0",
        ),
        (
            |nodes| fault(&mut status(&mut nodes[1]).ports[0], "NoPortAddress", "give it one"),
            false,
            true,
            "NoPortAddress",
            "at the other end, Thunderbolt 1 of node b: give it one",
        ),
        (
            |nodes| fault(&mut status(&mut nodes[0]).ports[0], "NoThunderbolt5", "it carries IP"),
            true,
            true,
            "NoThunderbolt5",
            "it carries IP",
        ),
        (
            |nodes| fault(&mut status(&mut nodes[0]).ports[0], "OfALaterRelease", "mend it"),
            false,
            true,
            "NewerRelease",
            "mend it",
        ),
        (
            |nodes| {
                let words = "system_profiler printed no JSON";
                let (kind, reason) = (Type::PortsRead, Reason::PortsUnreadable);
                let read = &mut status(&mut nodes[0]).conditions;
                conditions::set(read, kind, false, reason, words, None, Timestamp::UNIX_EPOCH);
            },
            false,
            true,
            "PortsUnreadable",
            "system_profiler printed no JSON",
        ),
    ];
    for (change, healthy, linked, reason, words) in faults {
        let mut nodes = pair();
        change(&mut nodes);
        let found = of("a", &nodes);
        let (is_healthy, found_reason, message) = found.health.unwrap();
        assert_eq!((is_healthy, format!("{found_reason:?}").as_str()), (healthy, reason), "{message}");
        assert!(message.contains(words), "{reason}: {message}");
        assert_eq!(!found.links.is_empty(), linked, "{reason}: {:?}", found.links);
        let unfit = ["SystemsDiffer", "AddressTwice", "AddressesApart"].contains(&reason);
        let offered = found.links.iter().any(|link| link.rdma_device.is_some());
        assert!(!(unfit && offered), "{reason}: the planner would choose RDMA");
    }
}

#[test]
fn every_cable_fault_is_listed_and_the_first_is_the_reason() {
    let mut nodes = pair();
    let ports = &mut status(&mut nodes[0]).ports;
    ports.push(port(3, "A3", "B4", "192.0.2.5"));
    ports.push(port(5, "A5", "nobody", "192.0.2.6"));
    fault(&mut ports[1], "RdmaPortDown", "plug it in again");
    let (healthy, reason, words) = of("a", &nodes).health.unwrap();
    assert_eq!((healthy, reason), (false, Reason::RdmaPortDown));
    assert_eq!(words, "Thunderbolt 3 (en4): plug it in again");

    status(&mut nodes[1]).ports.clear();
    let (_, reason, _) = of("a", &nodes).health.unwrap();
    assert_eq!(reason, Reason::RdmaPortDown, "who is no node's is nobody's fault");
    assert_eq!(of("b", &nodes), CableReport::default(), "a machine without ports has no health of them");
}

#[test]
fn bridge_loop_is_a_fault_and_a_bridge_chain_is_not() {
    let bridged = |number: u32, domain: &str, sees: &str| {
        let mut port = port(number, domain, sees, "192.0.2.1");
        fault(&mut port, "PortInBridge", "take it out");
        (port.address, port.bridge) = (None, Some("bridge0".to_owned()));
        port
    };
    let row = |last: bool| {
        let mut nodes = vec![
            node("a", vec![bridged(1, "A1", "B1"), bridged(2, "A2", "C2")]),
            node("b", vec![bridged(1, "B1", "A1"), bridged(2, "B2", "C1")]),
            node("c", vec![bridged(1, "C1", "B2"), bridged(2, "C2", "A2")]),
            node("d", vec![bridged(1, "D1", "C3")]),
        ];
        status(&mut nodes[2]).ports.push(bridged(3, "C3", "D1"));
        if !last {
            // Out of its bridge at one end, the cable closes no loop.
            status(&mut nodes[0]).ports[1].bridge = None;
        }
        nodes
    };
    let reasons = |nodes: &[InferenceNode]| {
        nodes.iter().map(|node| of(&node.name_any(), nodes).health.unwrap().1).collect::<Vec<_>>()
    };
    let (storm, lacking) = (Reason::BridgeLoop, Reason::PortInBridge);
    assert_eq!(reasons(&row(true)), [storm, storm, storm, lacking]);
    assert_eq!(reasons(&row(false)), [lacking; 4]);
    let words = of("c", &row(true)).health.unwrap().2;
    assert_eq!(words.lines().filter(|line| line.contains("in a loop")).count(), 2, "{words}");
    // Two cables between the same two bridges are a loop too.
    let pair = [
        node("a", vec![bridged(1, "A1", "B1"), bridged(2, "A2", "B2")]),
        node("b", vec![bridged(1, "B1", "A1"), bridged(2, "B2", "A2")]),
    ];
    assert_eq!(reasons(&pair), [storm; 2]);
}

#[test]
fn a_link_says_what_both_ends_measured() {
    let mut nodes = pair();
    let measured = |trip, bits| Some(LinkMeasured { round_trip_microseconds: trip, bits_per_second: bits });
    status(&mut nodes[0]).ports[0].measured = measured(Some(300), Some(20_000_000_000));
    assert_eq!(of("a", &nodes).links[0].measured, measured(Some(300), Some(20_000_000_000)));
    assert_eq!(of("b", &nodes).links[0].measured, None, "an end that measured nothing yet says nothing");
    status(&mut nodes[1]).ports[0].measured = measured(Some(350), Some(18_000_000_000));
    for name in ["a", "b"] {
        assert_eq!(of(name, &nodes).links[0].measured, measured(Some(350), Some(18_000_000_000)), "{name}");
    }
    status(&mut nodes[1]).ports[0].measured = measured(None, None);
    assert_eq!(of("a", &nodes).links[0].measured, measured(None, Some(20_000_000_000)));
}

#[test]
fn agent_unreachable_over_its_cable_is_reported() {
    let mut nodes = pair();
    let unanswered = LinkMeasured::default();
    status(&mut nodes[0]).ports[0].measured = Some(unanswered);
    status(&mut nodes[1]).peer_port = Some(20_001);
    assert_eq!(of("a", &nodes).health.unwrap().1, Reason::RdmaReady, "its Lease says that it is not there");
    let mut back = |seconds| {
        let conditions = &mut status(&mut nodes[1]).conditions;
        conditions.clear();
        let since = now() - SignedDuration::from_secs(seconds);
        conditions::set(conditions, Type::Reachable, true, Reason::LeaseRenewed, "", None, since);
        of("a", &nodes).health.unwrap().1
    };
    assert_eq!(back(59), Reason::RdmaReady, "it came back a moment ago");
    assert_eq!(back(60), Reason::LinkUnanswered);
    let (healthy, reason, words) = of("a", &nodes).health.unwrap();
    assert_eq!((healthy, reason), (false, Reason::LinkUnanswered));
    assert!(words.contains("from 192.0.2.1 to 192.0.2.2 port 20001"), "{words}");
    assert_eq!(of("a", &nodes).links[0].rdma_device.as_deref(), Some("rdma_en3"), "RDMA is no TCP");
    // A cable without response comes first.
    fault(&mut status(&mut nodes[0]).ports[0], "PortInBridge", "take it out");
    assert_eq!(of("a", &nodes).health.unwrap().1, Reason::PortInBridge);
}

#[test]
fn cable_below_half_the_typical_rate_is_reported() {
    let slow = |others: usize, bits: u64| {
        let mut nodes = pair();
        let measure = |node: &mut InferenceNode, bits| {
            status(node).ports[0].measured =
                Some(LinkMeasured { round_trip_microseconds: Some(300), bits_per_second: Some(bits) });
        };
        measure(&mut nodes[0], bits);
        for number in 0..others {
            let mut other =
                node(&format!("n{number}"), vec![port(1, &format!("N{number}"), "-", "192.0.2.9")]);
            measure(&mut other, 20_000_000_000 + number as u64);
            nodes.push(other);
        }
        of("a", &nodes).health.unwrap()
    };
    let (healthy, reason, words) = slow(3, 9_000_000_000);
    assert_eq!((healthy, reason), (false, Reason::LinkDegraded));
    assert!(words.contains("node b sends 9.0 Gbit/s") && words.contains("carry 20.0 Gbit/s"), "{words}");
    assert_eq!(slow(3, 10_000_000_001).1, Reason::RdmaReady, "half is a fluctuation");
    assert_eq!(slow(2, 1).1, Reason::RdmaReady, "nobody knows what is usual");
}

#[test]
fn path_fallback_of_ranks_is_reported_first() {
    let mut nodes = pair();
    let fallen = |nodes: &[InferenceNode]| {
        let mut ends = ends(&nodes[0], nodes.iter(), now());
        ends.fallbacks = vec!["Shard d/x: node b is reached over en0".to_owned()];
        cable_report(&nodes[0], &ends).health.unwrap()
    };
    let said = "Shard d/x: node b is reached over en0";
    assert_eq!(fallen(&nodes), (false, Reason::PathFallback, said.to_owned()));
    fault(&mut status(&mut nodes[0]).ports[0], "LinkTooSlow", "another cable");
    let (_, reason, words) = fallen(&nodes);
    assert_eq!(reason, Reason::PathFallback);
    assert_eq!(words.lines().collect::<Vec<_>>()[1], "Thunderbolt 2 (en3): to node b: another cable");
}
