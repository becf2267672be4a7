//! Placement tables that a person can follow, and thousands of random clusters for the checker.

use std::collections::BTreeMap;
use std::sync::Arc;

use russet_crds::{
    Adapter, BackendChoice, ENGINE_OPTIONS, EngineOptions, FabricKind, GroupMember, KvCacheType, KvCapacity,
    Link, LinkKind, LocalReference, ModelDeploymentSpec, Sharding, ShardingMode,
};
use russet_model::shape::{LayerGroup, ModelShape};
use russet_model::state::LayerState;

mod adapters;
mod draft_model;
mod failure_domains;
mod files;
mod kv_capacity;
mod namespaces;
mod pools;
mod splits;

use super::*;
use crate::check::check;
use crate::cow::ArcCow;
use crate::disk_state::DiskState;
use crate::disk_state::tests::disks;
use crate::memory_model::MemoryModel;
use crate::pool::{EligibleNodes, LinkDemand};
use crate::snapshot::{Availability, NodeInfo};
use crate::test_rng::TestRng;
use crate::validate::validate;

const GIB: u64 = 1 << 30;

fn node(gib: u64) -> NodeInfo {
    NodeInfo {
        serving_limit: gib * GIB,
        engine_build: Some("1".to_owned()),
        backends: vec!["ring".to_owned()],
        supports_tensor: true,
        engine_options: options(),
        ..NodeInfo::default()
    }
}

/// Options of engines of this release.
fn options() -> Vec<String> {
    ENGINE_OPTIONS.iter().map(|option| (*option).to_owned()).collect()
}

/// The same with a draft model `d` of one layer and this size.
fn with_draft(mut view: Snapshot, bytes: u64) -> Snapshot {
    let shape = ModelShape {
        architecture: "llama".to_owned(),
        layers: 1,
        layer_bytes: vec![bytes],
        kv_bytes_per_token_per_layer: 1 << 10,
        ..ModelShape::default()
    };
    view.models.insert(("ns".to_owned(), "d".to_owned()), shape);
    view
}

fn view(nodes: &[(&str, u64)], layers: u32) -> Snapshot {
    let shape = ModelShape {
        architecture: "llama".to_owned(),
        layers,
        layer_bytes: vec![GIB; layers as usize],
        context_length: 1024,
        ..ModelShape::default()
    };
    Snapshot {
        nodes: nodes.iter().map(|(name, gib)| ((*name).to_owned(), node(*gib))).collect(),
        models: [(("ns".to_owned(), "m".to_owned()), shape)].into_iter().collect(),
        ..Snapshot::default()
    }
}

fn spec(mode: ShardingMode, ranks: Option<u32>, replicas: i32) -> ModelDeploymentSpec {
    ModelDeploymentSpec {
        model_ref: LocalReference::new("m"),
        sharding: Some(Sharding {
            mode,
            ranks,
            kv: KvCapacity { context_tokens: 1024, max_sequences: 1, kv_tokens: None, headroom_percent: 0 },
            ..Sharding::default()
        }),
        replicas,
        ..ModelDeploymentSpec::default()
    }
}

fn desired(view: &Snapshot, spec: &ModelDeploymentSpec) -> ValidDeployment {
    validate(view, "ns", "chat", spec).unwrap()
}

/// Plans, checks the result, and returns it with the notes as one text.
#[track_caller]
fn checked(view: &Snapshot, desired: &ValidDeployment) -> (Placement, String) {
    let (placement, notes) = place(view, desired);
    assert_eq!(check(view, desired, &placement), vec![], "{placement:#?}\n{notes:#?}");
    (placement, crate::note::join(&notes))
}

fn shown(placement: &Placement) -> String {
    let groups = placement.create.iter().map(|new| {
        let members = new.plan.members.iter().map(|member| format!("{}{}", member.node_name, member.layers));
        members.collect::<Vec<_>>().join(" ")
    });
    groups.collect::<Vec<_>>().join(" | ")
}

fn ready(mut view: Snapshot) -> Snapshot {
    view.groups.values_mut().for_each(|group| group.ready = true);
    if let Some(disks) = &mut view.disks {
        // A ready group has its files.
        for ((namespace, _), group) in &view.groups {
            for (model, node) in group.files() {
                disks.mark_present(namespace, model, &[node.to_owned()]);
            }
        }
    }
    view
}

