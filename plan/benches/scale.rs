//! Planning time by cluster size: `cargo xtask bench plan`. Prints one JSON line per figure.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a bench may fail, and measures time")]

use std::sync::Arc;
use std::time::Instant;

use jiff::Timestamp;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{
    CopyMode, InferenceNode, InferenceNodeSpec, InferenceNodeStatus, Link, LinkKind, LocalReference,
    ModelCopy, ModelCopySpec, ModelCopyStatus, ModelDeploymentSpec, NamespacedReference, NodeDisk,
    NodeMemory, Shard, ShardGroup, ShardGroupSpec, ShardSpec, names,
};
use russet_model::shape::ModelShape;
use russet_plan::joint_placement::{JointPlan, solve};
use russet_plan::placement::place_with;
use russet_plan::snapshot::NodeInfo;
use russet_plan::{ClusterObjects, Snapshot, ValidDeployment, chips, validate};

const GIB: u64 = 1 << 30;
/// Repetitions of fast measurements; the median counts.
const TIMES: usize = 5;

/// Nodes in cabled racks of four, half of them with 512 GiB, and half as many deployments, which use the
/// models in turn.
fn cluster(nodes: usize) -> (Snapshot, Vec<ValidDeployment>) {
    let mut view = Snapshot::default();
    let name = |index: usize| format!("node-{index:05}");
    for index in 0..nodes {
        let (chip, gib) = if index % 8 < 4 { ("M3 Ultra", 480) } else { ("M4 Max", 96) };
        let rack = index / 4 * 4..(index / 4 * 4 + 4).min(nodes);
        let links = rack.filter(|peer| *peer != index).map(|peer| Link {
            peer: name(peer),
            interface: format!("en{}", peer % 4 + 3),
            kind: LinkKind::Thunderbolt,
            rdma_device: Some(format!("rdma_en{}", peer % 4 + 3)),
            bits_per_second: Some(80_000_000_000),
            ..Link::default()
        });
        let node = NodeInfo {
            serving_limit: gib * GIB,
            engine_build: Some("1".to_owned()),
            backends: vec!["ring".to_owned(), "jaccl".to_owned()],
            supports_tensor: true,
            links: links.collect(),
            gpu: chips::find(chip, None, None).map(Into::into),
            ..NodeInfo::default()
        };
        view.nodes.insert(name(index), node);
    }
    for (index, (layers, gib)) in [(32, 5), (80, 40), (64, 20), (126, 220)].into_iter().enumerate() {
        let shape = ModelShape {
            architecture: "llama".to_owned(),
            layers,
            layer_bytes: vec![gib * GIB / u64::from(layers); layers as usize],
            hidden_size: 8192,
            attention_heads: 64,
            key_value_heads: 8,
            head_dim: 128,
            intermediate_size: 28672,
            vocabulary: 128_256,
            parameters: gib * GIB * 2,
            kv_bytes_per_token_per_layer: 4096,
            context_length: 131_072,
            ..ModelShape::default()
        };
        view.models.insert(("ns".to_owned(), format!("m{index}")), shape);
    }
    let desired = |index: usize| {
        let spec = ModelDeploymentSpec {
            model_ref: LocalReference::new(format!("m{}", index % 4)),
            replicas: 1,
            ..ModelDeploymentSpec::default()
        };
        validate(&view, "ns", &format!("d{index:05}"), &spec).unwrap()
    };
    let deployments = (0..(nodes / 2).max(1)).map(desired).collect();
    (view, deployments)
}

/// The same cluster as objects in the operator's caches: nodes, groups, and a Shard for every rank.
fn objects(view: &Snapshot) -> ClusterObjects {
    let node = |(name, node): (&String, &NodeInfo)| {
        let memory = NodeMemory {
            total_bytes: node.serving_limit,
            serving_limit_bytes: node.serving_limit,
            ..NodeMemory::default()
        };
        let mut status = InferenceNodeStatus {
            chip: Some("Apple M3 Ultra".to_owned()),
            memory: Some(memory),
            engine_build: node.engine_build.clone(),
            backends: node.backends.clone(),
            sharding_modes: vec!["Tensor".to_owned()],
            links: node.links.clone(),
            ..InferenceNodeStatus::default()
        };
        for kind in [Type::Reachable, Type::Ready] {
            let now = Timestamp::UNIX_EPOCH;
            conditions::set(&mut status.conditions, kind, true, Reason::Settled, "", None, now);
        }
        let mut node = InferenceNode::new(name, InferenceNodeSpec::default());
        node.status = Some(status);
        Arc::new(node)
    };
    let mut cluster =
        ClusterObjects { nodes: view.nodes.iter().map(node).collect(), ..ClusterObjects::default() };
    for ((namespace, name), group) in &view.groups {
        let spec = ShardGroupSpec {
            deployment_ref: LocalReference::new(&group.deployment),
            model_ref: LocalReference::new(&group.model),
            plan: group.plan.clone(),
            ..ShardGroupSpec::default()
        };
        let mut object = ShardGroup::new(name, spec);
        object.metadata.namespace = Some(namespace.clone());
        object.metadata.uid = Some(name.clone());
        cluster.groups.push(Arc::new(object));
        for member in &group.plan.members {
            let spec = ShardSpec {
                group_uid: name.clone(),
                node_name: member.node_name.clone(),
                weight_bytes: member.weight_bytes,
                ..ShardSpec::default()
            };
            cluster.shards.push(Arc::new(Shard::new(&format!("{name}-{}", member.rank), spec)));
        }
    }
    cluster
}

