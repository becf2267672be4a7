//! Pools: where replicas may be placed, required links, and that nodes which leave a pool move no replica.

use std::sync::Arc;

use russet_crds::FabricKind;

use super::*;
use crate::pool::{EligibleNodes, LinkDemand};

fn pool(name: &str, nodes: &[&str], demand: Option<LinkDemand>) -> EligibleNodes {
    let nodes = nodes.iter().map(|node| (*node).to_owned()).collect();
    let asks = vec![format!("NodePool {name}")];
    EligibleNodes { pool: Some(name.to_owned()), nodes: Some(Arc::new(nodes)), demand, demanded_by: asks }
}

fn with(mut view: Snapshot, pools: &[EligibleNodes]) -> Snapshot {
    view.pools = pools.iter().map(|area| (area.pool.clone().unwrap(), Ok(area.clone()))).collect();
    view
}

fn spec_in(pools: &[&str], mode: ShardingMode, replicas: i32) -> ModelDeploymentSpec {
    let pool_refs = pools.iter().map(|pool| LocalReference::new(*pool)).collect();
    ModelDeploymentSpec { pool_refs, ..spec(mode, None, replicas) }
}

/// Both ends of a Thunderbolt link with RDMA.
fn join(view: &mut Snapshot, pairs: &[(&str, &str, u64)]) {
    for (a, b, gigabits) in pairs {
        for (node, peer) in [(a, b), (b, a)] {
            let link = Link {
                peer: (*peer).to_string(),
                interface: format!("en-{peer}"),
                kind: LinkKind::Thunderbolt,
                rdma_device: Some(format!("rdma_en-{peer}")),
                bits_per_second: Some(gigabits * 1_000_000_000),
                ..Link::default()
            };
            let node = view.nodes.get_mut(*node).unwrap();
            node.backends = vec!["ring".to_owned(), "jaccl".to_owned()];
            node.links.push(link);
        }
    }
}

#[test]
fn replicas_stay_in_the_pools_and_each_in_one_of_them() {
    use ShardingMode::*;
    let pools = [pool("small", &["a", "b"], None), pool("large", &["c", "d"], None), pool("none", &[], None)];
    for (gib, refs, mode, replicas, expected) in [
        (16, vec![], Auto, 1, "a4"),
        (16, vec!["large"], Auto, 1, "c4"),
        (16, vec!["large"], Auto, 2, "c4 | d4"),
        (16, vec!["small", "large"], Auto, 3, "a4 | b4 | c4"),
        (3, vec!["large"], Auto, 1, "c2 d2"),
        (3, vec!["small", "large"], Pipeline, 2, "a2 b2 | c2 d2"),
        // Three nodes would hold it, but no pool has three.
        (2, vec!["small", "large"], Auto, 1, ""),
        (2, vec![], Auto, 1, "a1 b1 c1 d1"),
        (16, vec!["none"], Auto, 1, ""),
    ] {
        let nodes = ["a", "b", "c", "d"].map(|node| (node, gib));
        let view = with(view(&nodes, 4), &pools);
        let desired = desired(&view, &spec_in(&refs, mode, replicas));
        let (placement, notes) = checked(&view, &desired);
        assert_eq!(shown(&placement), expected, "{gib} {refs:?} {mode:?}: {notes}");
        if refs == ["none"] {
            assert!(notes.contains("none of the 0 nodes of NodePool none can take work"), "{notes}");
        }
    }
}

#[test]
fn pool_link_demand_decides_which_nodes_share_a_group() {
    let demand = |kind, gigabits: u64| Some(LinkDemand { kind, bits: gigabits * 1_000_000_000 });
    for (demand, expected, words) in [
        // Without a requirement, any cable is preferred to none.
        (None, "b2 c2", ""),
        (demand(FabricKind::Any, 0), "b2 c2", ""),
        (demand(FabricKind::ThunderboltRdma, 60), "c2 d2", ""),
        (
            demand(FabricKind::Any, 100),
            "",
            "NodePool p: every two nodes of a group need a link of 100 Gbit/s: node a reports no link to node b; \
             node a reports no link to node c; node a reports no link to node d; connect them so, or require less",
        ),
    ] {
        let mut view = with(
            view(&[("a", 3), ("b", 3), ("c", 3), ("d", 3)], 4),
            &[pool("p", &["a", "b", "c", "d"], demand)],
        );
        join(&mut view, &[("b", "c", 40), ("c", "d", 80)]);
        let desired = desired(&view, &spec_in(&["p"], ShardingMode::Pipeline, 1));
        let (placement, notes) = checked(&view, &desired);
        assert_eq!(shown(&placement), expected, "{demand:?}: {notes}");
        assert!(notes.contains(words), "{notes}");
    }
    // One rank needs no link.
    let lonely = pool("p", &["a"], demand(FabricKind::ThunderboltRdma, 60));
    let view = with(view(&[("a", 16), ("b", 16)], 4), &[lonely]);
    assert_eq!(shown(&checked(&view, &desired(&view, &spec_in(&["p"], ShardingMode::Auto, 1))).0), "a4");
}