#[test]
fn deployments_go_where_they_fit_and_spread_where_they_can() {
    use ShardingMode::*;
    for (nodes, layers, mode, ranks, replicas, expected) in [
        (vec![("a", 16), ("b", 16)], 4, Auto, None, 1, "a4"),
        (vec![("a", 64), ("b", 8)], 4, Auto, None, 1, "b4"), // the tightest fit
        (vec![("a", 16), ("b", 16)], 4, Auto, None, 2, "a4 | b4"), // replicas spread
        (vec![("a", 16)], 4, Auto, None, 2, "a4 | a4"),      // and share a node when they must
        (vec![("a", 16)], 4, Auto, None, 4, "a4 | a4 | a4"), // and no more than fit
        (vec![("a", 3), ("b", 3), ("c", 3)], 4, Auto, None, 1, "a2 b2"), // the fewest that hold it
        (vec![("a", 16), ("b", 16)], 4, Pipeline, None, 1, "a2 b2"),
        (vec![("a", 16), ("b", 16)], 4, Auto, Some(2), 1, "a2 b2"),
        (vec![("a", 16), ("b", 16), ("c", 16)], 5, Pipeline, Some(3), 1, "a1 b2 c2"),
        (vec![("a", 16), ("b", 16)], 4, Pipeline, Some(3), 1, ""),
        (vec![("a", 3), ("b", 3)], 4, Single, None, 1, ""),
        (vec![("a", 16)], 4, Auto, None, 0, ""),
        (vec![], 4, Auto, None, 1, ""),
    ] {
        let view = view(&nodes, layers);
        let desired = desired(&view, &spec(mode, ranks, replicas));
        let (placement, notes) = checked(&view, &desired);
        assert_eq!(shown(&placement), expected, "{nodes:?} {mode:?} {ranks:?}: {notes}");
        assert_eq!(placement.report.is_some(), !expected.is_empty());
    }
}

#[test]
fn a_refusal_names_every_node_with_its_numbers_and_the_remedy() {
    let mut view = view(&[("a", 3), ("b", 2), ("c", 64), ("d", 64), ("e", 0)], 8);
    view.nodes.get_mut("c").unwrap().availability = Availability::Cordoned;
    view.nodes.get_mut("d").unwrap().availability = Availability::Unreachable;
    view.nodes.get_mut("e").unwrap().availability = Availability::Unmeasured;
    let desired = desired(&view, &spec(ShardingMode::Auto, None, 1));
    let (placement, notes) = checked(&view, &desired);
    assert_eq!(placement.waiting, [0]);
    for text in [
        "node a: the whole model needs 8.2 GiB, 3.0 GiB free of 3.0 GiB",
        "node b: the whole model needs 8.2 GiB, 2.0 GiB free of 2.0 GiB",
        "node c: cordoned",
        "node d: unreachable",
        "node e: its agent has not reported its memory yet",
        "2 ranks on a, b: 8.4 GiB needed in all, 5.0 GiB free in all",
        "replica 0 fits nowhere else (8.2 GiB on one node: 8.0 GiB weights",
        "than on c, d, which take no work now: start the agent of one",
    ] {
        assert!(notes.contains(text), "{notes}\nlacks {text:?}");
    }
}

#[test]
fn ranks_of_one_group_have_equal_engines_and_a_ring() {
    let mut view = view(&[("a", 5), ("b", 5), ("c", 5), ("d", 5)], 8);
    view.nodes.get_mut("a").unwrap().engine_build = Some("2".to_owned());
    view.nodes.get_mut("b").unwrap().backends = vec!["jaccl".to_owned()];
    let desired = desired(&view, &spec(ShardingMode::Auto, None, 1));
    assert_eq!(shown(&checked(&view, &desired).0), "c4 d4");
    view.nodes.get_mut("c").unwrap().engine_build = None;
    let (placement, notes) = checked(&view, &desired);
    assert!(
        placement.create.is_empty() && notes.contains("node b: its engine does not offer the ring"),
        "{notes}"
    );
}

#[test]
fn running_group_stays_when_better_nodes_appear() {
    let view = view(&[("b", 16)], 4);
    let desired = desired(&view, &spec(ShardingMode::Auto, None, 1));
    let mut after = checked(&view, &desired).0.apply(&view, &desired);
    after.nodes.insert("a".to_owned(), node(5));
    for availability in [Availability::Cordoned, Availability::Unreachable, Availability::Unmeasured] {
        after.nodes.get_mut("b").unwrap().availability = availability;
        let (placement, _) = checked(&after, &desired);
        assert!(placement.is_empty() && placement.keep.len() == 1 && placement.report.is_none());
    }
}

