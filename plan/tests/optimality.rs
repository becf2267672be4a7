//! Several deployments planned together: stories a person can follow, and how good plans are on random small
//! clusters, beside everything there is to find. `RUSSET_PLAN_SEEDS` says how many clusters.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "a test may fail, and is told by the environment how long to run"
)]

#[path = "../src/seeded.rs"]
mod seeded;

use russet_crds::{Link, LinkKind, LocalReference, ModelDeploymentSpec, Sharding, ShardingMode};
use russet_plan::check::check;
use russet_plan::fit::Fit;
use russet_plan::place::{Scale, place_as, ways};
use russet_plan::shard::Candidate;
use russet_plan::snapshot::{Group, Node};
use russet_plan::solve::{Advice, solve};
use russet_plan::{Snapshot, ValidDeployment, chips, note, validate};
use russet_wire::shape::ModelShape;
use seeded::Seeded;

const GIB: u64 = 1 << 30;

fn node(chip: &str, gib: u64) -> Node {
    Node {
        serving_limit: gib * GIB,
        engine_build: Some("1".to_owned()),
        backends: vec!["ring".to_owned(), "jaccl".to_owned()],
        cuts_layers: true,
        machine: chips::find(chip, None, None).map(Into::into),
        ..Node::default()
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

fn want(view: &Snapshot, name: &str, model: &str, mode: ShardingMode, replicas: i32) -> ValidDeployment {
    let spec = ModelDeploymentSpec {
        model_ref: LocalReference::new(model),
        sharding: Some(Sharding { mode, ..Sharding::default() }),
        replicas,
        ..ModelDeploymentSpec::default()
    };
    validate(view, "ns", name, &spec).unwrap()
}

/// What each deployment got, in the order of their names.
fn shown(advice: &Advice) -> Vec<String> {
    let split = |split: &Option<Candidate>| split.as_ref().map_or("-".to_owned(), Candidate::show);
    advice
        .splits
        .iter()
        .map(|(((_, name), replica), it)| format!("{name} {replica}: {}", split(it)))
        .collect()
}

/// An Ultra with 64 GiB and a Max with 24, a model of 8 GiB and one of 60.
fn house() -> Snapshot {
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
fn the_small_one_leaves_the_large_machine_to_the_one_that_needs_it() {
    let view = house();
    let small = want(&view, "small", "small", ShardingMode::Auto, 1);
    let large = want(&view, "large", "large", ShardingMode::Auto, 1);
    assert_eq!(
        shown(&solve(&view, &[&small])),
        ["small 0: 1 rank on ultra"],
        "alone it takes the faster one"
    );
    let advice = solve(&view, &[&small, &large]);
    assert_eq!(shown(&advice), ["large 0: 1 rank on ultra", "small 0: 1 rank on max"]);
    let (placement, _) = place_as(&view, &small, &advice);
    assert_eq!(check(&view, &small, &placement), vec![]);
    let report = placement.report.unwrap();
    assert_eq!(report.decision, "1 rank on max");
    assert!(report.reason.ends_with("best together with what else waits for a place"), "{}", report.reason);
}

#[test]
fn one_that_fits_alone_waits_where_others_are_worth_more_and_says_for_whom() {
    let mut view = house();
    view.nodes.remove("max");
    let view = view;
    let one = |name: &str| want(&view, name, "small", ShardingMode::Auto, 1);
    let (a, b, c) = (one("a"), one("b"), one("c"));
    let large = want(&view, "large", "large", ShardingMode::Auto, 1);
    let advice = solve(&view, &[&large, &a, &b, &c]);
    assert_eq!(
        shown(&advice),
        ["a 0: 1 rank on ultra", "b 0: 1 rank on ultra", "c 0: 1 rank on ultra", "large 0: -"]
    );
    let (placement, notes) = place_as(&view, &large, &advice);
    assert!(placement.is_empty() && placement.waiting == [0]);
    let said = note::join(&notes);
    assert!(said.contains("serves ns/a, ns/b, ns/c better together"), "{said}");
    // Once they have it, there is nothing to wait for, and the numbers are told.
    let mut later = view.clone();
    for want in [&a, &b, &c] {
        later = place_as(&later, want, &advice).0.apply(&later, want);
    }
    let advice = solve(&later, &[&large, &a, &b, &c]);
    assert!(advice.splits.is_empty(), "{advice:?}");
    let said = note::join(&place_as(&later, &large, &advice).1);
    assert!(said.contains("needs") && said.contains("free of 64.0 GiB"), "{said}");
}

/// Up to five machines and three deployments, of which many compete.
fn random(seeded: &mut Seeded) -> (Snapshot, Vec<ValidDeployment>) {
    const CHIPS: [(&str, u64); 6] =
        [("M3 Ultra", 96), ("M3 Ultra", 64), ("M4 Max", 64), ("M4 Max", 36), ("M4 Pro", 24), ("EPYC", 48)];
    let mut view = Snapshot::default();
    let nodes = 2 + seeded.below(4);
    for index in 0..nodes {
        let (chip, gib) = CHIPS[seeded.below(6) as usize];
        view.nodes.insert(format!("n{index}"), node(chip, gib));
    }
    let names: Vec<String> = view.nodes.keys().cloned().collect();
    let density = seeded.below(5);
    for (index, a) in names.iter().enumerate() {
        for b in &names[index + 1..] {
            if seeded.below(4) < density {
                join(&mut view, a, b);
            }
        }
    }
    let mut wants = Vec::new();
    for index in 0..1 + seeded.below(3) {
        let layers = [4, 8, 16][seeded.below(3) as usize];
        let model = format!("m{index}");
        let gib = [4, 12, 30, 50, 80, 120][seeded.below(6) as usize];
        let size = gib * GIB / u64::from(layers);
        view.models.insert(("ns".to_owned(), model.clone()), shape(layers, size));
        let mode = match seeded.below(6) {
            0 => ShardingMode::Tensor,
            1 => ShardingMode::Pipeline,
            _ => ShardingMode::Auto,
        };
        wants.push(want(&view, &format!("d{index}"), &model, mode, 1));
    }
    (view, wants)
}

/// The ways of a deployment that nothing restricts, and what each is worth.
struct Asked<'a> {
    want: &'a ValidDeployment,
    fit: Fit<'a>,
    scale: Option<Scale>,
}

impl<'a> Asked<'a> {
    fn all(view: &Snapshot, wants: &'a [ValidDeployment]) -> Vec<Asked<'a>> {
        let asked = wants.iter().map(|want| {
            let fit = want.fit();
            let found = ways(view, want, &fit, 0, true, |_| false).ok();
            let scale = found.and_then(|found| Scale::of(found.found.iter()));
            Asked { want, fit, scale }
        });
        asked.collect()
    }

    fn ways(&self, view: &Snapshot) -> Vec<(f64, Candidate)> {
        let Some(scale) = self.scale else { return Vec::new() };
        let found = ways(view, self.want, &self.fit, 0, true, |_| false).map(|found| found.found);
        found.unwrap_or_default().into_iter().map(|way| (scale.net(&way), way.candidate)).collect()
    }

    fn with(&self, view: &Snapshot, candidate: &Candidate) -> Snapshot {
        let mut after = view.clone();
        let group = Group {
            deployment: self.want.name.clone(),
            model: self.want.model.clone(),
            plan: candidate.plan(&self.fit),
            ..Group::default()
        };
        after.groups.insert((self.want.namespace.clone(), format!("x-{}", self.want.name)), group);
        after
    }
}

/// The best sum there is, by trying everything in every order.
fn exhaustive(view: &Snapshot, asked: &[&Asked<'_>]) -> f64 {
    let mut best = 0.0;
    for (at, first) in asked.iter().enumerate() {
        let mut rest = asked.to_vec();
        rest.remove(at);
        for (worth, candidate) in first.ways(view) {
            best = f64::max(best, worth + exhaustive(&first.with(view, &candidate), &rest));
        }
    }
    best
}

/// What comes out when each takes the first way by the names of nodes, one after another.
fn first_fit(view: &Snapshot, asked: &[Asked<'_>]) -> f64 {
    let Some((first, rest)) = asked.split_first() else { return 0.0 };
    let nodes = |candidate: &Candidate| -> Vec<String> {
        candidate.ranks.iter().map(|rank| rank.node.clone()).collect()
    };
    let mut ways = first.ways(view);
    ways.sort_by_key(|(_, candidate)| (candidate.ranks.len(), nodes(candidate)));
    match ways.into_iter().next() {
        Some((worth, candidate)) => worth + first_fit(&first.with(view, &candidate), rest),
        None => first_fit(view, rest),
    }
}

#[test]
fn plans_are_within_two_percent_of_the_best_there_is() {
    let seeds = std::env::var("RUSSET_PLAN_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(60);
    let (mut worst, mut naive, mut hard) = (0.0_f64, 0, 0);
    for seed in 0..seeds {
        let mut seeded = Seeded(seed * 31 + 7);
        let (view, wants) = random(&mut seeded);
        let asked = Asked::all(&view, &wants);
        let best = exhaustive(&view, &asked.iter().collect::<Vec<_>>());
        let refs: Vec<&ValidDeployment> = wants.iter().collect();
        let advice = solve(&view, &refs);
        assert_eq!(solve(&view, &refs), advice, "seed {seed}: the same question, another answer");
        if best > 0.0 {
            worst = worst.max(1.0 - advice.worth / best);
            naive += usize::from(first_fit(&view, &asked) < 0.98 * best);
            hard += 1;
        }
        assert!(advice.worth >= 0.98 * best, "seed {seed}: {} of {best}: {:?}", advice.worth, shown(&advice));
        // What the operator makes of it, one deployment after another, breaks no rule and gets as far.
        let (mut now, mut placed) = (view.clone(), 0);
        // Who waits for others has another turn once they have what they get.
        for want in wants.iter().chain(&wants) {
            let advice = solve(&now, &refs);
            let (placement, notes) = place_as(&now, want, &advice);
            assert_eq!(check(&now, want, &placement), vec![], "seed {seed}: {placement:#?} {notes:?}");
            placed += placement.create.len();
            now = placement.apply(&now, want);
        }
        let advised = advice.splits.values().filter(|split| split.is_some()).count();
        assert_eq!(placed, advised, "seed {seed}: {:?}", shown(&advice));
        let again = solve(&now, &refs);
        for want in &wants {
            let (placement, _) = place_as(&now, want, &again);
            assert!(placement.is_empty(), "seed {seed}: planning again changes {placement:?}");
        }
    }
    // For `cargo xtask proof plan`.
    let share = 100.0 * naive as f64 / hard as f64;
    for (what, ours) in [
        ("the worst plan, below the best by exhaustive search", 100.0 * worst),
        ("plans of first fit that are more than 2 % below it", share),
    ] {
        println!("{}", serde_json::json!({"what": format!("{what}, {seeds} clusters"), "ours": ours}));
    }
    assert!(naive * 5 >= hard, "the seeds are too easy: first fit loses in {naive} of {hard}");
}
