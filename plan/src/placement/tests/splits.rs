//! Placements of tensor and hybrid groups that a person can follow.

use super::*;
use crate::check::Violation;

/// Nodes `a`, `b`, … of this many GiB; the named pairs have a cable with RDMA at both ends.
fn cabled(nodes: &[(&str, u64)], layers: u32, pairs: &[(&str, &str)]) -> Snapshot {
    let mut view = view(nodes, layers);
    for node in view.nodes.values_mut() {
        node.backends.push("jaccl".to_owned());
    }
    for (a, b) in pairs {
        for (node, peer) in [(a, b), (b, a)] {
            let link = Link {
                peer: (*peer).to_owned(),
                interface: format!("en-{peer}"),
                kind: LinkKind::Thunderbolt,
                rdma_device: Some(format!("rdma_{peer}")),
                ..Link::default()
            };
            view.nodes.get_mut(*node).unwrap().links.push(link);
        }
    }
    let shape = view.models.values_mut().next().unwrap();
    (shape.attention_heads, shape.key_value_heads, shape.head_dim) = (16, 8, 64);
    shape.intermediate_size = 4096;
    view
}

fn sharded(
    mode: ShardingMode,
    ranks: Option<u32>,
    size: Option<u32>,
    backend: BackendChoice,
) -> ModelDeploymentSpec {
    let spec = spec(mode, ranks, 1);
    let sharding = spec.sharding.map(|own| Sharding { tensor_size: size, backend, ..own });
    ModelDeploymentSpec { sharding, ..spec }
}

const MESH_3: [(&str, &str); 3] = [("b", "c"), ("c", "d"), ("b", "d")];
const RING_4: [(&str, &str); 4] = [("a", "c"), ("c", "b"), ("b", "d"), ("d", "a")];

#[test]
fn groups_use_the_best_backend_their_cables_carry() {
    use BackendChoice::*;
    use ShardingMode::{Hybrid, Tensor};
    let auto = ShardingMode::Auto;
    let even = [("a", 16), ("b", 16), ("c", 16), ("d", 16)];
    for (story, nodes, pairs, spec, expected) in [
        (
            "no cables",
            even[..2].to_vec(),
            vec![],
            sharded(Tensor, Some(2), None, Auto),
            "tensor over 2 nodes (a, b), TCP ring: a and b have no RDMA link: node a reports no Thunderbolt link to node b",
        ),
        (
            "as few as hold it",
            even.to_vec(),
            vec![],
            sharded(Tensor, None, None, Ring),
            "tensor over 2 nodes (a, b), TCP ring: spec.sharding.backend asks for it",
        ),
        (
            "cables decide which nodes",
            even.to_vec(),
            MESH_3[1..2].to_vec(),
            sharded(Tensor, None, Some(2), Auto),
            "tensor over 2 nodes (c, d), RDMA mesh (Jaccl): an RDMA cable joins every two members",
        ),
        (
            "a ring of four",
            even.to_vec(),
            RING_4.to_vec(),
            sharded(Tensor, Some(4), None, Auto),
            "tensor over 4 nodes (a, c, b, d), RDMA ring (JacclRing): RDMA joins neighbours, 1 to each",
        ),
        (
            "pairs of a ring are meshes",
            even.to_vec(),
            RING_4.to_vec(),
            sharded(Hybrid, Some(4), Some(2), Auto),
            "2 stages of 2 tensor ranks (a, c | b, d): layers 4 + 4, RDMA mesh (Jaccl): an RDMA cable joins every two members",
        ),
        (
            "stages over TCP",
            even.to_vec(),
            vec![],
            sharded(Hybrid, None, Some(2), Ring),
            "2 stages of 2 tensor ranks (a, b | c, d): layers 4 + 4, TCP ring: spec.sharding.backend asks for it",
        ),
        (
            "a mesh is too small, TCP is not",
            vec![("a", 16), ("b", 3), ("c", 3), ("d", 16)],
            MESH_3[..1].to_vec(),
            sharded(Tensor, None, Some(2), Auto),
            "tensor over 2 nodes (a, d), TCP ring: a and d have no RDMA link: node a reports no Thunderbolt link to node d",
        ),
        (
            "Auto prefers one node",
            even.to_vec(),
            MESH_3.to_vec(),
            sharded(auto, None, None, Auto),
            "1 rank on a",
        ),
        (
            "Auto prefers RDMA to a pipeline",
            vec![("a", 5), ("b", 5), ("c", 5), ("d", 5)],
            MESH_3.to_vec(),
            sharded(auto, None, None, Auto),
            "tensor over 2 nodes (b, c), RDMA mesh (Jaccl): an RDMA cable joins every two members",
        ),
        (
            "Auto takes no sums over TCP",
            vec![("a", 5), ("b", 5), ("c", 5), ("d", 5)],
            vec![],
            sharded(auto, None, None, Auto),
            "2 ranks on a, b: layers 4 + 4",
        ),
        (
            "Auto with a size is a tensor group",
            even.to_vec(),
            vec![],
            sharded(auto, None, Some(4), Ring),
            "tensor over 4 nodes (a, b, c, d), TCP ring: spec.sharding.backend asks for it",
        ),
    ] {
        let view = cabled(&nodes, 8, &pairs);
        let desired = desired(&view, &spec);
        let (placement, notes) = checked(&view, &desired);
        let decision = placement.report.as_ref().map_or(notes.as_str(), |report| &report.decision);
        assert_eq!(decision, expected, "{story}");
    }
}

