//! Spread of replicas: the failure domain of a new one, and which one is removed from a surplus.

use russet_crds::{Spread, names};

use super::*;
use crate::chips;

/// A chip and a zone for every node; empty means none.
type Machines<'a> = &'a [(&'a str, u64, &'a str, &'a str)];

fn zoned(machines: Machines<'_>, layers: u32) -> Snapshot {
    let sizes: Vec<(&str, u64)> = machines.iter().map(|(name, gib, ..)| (*name, *gib)).collect();
    let mut view = view(&sizes, layers);
    for (name, _, chip, zone) in machines {
        let node = view.nodes.get_mut(*name).unwrap();
        node.gpu = chips::find(chip, None, None).map(Into::into);
        node.labels = match *zone {
            "" => BTreeMap::new(),
            zone => [(names::LABEL_ZONE.to_owned(), zone.to_owned())].into(),
        };
    }
    view
}

#[test]
fn replica_is_placed_in_the_least_used_failure_domain() {
    const MAX: &str = "M4 Max";
    const ULTRA: &str = "M3 Ultra";
    const PRO: &str = "M4 Pro";
    type Story<'a> = (&'a str, Machines<'a>, ShardingMode, i32, &'a str, &'a str);
    let stories: [Story<'_>; 9] = [
        (
            "one in each zone",
            &[("a", 16, MAX, "x"), ("b", 16, MAX, "x"), ("c", 32, MAX, "y")],
            ShardingMode::Auto,
            2,
            "a4 | c4",
            "",
        ),
        (
            "nodes without the label are apart from all",
            &[("a", 16, MAX, ""), ("b", 16, MAX, ""), ("c", 32, MAX, "y")],
            ShardingMode::Auto,
            2,
            "a4 | b4",
            "",
        ),
        (
            "the third goes where one is, and says so",
            &[("a", 16, MAX, "x"), ("b", 16, MAX, "x"), ("c", 32, MAX, "y")],
            ShardingMode::Auto,
            3,
            "a4 | c4 | b4",
            "replica 2 shares topology.kubernetes.io/zone x with replica 0: nothing fits apart from them",
        ),
        (
            "three and one: the fourth evens nothing out and takes what there is",
            &[("a", 16, MAX, "x"), ("b", 16, MAX, "x"), ("c", 16, MAX, "y"), ("d", 16, MAX, "y")],
            ShardingMode::Auto,
            4,
            "a4 | c4 | b4 | d4",
            "replica 3 shares topology.kubernetes.io/zone y with replica 1",
        ),
        (
            "a machine that is nearly as fast is taken",
            &[("a", 16, ULTRA, "x"), ("b", 16, ULTRA, "x"), ("c", 16, "M1 Ultra", "y")],
            ShardingMode::Auto,
            2,
            "a4 | c4",
            "",
        ),
        (
            "a machine that is a third as fast is not",
            &[("a", 16, ULTRA, "x"), ("b", 16, ULTRA, "x"), ("c", 16, PRO, "y")],
            ShardingMode::Auto,
            2,
            "a4 | b4",
            "the best place apart from them is worth less (1 rank on c",
        ),
        (
            "two nodes are not taken for it where one will do",
            &[("a", 16, MAX, "x"), ("b", 16, MAX, "x"), ("c", 3, MAX, "y"), ("d", 3, MAX, "y")],
            ShardingMode::Auto,
            2,
            "a4 | b4",
            "replica 1 shares",
        ),
        (
            "a group over two nodes is in both their zones",
            &[
                ("a", 3, MAX, "x"),
                ("b", 3, MAX, "x"),
                ("c", 3, MAX, "x"),
                ("d", 3, MAX, "y"),
                ("e", 3, MAX, "y"),
            ],
            ShardingMode::Pipeline,
            2,
            "a2 b2 | d2 e2",
            "",
        ),
        (
            "and is beside others in each of them",
            &[("a", 3, MAX, "x"), ("b", 3, MAX, "y"), ("c", 3, MAX, "y"), ("d", 3, MAX, "z")],
            ShardingMode::Pipeline,
            2,
            "a2 b2 | c2 d2",
            "replica 1 shares topology.kubernetes.io/zone y with replica 0: nothing fits apart",
        ),
    ];
    for (story, machines, mode, replicas, shows, says) in stories {
        let view = zoned(machines, 4);
        let desired = desired(&view, &spec(mode, None, replicas));
        let (placement, notes) = checked(&view, &desired);
        assert_eq!(shown(&placement), shows, "{story}: {notes}");
        assert_eq!(notes.contains("shares topology"), !says.is_empty(), "{story}: {notes}");
        assert!(notes.contains(says), "{story}: {notes}");
        let reason = placement.report.unwrap().reason;
        assert!(reason.contains(says), "{story}: {reason}");
    }
}

#[test]
fn other_topology_keys_work_and_unused_ones_spread_nothing() {
    for (key, shows) in [
        (names::LABEL_ZONE, "a4 | c4"),
        ("example.com/ups", "a4 | b4"),
        ("kubernetes.io/hostname", "a4 | b4"),
    ] {
        let mut view = zoned(&[("a", 16, "", "x"), ("b", 16, "", "x"), ("c", 32, "", "y")], 4);
        for (name, ups) in [("a", "1"), ("b", "2"), ("c", "1")] {
            let labels = &mut view.nodes.get_mut(name).unwrap().labels;
            labels.insert("example.com/ups".to_owned(), ups.to_owned());
        }
        let mut spec = spec(ShardingMode::Auto, None, 2);
        spec.spread = Some(Spread { topology_key: key.to_owned() });
        let desired = desired(&view, &spec);
        let (placement, notes) = checked(&view, &desired);
        assert_eq!(shown(&placement), shows, "{key}: {notes}");
    }
}

#[test]
fn surplus_leaves_the_fullest_domain_and_others_keep_indices() {
    // The nodes of the replicas 0, 1, …; `!` marks one that is not ready.
    for (story, zones, left, goes) in [
        ("the fullest zone", ["x", "x", "y", "z"].as_slice(), 3, "1"),
        ("then the highest number", &["x", "y", "z"], 2, "2"),
        ("two from the fullest", &["x", "x", "x", "y"], 2, "2 1"),
        ("one that does not answer first", &["x", "x", "y!", "z"], 3, "2"),
        ("nodes without a zone are domains of their own", &["", "x", "", "x"], 3, "3"),
        ("all", &["x", "x", "y"], 0, "0 1 2"),
    ] {
        let names = ["a", "b", "c", "d"];
        let machines: Vec<(&str, u64, &str, &str)> =
            names.iter().zip(zones).map(|(name, zone)| (*name, 16, "", zone.trim_end_matches('!'))).collect();
        let mut view = zoned(&machines, 4);
        let all = desired(&view, &spec(ShardingMode::Auto, None, zones.len() as i32));
        let fit = all.memory_model();
        for (replica, zone) in zones.iter().enumerate() {
            // One by one, so that each is placed as the story has it.
            let alone = Snapshot {
                nodes: view
                    .nodes
                    .iter()
                    .filter(|(name, _)| *name == names[replica])
                    .map(|(name, node)| (name.clone(), node.clone()))
                    .collect(),
                ..view.clone()
            };
            let scored = &enumerate(&alone, &all, &fit, replica as i32, true, |_| false).unwrap().found[0];
            let plan = GroupPlan { hash: format!("{replica:08}"), ..scored.candidate.plan(&fit) };
            let mut group = all.new_group(replica as i32, plan);
            group.ready = !zone.ends_with('!');
            view.groups.insert(("ns".to_owned(), group.name()), group);
        }
        let fewer = desired(&view, &spec(ShardingMode::Auto, None, left));
        let (placement, notes) = checked(&view, &fewer);
        let indices = placement
            .delete
            .iter()
            .map(|old| view.groups[&("ns".to_owned(), old.name.clone())].replica.to_string());
        assert_eq!(indices.collect::<Vec<_>>().join(" "), goes, "{story}: {notes}");
        assert!(placement.create.is_empty() && placement.waiting.is_empty(), "{story}: {placement:?}");
        // Scaled up again: the removed indices come back, and nothing else changes.
        if left > 0 {
            let after = placement.apply(&view, &fewer);
            let (again, _) = checked(&after, &all);
            let mut back: Vec<i32> = again.create.iter().map(|new| new.replica).collect();
            back.sort_by_key(|replica| std::cmp::Reverse(*replica));
            let mut gone: Vec<i32> = goes.split(' ').map(|index| index.parse().unwrap()).collect();
            gone.sort_by_key(|replica| std::cmp::Reverse(*replica));
            assert_eq!(back, gone, "{story}");
            assert!(again.delete.is_empty(), "{story}");
        }
    }
}