#[test]
fn node_leaving_its_pool_keeps_replicas_until_an_edit() {
    let nodes = [("a", 16), ("b", 16)];
    let view = |p: &[&str], q: &[&str]| with(view(&nodes, 4), &[pool("p", p, None), pool("q", q, None)]);
    let first = view(&["a"], &["b"]);
    let mut now = ready(
        checked(&first, &desired(&first, &spec_in(&["p"], ShardingMode::Auto, 1)))
            .0
            .apply(&first, &desired(&first, &spec_in(&["p"], ShardingMode::Auto, 1))),
    );
    let mut plan = |p: &[&str], refs: &[&str]| {
        now.pools = view(p, &["b"]).pools;
        let desired = desired(&now, &spec_in(refs, ShardingMode::Auto, 1));
        let (placement, notes) = checked(&now, &desired);
        (shown(&placement), placement.keep.len(), notes)
    };
    assert_eq!(plan(&["a"], &["p"]), (String::new(), 1, String::new()));
    let (created, retained, notes) = plan(&["b"], &["p"]);
    assert_eq!((created.as_str(), retained), ("", 1), "{notes}");
    assert!(notes.contains("stays on a, which NodePool p no longer has"), "{notes}");
    // A spec without pools requires nothing that it lacks; other pools require another placement.
    assert_eq!(plan(&["b"], &[]), (String::new(), 1, String::new()));
    assert_eq!(plan(&["b"], &["q"]).0, "b4");
}

#[test]
fn wrong_pool_names_list_the_existing_pools() {
    let mut view = with(view(&[("a", 16)], 4), &[pool("p", &["a"], None)]);
    let refusal = |view: &Snapshot, refs: &[&str]| {
        let notes = validate(view, "ns", "chat", &spec_in(refs, ShardingMode::Auto, 1)).unwrap_err();
        crate::note::join(&notes)
    };
    assert_eq!(
        refusal(&view, &["x", "p"]),
        "NodePool \"x\" does not exist; create it, or name one of the NodePools there are: p"
    );
    view.pools.insert("x".to_owned(), Err(Note::Newer { field: "spec.fabric.kind".to_owned() }));
    let text = refusal(&view, &["x"]);
    assert!(text.starts_with("NodePool x: spec.fabric.kind is a word of a newer release"), "{text}");
    view.pools.clear();
    assert!(refusal(&view, &["x"]).contains("there are no NodePools: create it, or leave the reference out"));
}

#[test]
fn named_strategy_equals_the_same_inline_sharding() {
    let mut view = with(view(&[("a", 16), ("b", 16), ("c", 16)], 4), &[pool("p", &["a", "b", "c"], None)]);
    join(&mut view, &[("a", "b", 40), ("b", "c", 80)]);
    let own = spec(ShardingMode::Pipeline, Some(2), 1);
    let named = |strategy: &str, pools: &[&str]| ModelDeploymentSpec {
        sharding: None,
        strategy_ref: Some(LocalReference::new(strategy)),
        ..spec_in(pools, ShardingMode::Auto, 1)
    };
    let fast = |rate: &str| {
        own.sharding.clone().map(|it| Sharding { min_bits_per_second: Some(rate.to_owned()), ..it }).unwrap()
    };
    view.strategies = [
        ("two".to_owned(), own.sharding.clone().unwrap()),
        ("fast".to_owned(), fast("60G")),
        ("faster".to_owned(), fast("100G")),
    ]
    .into();
    let place = |spec: &ModelDeploymentSpec| checked(&view, &desired(&view, spec));
    let (placement, _) = place(&named("two", &[]));
    assert_eq!(placement.create, place(&own).0.create, "the same words, the same plan");
    let reason = placement.report.unwrap().reason;
    assert!(reason.starts_with("ShardingStrategy two spec.ranks asks for 2"), "{reason}");
    assert_eq!(shown(&place(&named("fast", &[])).0), "b2 c2");
    let (_, notes) = place(&named("faster", &["p"]));
    let words = "ShardingStrategy faster spec.minBitsPerSecond: every two nodes of a group need a link of 100 Gbit/s: \
                 a and b are joined with 40 Gbit/s, not 100 Gbit/s; node a reports no link to node c; \
                 b and c are joined with 80 Gbit/s, not 100 Gbit/s";
    assert!(notes.contains(words), "{notes}");

    let refusal =
        |spec: &ModelDeploymentSpec| crate::note::join(&validate(&view, "ns", "chat", spec).unwrap_err());
    let text = refusal(&named("three", &[]));
    let there = "create it, or name one of the ShardingStrategies there are: fast, faster, two";
    assert_eq!(text, format!("ShardingStrategy \"three\" does not exist; {there}"));
    let both = ModelDeploymentSpec { sharding: own.sharding.clone(), ..named("two", &[]) };
    assert!(refusal(&both).contains("spec.strategyRef: it and spec.sharding exclude each other"));
}
