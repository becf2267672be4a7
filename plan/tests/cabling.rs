//! Device matrices: a cluster whose nodes report the cables of a matrix yields that matrix again. Some are
//! synthetic, some were recorded on real Macs.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test reads the recorded files and may fail"
)]

use russet_crds::{Backend, Link, LinkKind};
use russet_plan::fabric::{DeviceMatrix, Fabric, PortUse, teams};
use russet_plan::nodes::Nodes;
use russet_plan::snapshot::NodeInfo;
use serde_json::Value;

fn link(peer: &str, device: &str, address: &str, peer_address: &str) -> Link {
    Link {
        peer: peer.to_owned(),
        kind: LinkKind::Thunderbolt,
        address: Some(address.to_owned()),
        peer_address: Some(peer_address.to_owned()),
        rdma_device: Some(device.to_owned()),
        ..Link::default()
    }
}

fn fabric(nodes: &Nodes) -> Fabric<'_> {
    Fabric::new(nodes, PortUse::new())
}

/// A device matrix as MLX parses it: a cell is null, a name or several.
fn matrix(json: &Value) -> DeviceMatrix {
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
fn cabled(matrix: &DeviceMatrix) -> Nodes {
    let name = |index: usize| format!("n{index}");
    let mut nodes = Nodes::default();
    for (a, row) in matrix.iter().enumerate() {
        let mut links = Vec::new();
        for (b, cell) in row.iter().enumerate() {
            for (wire, device) in cell.iter().enumerate() {
                let address = |own: usize| {
                    format!("10.{}.{}.{}", a.min(b), a.max(b), 2 * wire + usize::from(own > a.min(b)))
                };
                links.push(link(&name(b), device, &address(a), &address(b)));
            }
        }
        // The order in which a node finds its links means nothing.
        links.reverse();
        nodes.insert(name(a), NodeInfo { links, ..NodeInfo::default() });
    }
    nodes
}

#[track_caller]
fn check_mesh(what: &str, json: &Value) {
    let expected = matrix(json);
    let nodes = cabled(&expected);
    let names: Vec<&str> = nodes.keys().map(String::as_str).collect();
    assert_eq!(fabric(&nodes).mesh(&names).as_ref(), Ok(&expected), "{what}");
    let indices: Vec<usize> = (0..names.len()).collect();
    if names.len() > 1 {
        let found = teams(&fabric(&nodes), Backend::Jaccl, &indices, (1, names.len()), |_| true);
        assert_eq!(found, Some(vec![indices]), "{what}");
    }
}

#[test]
fn synthetic_cabling_gives_its_matrix_again() {
    let mesh = serde_json::from_str(include_str!("fixtures/synthetic-mesh-4.json")).unwrap();
    check_mesh("mesh", &mesh);
    let expected =
        matrix(&serde_json::from_str(include_str!("fixtures/synthetic-ring-4-two-wires.json")).unwrap());
    let nodes = cabled(&expected);
    let names: Vec<&str> = nodes.keys().map(String::as_str).collect();
    let found = fabric(&nodes).ring(&names).unwrap();
    // Which of two cables is wire 0 is our choice, but it is the same one at both ends.
    let cable = |matrix: &DeviceMatrix, a: usize, b: usize| {
        let pairs = matrix[a][b].iter().cloned().zip(matrix[b][a].iter().cloned());
        pairs.collect::<Vec<_>>()
    };
    for a in 0..4 {
        for b in 0..4 {
            let (mut ours, mut theirs) = (cable(&found, a, b), cable(&expected, a, b));
            ours.sort();
            theirs.sort();
            assert_eq!(ours, theirs, "{a} and {b}");
        }
    }
    assert!(fabric(&nodes).mesh(&names).is_err_and(|why| why.contains("n0 and n2 have no RDMA link")));
    assert_eq!(teams(&fabric(&nodes), Backend::Jaccl, &[0, 1, 2, 3], (1, 3), |_| true), None);
    assert_eq!(
        teams(&fabric(&nodes), Backend::JacclRing, &[2, 0, 3, 1], (1, 4), |_| true),
        Some(vec![vec![0, 2, 1, 3]])
    );
}

#[test]
fn recorded_cabling_gives_its_matrix_again() {
    let Some(folder) = std::env::var_os("RUSSET_RECORDED").map(std::path::PathBuf::from) else {
        assert!(std::env::var_os("CI").is_none(), "CI must set RUSSET_RECORDED");
        eprintln!("not run: RUSSET_RECORDED names no folder of recorded files");
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
    // The same source gives this one for the same cabling; as a list of cables it is consistent by itself.
    check_mesh("pipeline", &read("jaccl-devices-matrix-3-node-pipeline.json"));
}
