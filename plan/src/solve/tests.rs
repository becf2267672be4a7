//! Plans for several deployments a person can follow.

use russet_crds::{LocalReference, ModelDeploymentSpec, Sharding, ShardingMode};
use russet_wire::shape::ModelShape;

use super::*;
use crate::check::check;
use crate::chips;
use crate::place::place_as;
use crate::snapshot::Node;
use crate::validate::validate;

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
    let said = crate::note::join(&notes);
    assert!(said.contains("serves ns/a, ns/b, ns/c better together"), "{said}");
    // Once they have it, there is nothing to wait for, and the numbers are told.
    let mut later = view.clone();
    for want in [&a, &b, &c] {
        later = place_as(&later, want, &advice).0.apply(&later, want);
    }
    let advice = solve(&later, &[&large, &a, &b, &c]);
    assert!(advice.splits.is_empty(), "{advice:?}");
    let said = crate::note::join(&place_as(&later, &large, &advice).1);
    assert!(said.contains("needs") && said.contains("free of 64.0 GiB"), "{said}");
}