#[test]
fn refusals_name_the_lacking_cable_engine_or_memory() {
    use BackendChoice::*;
    let even = [("a", 16), ("b", 16), ("c", 16), ("d", 16)];
    let tensor = |size, backend| sharded(ShardingMode::Tensor, None, Some(size), backend);
    for (nodes, pairs, spec, expected) in [
        (
            even[..].to_vec(),
            MESH_3[..2].to_vec(),
            tensor(4, Jaccl),
            "RDMA mesh (Jaccl) is not possible: a, b, c, d come nearest to a mesh, where a and b have no RDMA link: node a reports no Thunderbolt link to node b; a and c have no RDMA link: node a reports no Thunderbolt link to node c; a and d have no RDMA link: node a reports no Thunderbolt link to node d; and 1 more; cable the nodes",
        ),
        (
            even.to_vec(),
            MESH_3.to_vec(),
            tensor(4, JacclRing),
            "RDMA ring (JacclRing) is not possible: a, b, c, d come nearest to a ring, where a and b have no RDMA link: node a reports no Thunderbolt link to node b; d and a have no RDMA link: node d reports no Thunderbolt link to node a; cable the nodes",
        ),
        // Three cables of a ring of four: the missing one is found, whatever the order of the names.
        (
            even.to_vec(),
            RING_4[..3].to_vec(),
            tensor(4, JacclRing),
            "a, c, b, d come nearest to a ring, where d and a have no RDMA link: node d reports no Thunderbolt link to node a; cable the nodes",
        ),
        // The cabled nodes are not the largest.
        (
            vec![("a", 32), ("b", 32), ("c", 16), ("d", 16), ("e", 16)],
            vec![("c", "d"), ("d", "e"), ("e", "a"), ("c", "a"), ("c", "e")],
            tensor(4, Jaccl),
            "a, c, d, e come nearest to a mesh, where a and d have no RDMA link: node a reports no Thunderbolt link to node d; cable the nodes",
        ),
        // One stage is cabled, the other is not.
        (
            even.to_vec(),
            vec![("b", "c")],
            sharded(ShardingMode::Hybrid, Some(4), Some(2), Jaccl),
            "a, d | b, c come nearest to a mesh, where a and d have no RDMA link: node a reports no Thunderbolt link to node d; cable the nodes",
        ),
        // The cables exist, but their nodes lack memory.
        (
            vec![("a", 16), ("b", 16), ("c", 2), ("d", 2)],
            vec![("a", "c"), ("b", "d")],
            sharded(ShardingMode::Hybrid, Some(4), Some(2), Jaccl),
            "4 ranks on a, c, b, d",
        ),
        (even[..1].to_vec(), vec![], tensor(2, Auto), "2 ranks need 2 nodes"),
        (
            vec![("a", 2), ("b", 2)],
            vec![],
            tensor(2, Auto),
            "node a: a member of stage 0 with 1/2 of 8 layers needs 4.2 GiB, 2.0 GiB free of 2.0 GiB",
        ),
    ] {
        let view = cabled(&nodes, 8, &pairs);
        let (placement, notes) = checked(&view, &desired(&view, &spec));
        assert!(placement.create.is_empty() && notes.contains(expected), "{notes}\nlacks {expected}");
    }
    // Many nodes without memory are considered first, because they have no sibling.
    let small: Vec<String> = (0..20).map(|index| format!("s{index:02}")).collect();
    let nodes: Vec<(&str, u64)> =
        even.into_iter().chain(small.iter().map(|name| (name.as_str(), 1))).collect();
    let view = cabled(&nodes, 8, &[MESH_3.as_slice(), &[("a", "b"), ("a", "c"), ("a", "d")]].concat());
    let mut spec = tensor(4, Jaccl);
    spec.replicas = 2;
    let (placement, notes) = checked(&view, &desired(&view, &spec));
    let expected = "there is memory for it, and the RDMA ports it needs are in use";
    let port = "RDMA mesh (Jaccl) is not possible: port rdma_b of node a is in use by ShardGroup chat-0-";
    assert!(notes.contains(port), "{notes}\nlacks {port}");
    assert!(placement.create.len() == 1 && notes.contains(expected), "{notes}\nlacks {expected}");
    let mut view = cabled(&even[..2], 8, &[]);
    view.nodes.get_mut("a").unwrap().supports_tensor = false;
    let (_, notes) = checked(&view, &desired(&view, &tensor(2, Auto)));
    assert!(notes.contains("node a: its engine (1) is of a release that cannot cut layers"), "{notes}");
    let mut view = cabled(&even[..2], 8, &[]);
    view.nodes.get_mut("b").unwrap().engine_build = Some("2".to_owned());
    let (_, notes) = checked(&view, &desired(&view, &tensor(2, Auto)));
    assert!(notes.contains("cannot share a group: 1 on a; 2 on b; bring them to one release"), "{notes}");
}

