//! Steps of a group of two ranks, one table row per situation.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use russet_crds::conditions;
use russet_crds::{GroupMember, GroupPlan, Rendezvous, ShardGroup, ShardGroupSpec, Transport};

use super::*;

/// A point in time.
pub fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + second).unwrap()
}

/// A group of two ranks on a and b, nothing created yet.
pub fn observed(epoch: i64) -> ObservedGroup {
    let member = |rank: u32, node: &str| GroupMember {
        rank,
        node_name: node.to_owned(),
        layers: 2,
        ..GroupMember::default()
    };
    let plan = GroupPlan { members: vec![member(0, "a"), member(1, "b")], ..GroupPlan::default() };
    let spec = ShardGroupSpec {
        deployment_ref: LocalReference::new("chat"),
        plan,
        epoch,
        ..ShardGroupSpec::default()
    };
    let mut group = ShardGroup::new("g", spec);
    group.metadata.uid = Some("uid".to_owned());
    ObservedGroup {
        group: Arc::new(group),
        shards: BTreeMap::new(),
        orphans: Vec::new(),
        missing_files: BTreeMap::new(),
        unreachable: BTreeSet::new(),
        lost: BTreeSet::new(),
        until_lost: None,
        epoch_starts: Vec::new(),
        peer_table: None,
        links: BTreeMap::new(),
        energy: None,
    }
}

fn peers(port: u32) -> Vec<Peer> {
    let peer = |rank: u32, node: &str| Peer {
        rank,
        node_name: node.to_owned(),
        rpc: format!("{node}:{port}"),
        ring: format!("{node}:{}", port + 1),
        tensor: format!("{node}:{}", port + 2),
    };
    vec![peer(0, "a"), peer(1, "b")]
}

/// Adds a Shard as the operator writes it, with a status in which these conditions are true.
fn with(observed: &mut ObservedGroup, rank: u32, epoch: i64, peers: &[Peer], seen: i64, hold: &[Type]) {
    let peer_table = PeerTable { peers: peers.to_vec(), transport: Transport::Tunnel };
    let spec = shard_spec(observed, rank, epoch, &peer_table);
    let node = spec.node_name.clone();
    let mut shard = Shard::new(&russet_crds::names::shard("g", rank), spec);
    let mut status = ShardStatus { observed_epoch: Some(seen), ..ShardStatus::default() };
    for kind in hold {
        conditions::set(&mut status.conditions, *kind, true, Reason::Serving, "", None, at(0));
    }
    if hold.contains(&Type::Claimed) {
        status.rendezvous = Some(Rendezvous {
            rpc: format!("{node}:100"),
            ring: format!("{node}:101"),
            tensor: format!("{node}:102"),
        });
    }
    shard.status = Some(status);
    observed.shards.insert(rank, Arc::new(shard));
}

fn edit(observed: &mut ObservedGroup, rank: u32, change: impl FnOnce(&mut Shard)) {
    change(Arc::make_mut(observed.shards.get_mut(&rank).unwrap()));
}

#[test]
fn a_group_that_does_not_join_says_which_peer_cannot_be_reached() {
    let mut seen = observed(1);
    for rank in [0, 1] {
        with(&mut seen, rank, 1, &peers(100), 1, LOADED);
    }
    edit(&mut seen, 0, |shard| {
        let status = shard.status.as_mut().unwrap();
        let words = "waiting for rank 1 on b at b:100: refused";
        conditions::set(&mut status.conditions, Type::Joined, false, Reason::Joining, words, None, at(0));
    });
    let status = decide(&seen, at(1)).status;
    let ready = get(&status.conditions, Type::Ready).unwrap();
    let expected = "not joined yet: rank 0 on a (waiting for rank 1 on b at b:100: refused); rank 1 on b";
    assert_eq!((ready.reason.as_str(), ready.message.as_str()), ("Joining", expected));
}

const CLAIMED: &[Type] = &[Type::Claimed];
const LOADED: &[Type] = &[Type::Claimed, Type::Loaded];
const JOINED: &[Type] = &[Type::Claimed, Type::Loaded, Type::Joined];
const SERVING: &[Type] = &[Type::Claimed, Type::Loaded, Type::Joined, Type::Serving];

fn both(epoch: i64, peers: &[Peer], seen: i64, hold: [&[Type]; 2]) -> ObservedGroup {
    let mut observed = observed(epoch);
    with(&mut observed, 0, epoch, peers, seen, hold[0]);
    with(&mut observed, 1, epoch, peers, seen, hold[1]);
    observed
}

