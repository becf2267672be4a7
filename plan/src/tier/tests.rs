//! Clusters with tiers that a person can follow.

use russet_crds::{LocalReference, Sharding};
use russet_model::shape::ModelShape;

use super::*;
use crate::check::check;
use crate::placement::place_with;
use crate::pool::EligibleNodes;
use crate::snapshot::NodeInfo;

const GIB: u64 = 1 << 30;

fn node(gib: u64) -> NodeInfo {
    NodeInfo {
        serving_limit: gib * GIB,
        engine_build: Some("1".to_owned()),
        backends: vec!["ring".to_owned()],
        supports_tensor: true,
        ..NodeInfo::default()
    }
}

/// Nodes of this many GiB, models `m4`, `m10` and `m30` of that many, and a Dedicated tier `daily` with the
/// groups `chat`, `code` and `write` over all nodes.
fn tiered_cluster(nodes: &[(&str, u64)]) -> Snapshot {
    let mut view = Snapshot {
        nodes: nodes.iter().map(|(name, gib)| ((*name).to_owned(), node(*gib))).collect(),
        ..Snapshot::default()
    };
    for layers in [4, 10, 30] {
        let shape = ModelShape {
            architecture: "llama".to_owned(),
            layers,
            layer_bytes: vec![GIB; layers as usize],
            context_length: 1024,
            ..ModelShape::default()
        };
        view.models.insert(("ns".to_owned(), format!("m{layers}")), shape);
    }
    let groups = ["chat", "code", "write"].map(str::to_owned).to_vec();
    let tier = TierInfo { mode: TierMode::Dedicated, groups, ..TierInfo::default() };
    view.tiers.insert("daily".to_owned(), tier);
    view
}

fn spec(model: &str, group: Option<&str>, replicas: i32) -> ModelDeploymentSpec {
    let mut sharding = Sharding::default();
    (sharding.kv.context_tokens, sharding.kv.max_sequences, sharding.kv.headroom_percent) = (16, 1, 0);
    ModelDeploymentSpec {
        model_ref: LocalReference::new(model),
        sharding: Some(sharding),
        tier_ref: group.map(|_| LocalReference::new("daily")),
        workload_group: group.map(str::to_owned),
        replicas,
        ..ModelDeploymentSpec::default()
    }
}

/// Deployments by name, with group, model and replicas.
type DeploymentRows<'a> = [(&'a str, Option<&'a str>, &'a str, i32)];

/// Assigns nodes and places all deployments: the view afterwards and a line of text.
#[track_caller]
fn settle(view: &Snapshot, asked: &DeploymentRows<'_>) -> (Snapshot, String) {
    let specs: Vec<(&str, ModelDeploymentSpec)> =
        asked.iter().map(|(name, group, model, replicas)| (*name, spec(model, *group, *replicas))).collect();
    let mut members: BTreeMap<String, Vec<TierMember<'_>>> = BTreeMap::new();
    for (name, spec) in &specs {
        if let Some(group) = &spec.workload_group {
            members.entry(group.clone()).or_default().push(TierMember { namespace: "ns", name, spec });
        }
    }
    let mut view = view.clone();
    let grants = assign(&view, "daily", &members).unwrap();
    let owned = grants.iter().map(|(group, grant)| (group.clone(), grant.nodes.clone())).collect();
    view.tiers.get_mut("daily").unwrap().owned = owned;
    assert_eq!(assign(&view, "daily", &members).unwrap(), grants, "assigning again changes nothing");
    let deployments: Vec<ValidDeployment> =
        specs.iter().filter_map(|(name, spec)| validate(&view, "ns", name, spec).ok()).collect();
    let refs: Vec<&ValidDeployment> = deployments.iter().collect();
    for desired in &deployments {
        let (placement, notes) = place_with(&view, desired, &solve(&view, &refs));
        assert_eq!(check(&view, desired, &placement), vec![], "{placement:?} {notes:?}");
        view = placement.apply(&view, desired);
    }
    let said = grants.iter().map(|(group, grant)| {
        let nodes = grant.nodes.iter().cloned().collect::<Vec<_>>().join("+");
        let mark = if grant.shortage.is_some() { "!" } else { "" };
        format!("{group}={nodes}{mark}")
    });
    let groups = view
        .groups
        .values()
        .map(|group| format!("{}@{}", group.deployment, group.nodes().collect::<Vec<_>>().join("+")));
    let line = said.chain(groups).collect::<Vec<_>>().join(" ");
    (view, line)
}

