//! Files before memory: nothing stops for a model whose files are not on its node yet, and no node is chosen
//! that cannot hold them.

use russet_crds::{Rollout, RolloutStrategy};

use super::*;

/// One node with a ready replica, and its deployment's spec after an edit.
fn edited(gib: u64, strategy: RolloutStrategy) -> (Snapshot, ValidDeployment) {
    let view = view(&[("a", gib)], 4);
    let before = desired(&view, &spec(ShardingMode::Auto, None, 1));
    let (placement, _) = checked(&view, &before);
    let view = ready(placement.apply(&view, &before));
    let mut spec = spec(ShardingMode::Auto, None, 1);
    spec.sharding.as_mut().unwrap().kv.context_tokens = 512;
    spec.rollout = Some(Rollout { strategy, ..Rollout::default() });
    let after = desired(&view, &spec);
    (view, after)
}

/// The files to fetch first: their nodes, and the model if it is not the deployment's own.
fn fetched(prefetch: &[(String, String)]) -> String {
    let one = |(model, node): &(String, String)| match model.as_str() {
        "m" => node.clone(),
        other => format!("{node} {other}"),
    };
    prefetch.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn held(nodes: &[&str]) -> Option<ArcCow<DiskState>> {
    let copies: Vec<_> = nodes.iter().map(|node| ("m", *node, 4 * GIB, 4 * GIB, false)).collect();
    Some(disks(&[], &copies).into())
}

#[test]
fn nothing_stops_before_the_files_are_there() {
    use RolloutStrategy::{DrainThenReplace, SurgeIfFits};
    for (story, gib, strategy, files, expected) in [
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
        view.disks = files;
        let (placement, notes) = checked(&view, &after);
        let Placement { create, delete, prefetch, .. } = &placement;
        let got =
            format!("creates {}, deletes {}, fetches {}", create.len(), delete.len(), fetched(prefetch));
        assert_eq!(got, expected, "{story}: {notes}");
    }
}

#[test]
fn nothing_stops_before_draft_files_reach_rank_0s_node() {
    let view = with_draft(view(&[("a", 4), ("b", 4)], 4), GIB);
    let before = desired(&view, &spec(ShardingMode::Pipeline, None, 1));
    let (placement, _) = checked(&view, &before);
    assert_eq!(shown(&placement), "a2 b2");
    let view = ready(placement.apply(&view, &before));
    let spec = ModelDeploymentSpec {
        draft_model_ref: Some(LocalReference::new("d")),
        ..spec(ShardingMode::Pipeline, None, 1)
    };
    let after = desired(&view, &spec);
    let there = |files: &[(&str, &str)]| {
        let copies: Vec<_> = files.iter().map(|(model, node)| (*model, *node, GIB, GIB, false)).collect();
        Snapshot { disks: Some(disks(&[], &copies).into()), ..view.clone() }
    };
    for (files, expected) in [
        (vec![("m", "a"), ("m", "b"), ("d", "b")], "deletes 0, fetches a d"),
        (vec![("m", "a")], "deletes 0, fetches b, a d"),
        (vec![("m", "a"), ("m", "b"), ("d", "a")], "deletes 1, fetches "),
    ] {
        let (Placement { delete, prefetch, .. }, notes) = checked(&there(&files), &after);
        let got = format!("deletes {}, fetches {}", delete.len(), fetched(&prefetch));
        assert_eq!(got, expected, "{files:?}: {notes}");
    }
}

#[test]
fn a_node_holds_the_files_of_both_models_or_takes_no_rank() {
    for (story, limit, copies, shows) in [
        ("room for both", 6, vec![], "a4"),
        ("room for one", 5, vec![], "b4"),
        ("one is there, and the other has no room beside it", 5, vec![("m", "a", 4, 4, false)], "b4"),
        ("also the other way round", 5, vec![("d", "a", 2, 2, false)], "b4"),
        ("both are there", 6, vec![("m", "a", 4, 4, false), ("d", "a", 2, 2, false)], "a4"),
        ("others go for them", 6, vec![("x", "a", 6, 6, false)], "b4"),
    ] {
        let mut view = with_draft(view(&[("a", 16), ("b", 32)], 4), 2 * GIB);
        // Every model is known.
        let gone = [("m", "gone", 4, 4, false), ("d", "gone", 2, 2, false)];
        let copies: Vec<StoredFiles<'_>> = copies.into_iter().chain(gone).collect();
        view.disks = stored(&[("a", Some(limit)), ("b", Some(99))], &copies);
        let spec = ModelDeploymentSpec {
            draft_model_ref: Some(LocalReference::new("d")),
            ..spec(ShardingMode::Auto, None, 1)
        };
        let (placement, notes) = checked(&view, &desired(&view, &spec));
        assert_eq!(shown(&placement), shows, "{story}: {notes}");
    }
}

#[test]
fn victims_run_until_the_preemptors_files_are_there() {
    let mut view = view(&[("a", 6)], 4);
    let tier =
        |priority, preempts| crate::tier::TierInfo { priority, preempts, ..crate::tier::TierInfo::default() };
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
        view.disks = files;
        let (Placement { preempt, prefetch, .. }, notes) = checked(&view, &high);
        assert_eq!((preempt.len(), prefetch.len()), (stopped, fetched), "{notes}");
    }
}

/// A copy: its model, node, GiB, GiB present, and whether it is never evicted.
type StoredFiles<'a> = (&'a str, &'a str, u64, u64, bool);