#[test]
fn plan_of_an_older_release_stays_until_headroom_is_raised() {
    let view = view(&[("a", 16), ("b", 16)], 4);
    let asked = spec(ShardingMode::Auto, None, 1);
    let mut before = checked(&view, &desired(&view, &asked)).0.apply(&view, &desired(&view, &asked));
    let plan = &mut before.groups.values_mut().next().unwrap().plan;
    plan.members[0].overhead_bytes = GIB / 2;
    for (percent, unchanged) in [(0, true), (10, true), (20, false)] {
        let mut asked = asked.clone();
        asked.sharding.as_mut().unwrap().kv.headroom_percent = percent;
        let (placement, _) = place(&before, &desired(&view, &asked));
        assert_eq!(placement.is_empty(), unchanged, "{percent} %: {placement:?}");
    }
}

#[test]
fn replicas_leave_draining_and_lost_nodes_once_replaced() {
    for availability in [Availability::Draining, Availability::Lost] {
        let before = view(&[("a", 5), ("b", 16)], 4);
        let desired = desired(&before, &spec(ShardingMode::Auto, None, 1));
        let mut now = ready(checked(&before, &desired).0.apply(&before, &desired));
        now.nodes.get_mut("a").unwrap().availability = availability;
        let (moved, _) = checked(&now, &desired);
        assert_eq!((shown(&moved).as_str(), moved.delete.len()), ("b4", 0), "the old one answers meanwhile");
        let after = ready(moved.apply(&now, &desired));
        let (gone, _) = checked(&after, &desired);
        assert_eq!((gone.create.len(), gone.delete.len()), (0, 1));
        assert_eq!(gone.delete[0].reason, RemovalReason::Replaced);
        assert!(checked(&gone.apply(&after, &desired), &desired).0.is_empty());
    }
}

#[test]
fn an_edit_surges_when_memory_allows_and_drains_first_when_not() {
    for (gib, surges) in [(16, true), (5, false)] {
        let before = view(&[("a", gib), ("b", gib)], 4);
        let two = desired(&before, &spec(ShardingMode::Auto, Some(2), 1));
        let now = ready(checked(&before, &two).0.apply(&before, &two));
        let one = desired(&before, &spec(ShardingMode::Auto, Some(1), 1));
        let (step, notes) = checked(&now, &one);
        if surges {
            assert_eq!((shown(&step).as_str(), step.delete.len()), ("a4", 0));
            continue;
        }
        assert!(step.create.is_empty() && notes.contains("makes room first"), "{notes}");
        assert_eq!(step.delete[0].reason, RemovalReason::Drained);
        // While the agents still hold the memory, the replica waits and names the holders.
        let mut draining = now.clone();
        draining.groups.values_mut().for_each(|group| group.deleting = true);
        let (waits, notes) = checked(&draining, &one);
        assert!(waits.is_empty() && notes.contains("waits until agents release memory"), "{notes}");
        let mut held = step.apply(&now, &one);
        held.nodes.values_mut().for_each(|node| node.unreleased = 3 * GIB);
        let (waits, notes) = checked(&held, &one);
        assert!(waits.is_empty() && notes.contains("node a 3.0 GiB"), "{notes}");
        assert_eq!(shown(&checked(&step.apply(&now, &one), &one).0), "a4");
    }
}

