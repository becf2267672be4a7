//! What to do about the Shards of this node: a pure function from desired and actual state to the next
//! actions. It is called after every change; applying an action late never does harm.
//!
//! ```text
//! no state ──Claim──▶ claimed ──(peers known, files here)──Start──▶ engine
//! older epoch: Stop, then Claim again       failed: wait for a higher epoch
//!   with weights: LeaveGroup, then Claim with the same process; it gets Reform instead of Start
//! Shard gone:  Drain, then Release (only now the memory is free)
//! ```

use std::collections::BTreeMap;

use russet_crds::conditions::Reason;
use russet_crds::{Peer, Rendezvous};

/// Desired state of a Shard, from the API server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DesiredShard {
    /// Epoch of the group.
    pub epoch: i64,
    /// This rank.
    pub rank: u32,
    /// Ranks in the group.
    pub size: usize,
    /// Rendezvous addresses of all ranks; empty until all have claimed.
    pub peers: Vec<Peer>,
    /// Whether the model's files are published here.
    pub files_ready: bool,
}

/// Actual state of a Shard on this node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ActualShard {
    /// Epoch it was claimed for.
    pub epoch: i64,
    /// Rendezvous address of this rank; absent when the claim was refused.
    pub rendezvous: Option<Rendezvous>,
    /// State of the engine's process.
    pub engine: EngineState,
    /// Whether the rank failed at this epoch.
    pub failed: bool,
    /// Whether other ranks can reach the rank at its address.
    pub address_state: AddressState,
}

/// Whether other ranks can reach a rank at its address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressState {
    /// At the node's address.
    #[default]
    Current,
    /// At an address of this machine that is no longer its best one.
    Stale,
    /// At an address that this machine has lost.
    Lost,
}

/// State of an engine process, as far as decisions need it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineState {
    /// Not started, or exited.
    #[default]
    None,
    /// Alive without its weights, or failed and unable to reform.
    Alive,
    /// Alive, with its weights in memory.
    Loaded,
    /// Leaving its lost group.
    LeavingGroup,
    /// Without a group; its weights stay in memory for the next one.
    Detached,
    /// Received the next formation and has not answered yet.
    Forming,
    /// Did not accept another formation.
    ReformRefused,
    /// Alive, and asked to stop.
    Stopping,
}

/// One action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShardAction {
    /// Grant memory, allocate addresses and report them, or refuse.
    Claim {
        /// UID of the Shard.
        shard: String,
        /// Epoch to claim for.
        epoch: i64,
    },
    /// Start the engine.
    Start {
        /// UID of the Shard.
        shard: String,
    },
    /// Have the engine, which has weights and no group, join the next formation.
    Reform {
        /// UID of the Shard.
        shard: String,
    },
    /// Have the engine leave a group that was formed again without it.
    LeaveGroup {
        /// UID of the Shard.
        shard: String,
    },
    /// Let the engine finish its requests, then stop it.
    Drain {
        /// UID of the Shard.
        shard: String,
    },
    /// Kill the engine.
    Stop {
        /// UID of the Shard.
        shard: String,
        /// Reason, for the log.
        why: &'static str,
    },
    /// Report that the rank cannot serve at this epoch.
    Fail {
        /// UID of the Shard.
        shard: String,
        /// Reason for conditions.
        reason: Reason,
        /// Explanation.
        message: String,
    },
    /// Release the memory and remove the state.
    Release {
        /// UID of the Shard.
        shard: String,
    },
}

