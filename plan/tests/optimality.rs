//! Joint placement of several deployments: stories that a person can follow, and the quality of plans on
//! small random clusters against the optimum by exhaustive search. `RUSSET_PLAN_SEEDS` is the number of
//! clusters.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "a test may fail, and reads from the environment how long to run"
)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

#[path = "../src/test_rng.rs"]
mod test_rng;

use russet_crds::{Link, LinkKind, LocalReference, ModelDeploymentSpec, Sharding, ShardingMode};
use russet_model::shape::ModelShape;
use russet_plan::check::check;
use russet_plan::joint_placement::{JointPlan, solve};
use russet_plan::memory_model::MemoryModel;
use russet_plan::placement::{ScoreScale, enumerate, place_with};
use russet_plan::shard::SplitCandidate;
use russet_plan::snapshot::{GroupInfo, NodeInfo};
use russet_plan::{Snapshot, ValidDeployment, chips, note, validate};
use test_rng::TestRng;

const GIB: u64 = 1 << 30;

fn node(chip: &str, gib: u64) -> NodeInfo {
    NodeInfo {
        serving_limit: gib * GIB,
        engine_build: Some("1".to_owned()),
        backends: vec!["ring".to_owned(), "jaccl".to_owned()],
        supports_tensor: true,
        gpu: chips::find(chip, None, None).map(Into::into),
        ..NodeInfo::default()
    }
}

fn shape(layers: u32, layer: u64) -> ModelShape {
    ModelShape {
        architecture: "llama".to_owned(),
        layers,
        layer_bytes: vec![layer; layers as usize],
        hidden_size: 4096,
        attention_heads: 32,
        key_value_heads: 8,
        head_dim: 128,
        intermediate_size: 14336,
        parameters: u64::from(layers) * layer * 2,
        context_length: 2048,
        ..ModelShape::default()
    }
}

fn join(view: &mut Snapshot, a: &str, b: &str) {
    for (node, peer) in [(a, b), (b, a)] {
        let link = Link {
            peer: peer.to_owned(),
            interface: format!("en-{peer}"),
            kind: LinkKind::Thunderbolt,
            rdma_device: Some(format!("rdma_{peer}")),
            ..Link::default()
        };
        view.nodes.get_mut(node).unwrap().links.push(link);
    }
}

fn desired(view: &Snapshot, name: &str, model: &str, mode: ShardingMode, replicas: i32) -> ValidDeployment {
    let spec = ModelDeploymentSpec {
        model_ref: LocalReference::new(model),
        sharding: Some(Sharding { mode, ..Sharding::default() }),
        replicas,
        ..ModelDeploymentSpec::default()
    };
    validate(view, "ns", name, &spec).unwrap()
}

/// The nodes of each deployment, in the order of their names.
fn shown(joint_plan: &JointPlan) -> Vec<String> {
    let split = |split: &Option<SplitCandidate>| split.as_ref().map_or("-".to_owned(), SplitCandidate::show);
    joint_plan
        .splits
        .iter()
        .map(|(((_, name), replica), it)| format!("{name} {replica}: {}", split(it)))
        .collect()
}

/// An Ultra with 64 GiB and a Max with 24, a model of 8 GiB and one of 60.
fn two_macs() -> Snapshot {
    let mut view = Snapshot {
        nodes: [("max", node("M4 Max", 24)), ("ultra", node("M3 Ultra", 64))]
            .map(|(name, node)| (name.to_owned(), node))
            .into_iter()
            .collect(),
        ..Snapshot::default()
    };
    for (name, shape) in [("small", shape(8, GIB)), ("large", shape(60, GIB))] {
        view.models.insert(("ns".to_owned(), name.to_owned()), shape);
    }
    view
}

#[test]
fn small_model_leaves_the_large_node_to_the_one_needing_it() {
    let view = two_macs();
    let small = desired(&view, "small", "small", ShardingMode::Auto, 1);
    let large = desired(&view, "large", "large", ShardingMode::Auto, 1);
    assert_eq!(
        shown(&solve(&view, &[&small])),
        ["small 0: 1 rank on ultra"],
        "alone it takes the faster one"
    );
    let joint_plan = solve(&view, &[&small, &large]);
    assert_eq!(shown(&joint_plan), ["large 0: 1 rank on ultra", "small 0: 1 rank on max"]);
    let (placement, _) = place_with(&view, &small, &joint_plan);
    assert_eq!(check(&view, &small, &placement), vec![]);
    let report = placement.report.unwrap();
    assert_eq!(report.decision, "1 rank on max");
    assert!(report.reason.ends_with("best together with the other pending replicas"), "{}", report.reason);
}