/// `(epoch, ranks written, whether with peers, reason)`
fn outcome(planned: &PlannedGroup) -> (i64, Vec<u32>, bool, String) {
    let written = planned.shards.iter().map(|shard| shard.rank).collect();
    let with_peers = planned.shards.iter().any(|shard| !shard.peers.is_empty());
    let ready = conditions::get(&planned.status.conditions, Type::Ready).unwrap();
    (planned.epoch, written, with_peers, ready.reason.clone())
}

#[test]
fn a_group_forms_step_by_step() {
    let met = peers(100);
    let files = |mut observed: ObservedGroup| {
        observed.missing_files.insert("b".to_owned(), "1.0Gi / 4.0Gi".to_owned());
        observed
    };
    for (story, observed, expected) in [
        ("nothing there", observed(1), (1, vec![0, 1], false, "WaitingForAgent")),
        ("one claimed", both(1, &[], 1, [CLAIMED, &[]]), (1, vec![], false, "WaitingForAgent")),
        (
            "both claimed, files missing",
            files(both(1, &[], 1, [CLAIMED, CLAIMED])),
            (1, vec![], false, "WaitingForCopies"),
        ),
        ("both claimed, files there", both(1, &[], 1, [CLAIMED, CLAIMED]), (1, vec![0, 1], true, "Loading")),
        (
            "claims of an older epoch",
            both(2, &[], 1, [CLAIMED, CLAIMED]),
            (2, vec![], false, "WaitingForAgent"),
        ),
        ("peers published", both(1, &met, 1, [CLAIMED, LOADED]), (1, vec![], false, "Loading")),
        ("loaded", both(1, &met, 1, [LOADED, JOINED]), (1, vec![], false, "Joining")),
        ("joined", both(1, &met, 1, [JOINED, SERVING]), (1, vec![], false, "WaitingForRanks")),
        ("serving", both(1, &met, 1, [SERVING, SERVING]), (1, vec![], false, "Serving")),
        (
            "files removed while serving",
            files(both(1, &met, 1, [SERVING, SERVING])),
            (1, vec![], false, "Serving"),
        ),
    ] {
        let (epoch, written, with_peers, reason) = expected;
        assert_eq!(
            outcome(&decide(&observed, at(0))),
            (epoch, written, with_peers, reason.to_owned()),
            "{story}"
        );
    }
}

#[test]
fn the_endpoint_is_rank_zeros_and_only_while_all_serve() {
    let met = peers(100);
    let planned = decide(&both(3, &met, 3, [SERVING, SERVING]), at(0));
    let endpoint = planned.status.endpoint.unwrap();
    assert_eq!((endpoint.address.as_str(), endpoint.node_name.as_str()), ("a:100", "a"));
    assert_eq!((planned.status.served_epoch, planned.status.restarts), (Some(3), 2));
    assert_eq!(decide(&both(3, &met, 3, [SERVING, JOINED]), at(0)).status.endpoint, None);
}