/// The next actions. `desired` is `None` until the Shards were listed once: unseen Shards must not be taken
/// for deleted ones.
pub fn decide(
    desired: Option<&BTreeMap<String, DesiredShard>>,
    actual: &BTreeMap<String, ActualShard>,
) -> Vec<ShardAction> {
    let Some(desired) = desired else { return Vec::new() };
    let gone = actual.iter().filter(|(uid, _)| !desired.contains_key(*uid)).filter_map(|(uid, held)| {
        let shard = uid.clone();
        match held.engine {
            EngineState::None => Some(ShardAction::Release { shard }),
            // The whole group is removed on purpose: these ranks will not reform.
            EngineState::Alive | EngineState::Loaded if held.failed => {
                Some(ShardAction::Stop { shard, why: "the rank failed" })
            }
            EngineState::Alive | EngineState::Loaded => Some(ShardAction::Drain { shard }),
            EngineState::LeavingGroup
            | EngineState::Detached
            | EngineState::Forming
            | EngineState::ReformRefused => {
                Some(ShardAction::Stop { shard, why: "the Shard was deleted, and the rank has no group" })
            }
            EngineState::Stopping => None,
        }
    });
    let rest = desired.iter().filter_map(|(uid, desired)| match actual.get(uid) {
        None => Some(ShardAction::Claim { shard: uid.clone(), epoch: desired.epoch }),
        Some(held) => decide_shard(uid, desired, held),
    });
    // Actions that free memory come before those that need it.
    gone.chain(rest).collect()
}