#[test]
fn quantised_cache_fits_in_less_memory_and_is_another_plan() {
    let mut before = view(&[("a", 12)], 4);
    let shape = before.models.values_mut().next().unwrap();
    (shape.head_dim, shape.key_value_heads, shape.context_length) = (128, 8, 0);
    shape.kv_bytes_per_token_per_layer = 4096;
    // Eight sequences of 64 Ki tokens: 8 GiB of KV cache, 4.3 GiB in 8 bits, 2.3 GiB in 4; beside 4 GiB of
    // weights.
    let asks = |kv_cache| {
        let mut spec = spec(ShardingMode::Auto, None, 1);
        let kv =
            KvCapacity { context_tokens: 1 << 16, max_sequences: 8, kv_tokens: None, headroom_percent: 0 };
        spec.sharding.as_mut().unwrap().kv = kv;
        desired(
            &before,
            &ModelDeploymentSpec {
                engine: EngineOptions { kv_cache, ..EngineOptions::default() }.into(),
                ..spec
            },
        )
    };
    let eight = asks(KvCacheType::Int8);
    for (kv_cache, kv) in [
        (KvCacheType::AsComputed, None),
        (KvCacheType::Int8, Some((4 * (2048 + 128)) << 19)),
        (KvCacheType::Int4, Some((4 * (1024 + 128)) << 19)),
    ] {
        let placement = checked(&before, &asks(kv_cache)).0;
        let plans: Vec<&GroupPlan> = placement.create.iter().map(|new| &new.plan).collect();
        assert_eq!(plans.first().map(|plan| plan.members[0].kv_bytes), kv, "{kv_cache:?}");
        assert!(plans.iter().all(|plan| plan.engine.kv_cache == kv_cache));
    }
    let mut older = before.clone();
    older.nodes.get_mut("a").unwrap().engine_options.clear();
    let (placement, notes) = checked(&older, &eight);
    assert!(
        placement.create.is_empty() && notes.contains("has no engine.kvCache; update the node"),
        "{notes}"
    );
    // An edit of it is rolled out like any other.
    let now = ready(checked(&before, &eight).0.apply(&before, &eight));
    assert!(checked(&now, &eight).0.is_empty());
    let step = checked(&now, &asks(KvCacheType::Int4)).0;
    assert_eq!(step.delete[0].reason, RemovalReason::Drained, "there is no room for both");
}

#[test]
fn patterns_that_are_none_are_named() {
    let view = view(&[("a", 64)], 4);
    let with = |pattern: &str| {
        let mut spec = spec(ShardingMode::Auto, None, 1);
        spec.engine.strip_patterns = vec!["^Date: .*$".into(), pattern.into()];
        validate(&view, "ns", "chat", &spec)
    };
    assert!(with("(a)").is_ok());
    let notes = format!("{:?}", with("(a").unwrap_err());
    assert!(notes.contains("spec.engine.stripPatterns[1]") && notes.contains("unclosed group"), "{notes}");
}

#[test]
fn running_replica_is_never_drained_for_one_that_cannot_fit() {
    let before = view(&[("a", 5)], 4);
    let one = desired(&before, &spec(ShardingMode::Auto, None, 1));
    let now = ready(checked(&before, &one).0.apply(&before, &one));
    let two = desired(&before, &spec(ShardingMode::Auto, Some(2), 1));
    let (step, notes) = checked(&now, &two);
    assert!(step.is_empty() && step.waiting == [0] && step.keep.len() == 1);
    assert!(notes.contains("keeps running as it was") && notes.contains("2 ranks need 2 nodes"), "{notes}");
}

#[test]
fn identical_plan_waits_until_its_old_group_is_deleted() {
    let before = view(&[("a", 16)], 4);
    let desired = desired(&before, &spec(ShardingMode::Auto, None, 1));
    let mut now = checked(&before, &desired).0.apply(&before, &desired);
    now.groups.values_mut().for_each(|group| group.deleting = true);
    let (step, _) = checked(&now, &desired);
    assert!(step.is_empty() && step.waiting == [0]);
}

#[test]
fn a_plan_of_another_model_or_size_has_another_hash() {
    let mut plan = GroupPlan { members: vec![GroupMember::default()], ..GroupPlan::default() };
    let first = plan_hash("m", &plan);
    plan.hash = first.clone();
    assert_eq!(plan_hash("m", &plan), first, "the hash is not part of itself");
    assert_ne!(plan_hash("n", &plan), first);
    plan.members[0].layers = 1;
    assert_ne!(plan_hash("m", &plan), first);
}