#[test]
fn a_port_carries_one_group_and_a_successor_waits_for_it() {
    let before = cabled(&[("a", 64), ("b", 64)], 8, &[("a", "b")]);
    let spec = sharded(ShardingMode::Tensor, Some(2), None, BackendChoice::Auto);
    let chat = desired(&before, &spec);
    let now = ready(checked(&before, &chat).0.apply(&before, &chat));
    // Another deployment settles for TCP: it is unknown when the ports become free.
    let other = validate(&now, "ns", "code", &spec).unwrap();
    let (placement, _) = checked(&now, &other);
    let decision = placement.report.unwrap().decision;
    let reason = "TCP ring: port rdma_b of node a is in use by ShardGroup chat-0-";
    assert!(decision.contains(reason), "{decision}");
    // Its predecessor stops first, although there is memory for both.
    let mut longer = spec.clone();
    longer.sharding.as_mut().unwrap().kv.context_tokens = 512;
    let longer = desired(&now, &longer);
    let (step, notes) = checked(&now, &longer);
    assert!(step.create.is_empty() && notes.contains("its successor needs the RDMA ports"), "{notes}");
    let after = step.apply(&now, &longer);
    let (placed, _) = checked(&after, &longer);
    assert_eq!(placed.create[0].plan.backend, russet_crds::Backend::Jaccl);
    // While an unaccounted engine still runs, its ports may be in use.
    let mut held = after.clone();
    held.nodes.get_mut("a").unwrap().unreleased = GIB;
    let (waits, notes) = checked(&held, &longer);
    assert!(waits.is_empty() && notes.contains("waits until agents release memory"), "{notes}");
}

/// The model of a view with a seventh layer that reads the keys and values of the fourth, and with per-layer inputs.
fn with_shared_cache(mut view: Snapshot) -> Snapshot {
    let shape = view.models.get_mut(&("ns".to_owned(), "m".to_owned())).unwrap();
    let layer = |index| LayerGroup {
        count: 1,
        weight_bytes: GIB,
        shares_cache_of: (index == 6).then_some(3),
        ..LayerGroup::default()
    };
    shape.layer_groups = (0..shape.layers).map(layer).collect();
    shape.per_layer_input_bytes = GIB;
    view
}

