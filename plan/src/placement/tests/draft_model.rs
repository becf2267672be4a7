//! Draft models: memory on the node of rank 0, and a plan of its own.

use super::*;

fn drafted(mode: ShardingMode) -> ModelDeploymentSpec {
    ModelDeploymentSpec { draft_model_ref: Some(LocalReference::new("d")), ..spec(mode, None, 1) }
}

#[test]
fn draft_model_is_reserved_on_rank_0_and_named_in_refusals() {
    use ShardingMode::{Auto, Pipeline, Tensor};
    for (nodes, mode, shows) in [
        (vec![("a", 6), ("b", 16)], Auto, "b4"),
        (vec![("a", 7), ("b", 16)], Auto, "a4"),
        (vec![("a", 4), ("b", 5)], Pipeline, "b2 a2"), // the larger one leads
        (vec![("a", 2), ("b", 7)], Pipeline, "b3 a1"),
        (vec![("a", 3), ("b", 3)], Pipeline, ""),
        (vec![("a", 3), ("b", 5)], Tensor, "b4 a4"),
        (vec![("a", 4), ("b", 4)], Tensor, ""),
    ] {
        let mut view = with_draft(view(&nodes, 4), 2 * GIB);
        for shape in view.models.values_mut() {
            (shape.attention_heads, shape.key_value_heads, shape.head_dim) = (8, 2, 64);
            shape.intermediate_size = 64;
        }
        let desired = desired(&view, &drafted(mode));
        let (placement, notes) = checked(&view, &desired);
        assert_eq!(shown(&placement), shows, "{nodes:?}: {notes}");
        let said = notes.contains(", of it 2.") && notes.contains("for the draft model d, beside rank 0)");
        assert_eq!(said, shows.is_empty(), "{nodes:?}: {notes}");
        for plan in placement.create.iter().map(|new| &new.plan) {
            assert_eq!(plan.draft_model_ref, Some(LocalReference::new("d")));
            let first = &plan.members[0];
            assert_eq!(plan.files("m").last(), Some(("d", first.node_name.as_str())));
            // A KiB for every token of KV-cache capacity.
            let kv: u64 = plan.members.iter().map(|member| member.kv_bytes).sum();
            assert_eq!(kv, 1 << 20, "the cache of the draft model alone");
            assert!(first.weight_bytes >= 2 * GIB + 4 * GIB / plan.members.len() as u64 / 2);
        }
    }
}

#[test]
fn draft_model_changes_the_plan_and_its_absence_does_not() {
    let view = with_draft(view(&[("a", 16)], 4), GIB);
    let plain = spec(ShardingMode::Auto, None, 1);
    let (with, without) = (desired(&view, &drafted(ShardingMode::Auto)), desired(&view, &plain));
    let now = ready(checked(&view, &with).0.apply(&view, &with));
    assert!(checked(&now, &with).0.is_empty());
    let (step, _) = checked(&now, &without);
    assert_eq!((shown(&step).as_str(), step.keep.len()), ("a4", 1), "the new one comes beside the old one");
    let json = serde_json::to_string(&step.create[0].plan).unwrap();
    assert!(!json.contains("draft"), "{json}");
    assert_ne!(with.spec_digest, without.spec_digest);
    // Another one of the same sizes.
    let mut twins = now.clone();
    let shape = twins.models[&("ns".to_owned(), "d".to_owned())].clone();
    twins.models.insert(("ns".to_owned(), "e".to_owned()), shape);
    let named = drafted(ShardingMode::Auto);
    let named = ModelDeploymentSpec { draft_model_ref: Some(LocalReference::new("e")), ..named };
    assert_eq!(shown(&checked(&twins, &desired(&twins, &named)).0), "a4");
    // A draft model with another size is loaded again.
    let other = with_draft(now.clone(), GIB / 2);
    let again = desired(&other, &drafted(ShardingMode::Auto));
    assert_eq!(shown(&checked(&other, &again).0), "a4");
}

#[test]
fn nodes_without_draft_model_support_are_skipped() {
    let mut view = with_draft(view(&[("a", 16)], 4), GIB);
    view.nodes.get_mut("a").unwrap().engine_options = vec!["kvCache".to_owned(), "speculation".to_owned()];
    let (placement, notes) = checked(&view, &desired(&view, &drafted(ShardingMode::Auto)));
    assert!(placement.create.is_empty() && notes.contains("has no draft models; update the node"), "{notes}");
    let (placement, notes) = checked(&view, &desired(&view, &spec(ShardingMode::Auto, None, 1)));
    assert_eq!(shown(&placement), "a4", "{notes}");
}