fn stored(limits: &[(&str, Option<u64>)], copies: &[StoredFiles<'_>]) -> Option<ArcCow<DiskState>> {
    let limits: Vec<_> = limits.iter().map(|(node, limit)| (*node, limit.map(|gib| gib * GIB))).collect();
    let copies = copies
        .iter()
        .map(|(model, node, bytes, done, protected)| (*model, *node, bytes * GIB, done * GIB, *protected));
    Some(disks(&limits, &copies.collect::<Vec<_>>()).into())
}

#[test]
fn local_files_and_disk_space_decide_between_nodes() {
    type Story<'a> = (&'a str, &'a [(&'a str, Option<u64>)], &'a [StoredFiles<'a>], &'a str, &'a str);
    // The model has 4 GiB; node a fits tighter than b.
    let stories: [Story<'_>; 10] = [
        ("nobody has measured anything", &[], &[], "a4", ""),
        ("room on both", &[("a", Some(9)), ("b", Some(9))], &[], "a4", ""),
        ("room on the other", &[("a", Some(3)), ("b", Some(9))], &[], "b4", ""),
        ("exactly enough", &[("a", Some(4)), ("b", Some(9))], &[], "a4", ""),
        ("there on the other", &[("a", Some(9)), ("b", Some(9))], &[("m", "b", 4, 4, false)], "b4", ""),
        ("half there on the other", &[("a", Some(9)), ("b", Some(9))], &[("m", "b", 4, 2, false)], "b4", ""),
        (
            "something would have to go for them",
            &[("a", Some(9)), ("b", Some(9))],
            &[("n", "a", 6, 6, false)],
            "b4",
            "",
        ),
        (
            "and goes where there is nothing else",
            &[("a", Some(9)), ("b", Some(1))],
            &[("n", "a", 6, 6, false)],
            "a4",
            "",
        ),
        (
            "what is pinned does not go",
            &[("a", Some(9)), ("b", Some(1))],
            &[("n", "a", 6, 6, true)],
            "",
            "the model's files do not come to node a: 4.0 GiB more are needed, 3.0 GiB are free beyond the reserve and 0 B could go, of 9.0 GiB",
        ),
        (
            "what is not measured has room",
            &[("a", Some(9)), ("b", None)],
            &[("n", "a", 6, 6, true), ("n", "b", 6, 6, true)],
            "b4",
            "",
        ),
    ];
    for (story, limits, copies, shows, says) in stories {
        let mut view = view(&[("a", 16), ("b", 32)], 4);
        view.disks = stored(limits, copies);
        let desired = desired(&view, &spec(ShardingMode::Auto, None, 1));
        let (placement, notes) = checked(&view, &desired);
        assert_eq!(shown(&placement), shows, "{story}: {notes}");
        assert!(notes.contains(says), "{story}: {notes}");
        let remedy = "lower spec.disk.reserve of these nodes";
        assert_eq!(notes.contains(remedy), shows.is_empty(), "{story}: {notes}");
    }
}

#[test]
fn the_reason_names_the_files_where_they_decide() {
    for (story, there, node, says) in [
        ("nowhere", None, "a4", "the tightest fit keeps larger nodes free"),
        ("on the tighter one", Some("a"), "a4", "the tightest fit keeps larger nodes free"),
        ("on the larger one", Some("b"), "b4", "the files decide: 1 rank on a would fit more tightly"),
    ] {
        let mut view = view(&[("a", 16), ("b", 32)], 4);
        let copies: Vec<_> = there.iter().map(|node| ("m", *node, 4, 4, false)).collect();
        view.disks = stored(&[("a", Some(9)), ("b", Some(9))], &copies);
        let desired = desired(&view, &spec(ShardingMode::Auto, None, 1));
        let (placement, notes) = checked(&view, &desired);
        assert_eq!(shown(&placement), node, "{story}: {notes}");
        let reason = &placement.report.as_ref().unwrap().reason;
        assert!(reason.contains(says), "{story}: {reason}");
        assert_eq!(reason.contains("tightest fit"), there != Some("b"), "{story}: {reason}");
    }
}

#[test]
fn disk_space_is_reserved_for_one_replica_only() {
    // Disk space for the files of one of two models on each node, and memory for both.
    let mut view = view(&[("a", 16), ("b", 16)], 4);
    let shape = view.models[&("ns".to_owned(), "m".to_owned())].clone();
    view.models.insert(("ns".to_owned(), "n".to_owned()), shape);
    let copies = [("m", "gone", 4, 4, false), ("n", "gone", 4, 4, false)];
    view.disks = stored(&[("a", Some(6)), ("b", Some(6))], &copies);
    let named = |view: &Snapshot, name: &str, model: &str| {
        let spec = ModelDeploymentSpec {
            model_ref: LocalReference::new(model),
            ..spec(ShardingMode::Auto, None, 1)
        };
        validate(view, "ns", name, &spec).unwrap()
    };
    let (one, two) = (named(&view, "one", "m"), named(&view, "two", "n"));
    let (first, _) = checked(&view, &one);
    assert_eq!(shown(&first), "a4");
    let view = first.apply(&view, &one);
    let (second, _) = checked(&view, &two);
    assert_eq!(shown(&second), "b4");
    let view = second.apply(&view, &two);
    let (more, notes) = checked(&view, &named(&view, "three", "n"));
    assert_eq!(shown(&more), "b4", "the files come there already: {notes}");
    let both = crate::joint_placement::solve(&Snapshot { groups: BTreeMap::new(), ..view }, &[&one, &two]);
    let nodes: Vec<String> =
        both.splits.values().flatten().map(|split| split.ranks[0].node.clone()).collect();
    assert_eq!(nodes, ["a", "b"], "also where both are placed together");
}