#[test]
fn workload_groups_get_own_nodes_that_hold_all_of_them() {
    let five = [("a", 16), ("b", 16), ("c", 16), ("d", 48), ("e", 48)];
    for (story, nodes, asked, line) in [
        ("nobody there yet: one node each", &five[..], vec![], "chat=a code=b write=c"),
        (
            "two small ones share their group's node",
            &five[..],
            vec![("x", Some("chat"), "m4", 1), ("y", Some("chat"), "m10", 1)],
            "chat=a code=b write=c x@a y@a",
        ),
        (
            "the smallest node that holds all of a group",
            &five[..],
            vec![("x", Some("chat"), "m30", 1), ("y", Some("code"), "m4", 1)],
            "chat=d code=a write=b x@d y@a",
        ),
        (
            "replicas on nodes of their own",
            &five[..3],
            vec![("x", Some("chat"), "m10", 2)],
            "chat=a+b code=c write=! x@a x@b",
        ),
        (
            "a strange deployment goes elsewhere",
            &five[..],
            vec![("x", Some("chat"), "m4", 1), ("other", None, "m4", 1)],
            "chat=a code=b write=c other@d x@a",
        ),
        (
            "three machines for one group, and none for the others, who say so",
            &five[..3],
            vec![("x", Some("chat"), "m30", 1), ("y", Some("chat"), "m4", 1)],
            "chat=a+b+c code=! write=! x@a+b y@c",
        ),
    ] {
        let (_, got) = settle(&tiered_cluster(nodes), &asked);
        assert_eq!(got, line, "{story}");
    }
}

#[test]
fn workload_group_keeps_its_nodes_and_grows() {
    let view = tiered_cluster(&[("a", 16), ("b", 16), ("c", 16), ("d", 48)]);
    let (now, line) = settle(&view, &[("x", Some("chat"), "m10", 1)]);
    assert_eq!(line, "chat=a code=b write=c x@a");
    // A second deployment does not fit beside it: the group gets the free node too, and nothing moves.
    let asked = [("x", Some("chat"), "m10", 1), ("y", Some("chat"), "m10", 1)];
    let (now, line) = settle(&now, &asked);
    assert_eq!(line, "chat=a+d code=b write=c x@a y@d");
    // Its node drains: its replicas move to the group's other node, and the group loses the drained one.
    let mut draining = now.clone();
    draining.nodes.get_mut("a").unwrap().availability = Availability::Draining;
    let (_, line) = settle(&draining, &asked);
    assert!(line.starts_with("chat=d code=b write=c"), "{line}");
    // A lost node is replaced by a free one, if there is one.
    let mut more = now.clone();
    more.nodes.insert("e".to_owned(), node(16));
    more.nodes.get_mut("a").unwrap().availability = Availability::Lost;
    let (_, line) = settle(&more, &asked);
    assert!(line.starts_with("chat=d code=b write=c"), "both fit what is left: {line}");
}

#[test]
fn pools_bound_a_tier_and_wrong_names_are_said() {
    let mut view = tiered_cluster(&[("a", 16), ("b", 16), ("c", 64)]);
    let nodes = ["a", "b"].map(str::to_owned).into();
    let area = EligibleNodes {
        pool: Some("p".to_owned()),
        nodes: Some(std::sync::Arc::new(nodes)),
        ..EligibleNodes::default()
    };
    view.pools.insert("p".to_owned(), Ok(area));
    let tier = view.tiers.get_mut("daily").unwrap();
    tier.pools = vec![LocalReference::new("p")];
    tier.priority = 100;
    let (now, line) = settle(&view, &[("x", Some("chat"), "m30", 1), ("y", Some("code"), "m4", 1)]);
    assert_eq!(line, "chat=a+b code=! write=! x@a+b", "the larger c is in no pool of the tier");
    let members = [("chat".to_owned(), vec![])].into();
    let grants = assign(&now, "daily", &members).unwrap();
    assert!(
        grants["write"].shortage.as_ref().unwrap().contains("no node of the tier's pools is free"),
        "{grants:?}"
    );
    for (group, tier, words) in [
        (
            Some("chat"),
            "nightly",
            "Tier \"nightly\" does not exist; create it, or name one of the Tiers there are: daily",
        ),
        (Some("cook"), "daily", "Tier daily has no group \"cook\"; it has chat, code, write"),
        (None, "daily", "Tier daily is Dedicated; name one of its groups: chat, code, write"),
    ] {
        let spec = ModelDeploymentSpec {
            tier_ref: Some(LocalReference::new(tier)),
            workload_group: group.map(str::to_owned),
            ..spec("m4", None, 1)
        };
        let said = crate::note::join(&validate(&view, "ns", "x", &spec).unwrap_err());
        assert!(said.contains(words), "{said}");
    }
    let valid = validate(&now, "ns", "x", &spec("m4", Some("chat"), 1)).unwrap();
    assert_eq!((valid.priority, valid.pools()), (100, vec!["p".to_owned()]));
}

#[test]
fn tier_priority_decides_which_deployment_waits() {
    let mut view = tiered_cluster(&[("a", 12)]);
    let cluster = |priority| TierInfo { mode: TierMode::Cluster, priority, ..TierInfo::default() };
    view.tiers = [("low".to_owned(), cluster(0)), ("high".to_owned(), cluster(100))].into();
    let of = |name: &str, tier: &str| {
        let spec = ModelDeploymentSpec { tier_ref: Some(LocalReference::new(tier)), ..spec("m10", None, 1) };
        validate(&view, "ns", name, &spec).unwrap()
    };
    let (first, second) = (of("first", "low"), of("second", "high"));
    let joint_plan = solve(&view, &[&first, &second]);
    assert!(
        place_with(&view, &first, &joint_plan).0.is_empty(),
        "the lesser one waits, though it came first"
    );
    assert_eq!(place_with(&view, &second, &joint_plan).0.create.len(), 1);
}