fn random_view(test_rng: &mut TestRng) -> Snapshot {
    // A separate generator, so that these seeds draw everything else as before.
    let mut apart = TestRng(test_rng.0 ^ 1);
    let mut view = Snapshot::default();
    for index in 0..test_rng.below(8) {
        let availability = match test_rng.below(12) {
            0 => Availability::Cordoned,
            1 => Availability::Draining,
            2 => Availability::Unreachable,
            3 => Availability::Lost,
            4 => Availability::Unmeasured,
            _ => Availability::Open,
        };
        let node = NodeInfo {
            serving_limit: test_rng.below(40) * GIB / 2,
            unreleased: if test_rng.below(6) == 0 { test_rng.below(GIB) } else { 0 },
            availability,
            os: None,
            engine_build: Some(test_rng.below(5).min(1).to_string()),
            backends: match test_rng.below(6) {
                0 => vec![],
                1 => vec!["ring".to_owned()],
                _ => vec!["ring".to_owned(), "jaccl".to_owned()],
            },
            supports_tensor: test_rng.below(8) > 0,
            engine_options: if apart.below(32) > 0 { options() } else { Vec::new() },
            links: Vec::new(),
            gpu: None,
            labels: match test_rng.below(4) {
                0 => BTreeMap::new(),
                zone => [(names::LABEL_ZONE.to_owned(), zone.to_string())].into(),
            },
        };
        view.nodes.insert(format!("n{index}"), node);
    }
    random_links(test_rng, &mut view);
    view.pools = random_pools(test_rng, &view);
    for model in ["m", "n"] {
        let layers = 1 + test_rng.below(12) as u32;
        let embedding = test_rng.below(2 * GIB);
        let tied = test_rng.below(2) == 0;
        let shape = ModelShape {
            architecture: "llama".to_owned(),
            layers,
            hidden_size: test_rng.below(9000) as u32,
            vocabulary: test_rng.below(200_000) as u32,
            context_length: test_rng.below(3) as u32 * 4096,
            embedding_bytes: embedding,
            head_bytes: if tied { 4096 } else { embedding + 4096 },
            tied,
            layer_bytes: (0..layers).map(|_| test_rng.below(2 * GIB)).collect(),
            kv_bytes_per_token_per_layer: test_rng.below(8192),
            attention_heads: [8, 12, 32][test_rng.below(3) as usize],
            key_value_heads: [2, 4, 8][test_rng.below(3) as usize],
            head_dim: 64,
            intermediate_size: [1024, 1536][test_rng.below(2) as usize],
            quantization_group_size: [0, 64][test_rng.below(2) as usize],
            replicated_layer_bytes: test_rng.below(1 << 20),
            ..ModelShape::default()
        };
        let mut sharing = TestRng(test_rng.0 ^ 3);
        let shape = if sharing.below(4) == 0 { with_shared_caches(shape, &mut sharing) } else { shape };
        view.models.insert(("ns".to_owned(), model.to_owned()), shape);
    }
    view.disks = random_disks(test_rng, &view);
    let view = with_draft(view, apart.below(4 * GIB));
    let mut view = adapters::with_adapters(view, 1 + apart.below(GIB));
    if let Some(disks) = &mut view.disks {
        let nodes: Vec<String> = view.nodes.keys().filter(|_| apart.below(2) == 0).cloned().collect();
        disks.mark_present("ns", "d", &nodes);
        for adapter in ["x", "y"] {
            let nodes: Vec<String> = view.nodes.keys().filter(|_| apart.below(2) == 0).cloned().collect();
            disks.mark_present("ns", adapter, &nodes);
        }
    }
    view
}

/// The same where the last layers read the keys and values of one or two before them, and have inputs of their own.
fn with_shared_caches(shape: ModelShape, rng: &mut TestRng) -> ModelShape {
    let own = 1 + rng.below(u64::from(shape.layers)) as u32;
    let groups = shape.layer_bytes.iter().zip(0..).map(|(&weight_bytes, layer)| {
        let shares_cache_of = (layer >= own).then(|| own.saturating_sub(1 + layer % 2));
        let per_token_bytes = shares_cache_of.map_or(shape.kv_bytes_per_token_per_layer, |_| 0);
        LayerGroup {
            count: 1,
            weight_bytes,
            replicated_bytes: shape.replicated_layer_bytes.min(weight_bytes),
            state: LayerState { per_token_bytes, ..LayerState::default() },
            shares_cache_of,
            ..LayerGroup::default()
        }
    });
    ModelShape { layer_groups: groups.collect(), per_layer_input_bytes: rng.below(GIB), ..shape }
}

/// In one of three clusters the disks are unknown.
fn random_disks(test_rng: &mut TestRng, view: &Snapshot) -> Option<ArcCow<DiskState>> {
    let size = |model: &str| view.models[&("ns".to_owned(), model.to_owned())].total_bytes();
    let nodes: Vec<&str> = view.nodes.keys().map(String::as_str).collect();
    let mut limits = Vec::new();
    // On a machine that is gone, so that every model is known.
    let mut copies = ["m", "n"].map(|model| (model, "gone", size(model), 0, false)).to_vec();
    for node in nodes {
        limits.push((node, (test_rng.below(4) > 0).then(|| test_rng.below(40) * GIB / 2)));
        for (model, bytes) in [("m", size("m")), ("n", size("n")), ("x", 4 * GIB), ("y", 4 * GIB)] {
            if test_rng.below(3) == 0 {
                let done = [0, bytes / 2, bytes][test_rng.below(3) as usize];
                copies.push((model, node, bytes, done, test_rng.below(4) == 0));
            }
        }
    }
    (test_rng.below(3) > 0).then(|| disks(&limits, &copies).into())
}

