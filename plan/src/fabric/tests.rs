//! Hand-written cables. Whole matrices, and recorded ones, are in `tests/cabling.rs`.

use super::*;
use crate::snapshot::NodeInfo;

fn link(peer: &str, device: Option<&str>, address: Option<&str>, peer_address: Option<&str>) -> Link {
    Link {
        peer: peer.to_owned(),
        interface: "en5".to_owned(),
        kind: LinkKind::Thunderbolt,
        address: address.map(str::to_owned),
        peer_address: peer_address.map(str::to_owned),
        rdma_device: device.map(str::to_owned),
        bits_per_second: None,
        ..Link::default()
    }
}

fn cluster(links: Vec<(&str, Vec<Link>)>) -> Nodes {
    links
        .into_iter()
        .map(|(name, links)| (name.to_owned(), NodeInfo { links, ..NodeInfo::default() }))
        .collect()
}

fn fabric(nodes: &Nodes) -> Fabric<'_> {
    Fabric::new(nodes, PortUse::new())
}

#[test]
fn a_cable_is_believed_when_both_ends_report_it() {
    let both = |near: Vec<Link>, far: Vec<Link>| cluster(vec![("a", near), ("b", far)]);
    let plain = |peer: &str, device: &str| link(peer, Some(device), None, None);
    let ethernet = Link { kind: LinkKind::Ethernet, ..plain("b", "x") };
    for (story, nodes, cables, lack) in [
        ("one each", both(vec![plain("b", "x")], vec![plain("a", "y")]), vec![("x", "y")], ""),
        (
            "one end alone",
            both(vec![plain("b", "x")], vec![]),
            vec![],
            "node b reports no Thunderbolt link to node a",
        ),
        (
            "Ethernet",
            both(vec![ethernet], vec![plain("a", "y")]),
            vec![],
            "node a reports no Thunderbolt link to node b",
        ),
        (
            "no device",
            both(vec![plain("b", "x")], vec![link("a", None, None, None)]),
            vec![],
            "node b has no RDMA device on its Thunderbolt link en5 to node a",
        ),
        (
            "two cables and no addresses",
            both(vec![plain("b", "x"), plain("b", "z")], vec![plain("a", "y"), plain("a", "w")]),
            vec![],
            "do not tell which ends",
        ),
        (
            "two cables told apart by one address each",
            both(
                vec![link("b", Some("x"), Some("1"), None), link("b", Some("z"), Some("2"), None)],
                vec![link("a", Some("y"), None, Some("2")), link("a", Some("w"), None, Some("1"))],
            ),
            vec![("x", "w"), ("z", "y")],
            "",
        ),
        (
            "addresses that contradict each other",
            both(
                vec![link("b", Some("x"), Some("1"), Some("2"))],
                vec![link("a", Some("y"), Some("2"), Some("3"))],
            ),
            vec![],
            "do not tell which ends",
        ),
        (
            "a device on two links",
            both(vec![plain("b", "x"), plain("c", "x")], vec![plain("a", "y")]),
            vec![],
            "do not tell which ends",
        ),
    ] {
        let fabric = fabric(&nodes);
        let found = fabric.cables("a", "b");
        let shown: Vec<(&str, &str)> = found.iter().map(|cable| (&*cable.near, &*cable.far)).collect();
        assert_eq!(shown, cables, "{story}");
        assert_eq!(fabric.joined("b", "a"), !cables.is_empty(), "{story}");
        if cables.is_empty() {
            assert!(
                fabric.missing_link("a", "b").contains(lack),
                "{story}: {}",
                fabric.missing_link("a", "b")
            );
        }
    }
}

#[test]
fn a_port_carries_one_group() {
    let nodes = cluster(vec![
        ("a", vec![link("b", Some("x"), None, None)]),
        ("b", vec![link("a", Some("y"), None, None)]),
    ]);
    let taken = PortUse::from([(("b", "y"), PortUser::Group("chat-0"))]);
    let fabric = Fabric::new(&nodes, taken);
    assert!(fabric.mesh(&["a", "b"]).is_err());
    assert_eq!(fabric.missing_link("a", "b"), "port y of node b is in use by ShardGroup chat-0");
}