fn decide_shard(uid: &str, desired: &DesiredShard, actual: &ActualShard) -> Option<ShardAction> {
    let shard = uid.to_owned();
    if actual.epoch > desired.epoch {
        // The watch lags behind what this node has seen already.
        return None;
    }
    if actual.epoch < desired.epoch {
        return match actual.engine {
            EngineState::None | EngineState::Detached => {
                Some(ShardAction::Claim { shard, epoch: desired.epoch })
            }
            // Its loaded weights may be reused.
            EngineState::Loaded if desired.size > 1 => Some(ShardAction::LeaveGroup { shard }),
            EngineState::Alive | EngineState::Loaded | EngineState::ReformRefused => {
                Some(ShardAction::Stop { shard, why: "the group has a higher epoch" })
            }
            // It answers soon, or has refused.
            EngineState::LeavingGroup | EngineState::Forming | EngineState::Stopping => None,
        };
    }
    if actual.engine == EngineState::ReformRefused {
        return Some(ShardAction::Stop { shard, why: "it cannot join another formation" });
    }
    if actual.failed {
        let useless = matches!(actual.engine, EngineState::Alive | EngineState::Loaded);
        return useless.then_some(ShardAction::Stop { shard, why: "the rank failed" });
    }
    let runs = matches!(actual.engine, EngineState::Alive | EngineState::Loaded);
    if let (true, AddressState::Lost, Some(rendezvous)) = (runs, actual.address_state, &actual.rendezvous) {
        let message = format!(
            "this machine no longer has the address of {}; the group must re-form at another one",
            rendezvous.rpc
        );
        return Some(ShardAction::Fail { shard, reason: Reason::AddressLost, message });
    }
    if !matches!(actual.engine, EngineState::None | EngineState::Detached) {
        return None;
    }
    // The old address is not published yet, or nothing can reach it any more.
    if actual.address_state == AddressState::Lost
        || (actual.address_state == AddressState::Stale && desired.peers.is_empty())
    {
        return Some(ShardAction::Claim { shard, epoch: desired.epoch });
    }
    let Some(rendezvous) = &actual.rendezvous else {
        return Some(ShardAction::Claim { shard, epoch: desired.epoch });
    };
    if desired.peers.len() < desired.size {
        return None;
    }
    let own = desired.peers.iter().find(|peer| peer.rank == desired.rank);
    if !own.is_some_and(|own| {
        own.rpc == rendezvous.rpc && own.ring == rendezvous.ring && own.tensor == rendezvous.tensor
    }) {
        let message = format!(
            "the peers name {} for this rank, but the node listens at {}; the group must re-form",
            own.map_or("no address", |own| own.rpc.as_str()),
            rendezvous.rpc,
        );
        return Some(ShardAction::Fail { shard, reason: Reason::EngineNotStarted, message });
    }
    let begin = match actual.engine {
        EngineState::Detached => ShardAction::Reform { shard },
        _ => ShardAction::Start { shard },
    };
    desired.files_ready.then_some(begin)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendezvous(port: u16) -> Rendezvous {
        Rendezvous {
            rpc: format!("10.0.0.1:{port}"),
            ring: format!("10.0.0.1:{}", port + 1),
            tensor: format!("10.0.0.1:{}", port + 2),
        }
    }

    fn peers(port: u16) -> Vec<Peer> {
        let Rendezvous { rpc, ring, tensor } = rendezvous(port);
        let other = Peer {
            rank: 1,
            node_name: "b".into(),
            rpc: "b:1".into(),
            ring: "b:2".into(),
            tensor: "b:3".into(),
        };
        vec![Peer { rank: 0, node_name: "a".into(), rpc, ring, tensor }, other]
    }

    fn desired(epoch: i64) -> DesiredShard {
        DesiredShard { epoch, rank: 0, size: 2, peers: vec![], files_ready: true }
    }

    fn actual(epoch: i64) -> ActualShard {
        ActualShard { epoch, rendezvous: Some(rendezvous(7000)), ..ActualShard::default() }
    }

    #[test]
    fn every_shard_state_has_one_next_action() {
        let ready = DesiredShard { peers: peers(7000), ..desired(1) };
        let alive = ActualShard { engine: EngineState::Alive, ..actual(1) };
        let stopping = ActualShard { engine: EngineState::Stopping, ..actual(1) };
        let does = |engine| ActualShard { engine, ..actual(1) };
        let failed = |engine| ActualShard { failed: true, ..does(engine) };
        for (story, expected, held, action) in [
            ("a new Shard is claimed", Some(desired(1)), None, "Claim"),
            ("a claimed one waits for its peers", Some(desired(1)), Some(actual(1)), ""),
            (
                "half the peers are not enough",
                Some(DesiredShard { peers: peers(7000)[..1].to_vec(), ..desired(1) }),
                Some(actual(1)),
                "",
            ),
            (
                "it waits for its files",
                Some(DesiredShard { files_ready: false, ..ready.clone() }),
                Some(actual(1)),
                "",
            ),
            ("with both it starts", Some(ready.clone()), Some(actual(1)), "Start"),
            ("a running engine is left alone", Some(ready.clone()), Some(alive.clone()), ""),
            (
                "peers that name another address are a failure",
                Some(DesiredShard { peers: peers(8000), ..desired(1) }),
                Some(actual(1)),
                "Fail",
            ),
            (
                "a refused claim is tried again",
                Some(desired(1)),
                Some(ActualShard { rendezvous: None, ..actual(1) }),
                "Claim",
            ),
            (
                "a claimed one moves with its machine",
                Some(desired(1)),
                Some(ActualShard { address_state: AddressState::Stale, ..actual(1) }),
                "Claim",
            ),
            (
                "unless its peers know where it is",
                Some(ready.clone()),
                Some(ActualShard { address_state: AddressState::Stale, ..actual(1) }),
                "Start",
            ),
            (
                "and that address is still there",
                Some(ready.clone()),
                Some(ActualShard { address_state: AddressState::Lost, ..actual(1) }),
                "Claim",
            ),
            (
                "a running engine may stay at an old address",
                Some(ready.clone()),
                Some(ActualShard { address_state: AddressState::Stale, ..alive.clone() }),
                "",
            ),
            (
                "but not at one that is gone",
                Some(ready.clone()),
                Some(ActualShard { address_state: AddressState::Lost, ..alive.clone() }),
                "Fail",
            ),
            (
                "a higher epoch stops an engine that has nothing to keep",
                Some(desired(2)),
                Some(alive.clone()),
                "Stop",
            ),
            (
                "one with weights leaves its group instead",
                Some(desired(2)),
                Some(does(EngineState::Loaded)),
                "LeaveGroup",
            ),
            (
                "unless it is the whole group",
                Some(DesiredShard { size: 1, ..desired(2) }),
                Some(does(EngineState::Loaded)),
                "Stop",
            ),
            ("that takes a moment", Some(desired(2)), Some(does(EngineState::LeavingGroup)), ""),
            ("it may be in vain", Some(desired(2)), Some(does(EngineState::ReformRefused)), "Stop"),
            (
                "who has left is claimed for, as it is",
                Some(desired(2)),
                Some(does(EngineState::Detached)),
                "Claim",
            ),
            ("it waits for its peers like others", Some(desired(1)), Some(does(EngineState::Detached)), ""),
            (
                "and for its files",
                Some(DesiredShard { files_ready: false, ..ready.clone() }),
                Some(does(EngineState::Detached)),
                "",
            ),
            (
                "then it is requested to form",
                Some(ready.clone()),
                Some(does(EngineState::Detached)),
                "Reform",
            ),
            ("once", Some(ready.clone()), Some(does(EngineState::Forming)), ""),
            ("also if the epoch rises meanwhile", Some(desired(2)), Some(does(EngineState::Forming)), ""),
            (
                "and if it does not, it goes",
                Some(ready.clone()),
                Some(does(EngineState::ReformRefused)),
                "Stop",
            ),
            (
                "where it listens moves with its machine",
                Some(desired(1)),
                Some(ActualShard { address_state: AddressState::Stale, ..does(EngineState::Detached) }),
                "Claim",
            ),
            (
                "a rank that has lost its group waits for a higher epoch",
                Some(ready.clone()),
                Some(failed(EngineState::Detached)),
                "",
            ),
            ("also while it leaves", Some(ready.clone()), Some(failed(EngineState::LeavingGroup)), ""),
            ("but not if it cannot", Some(ready.clone()), Some(failed(EngineState::ReformRefused)), "Stop"),
            (
                "a deleted Shard's engine without a group goes",
                None,
                Some(failed(EngineState::Detached)),
                "Stop",
            ),
            ("whatever it was asked", None, Some(does(EngineState::Forming)), "Stop"),
            ("a serving engine is left alone", Some(ready.clone()), Some(does(EngineState::Loaded)), ""),
            ("a deleted Shard's serving engine answers", None, Some(does(EngineState::Loaded)), "Drain"),
            ("once", Some(desired(2)), Some(stopping.clone()), ""),
            ("and is claimed when it is gone", Some(desired(2)), Some(actual(1)), "Claim"),
            (
                "even after a failure",
                Some(desired(2)),
                Some(ActualShard { failed: true, ..actual(1) }),
                "Claim",
            ),
            (
                "a lower epoch is old news",
                Some(desired(1)),
                Some(ActualShard { engine: EngineState::Alive, ..actual(2) }),
                "",
            ),
            (
                "a failed rank waits for a higher epoch",
                Some(ready.clone()),
                Some(ActualShard { failed: true, ..actual(1) }),
                "",
            ),
            (
                "but its process goes",
                Some(ready.clone()),
                Some(ActualShard { failed: true, ..alive.clone() }),
                "Stop",
            ),
            (
                "a deleted Shard's failed engine has nothing to answer",
                None,
                Some(ActualShard { failed: true, ..alive.clone() }),
                "Stop",
            ),
            ("a deleted Shard's engine answers what runs", None, Some(alive), "Drain"),
            ("keeps its memory until it is gone", None, Some(stopping), ""),
            ("and is then forgotten", None, Some(actual(1)), "Release"),
        ] {
            let expected: BTreeMap<String, DesiredShard> =
                expected.map(|expected| ("u".to_owned(), expected)).into_iter().collect();
            let held: BTreeMap<String, ActualShard> =
                held.map(|held| ("u".to_owned(), held)).into_iter().collect();
            let actions = decide(Some(&expected), &held);
            let names: Vec<String> = actions
                .iter()
                .map(|action| format!("{action:?}").split(' ').next().unwrap_or_default().to_owned())
                .collect();
            assert_eq!(names.join(" "), action, "{story}: {actions:?}");
        }
    }

    #[test]
    fn nothing_is_deleted_before_the_first_list() {
        let held =
            BTreeMap::from([("u".to_owned(), ActualShard { engine: EngineState::Alive, ..actual(1) })]);
        assert_eq!(decide(None, &held), vec![]);
    }
}