#[test]
fn any_loss_begins_a_new_epoch_without_peers() {
    let met = peers(100);
    let failed_at = |rank: u32, seen: i64, reason: Reason| {
        let mut observed = both(4, &met, 4, [SERVING, SERVING]);
        edit(&mut observed, rank, |shard| {
            let status = shard.status.as_mut().unwrap();
            status.failure = Some("killed by signal 9".to_owned());
            status.observed_epoch = Some(seen);
            conditions::set(&mut status.conditions, Type::Serving, false, reason, "", None, at(0));
        });
        observed
    };
    let failed = |rank, seen| failed_at(rank, seen, Reason::EngineExited);
    let lost_peers = |hung: bool| {
        let mut observed = failed_at(0, 4, Reason::PeerLost);
        let other = failed_at(1, 4, if hung { Reason::EngineHung } else { Reason::PeerLost });
        observed.shards.insert(1, other.shards[&1].clone());
        observed
    };
    let moved = || {
        let mut observed = both(4, &met, 4, [SERVING, SERVING]);
        edit(&mut observed, 1, |shard| {
            let status = shard.status.as_mut().unwrap();
            status.rendezvous = Some(Rendezvous {
                rpc: "b:900".to_owned(),
                ring: "b:901".to_owned(),
                tensor: "b:902".to_owned(),
            });
        });
        observed
    };
    let deleted = || {
        let mut observed = both(4, &met, 4, [SERVING, SERVING]);
        observed.shards.remove(&1);
        observed
    };
    let leaving = || {
        let mut observed = both(4, &met, 4, [SERVING, SERVING]);
        edit(&mut observed, 1, |shard| shard.metadata.deletion_timestamp = Some(Time(at(0))));
        observed
    };
    for (story, observed, epoch, written, reason) in [
        ("a rank fails", failed(1, 4), 5, vec![0, 1], "EngineExited"),
        ("rank 0 fails", failed(0, 4), 5, vec![0, 1], "EngineExited"),
        (
            "nobody answers the smoke prompt",
            failed_at(1, 4, Reason::SmokeFailed),
            5,
            vec![0, 1],
            "SmokeFailed",
        ),
        ("a rank is frozen", failed_at(1, 4, Reason::EngineSilent), 5, vec![0, 1], "EngineSilent"),
        ("a rank hangs", failed_at(0, 4, Reason::EngineHung), 5, vec![0, 1], "EngineHung"),
        (
            "a rank fails at what has no reason of its own",
            failed_at(1, 4, Reason::Joining),
            5,
            vec![0, 1],
            "EngineFailed",
        ),
        ("a failure of an older epoch", failed(1, 3), 4, vec![], "WaitingForAgent"),
        ("both lose each other", lost_peers(false), 5, vec![0, 1], "PeerLost"),
        ("the cause comes after its consequence", lost_peers(true), 5, vec![0, 1], "EngineHung"),
        ("a rank moves", moved(), 5, vec![0, 1], "PeerLost"),
        ("a Shard is gone", deleted(), 5, vec![0, 1], "PeerLost"),
        ("a Shard is leaving", leaving(), 5, vec![0], "PeerLost"),
        (
            "a Shard is gone before peers were published",
            {
                let mut observed = both(4, &[], 4, [CLAIMED, CLAIMED]);
                observed.shards.remove(&1);
                observed
            },
            4,
            vec![1],
            "WaitingForAgent",
        ),
    ] {
        let planned = decide(&observed, at(0));
        assert_eq!(outcome(&planned), (epoch, written, false, reason.to_owned()), "{story}");
        assert_eq!(planned.bump.is_some(), epoch == 5, "{story}");
        assert_eq!(planned.status.endpoint, None, "{story}");
    }
}

#[test]
fn an_epoch_begun_half_way_is_finished() {
    // The operator wrote the group and crashed before it wrote the Shards.
    let mut observed = both(4, &peers(100), 4, [SERVING, SERVING]);
    Arc::make_mut(&mut observed.group).spec.epoch = 5;
    assert_eq!(outcome(&decide(&observed, at(0))), (5, vec![0, 1], false, "WaitingForAgent".to_owned()));
    // The cache of groups lags behind that of Shards: no decision on inconsistent state.
    assert!(!both(4, &[], 4, [CLAIMED, CLAIMED]).is_stale());
    let mut stale = both(5, &[], 5, [CLAIMED, CLAIMED]);
    Arc::make_mut(&mut stale.group).spec.epoch = 4;
    assert!(stale.is_stale());
    // It wrote the peers of one Shard and crashed before the other.
    let mut observed = both(5, &peers(100), 5, [CLAIMED, CLAIMED]);
    edit(&mut observed, 1, |shard| shard.spec.peers.clear());
    assert_eq!(outcome(&decide(&observed, at(0))), (5, vec![1], true, "Loading".to_owned()));
}

#[test]
fn orphaned_shards_are_deleted_before_names_are_reused() {
    let mut observed = observed(1);
    with(&mut observed, 0, 1, &[], 1, CLAIMED);
    let former = observed.shards.remove(&0).unwrap();
    observed.orphans.push(former);
    let planned = decide(&observed, at(0));
    assert_eq!(planned.delete, ["g-0"]);
    assert_eq!(outcome(&planned).1, [1]);
}

#[test]
fn a_refusal_shows_the_agents_numbers() {
    let mut observed = both(1, &[], 1, [CLAIMED, &[]]);
    edit(&mut observed, 1, |shard| {
        let conditions = &mut shard.status.as_mut().unwrap().conditions;
        conditions::set(
            conditions,
            Type::Claimed,
            false,
            Reason::MemoryRefused,
            "9 GiB needed, 4 GiB free",
            None,
            at(0),
        );
    });
    let planned = decide(&observed, at(0));
    let ready = conditions::get(&planned.status.conditions, Type::Ready).unwrap();
    assert_eq!(
        (ready.reason.as_str(), ready.message.as_str()),
        ("MemoryRefused", "rank 1 on b: 9 GiB needed, 4 GiB free")
    );
}