#[test]
fn a_plan_says_which_of_its_cables_is_gone() {
    let plain = |peer: &str, device: &str| link(peer, Some(device), None, None);
    let both = |near: Vec<Link>, far: Vec<Link>| cluster(vec![("a", near), ("b", far)]);
    let member = |node: &str, cells: [&str; 2]| russet_crds::GroupMember {
        node_name: node.to_owned(),
        rdma_devices: cells.map(|cell| cell.split_whitespace().map(str::to_owned).collect()).to_vec(),
        ..russet_crds::GroupMember::default()
    };
    let rdma = GroupPlan {
        tensor_size: 2,
        backend: Backend::Jaccl,
        members: vec![member("a", ["", "x"]), member("b", ["y", ""])],
        ..GroupPlan::default()
    };
    let mut tcp = rdma.clone();
    tcp.members.iter_mut().for_each(|member| member.rdma_devices.clear());
    for (story, nodes, plan, why) in [
        ("all is there", both(vec![plain("b", "x")], vec![plain("a", "y")]), &rdma, None),
        (
            "one end is out",
            both(vec![plain("b", "x")], vec![]),
            &rdma,
            Some("a and b have no RDMA link: node b reports no Thunderbolt link to node a"),
        ),
        (
            "in another port",
            both(vec![plain("b", "z")], vec![plain("a", "y")]),
            &rdma,
            Some("port x of node a leads to node b no longer"),
        ),
        (
            "a machine has left",
            cluster(vec![("a", vec![plain("b", "x")])]),
            &rdma,
            Some("a and b have no RDMA link: the engine of node b does not offer jaccl"),
        ),
        ("it runs over TCP", both(vec![], vec![]), &tcp, None),
    ] {
        assert_eq!(severed(&nodes, plan).as_deref(), why, "{story}");
    }
}

#[test]
fn tunnel_is_skipped_only_if_every_connection_is_on_a_cable() {
    let peer = |rank: u32, node: &str, ip: &str| Peer {
        rank,
        node_name: node.to_owned(),
        rpc: format!("{ip}:1"),
        ring: format!("{ip}:2"),
        tensor: format!("{ip}:3"),
    };
    let plan = |size: u32, backend: Backend| GroupPlan { tensor_size: size, backend, ..GroupPlan::default() };
    let pair = || [peer(0, "a", "10.0.0.1"), peer(1, "b", "10.0.0.2")];
    let cable = |near: &str, far: &str| {
        vec![link(if near == "10.0.0.1" { "b" } else { "a" }, None, Some(near), Some(far))]
    };
    let ends = || (cable("10.0.0.1", "10.0.0.2"), cable("10.0.0.2", "10.0.0.1"));
    let ethernet = |links: Vec<Link>| -> Vec<Link> {
        links.into_iter().map(|link| Link { kind: LinkKind::Ethernet, ..link }).collect()
    };
    for (story, plan, peers, (near, far), direct) in [
        ("a pipeline over a cable", plan(1, Backend::Ring), pair().to_vec(), ends(), true),
        ("a tensor group over a cable", plan(2, Backend::Ring), pair().to_vec(), ends(), true),
        (
            "one end says Ethernet",
            plan(1, Backend::Ring),
            pair().to_vec(),
            (ends().0, ethernet(ends().1)),
            false,
        ),
        ("one end says nothing", plan(1, Backend::Ring), pair().to_vec(), (ends().0, vec![]), false),
        (
            "the ranks meet elsewhere",
            plan(1, Backend::Ring),
            vec![peer(0, "a", "192.168.0.1"), peer(1, "b", "192.168.0.2")],
            ends(),
            false,
        ),
        (
            "a third rank without a cable",
            plan(1, Backend::Ring),
            [pair().to_vec(), vec![peer(2, "c", "10.0.0.3")]].concat(),
            ends(),
            false,
        ),
        ("one rank alone", plan(1, Backend::None), pair()[..1].to_vec(), ends(), false),
    ] {
        let links = BTreeMap::from([("a".to_owned(), near), ("b".to_owned(), far)]);
        let expected = if direct { Transport::Direct } else { Transport::Tunnel };
        assert_eq!(transport(&plan, &peers, &links), expected, "{story}");
    }
}

#[test]
fn rdma_needs_the_same_build_and_thunderbolt_5_at_both_ends() {
    let end = |peer: &str, bits| Link { bits_per_second: bits, ..link(peer, Some("x"), None, None) };
    let node = |peer: &str, os: Option<&str>, bits| NodeInfo {
        links: vec![end(peer, bits)],
        os: os.map(str::to_owned),
        ..NodeInfo::default()
    };
    let (older, newer) = (Some("macOS 26.2 (25C56)"), Some("macOS 26.2 (25C57)"));
    let (four, five) = (Some(40_000_000_000), Some(80_000_000_000));
    for (systems, speeds, lack) in [
        ([newer, newer], [five, five], None),
        ([newer, None], [five, None], None),
        ([older, newer], [five, five], Some("macOS 26.2 (25C56) and node b macOS 26.2 (25C57)")),
        ([Some("Debian 12 (6.1)"), Some("Debian 13 (6.12)")], [five, five], None),
        ([newer, newer], [five, four], Some("en5 of node b to node a has 40 Gbit/s")),
        ([newer, newer], [four, four], Some("en5 of node a to node b has 40 Gbit/s")),
    ] {
        let nodes: Nodes = [("a", "b", 0), ("b", "a", 1)]
            .map(|(name, peer, index)| (name.to_owned(), node(peer, systems[index], speeds[index])))
            .into_iter()
            .collect();
        let fabric = fabric(&nodes);
        assert_eq!(fabric.joined("a", "b"), lack.is_none(), "{systems:?} {speeds:?}");
        if let Some(lack) = lack {
            assert!(fabric.missing_link("a", "b").contains(lack), "{}", fabric.missing_link("a", "b"));
        }
    }
}