/// Ten copies on every node, which fill the disks: of one model that is planned and of nine others.
fn stock(mut cluster: ClusterObjects) -> ClusterObjects {
    let copy = |model: &str, node: &str| {
        let spec = ModelCopySpec {
            model_ref: NamespacedReference { namespace: "ns".to_owned(), name: model.to_owned() },
            node_name: node.to_owned(),
            want: CopyMode::Files,
            ..ModelCopySpec::default()
        };
        let mut status =
            ModelCopyStatus { bytes_done: 50 * GIB, bytes_total: 50 * GIB, ..ModelCopyStatus::default() };
        let now = Timestamp::UNIX_EPOCH;
        for kind in [Type::Resolved, Type::Downloaded, Type::Verified, Type::Ready] {
            conditions::set(&mut status.conditions, kind, true, Reason::Settled, "", None, now);
        }
        let mut copy = ModelCopy::new(&names::model_copy("ns", model, node), spec);
        copy.status = Some(status);
        Arc::new(copy)
    };
    let mut copies = Vec::new();
    for node in &mut cluster.nodes {
        let node = Arc::make_mut(node);
        let name = node.metadata.name.clone().unwrap();
        copies.push(copy("m0", &name));
        copies.extend((0..9).map(|other| copy(&format!("x{other}"), &name)));
        let disk = NodeDisk { models_limit_bytes: Some(500 * GIB), ..NodeDisk::default() };
        node.status.as_mut().unwrap().disk = Some(disk);
        node.metadata.labels = Some([(names::LABEL_ZONE.to_owned(), "cellar".to_owned())].into());
    }
    ClusterObjects { copies: Some(copies), ..cluster }
}

/// The median time of several runs, in milliseconds.
fn timed(times: usize, mut what: impl FnMut()) -> f64 {
    let mut took: Vec<f64> = (0..times)
        .map(|_| {
            let started = Instant::now();
            what();
            started.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    took.sort_by(f64::total_cmp);
    took[took.len() / 2]
}

fn main() {
    for nodes in [10, 100, 1000, 5000] {
        let (view, all_desired) = cluster(nodes);
        let refs: Vec<&ValidDeployment> = all_desired.iter().collect();
        let tell = |what: &str, took: f64| {
            println!(
                "{}",
                serde_json::json!({"what": format!("{what}, {nodes} nodes"), "nodes": nodes, "ours": took})
            );
        };
        let mut joint_plan = JointPlan::default();
        let mut full = view.clone();
        if nodes <= 1000 {
            tell("all deployments of an empty cluster placed", timed(1, || joint_plan = solve(&view, &refs)));
        }
        for desired in &all_desired {
            let (placement, _) = place_with(&full, desired, &joint_plan);
            full = placement.apply(&full, desired);
        }
        assert_eq!(full.groups.len(), all_desired.len(), "{nodes} nodes: not all have a place");
        tell(
            "everything that runs planned again",
            timed(TIMES, || {
                for desired in &all_desired {
                    assert!(place_with(&full, desired, &JointPlan::default()).0.is_empty());
                }
            }),
        );
        let objects = objects(&full);
        tell(
            "a view taken of the objects",
            timed(TIMES, || {
                assert_eq!(objects.snapshot(Timestamp::UNIX_EPOCH).groups.len(), all_desired.len())
            }),
        );
        let stocked = stock(objects);
        tell(
            "a view taken of the objects, ten copies a node",
            timed(TIMES, || assert!(stocked.snapshot(Timestamp::UNIX_EPOCH).disks.is_some())),
        );
        let mut fewer = full.clone();
        let last = all_desired.last().unwrap();
        fewer.groups.retain(|_, group| group.deployment != last.name);
        // A new view has no cached state.
        let taken = || fewer.nodes.iter().map(|(name, node)| (name.clone(), node.clone())).collect();
        let one_more = |what: &str, like: &Snapshot| {
            let mut views: Vec<Snapshot> =
                (0..TIMES).map(|_| Snapshot { nodes: taken(), ..like.clone() }).collect();
            tell(
                what,
                timed(TIMES, || {
                    let view = views.pop().unwrap();
                    let joint_plan = solve(&view, &refs);
                    assert_eq!(place_with(&view, last, &joint_plan).0.create.len(), 1);
                }),
            );
        };
        one_more("one more deployment placed", &fewer);
        let mut stored = Snapshot { disks: stocked.snapshot(Timestamp::UNIX_EPOCH).disks, ..fewer.clone() };
        stored.groups.values_mut().for_each(|group| group.ready = true);
        one_more("one more deployment placed where every disk is full", &stored);
    }
}