/// Two pools of some nodes, possibly with link requirements.
fn random_pools(test_rng: &mut TestRng, view: &Snapshot) -> BTreeMap<String, Result<EligibleNodes, Note>> {
    let kinds = [FabricKind::Any, FabricKind::Thunderbolt, FabricKind::ThunderboltRdma];
    let mut area = |name: &str| {
        let nodes = view.nodes.keys().filter(|_| test_rng.below(4) > 0).cloned().collect();
        let demand = (test_rng.below(2) == 0).then(|| LinkDemand {
            kind: kinds[test_rng.below(3) as usize],
            bits: [0, 40, 80][test_rng.below(3) as usize],
        });
        EligibleNodes {
            pool: Some(name.to_owned()),
            nodes: Some(Arc::new(nodes)),
            demand,
            demanded_by: Vec::new(),
        }
    };
    ["p", "q"].map(|name| (name.to_owned(), Ok(area(name)))).into()
}

/// Cables between some nodes, sometimes two, sometimes with addresses, sometimes reported by one end.
fn random_links(test_rng: &mut TestRng, view: &mut Snapshot) {
    let names: Vec<String> = view.nodes.keys().cloned().collect();
    let density = test_rng.below(6);
    for (index, near) in names.iter().enumerate() {
        for far in &names[index + 1..] {
            if test_rng.below(4) >= density {
                continue;
            }
            let addressed = test_rng.below(3) > 0;
            for wire in 0..1 + test_rng.below(3) / 2 {
                let flaw = test_rng.below(12);
                let address = |node: &str| addressed.then(|| format!("10.{near}{far}.{wire}.{node}"));
                for (node, peer) in [(near, far), (far, near)] {
                    let link = Link {
                        peer: peer.clone(),
                        interface: format!("en{peer}{wire}"),
                        kind: if flaw == 1 { LinkKind::Ethernet } else { LinkKind::Thunderbolt },
                        address: address(node),
                        peer_address: address(peer),
                        rdma_device: (flaw != 2 || node == near).then(|| format!("rdma_en{peer}{wire}")),
                        bits_per_second: [None, Some(50_000_000_000), Some(80_000_000_000)]
                            [test_rng.below(3) as usize],
                        ..Link::default()
                    };
                    if flaw != 3 || node == near {
                        view.nodes.get_mut(node).unwrap().links.push(link);
                    }
                }
            }
        }
    }
}