#[test]
fn a_lost_node_takes_the_endpoint_with_it() {
    let mut observed = both(1, &peers(100), 1, [SERVING, SERVING]);
    observed.unreachable.insert("b".to_owned());
    assert_eq!(
        outcome(&decide(&observed, at(0))).3,
        "Serving",
        "an agent that cannot reach the API keeps its ranks"
    );
    observed.lost.insert("b".to_owned());
    let planned = decide(&observed, at(0));
    assert_eq!((outcome(&planned).3.as_str(), planned.status.endpoint), ("LeaseExpired", None));
}

#[test]
fn engine_that_cannot_start_is_tried_once_a_second() {
    for (reason, age, bumps) in [
        (Reason::EngineNotStarted, 0, false),
        (Reason::EngineNotStarted, 1, true),
        (Reason::EngineExited, 0, true),
    ] {
        let mut observed = both(9, &peers(100), 9, [SERVING, SERVING]);
        edit(&mut observed, 1, |shard| {
            let status = shard.status.as_mut().unwrap();
            status.failure = Some("no space left on device".to_owned());
            let serving = status.conditions.iter_mut().find(|condition| condition.type_ == "Serving");
            serving.unwrap().reason = format!("{reason:?}");
        });
        observed.epoch_starts = vec![at(100)];
        let planned = decide(&observed, at(100 + age));
        assert_eq!(
            (planned.bump.is_some(), planned.requeue_after.is_none()),
            (bumps, bumps),
            "{reason:?}, {age} s"
        );
    }
}

#[test]
fn restarts_back_off_after_twenty_in_ten_minutes() {
    for (started, now, pause) in [
        (vec![], 0, None),
        ((0..19).collect(), 19, None),
        ((0..20).collect(), 20, Some(14)),
        ((0..20).collect(), 34, None),
        ((0..21).collect(), 21, Some(29)),
        ((0..30).collect(), 30, Some(239)),
        ((0..20).collect(), 605, None), // the first ones have left the window
    ] {
        let started: Vec<i64> = started;
        let mut observed = both(9, &peers(100), 9, [SERVING, SERVING]);
        edit(&mut observed, 1, |shard| {
            shard.status.as_mut().unwrap().failure = Some("out of memory".to_owned())
        });
        observed.epoch_starts = started.iter().map(|second| at(*second)).collect();
        let planned = decide(&observed, at(now));
        assert_eq!(
            planned.requeue_after.map(|again| again.as_secs()),
            pause,
            "{} restarts at {now}",
            started.len()
        );
        assert_eq!(planned.bump.is_none(), pause.is_some());
        assert_eq!(conditions::is_true(&planned.status.conditions, Type::Stalled), pause.is_some());
        if pause.is_some() {
            assert_eq!((planned.epoch, outcome(&planned).3.as_str()), (9, "TooManyRestarts"));
        }
    }
}

#[test]
fn a_serving_group_says_which_node_is_unreachable() {
    let mut observed = both(1, &peers(100), 1, [SERVING, SERVING]);
    for (unreachable, says) in [(false, "every rank serves"), (true, "node b is unreachable")] {
        if unreachable {
            observed.unreachable.insert("b".to_owned());
        }
        let status = decide(&observed, at(0)).status;
        let ready = conditions::get(&status.conditions, Type::Ready).unwrap();
        assert_eq!(ready.status, "True");
        assert!(ready.message.contains(says), "{}", ready.message);
    }
}

#[test]
fn a_plan_of_a_newer_release_is_left_alone() {
    for mut observed in [observed(2), both(2, &peers(100), 2, [SERVING, SERVING]), {
        let mut failed = both(2, &peers(100), 2, [SERVING, SERVING]);
        edit(&mut failed, 1, |shard| {
            shard.status.as_mut().unwrap().failure = Some("signal 9".to_owned());
        });
        failed
    }] {
        Arc::make_mut(&mut observed.group).spec.plan.backend = Backend::Unknown;
        let planned = decide(&observed, at(0));
        assert_eq!(outcome(&planned), (2, vec![], false, "NewerRelease".to_owned()));
        assert_eq!(planned.bump, None);
    }
}

#[test]
fn a_shard_no_agent_of_this_release_can_run_shows_in_its_group() {
    let mut observed = both(1, &[], 1, [CLAIMED, &[]]);
    edit(&mut observed, 1, |shard| {
        let conditions = &mut shard.status.as_mut().unwrap().conditions;
        let why = "spec.backend has a value of a newer release than this agent's 0.1.0; update this node";
        conditions::set(conditions, Type::Claimed, false, Reason::NewerRelease, why, None, at(0));
    });
    let planned = decide(&observed, at(0));
    let ready = conditions::get(&planned.status.conditions, Type::Ready).unwrap();
    assert_eq!(ready.reason, "NewerRelease");
    assert!(ready.message.starts_with("rank 1 on b: spec.backend has a value of a newer release"));
}

