//! Adapters: memory and files on every node of a replica, and a plan of their own.

use russet_model::adapter::AdapterShape;

use super::*;

/// The view with the Models `x` and `y`, adapters of so many bytes.
pub(super) fn with_adapters(mut view: Snapshot, bytes: u64) -> Snapshot {
    for name in ["x", "y"] {
        let adapter = AdapterShape { layers: 1, rank: 8, bytes, widest: 64, ..AdapterShape::default() };
        let shape = ModelShape { head_bytes: bytes, adapter: Some(adapter), ..ModelShape::default() };
        view.models.insert(("ns".to_owned(), name.to_owned()), shape);
    }
    view
}

fn adapted(mode: ShardingMode, models: &[&str]) -> ModelDeploymentSpec {
    let adapter =
        |model: &&str| Adapter { name: format!("of-{model}"), model_ref: LocalReference::new(*model) };
    ModelDeploymentSpec { adapters: models.iter().map(adapter).collect(), ..spec(mode, None, 1) }
}

#[test]
fn every_rank_reserves_all_adapters_and_needs_their_files() {
    use ShardingMode::{Auto, Pipeline};
    for (nodes, mode, shows) in [
        (vec![("a", 5), ("b", 16)], Auto, "b4"),
        (vec![("a", 7), ("b", 16)], Auto, "a4"),
        (vec![("a", 5), ("b", 5)], Pipeline, "a2 b2"),
        (vec![("a", 3), ("b", 3)], Pipeline, ""),
    ] {
        let view = with_adapters(view(&nodes, 4), GIB);
        let desired = desired(&view, &adapted(mode, &["x", "y"]));
        let (placement, notes) = checked(&view, &desired);
        assert_eq!(shown(&placement), shows, "{nodes:?}: {notes}");
        let is_said = notes.contains(", of it 2.0 GiB for 2 adapters, on every rank)");
        assert_eq!(is_said, shows.is_empty(), "{nodes:?}: {notes}");
        for plan in placement.create.iter().map(|new| &new.plan) {
            for member in &plan.members {
                assert_eq!(member.weight_bytes, 2 * GIB + u64::from(member.layers) * GIB);
                for model in ["m", "x", "y"] {
                    assert!(plan.files("m").any(|file| file == (model, member.node_name.as_str())));
                }
            }
            assert_eq!(plan.files("m").count(), 3 * plan.members.len());
        }
    }
}

#[test]
fn adapters_change_the_plan_and_their_absence_does_not() {
    let view = with_adapters(view(&[("a", 32)], 4), GIB);
    let plain = spec(ShardingMode::Auto, None, 1);
    let (with, without) = (desired(&view, &adapted(ShardingMode::Auto, &["x"])), desired(&view, &plain));
    let now = ready(checked(&view, &with).0.apply(&view, &with));
    assert!(checked(&now, &with).0.is_empty());
    let (step, _) = checked(&now, &without);
    assert_eq!((shown(&step).as_str(), step.keep.len()), ("a4", 1), "the new one comes beside the old one");
    let json = serde_json::to_string(&step.create[0].plan).unwrap();
    assert!(!json.contains("adapter"), "{json}");
    assert_ne!(with.spec_digest, without.spec_digest);
    let [one, other] =
        [&["x", "y"], &["y", "x"]].map(|names| desired(&now, &adapted(ShardingMode::Auto, names)));
    assert_eq!(one, other, "their order in the spec means nothing");
    // One with another size is loaded again.
    let resized = with_adapters(now.clone(), GIB / 2);
    let again = desired(&resized, &adapted(ShardingMode::Auto, &["x"]));
    assert_eq!(shown(&checked(&resized, &again).0), "a4");
    for other in [&["y"][..], &["x", "y"]] {
        let other = desired(&now, &adapted(ShardingMode::Auto, other));
        assert_eq!(shown(&checked(&now, &other).0), "a4");
        assert_ne!(with.spec_digest, other.spec_digest);
    }
}

#[test]
fn nodes_without_adapter_support_are_skipped() {
    let mut view = with_adapters(view(&[("a", 16)], 4), GIB);
    view.nodes.get_mut("a").unwrap().engine_options = vec!["kvCache".to_owned(), "speculation".to_owned()];
    let (placement, notes) = checked(&view, &desired(&view, &adapted(ShardingMode::Auto, &["x"])));
    assert!(placement.create.is_empty() && notes.contains("has no adapters; update the node"), "{notes}");
    let (placement, notes) = checked(&view, &desired(&view, &spec(ShardingMode::Auto, None, 1)));
    assert_eq!(shown(&placement), "a4", "{notes}");
}

#[test]
fn nothing_stops_before_adapter_files_reach_every_node() {
    let view = with_adapters(view(&[("a", 4), ("b", 4)], 4), GIB);
    let before = desired(&view, &spec(ShardingMode::Pipeline, None, 1));
    let (placement, _) = checked(&view, &before);
    assert_eq!(shown(&placement), "a2 b2");
    let view = ready(placement.apply(&view, &before));
    let after = desired(&view, &adapted(ShardingMode::Pipeline, &["x"]));
    for (files, expected) in [
        (vec![("m", "a"), ("m", "b"), ("x", "b")], (0, 1)),
        (vec![("m", "a"), ("m", "b")], (0, 2)),
        (vec![("m", "a"), ("m", "b"), ("x", "a"), ("x", "b")], (1, 0)),
    ] {
        let copies: Vec<_> = files.iter().map(|(model, node)| (*model, *node, GIB, GIB, false)).collect();
        let view = Snapshot { disks: Some(disks(&[], &copies).into()), ..view.clone() };
        let (Placement { delete, prefetch, .. }, notes) = checked(&view, &after);
        let of_x = prefetch.iter().filter(|file| format!("{file:?}").contains("\"x\"")).count();
        assert_eq!((delete.len(), of_x), expected, "{files:?}: {notes}");
    }
}

#[test]
fn a_node_holds_the_files_of_all_adapters_or_takes_no_rank() {
    for (names, limit, shows) in [
        (&["x"][..], 5, "a4"),
        (&["x"], 4, "b4"),
        (&["x", "y"], 6, "a4"),
        // Each of them has room beside the model, and both have none.
        (&["x", "y"], 5, "b4"),
    ] {
        let mut view = with_adapters(view(&[("a", 16), ("b", 32)], 4), GIB);
        let known = ["m", "x", "y"].map(|model| {
            let bytes = if model == "m" { 4 * GIB } else { GIB };
            (model, "gone", bytes, bytes, false)
        });
        let limits = [("a", Some(limit * GIB)), ("b", Some(99 * GIB))];
        view.disks = Some(disks(&limits, &known).into());
        let (placement, notes) = checked(&view, &desired(&view, &adapted(ShardingMode::Auto, names)));
        assert_eq!(shown(&placement), shows, "{names:?} {limit}: {notes}");
    }
}

#[test]
fn a_plan_with_other_adapters_is_a_violation() {
    let view = with_adapters(view(&[("a", 16)], 4), GIB);
    let desired = desired(&view, &adapted(ShardingMode::Auto, &["x"]));
    let (mut placement, _) = checked(&view, &desired);
    placement.create[0].plan.adapters.clear();
    let wrong = check(&view, &desired, &placement);
    assert!(
        wrong.iter().any(|wrong| wrong.to_string().contains("adapters [] were not asked for")),
        "{wrong:?}"
    );
}
