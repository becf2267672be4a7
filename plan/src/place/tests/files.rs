//! Files before memory: nothing stops for a model whose files are not where it is to run.

use std::collections::{BTreeMap, BTreeSet};

use russet_crds::{Rollout, RolloutStrategy};

use super::*;

/// One node with a replica that answers, and what its deployment asks for after an edit.
fn edited(gib: u64, strategy: RolloutStrategy) -> (Snapshot, ValidDeployment) {
    let view = view(&[("a", gib)], 4);
    let before = want(&view, &spec(ShardingMode::Auto, None, 1));
    let (placement, _) = checked(&view, &before);
    let view = ready(placement.apply(&view, &before));
    let mut spec = spec(ShardingMode::Auto, None, 1);
    spec.sharding.as_mut().unwrap().kv.context_tokens = 512;
    spec.rollout = Some(Rollout { strategy, ..Rollout::default() });
    let after = want(&view, &spec);
    (view, after)
}

fn held(nodes: &[&str]) -> Option<BTreeMap<Key, BTreeSet<String>>> {
    let nodes = nodes.iter().map(|node| (*node).to_owned()).collect();
    Some([(("ns".to_owned(), "m".to_owned()), nodes)].into())
}

#[test]
fn nothing_stops_before_the_files_are_there() {
    use RolloutStrategy::{DrainThenReplace, SurgeIfFits};
    for (story, gib, strategy, files, want) in [
        ("room for both", 16, SurgeIfFits, held(&[]), "creates 1, deletes 0, fetches "),
        (
            "the old one first all the same",
            16,
            DrainThenReplace,
            held(&["a"]),
            "creates 0, deletes 1, fetches ",
        ),
        ("and not without files", 16, DrainThenReplace, held(&[]), "creates 0, deletes 0, fetches a"),
        ("room for one, files there", 6, SurgeIfFits, held(&["a", "b"]), "creates 0, deletes 1, fetches "),
        ("room for one, files elsewhere", 6, SurgeIfFits, held(&["b"]), "creates 0, deletes 0, fetches a"),
        ("nobody says where files are", 6, SurgeIfFits, None, "creates 0, deletes 1, fetches "),
    ] {
        let (mut view, after) = edited(gib, strategy);
        view.files = files;
        let (placement, notes) = checked(&view, &after);
        let Placement { create, delete, prefetch, .. } = &placement;
        let got =
            format!("creates {}, deletes {}, fetches {}", create.len(), delete.len(), prefetch.join(" "));
        assert_eq!(got, want, "{story}: {notes}");
    }
}

#[test]
fn others_go_on_until_the_files_of_what_is_more_important_are_there() {
    let mut view = view(&[("a", 6)], 4);
    let tier = |priority, preempts| crate::tier::Tier { priority, preempts, ..crate::tier::Tier::default() };
    view.tiers = [("low".to_owned(), tier(1, false)), ("high".to_owned(), tier(2, true))].into();
    let of = |view: &Snapshot, name: &str, tier: &str| {
        let mut spec = spec(ShardingMode::Auto, None, 1);
        spec.tier_ref = Some(LocalReference::new(tier));
        validate(view, "ns", name, &spec).unwrap()
    };
    let low = of(&view, "low", "low");
    let (placement, _) = checked(&view, &low);
    view = ready(placement.apply(&view, &low));
    let high = of(&view, "high", "high");
    for (files, stopped, fetched) in [(held(&[]), 0, 1), (held(&["a"]), 1, 0), (None, 1, 0)] {
        view.files = files;
        let (Placement { preempt, prefetch, .. }, notes) = checked(&view, &high);
        assert_eq!((preempt.len(), prefetch.len()), (stopped, fetched), "{notes}");
    }
}