#[test]
fn every_rank_gets_the_rdma_devices_of_its_stage() {
    let mut observed = observed(1);
    let cell = |name: &str| if name.is_empty() { vec![] } else { vec![name.to_owned()] };
    let plan = &mut Arc::make_mut(&mut observed.group).spec.plan;
    (plan.backend, plan.tensor_size) = (Backend::Jaccl, 2);
    let rows = [["", "x0"], ["x1", ""], ["", "y0"], ["y1", ""]];
    plan.members = (0..4)
        .map(|rank: u32| GroupMember {
            rank,
            node_name: format!("n{rank}"),
            layers: 2,
            rdma_devices: rows[rank as usize].map(cell).to_vec(),
            ..GroupMember::default()
        })
        .collect();
    let shards = decide(&observed, at(0)).shards;
    for (rank, expected) in [(0, &rows[..2]), (1, &rows[..2]), (2, &rows[2..]), (3, &rows[2..])] {
        let expected: Vec<Vec<Vec<String>>> = expected.iter().map(|row| row.map(cell).to_vec()).collect();
        let shard: &ShardSpec = &shards[rank];
        assert_eq!((&shard.rdma_devices, shard.backend, shard.tensor_size), (&expected, Backend::Jaccl, 2));
        assert_eq!(shard.layers_per_rank, [2, 2, 2, 2]);
    }
}

#[test]
fn how_ranks_meet_is_decided_once_for_an_epoch() {
    let link = |peer: &str, own: &str, other: &str| russet_crds::Link {
        peer: peer.to_owned(),
        kind: russet_crds::LinkKind::Thunderbolt,
        address: Some(own.to_owned()),
        peer_address: Some(other.to_owned()),
        ..russet_crds::Link::default()
    };
    let mut observed = both(1, &[], 1, [CLAIMED, CLAIMED]);
    observed.links = BTreeMap::from([
        ("a".to_owned(), vec![link("b", "a", "b")]),
        ("b".to_owned(), vec![link("a", "b", "a")]),
    ]);
    let peer_table = decide(&observed, at(0)).shards;
    assert!(peer_table.iter().all(|shard| shard.transport == Transport::Direct && shard.peers.len() == 2));
    // The cable is gone, and half of the ranks have the table: the other half gets the same one.
    let (peers, transport) = (peer_table[0].peers.clone(), peer_table[0].transport);
    edit(&mut observed, 0, |shard| (shard.spec.peers, shard.spec.transport) = (peers, transport));
    observed.links.clear();
    let rest = decide(&observed, at(0)).shards;
    assert_eq!(rest.len(), 1);
    assert_eq!((rest[0].rank, rest[0].transport), (1, Transport::Direct));
}

#[test]
fn refused_model_stalls_at_once_and_is_tried_again_later() {
    let met = peers(100);
    let mut seen = both(1, &met, 1, [CLAIMED, CLAIMED]);
    edit(&mut seen, 1, |shard| {
        let status = shard.status.as_mut().unwrap();
        status.failure = Some("tokenizer.json is broken".to_owned());
        let reason = Reason::ModelRefused;
        conditions::set(&mut status.conditions, Type::Serving, false, reason, "", None, at(0));
    });
    let words = "rank 1 on b: tokenizer.json is broken; it would be refused again";
    // What was decided is what the next decision sees.
    for (second, epoch, stalled, reason) in [
        (10, 1, "True", "ModelRefused"),
        (11, 1, "True", "ModelRefused"),
        (1809, 1, "True", "ModelRefused"),
        (1810, 2, "False", "ModelRefused"),
    ] {
        let planned = decide(&seen, at(second));
        let ready = get(&planned.status.conditions, Type::Ready).unwrap();
        let stuck = get(&planned.status.conditions, Type::Stalled).unwrap();
        assert_eq!((planned.epoch, stuck.status.as_str(), ready.reason.as_str()), (epoch, stalled, reason));
        assert_eq!(ready.message.starts_with(words), epoch == 1, "{}", ready.message);
        assert_eq!(planned.requeue_after.is_some(), epoch == 1);
        Arc::make_mut(&mut seen.group).status = Some(planned.status);
    }
    // Other failures are tried at once, as before.
    edit(&mut seen, 1, |shard| {
        let status = shard.status.as_mut().unwrap();
        let reason = Reason::EngineFailed;
        conditions::set(&mut status.conditions, Type::Serving, false, reason, "", None, at(0));
    });
    assert_eq!(decide(&seen, at(12)).epoch, 2);
}