#[test]
fn lone_fit_waits_where_others_score_higher_and_names_them() {
    let mut view = two_macs();
    view.nodes.remove("max");
    let view = view;
    let one = |name: &str| desired(&view, name, "small", ShardingMode::Auto, 1);
    let (a, b, c) = (one("a"), one("b"), one("c"));
    let large = desired(&view, "large", "large", ShardingMode::Auto, 1);
    let joint_plan = solve(&view, &[&large, &a, &b, &c]);
    assert_eq!(
        shown(&joint_plan),
        ["a 0: 1 rank on ultra", "b 0: 1 rank on ultra", "c 0: 1 rank on ultra", "large 0: -"]
    );
    let (placement, notes) = place_with(&view, &large, &joint_plan);
    assert!(placement.is_empty() && placement.waiting == [0]);
    let said = note::join(&notes);
    assert!(said.contains("serves ns/a, ns/b, ns/c better together"), "{said}");
    // Once they are placed, nothing is pending, and the numbers are reported.
    let mut later = view.clone();
    for desired in [&a, &b, &c] {
        later = place_with(&later, desired, &joint_plan).0.apply(&later, desired);
    }
    let joint_plan = solve(&later, &[&large, &a, &b, &c]);
    assert!(joint_plan.splits.is_empty(), "{joint_plan:?}");
    let said = note::join(&place_with(&later, &large, &joint_plan).1);
    assert!(said.contains("needs") && said.contains("free of 64.0 GiB"), "{said}");
}

/// Up to five machines and three deployments, many of them in competition.
fn random(test_rng: &mut TestRng) -> (Snapshot, Vec<ValidDeployment>) {
    const CHIPS: [(&str, u64); 6] =
        [("M3 Ultra", 96), ("M3 Ultra", 64), ("M4 Max", 64), ("M4 Max", 36), ("M4 Pro", 24), ("EPYC", 48)];
    let mut view = Snapshot::default();
    let nodes = 2 + test_rng.below(4);
    for index in 0..nodes {
        let (chip, gib) = CHIPS[test_rng.below(6) as usize];
        view.nodes.insert(format!("n{index}"), node(chip, gib));
    }
    let names: Vec<String> = view.nodes.keys().cloned().collect();
    let density = test_rng.below(5);
    for (index, a) in names.iter().enumerate() {
        for b in &names[index + 1..] {
            if test_rng.below(4) < density {
                join(&mut view, a, b);
            }
        }
    }
    let mut deployments = Vec::new();
    for index in 0..1 + test_rng.below(3) {
        let layers = [4, 8, 16][test_rng.below(3) as usize];
        let model = format!("m{index}");
        let gib = [4, 12, 30, 50, 80, 120][test_rng.below(6) as usize];
        let size = gib * GIB / u64::from(layers);
        view.models.insert(("ns".to_owned(), model.clone()), shape(layers, size));
        let mode = match test_rng.below(6) {
            0 => ShardingMode::Tensor,
            1 => ShardingMode::Pipeline,
            _ => ShardingMode::Auto,
        };
        deployments.push(desired(&view, &format!("d{index}"), &model, mode, 1));
    }
    (view, deployments)
}

/// The candidates of an unrestricted deployment, with their scores.
struct DeploymentCandidates<'a> {
    deployment: &'a ValidDeployment,
    memory_model: MemoryModel<'a>,
    scale: Option<ScoreScale>,
}