fn random_spec(test_rng: &mut TestRng, view: &Snapshot) -> ModelDeploymentSpec {
    let model = if test_rng.below(4) == 0 { "n" } else { "m" };
    let shape = &view.models[&("ns".to_owned(), model.to_owned())];
    let (layers, most) = (shape.layers, shape.max_stages());
    let cuts: Vec<u32> = shape.tensor_sizes().into_iter().filter(|&size| size > 1).collect();
    let mut mode = match test_rng.below(9) {
        0 => ShardingMode::Single,
        1 | 2 => ShardingMode::Pipeline,
        3 | 4 => ShardingMode::Tensor,
        5 | 6 => ShardingMode::Hybrid,
        _ => ShardingMode::Auto,
    };
    if cuts.is_empty() && matches!(mode, ShardingMode::Tensor | ShardingMode::Hybrid) {
        mode = ShardingMode::Auto;
    }
    let split_into = |test_rng: &mut TestRng, stages: u32| {
        let mut split = vec![1; stages as usize];
        (0..layers - stages).for_each(|_| split[test_rng.below(u64::from(stages)) as usize] += 1);
        split
    };
    let (mut ranks, mut layers_per_rank, mut tensor_size) = (None, None, None);
    match mode {
        ShardingMode::Tensor | ShardingMode::Hybrid => {
            let size = cuts[test_rng.below(cuts.len() as u64) as usize];
            let stages = if mode == ShardingMode::Tensor { 1 } else { 2.min(most) };
            if stages == 1 {
                mode = ShardingMode::Tensor;
            }
            tensor_size = (test_rng.below(2) == 0).then_some(size);
            ranks = (test_rng.below(2) == 0).then_some(size * stages);
            layers_per_rank = (stages > 1 && test_rng.below(3) == 0).then(|| split_into(test_rng, stages));
        }
        ShardingMode::Single | ShardingMode::Unknown => {}
        ShardingMode::Auto | ShardingMode::Pipeline => {
            ranks = (test_rng.below(2) == 0).then(|| 1 + test_rng.below(u64::from(most).min(5)) as u32);
            if let Some(ranks) = ranks.filter(|_| test_rng.below(3) == 0) {
                layers_per_rank = Some(split_into(test_rng, ranks));
            }
        }
    }
    // Which splits keep layers together is the planner's to find.
    let layers_per_rank = layers_per_rank.filter(|_| shape.kept_together().is_empty());
    let backend = match (mode, test_rng.below(8)) {
        (ShardingMode::Tensor | ShardingMode::Hybrid, 0) => BackendChoice::Jaccl,
        (ShardingMode::Tensor | ShardingMode::Hybrid, 1) => BackendChoice::JacclRing,
        (_, 2) => BackendChoice::Ring,
        _ => BackendChoice::Auto,
    };
    ModelDeploymentSpec {
        model_ref: LocalReference::new(model),
        sharding: Some(Sharding {
            tensor_size,
            backend,
            mode,
            ranks,
            layers_per_rank,
            min_bits_per_second: (test_rng.below(8) == 0).then(|| "50G".to_owned()),
            kv: KvCapacity {
                context_tokens: 16 + test_rng.below(20_000) as u32,
                max_sequences: 1 + test_rng.below(8) as u32,
                kv_tokens: (test_rng.below(4) == 0).then(|| 20_016 + test_rng.below(100_000)),
                headroom_percent: test_rng.below(30) as u32,
            },
        }),
        strategy_ref: None,
        pool_refs: match test_rng.below(8) {
            0 => vec![LocalReference::new("p")],
            1 => vec![LocalReference::new("q"), LocalReference::new("p")],
            _ => Vec::new(),
        },
        replicas: test_rng.below(4) as i32,
        adapters: ["y", "x"]
            .into_iter()
            .take(TestRng(test_rng.0 ^ 3).below(6).saturating_sub(3) as usize)
            .map(|model| Adapter { name: format!("of-{model}"), model_ref: LocalReference::new(model) })
            .collect(),
        draft_model_ref: (TestRng(test_rng.0 ^ 2).below(5) == 0).then(|| LocalReference::new("d")),
        engine: EngineOptions {
            kv_cache: match TestRng(test_rng.0 ^ 1).below(6) {
                0 => KvCacheType::Int8,
                1 => KvCacheType::Int4,
                _ => KvCacheType::AsComputed,
            },
            ..EngineOptions::default()
        }
        .into(),
        ..ModelDeploymentSpec::default()
    }
}