#[test]
fn layers_that_share_a_cache_are_placed_on_one_stage() {
    let view = with_shared_cache(view(&[("a", 16), ("b", 16), ("c", 16)], 8));
    for (ranks, expected) in [(1, "a8"), (2, "a5 b3"), (3, "a1 b4 c3")] {
        let desired = desired(&view, &spec(ShardingMode::Pipeline, Some(ranks), 1));
        let (mut placement, notes) = checked(&view, &desired);
        assert_eq!(shown(&placement), expected, "{notes}");
        // The rank with the embedding has what makes the inputs.
        let last = placement.create[0].plan.members.last().unwrap();
        assert_eq!(last.weight_bytes, u64::from(last.layers + 1) * GIB);
        if ranks == 2 {
            let members = &mut placement.create[0].plan.members;
            (members[0].layers, members[1].layers) = (3, 5);
            let shared =
                Violation::SharedCache { group: placement.create[0].name.clone(), layer: 6, owner: 3 };
            let wrong = check(&view, &desired, &placement);
            assert!(wrong.contains(&shared), "{wrong:?}");
        }
    }
    let six = validate(&view, "ns", "chat", &spec(ShardingMode::Pipeline, Some(6), 1)).unwrap_err();
    let said = crate::note::join(&six);
    assert!(
        said.contains("layers 3 to 6 share keys and values and stay together, so ask for at most 5"),
        "{said}"
    );
}

/// The deepest model that is planned, its layers all different, on machines of which no two are alike.
fn deepest() -> Snapshot {
    let layers = russet_model::config::MAX_LAYERS;
    let mut view = view(&[("a", 18), ("b", 22), ("c", 26), ("d", 31), ("e", 37)], layers);
    for (at, node) in view.nodes.values_mut().enumerate() {
        node.gpu = Some(crate::performance_model::GpuProfile {
            bandwidth: (100 + 70 * at) as f64 * 1e9,
            flops: (4 + 3 * at) as f64 * 1e12,
            cores: (10 + 10 * at) as f64,
            matmul_speedup: 1.0,
            emulates_bfloat16: false,
        });
    }
    let shape = view.models.get_mut(&("ns".to_owned(), "m".to_owned())).unwrap();
    shape.layer_bytes =
        (0..u64::from(layers)).map(|layer| (32 << 20) + (layer * 7919 % 97) * 65_536).collect();
    view
}

#[test]
fn deepest_pipeline_is_planned_within_counted_steps() {
    let view = deepest();
    for (mode, ranks) in [(ShardingMode::Pipeline, None), (ShardingMode::Pipeline, Some(5))] {
        let desired = desired(&view, &spec(mode, ranks, 1));
        let fit = desired.memory_model();
        let found = enumerate(&view, &desired, &fit, 0, true, |_| false).unwrap().found;
        let steps = fit.search_budget().steps();
        println!("1000 layers, 5 nodes, {mode:?} {ranks:?}: {} candidates, {steps} steps", found.len());
        assert!(steps < 5_000_000, "{steps}; every start of every end would take some 10^8");
        let (placement, _) = checked(&view, &desired);
        assert_eq!(placement.create.len(), 1);
    }
}

#[test]
fn search_degrades_and_then_ends_with_words() {
    use crate::search_budget::{FULL_SEARCH_STEPS, MAX_SEARCH_STEPS};
    let view = deepest();
    let desired = desired(&view, &spec(ShardingMode::Pipeline, None, 1));
    let steps = |before| {
        let fit = desired.memory_model();
        fit.search_budget().add(before);
        let found = enumerate(&view, &desired, &fit, 0, true, |_| false);
        (
            found.map(|found| found.found.len()).map_err(|notes| crate::note::join(&notes)),
            fit.search_budget().steps() - before,
        )
    };
    let (all, full) = steps(0);
    let (one, degraded) = steps(FULL_SEARCH_STEPS);
    assert_eq!(all, one, "a split of each set of nodes is found in either case");
    assert!(degraded * 4 < full, "{degraded} of {full}");
    let (none, spent) = steps(MAX_SEARCH_STEPS);
    let words = none.unwrap_err();
    assert!(
        words.contains("1000 layers") && words.contains("given up") && words.contains("spec.sharding"),
        "{words}"
    );
    assert_eq!(spent, 0);
}

#[test]
fn more_layers_than_any_model_has_are_refused() {
    let mut view = view(&[("a", 64)], 1);
    for (layers, layer_bytes) in [(1001, 1001), (1, 200_000), (u32::MAX, 1)] {
        let shape = view.models.get_mut(&("ns".to_owned(), "m".to_owned())).unwrap();
        (shape.layers, shape.layer_bytes) = (layers, vec![1; layer_bytes]);
        let notes = validate(&view, "ns", "chat", &spec(ShardingMode::Auto, None, 1)).unwrap_err();
        let words = crate::note::join(&notes);
        assert!(words.contains("more than the limit of 1000"), "{words}");
    }
}