impl<'a> DeploymentCandidates<'a> {
    fn all(view: &Snapshot, deployments: &'a [ValidDeployment]) -> Vec<DeploymentCandidates<'a>> {
        let asked = deployments.iter().map(|desired| {
            let memory_model = desired.memory_model();
            let found = enumerate(view, desired, &memory_model, 0, true, |_| false).ok();
            let scale = found.and_then(|found| ScoreScale::from_candidates(found.found.iter()));
            DeploymentCandidates { deployment: desired, memory_model, scale }
        });
        asked.collect()
    }

    fn scored_candidates(&self, view: &Snapshot) -> Vec<(f64, SplitCandidate)> {
        let Some(scale) = self.scale else { return Vec::new() };
        let found =
            enumerate(view, self.deployment, &self.memory_model, 0, true, |_| false).map(|found| found.found);
        found
            .unwrap_or_default()
            .into_iter()
            .map(|scored| (scale.net_score(&scored), scored.candidate))
            .collect()
    }

    fn with(&self, view: &Snapshot, candidate: &SplitCandidate) -> Snapshot {
        let mut after = view.clone();
        let group = GroupInfo {
            deployment: self.deployment.name.clone(),
            model: self.deployment.model.clone(),
            plan: candidate.plan(&self.memory_model),
            ..GroupInfo::default()
        };
        after
            .groups
            .insert((self.deployment.namespace.clone(), format!("x-{}", self.deployment.name)), group);
        after
    }
}

/// Placed deployments, by name, and where each is.
type Placed = BTreeMap<String, String>;

/// The best sum, by exhaustive search in every order. What is placed determines the rest, in whatever order it was
/// placed: `known` has the best sums after it.
fn exhaustive(
    view: &Snapshot,
    asked: &[&DeploymentCandidates<'_>],
    placed: &Placed,
    known: &mut BTreeMap<Placed, f64>,
) -> f64 {
    if let Some(best) = known.get(placed) {
        return *best;
    }
    let mut best = 0.0;
    for (at, first) in asked.iter().enumerate() {
        let mut rest = asked.to_vec();
        rest.remove(at);
        for (worth, candidate) in first.scored_candidates(view) {
            let mut placed = placed.clone();
            placed.insert(first.deployment.name.clone(), format!("{candidate:?}"));
            let others = exhaustive(&first.with(view, &candidate), &rest, &placed, known);
            best = f64::max(best, worth + others);
        }
    }
    known.insert(placed.clone(), best);
    best
}

/// First fit: each deployment takes the first candidate by node names, one after another.
fn first_fit(view: &Snapshot, asked: &[DeploymentCandidates<'_>]) -> f64 {
    let Some((first, rest)) = asked.split_first() else { return 0.0 };
    let nodes = |candidate: &SplitCandidate| -> Vec<String> {
        candidate.ranks.iter().map(|rank| rank.node.clone()).collect()
    };
    let mut candidates = first.scored_candidates(view);
    candidates.sort_by_key(|(_, candidate)| (candidate.ranks.len(), nodes(candidate)));
    match candidates.into_iter().next() {
        Some((worth, candidate)) => worth + first_fit(&first.with(view, &candidate), rest),
        None => first_fit(view, rest),
    }
}

/// What one random cluster showed; `None` where nothing can be placed.
#[derive(Clone, Copy)]
struct Comparison {
    /// How far the plan is below the best one, as a share of it.
    below: f64,
    /// Whether first fit is more than 2 % below it.
    first_fit_loses: bool,
}

fn compare(seed: u64) -> Option<Comparison> {
    let mut test_rng = TestRng(seed * 31 + 7);
    let (view, deployments) = random(&mut test_rng);
    let asked = DeploymentCandidates::all(&view, &deployments);
    let best = exhaustive(&view, &asked.iter().collect::<Vec<_>>(), &Placed::new(), &mut BTreeMap::new());
    let refs: Vec<&ValidDeployment> = deployments.iter().collect();
    let joint_plan = solve(&view, &refs);
    assert_eq!(solve(&view, &refs), joint_plan, "seed {seed}: the same question, another answer");
    assert!(
        joint_plan.score >= 0.98 * best,
        "seed {seed}: {} of {best}: {:?}",
        joint_plan.score,
        shown(&joint_plan)
    );
    // The operator's steps, one deployment after another, violate no invariant and get as far.
    let (mut now, mut placed) = (view.clone(), 0);
    // Pending deployments are placed again once the others have their nodes.
    for desired in deployments.iter().chain(&deployments) {
        let joint_plan = solve(&now, &refs);
        let (placement, notes) = place_with(&now, desired, &joint_plan);
        assert_eq!(check(&now, desired, &placement), vec![], "seed {seed}: {placement:#?} {notes:?}");
        placed += placement.create.len();
        now = placement.apply(&now, desired);
    }
    let advised = joint_plan.splits.values().filter(|split| split.is_some()).count();
    assert_eq!(placed, advised, "seed {seed}: {:?}", shown(&joint_plan));
    let again = solve(&now, &refs);
    for desired in &deployments {
        let (placement, _) = place_with(&now, desired, &again);
        assert!(placement.is_empty(), "seed {seed}: planning again changes {placement:?}");
    }
    let first_fit_loses = first_fit(&view, &asked) < 0.98 * best;
    (best > 0.0).then_some(Comparison { below: 1.0 - joint_plan.score / best, first_fit_loses })
}

#[test]
fn plans_are_within_two_percent_of_the_best_there_is() {
    let seeds = std::env::var("RUSSET_PLAN_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(60);
    let next = AtomicU64::new(0);
    // Exhaustive search takes very different times: each thread takes the next seed.
    let worker = || -> Vec<Comparison> {
        let seeds =
            std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)).filter(|seed| *seed < seeds));
        seeds.filter_map(compare).collect()
    };
    let found: Vec<Comparison> = thread::scope(|scope| {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(worker)).collect();
        workers
            .into_iter()
            .flat_map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    let worst = found.iter().map(|one| one.below).fold(0.0, f64::max);
    let (naive, all) = (found.iter().filter(|one| one.first_fit_loses).count(), found.len());
    // For `cargo xtask proof plan`.
    let share = 100.0 * naive as f64 / all as f64;
    for (what, ours) in [
        ("the worst plan, below the best by exhaustive search", 100.0 * worst),
        ("plans of first fit that are more than 2 % below it", share),
    ] {
        println!("{}", serde_json::json!({"what": format!("{what}, {seeds} clusters"), "ours": ours}));
    }
    assert!(naive * 5 >= all, "the seeds are too easy: first fit loses in {naive} of {all}");
}