#[test]
#[allow(clippy::disallowed_methods, reason = "the environment may tell it to run longer")]
fn random_clusters_never_break_a_rule_and_always_settle() {
    let seeds = std::env::var("RUSSET_PLAN_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2000);
    let (mut created, mut refused, mut drained, mut moved, mut joined) = (0, 0, 0, 0, 0);
    // Created groups, by backend and by whether they have several stages of several ranks.
    let mut kinds: BTreeMap<(String, bool), usize> = BTreeMap::new();
    for seed in 0..seeds {
        let mut test_rng = TestRng(seed);
        let mut now = random_view(&mut test_rng);
        // Several deployments in turn, while their specs and the nodes change.
        for turn in 0..6 {
            let name = ["chat", "code"][test_rng.below(2) as usize];
            let spec = random_spec(&mut test_rng, &now);
            let desired =
                validate(&now, "ns", name, &spec).unwrap_or_else(|notes| panic!("seed {seed}: {notes:?}"));
            let mut settled = false;
            for step in 0..12 {
                let (placement, notes) = place(&now, &desired);
                assert_eq!(
                    check(&now, &desired, &placement),
                    vec![],
                    "seed {seed} turn {turn}: {placement:#?} {notes:#?}"
                );
                assert_eq!(
                    place(&now, &desired).0,
                    placement,
                    "seed {seed}: the same question, another answer"
                );
                created += placement.create.len();
                for new in &placement.create {
                    let (plan, size) = (&new.plan, new.plan.tensor_size);
                    let asked = desired.eligible_nodes.iter().all(|area| area.demand.is_some());
                    joined += usize::from(asked && plan.members.len() > 1);
                    let hybrid = size > 1 && plan.members.len() as u32 > size;
                    let tensor = if size > 1 { "cut" } else { "whole" };
                    *kinds.entry((format!("{:?} {tensor}", plan.backend), hybrid)).or_default() += 1;
                }
                refused += usize::from(!placement.waiting.is_empty());
                drained += placement.delete.iter().filter(|old| old.reason == RemovalReason::Drained).count();
                moved += placement.delete.iter().filter(|old| old.reason == RemovalReason::Replaced).count();
                now = placement.apply(&now, &desired);
                if step < 6 && test_rng.below(2) == 0 {
                    now = ready(now);
                } else if placement.is_empty() {
                    settled = true;
                    break;
                }
            }
            assert!(settled, "seed {seed} turn {turn}: no rest after 12 steps");
            if !now.nodes.is_empty() {
                let pick = test_rng.below(now.nodes.len() as u64) as usize;
                let other = random_view(&mut test_rng);
                now.pools = random_pools(&mut test_rng, &now);
                if let (Some(node), Some(new)) =
                    (now.nodes.values_mut().nth(pick), other.nodes.values().next())
                {
                    node.availability = new.availability;
                    node.unreleased = new.unreleased;
                }
            }
        }
    }
    // Coverage: the loop has taken all paths.
    assert!(
        created > 2000 && refused > 700 && drained > 30 && moved > 200 && joined > 20,
        "{created} {refused} {drained} {moved} {joined}"
    );
    for (kind, hybrid) in [
        ("None whole", false),
        ("Ring whole", false),
        ("Ring cut", false),
        ("Ring cut", true),
        ("Jaccl cut", false),
        ("Jaccl cut", true),
        ("JacclRing cut", false),
    ] {
        assert!(
            kinds.get(&(kind.to_owned(), hybrid)).is_some_and(|&count| count > if hybrid { 1 } else { 10 }),
            "{kind}: {kinds:?}"
        );
    }
    // For `cargo xtask proof plan`: after a violation this is not reached.
    println!(
        "{}",
        serde_json::json!({"what": format!("plans that break a rule, {seeds} clusters"), "ours": 0})
    );
}

#[test]
fn refused_models_fit_in_no_node_order_and_no_split() {
    let mut refused = 0;
    for seed in 0..400 {
        let mut test_rng = TestRng(seed * 7919);
        let mut view = random_view(&mut test_rng);
        view.nodes.retain(|_, node| node.availability == Availability::Open);
        view.disks = None;
        while view.nodes.len() > 3 {
            view.nodes.pop_first();
        }
        for node in view.nodes.values_mut() {
            (node.engine_build, node.links) = (None, Vec::new());
            node.engine_options = options();
            // Otherwise it may wait until fewer nodes are enough.
            node.unreleased = 0;
        }
        let spec =
            ModelDeploymentSpec { pool_refs: Vec::new(), replicas: 1, ..random_spec(&mut test_rng, &view) };
        let spec = ModelDeploymentSpec {
            sharding: Some(Sharding {
                kv: spec.sharding.clone().unwrap_or_default().kv,
                ..Sharding::default()
            }),
            ..spec
        };
        let desired = desired(&view, &spec);
        let fit = desired.memory_model();
        let (placement, notes) = checked(&view, &desired);
        let committed = view.committed_bytes(|_| false);
        let taken = |name: &String| committed.get(name.as_str()).copied().unwrap_or(0);
        let free: Vec<u64> =
            view.nodes.iter().map(|(name, node)| node.serving_limit.saturating_sub(taken(name))).collect();
        let possible = brute_force(&fit, &free, fit.layers(), true);
        assert_eq!(placement.create.len() == 1, possible, "seed {seed}: {notes}");
        refused += usize::from(!possible);
    }
    assert!(refused > 50, "{refused}");
}

/// Whether the first `end` layers fit on any of the nodes in any order, rank by rank from rank 0 on.
fn brute_force(fit: &MemoryModel<'_>, free: &[u64], end: u32, head: bool) -> bool {
    if end == 0 {
        return !head;
    }
    (0..free.len()).any(|pick| {
        let mut others = free.to_vec();
        let room = others.remove(pick);
        (0..end).filter(|start| fit.may_cut_before(*start)).any(|start| {
            fit.estimate(start..end, start == 0, head).total() <= room
                && brute_force(fit, &others, start, false)
        })
    })
}
