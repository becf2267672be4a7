//! Cables by hand, matrices from synthetic fixtures, and those that people recorded on their Macs.

use serde_json::Value;

use super::*;

fn link(peer: &str, device: Option<&str>, address: Option<&str>, peer_address: Option<&str>) -> Link {
    Link {
        peer: peer.to_owned(),
        interface: "en5".to_owned(),
        kind: LinkKind::Thunderbolt,
        address: address.map(str::to_owned),
        peer_address: peer_address.map(str::to_owned),
        rdma_device: device.map(str::to_owned),
        bits_per_second: None,
    }
}

fn cluster(links: Vec<(&str, Vec<Link>)>) -> BTreeMap<String, Node> {
    links.into_iter().map(|(name, links)| (name.to_owned(), Node { links, ..Node::default() })).collect()
}

fn fabric(nodes: &BTreeMap<String, Node>) -> Fabric<'_> {
    Fabric::new(nodes, BTreeMap::new())
}

/// A device matrix as MLX reads it: a cell is null, a name or several.
fn matrix(json: &Value) -> Matrix {
    let cell = |cell: &Value| match cell {
        Value::String(name) => vec![name.clone()],
        Value::Array(names) => names.iter().filter_map(|name| Some(name.as_str()?.to_owned())).collect(),
        _ => Vec::new(),
    };
    let rows = json.as_array().unwrap().iter();
    rows.map(|row| row.as_array().unwrap().iter().map(cell).collect()).collect()
}

/// The cluster whose nodes would report exactly these cables: wire `k` of a cell is wire `k` of the
/// cell across the diagonal.
fn cabled(matrix: &Matrix) -> BTreeMap<String, Node> {
    let name = |index: usize| format!("n{index}");
    let mut nodes = BTreeMap::new();
    for (a, row) in matrix.iter().enumerate() {
        let mut links = Vec::new();
        for (b, cell) in row.iter().enumerate() {
            for (wire, device) in cell.iter().enumerate() {
                let address = |own: usize| {
                    format!("10.{}.{}.{}", a.min(b), a.max(b), 2 * wire + usize::from(own > a.min(b)))
                };
                links.push(link(&name(b), Some(device), Some(&address(a)), Some(&address(b))));
            }
        }
        // The order in which a node finds its links says nothing.
        links.reverse();
        nodes.insert(name(a), Node { links, ..Node::default() });
    }
    nodes
}

#[track_caller]
fn check_mesh(what: &str, json: &Value) {
    let wanted = matrix(json);
    let nodes = cabled(&wanted);
    let names: Vec<&str> = nodes.keys().map(String::as_str).collect();
    assert_eq!(fabric(&nodes).mesh(&names).as_ref(), Ok(&wanted), "{what}");
    let indices: Vec<usize> = (0..names.len()).collect();
    if names.len() > 1 {
        let found = teams(&fabric(&nodes), Backend::Jaccl, &names, 1, names.len(), |_| true);
        assert_eq!(found, Some(vec![indices]), "{what}");
    }
}

#[test]
fn synthetic_cabling_gives_its_matrix_again() {
    let mesh = serde_json::from_str(include_str!("fixtures/synthetic-mesh-4.json")).unwrap();
    check_mesh("mesh", &mesh);
    let wanted =
        matrix(&serde_json::from_str(include_str!("fixtures/synthetic-ring-4-two-wires.json")).unwrap());
    let nodes = cabled(&wanted);
    let names: Vec<&str> = nodes.keys().map(String::as_str).collect();
    let found = fabric(&nodes).ring(&names).unwrap();
    // Which of two cables is wire 0 is ours to say, but it is the same one at both ends.
    let cable = |matrix: &Matrix, a: usize, b: usize| {
        let pairs = matrix[a][b].iter().cloned().zip(matrix[b][a].iter().cloned());
        pairs.collect::<Vec<_>>()
    };
    for a in 0..4 {
        for b in 0..4 {
            let (mut ours, mut theirs) = (cable(&found, a, b), cable(&wanted, a, b));
            ours.sort();
            theirs.sort();
            assert_eq!(ours, theirs, "{a} and {b}");
        }
    }
    assert!(fabric(&nodes).mesh(&names).is_err_and(|why| why.contains("n0 and n2 have no RDMA link")));
    assert_eq!(teams(&fabric(&nodes), Backend::Jaccl, &names, 1, 3, |_| true), None);
    assert_eq!(
        teams(&fabric(&nodes), Backend::JacclRing, &["n2", "n0", "n3", "n1"], 1, 4, |_| true),
        Some(vec![vec![0, 2, 1, 3]])
    );
}

#[test]
fn recorded_cabling_gives_its_matrix_again() {
    let Some(folder) = std::env::var_os("RUSSET_MACOS_DATA").map(std::path::PathBuf::from) else {
        assert!(std::env::var_os("CI").is_none(), "CI must set RUSSET_MACOS_DATA");
        eprintln!("not run: RUSSET_MACOS_DATA names no folder of recorded files");
        return;
    };
    let read = |name: &str| -> Value {
        serde_json::from_str(&std::fs::read_to_string(folder.join(name)).unwrap()).unwrap()
    };
    for name in ["1-node", "2-node", "4-node-m3-ultra-mlx-docs", "4-node-mesh"] {
        let file = read(&format!("hostfile-jaccl-{name}.json"));
        let rows = file.as_array().unwrap().iter().map(|host| host["rdma"].clone());
        check_mesh(name, &rows.collect());
    }
    check_mesh("readme", &read("jaccl-devices-matrix-3-node-readme.json"));
    // The other matrix of the same source names one port of its second and third node as joined to
    // itself the wrong way round; as a list of cables it is still one.
    check_mesh("pipeline", &read("jaccl-devices-matrix-3-node-pipeline.json"));
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
            assert!(fabric.lack("a", "b").contains(lack), "{story}: {}", fabric.lack("a", "b"));
        }
    }
}

#[test]
fn a_port_carries_one_group() {
    let nodes = cluster(vec![
        ("a", vec![link("b", Some("x"), None, None)]),
        ("b", vec![link("a", Some("y"), None, None)]),
    ]);
    let taken = BTreeMap::from([(("b".to_owned(), "y".to_owned()), "ShardGroup chat-0".to_owned())]);
    let fabric = Fabric::new(&nodes, taken);
    assert!(fabric.mesh(&["a", "b"]).is_err());
    assert_eq!(fabric.lack("a", "b"), "port y of node b is in use by ShardGroup chat-0");
}

#[test]
fn no_tunnel_is_left_out_unless_every_connection_stays_on_a_cable() {
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
        let wanted = if direct { Transport::Direct } else { Transport::Tunnel };
        assert_eq!(transport(&plan, &peers, &links), wanted, "{story}");
    }
}
