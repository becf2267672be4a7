//! What to do about the Shards of this node: a pure function from what is wanted and what runs to
//! the next actions. It is called after every change; doing what it says, however late, never
//! does harm.
//!
//! ```text
//! no slot ──Claim──▶ claimed ──(peers known, files here)──Start──▶ engine
//! older epoch: Stop, then Claim anew        failed: wait for a higher epoch
//!   with weights: Disband, then Claim with the process that has them; instead of Start it is told to Form
//! Shard gone:  Drain, then Forget (only now the memory is free)
//! ```

use std::collections::BTreeMap;

use russet_crds::conditions::Reason;
use russet_crds::{Peer, Rendezvous};

/// A Shard as the API server has it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wanted {
    /// Incarnation.
    pub epoch: i64,
    /// This rank.
    pub rank: u32,
    /// Ranks in the group.
    pub size: usize,
    /// Where all ranks meet; empty until all have claimed.
    pub peers: Vec<Peer>,
    /// Whether the model's files are published here.
    pub files: bool,
}

/// What this node has for a Shard.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Held {
    /// Incarnation it belongs to.
    pub epoch: i64,
    /// Where this rank meets the others; absent when the claim was refused.
    pub rendezvous: Option<Rendezvous>,
    /// The engine's process.
    pub engine: Engine,
    /// Whether the rank failed at this epoch.
    pub failed: bool,
    /// Whether the rank is where others reach it.
    pub place: Place,
}

/// Whether a rank is where others reach it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Place {
    /// At the node's address.
    #[default]
    Right,
    /// At an address of this machine that is no longer its best.
    Old,
    /// At an address this machine does not have any more.
    Lost,
}

/// A process as decisions see it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// Not started, or gone.
    #[default]
    None,
    /// Alive, without its weights, or failed and of no use to another formation.
    Alive,
    /// Alive, with its weights in memory.
    Loaded,
    /// Leaving its group, which is lost.
    Leaving,
    /// Without a group: its weights are there for the next one.
    Free,
    /// Told the next formation, and has not answered yet.
    Forming,
    /// Asked for another formation in vain.
    Refused,
    /// Alive, and told to go.
    Stopping,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Grant memory, allocate addresses and say so, or refuse.
    Claim {
        /// UID of the Shard.
        shard: String,
        /// Incarnation to claim for.
        epoch: i64,
    },
    /// Start the engine.
    Start {
        /// UID of the Shard.
        shard: String,
    },
    /// Have the engine, which has its weights and no group, begin the next formation.
    Form {
        /// UID of the Shard.
        shard: String,
    },
    /// Have the engine leave a group that formed anew without it.
    Disband {
        /// UID of the Shard.
        shard: String,
    },
    /// Let the engine answer what it is asked already, then end it.
    Drain {
        /// UID of the Shard.
        shard: String,
    },
    /// Kill the engine.
    Stop {
        /// UID of the Shard.
        shard: String,
        /// Why, for the log.
        why: &'static str,
    },
    /// Report that the rank cannot serve at this epoch.
    Fail {
        /// UID of the Shard.
        shard: String,
        /// The reason for conditions.
        reason: Reason,
        /// Why.
        message: String,
    },
    /// Release the memory and remove the state.
    Forget {
        /// UID of the Shard.
        shard: String,
    },
}

/// The next actions. `wanted` is `None` until the Shards were listed once: what was not seen yet
/// must not be taken for deleted.
pub fn decide(wanted: Option<&BTreeMap<String, Wanted>>, held: &BTreeMap<String, Held>) -> Vec<Action> {
    let Some(wanted) = wanted else { return Vec::new() };
    let gone = held.iter().filter(|(uid, _)| !wanted.contains_key(*uid)).filter_map(|(uid, held)| {
        let shard = uid.clone();
        match held.engine {
            Engine::None => Some(Action::Forget { shard }),
            // Its group goes as a whole and on purpose: nobody waits for these ranks to form anew.
            Engine::Alive | Engine::Loaded if held.failed => {
                Some(Action::Stop { shard, why: "the rank failed" })
            }
            Engine::Alive | Engine::Loaded => Some(Action::Drain { shard }),
            Engine::Leaving | Engine::Free | Engine::Forming | Engine::Refused => {
                Some(Action::Stop { shard, why: "the Shard was deleted, and the rank has no group" })
            }
            Engine::Stopping => None,
        }
    });
    let rest = wanted.iter().filter_map(|(uid, wanted)| match held.get(uid) {
        None => Some(Action::Claim { shard: uid.clone(), epoch: wanted.epoch }),
        Some(held) => one(uid, wanted, held),
    });
    // What frees memory comes before what needs it.
    gone.chain(rest).collect()
}

fn one(uid: &str, wanted: &Wanted, held: &Held) -> Option<Action> {
    let shard = uid.to_owned();
    if held.epoch > wanted.epoch {
        // The watch lags behind what this node has seen already.
        return None;
    }
    if held.epoch < wanted.epoch {
        return match held.engine {
            Engine::None | Engine::Free => Some(Action::Claim { shard, epoch: wanted.epoch }),
            // What it has read may be of use.
            Engine::Loaded if wanted.size > 1 => Some(Action::Disband { shard }),
            Engine::Alive | Engine::Loaded | Engine::Refused => {
                Some(Action::Stop { shard, why: "the group has a higher epoch" })
            }
            // It answers soon, or has refused.
            Engine::Leaving | Engine::Forming | Engine::Stopping => None,
        };
    }
    if held.engine == Engine::Refused {
        return Some(Action::Stop { shard, why: "it is of no use to another formation" });
    }
    if held.failed {
        let useless = matches!(held.engine, Engine::Alive | Engine::Loaded);
        return useless.then_some(Action::Stop { shard, why: "the rank failed" });
    }
    let runs = matches!(held.engine, Engine::Alive | Engine::Loaded);
    if let (true, Place::Lost, Some(rendezvous)) = (runs, held.place, &held.rendezvous) {
        let message = format!(
            "this machine no longer has the address of {}; the group must form anew at another one",
            rendezvous.rpc
        );
        return Some(Action::Fail { shard, reason: Reason::AddressLost, message });
    }
    if !matches!(held.engine, Engine::None | Engine::Free) {
        return None;
    }
    // Nobody was told the old address yet, or nobody can reach it any more.
    if held.place == Place::Lost || (held.place == Place::Old && wanted.peers.is_empty()) {
        return Some(Action::Claim { shard, epoch: wanted.epoch });
    }
    let Some(rendezvous) = &held.rendezvous else {
        return Some(Action::Claim { shard, epoch: wanted.epoch });
    };
    if wanted.peers.len() < wanted.size {
        return None;
    }
    let own = wanted.peers.iter().find(|peer| peer.rank == wanted.rank);
    if !own.is_some_and(|own| {
        own.rpc == rendezvous.rpc && own.ring == rendezvous.ring && own.tensor == rendezvous.tensor
    }) {
        let message = format!(
            "the peers name {} for this rank, but the node listens at {}; the group must form anew",
            own.map_or("no address", |own| own.rpc.as_str()),
            rendezvous.rpc,
        );
        return Some(Action::Fail { shard, reason: Reason::EngineNotStarted, message });
    }
    let begin = match held.engine {
        Engine::Free => Action::Form { shard },
        _ => Action::Start { shard },
    };
    wanted.files.then_some(begin)
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

    fn wanted(epoch: i64) -> Wanted {
        Wanted { epoch, rank: 0, size: 2, peers: vec![], files: true }
    }

    fn held(epoch: i64) -> Held {
        Held { epoch, rendezvous: Some(rendezvous(7000)), ..Held::default() }
    }

    #[test]
    fn every_state_has_one_next_step() {
        let ready = Wanted { peers: peers(7000), ..wanted(1) };
        let alive = Held { engine: Engine::Alive, ..held(1) };
        let stopping = Held { engine: Engine::Stopping, ..held(1) };
        let does = |engine| Held { engine, ..held(1) };
        let failed = |engine| Held { failed: true, ..does(engine) };
        for (story, wanted, held, action) in [
            ("a new Shard is claimed", Some(wanted(1)), None, "Claim"),
            ("a claimed one waits for its peers", Some(wanted(1)), Some(held(1)), ""),
            (
                "half the peers are not enough",
                Some(Wanted { peers: peers(7000)[..1].to_vec(), ..wanted(1) }),
                Some(held(1)),
                "",
            ),
            ("it waits for its files", Some(Wanted { files: false, ..ready.clone() }), Some(held(1)), ""),
            ("with both it starts", Some(ready.clone()), Some(held(1)), "Start"),
            ("a running engine is left alone", Some(ready.clone()), Some(alive.clone()), ""),
            (
                "peers that name another address are a failure",
                Some(Wanted { peers: peers(8000), ..wanted(1) }),
                Some(held(1)),
                "Fail",
            ),
            (
                "a refused claim is tried again",
                Some(wanted(1)),
                Some(Held { rendezvous: None, ..held(1) }),
                "Claim",
            ),
            (
                "a claimed one moves with its machine",
                Some(wanted(1)),
                Some(Held { place: Place::Old, ..held(1) }),
                "Claim",
            ),
            (
                "unless its peers know where it is",
                Some(ready.clone()),
                Some(Held { place: Place::Old, ..held(1) }),
                "Start",
            ),
            (
                "and that address is still there",
                Some(ready.clone()),
                Some(Held { place: Place::Lost, ..held(1) }),
                "Claim",
            ),
            (
                "a running engine may stay at an old address",
                Some(ready.clone()),
                Some(Held { place: Place::Old, ..alive.clone() }),
                "",
            ),
            (
                "but not at one that is gone",
                Some(ready.clone()),
                Some(Held { place: Place::Lost, ..alive.clone() }),
                "Fail",
            ),
            (
                "a higher epoch stops an engine that has nothing to keep",
                Some(wanted(2)),
                Some(alive.clone()),
                "Stop",
            ),
            (
                "one with weights leaves its group instead",
                Some(wanted(2)),
                Some(does(Engine::Loaded)),
                "Disband",
            ),
            (
                "unless it is the whole group",
                Some(Wanted { size: 1, ..wanted(2) }),
                Some(does(Engine::Loaded)),
                "Stop",
            ),
            ("that takes a moment", Some(wanted(2)), Some(does(Engine::Leaving)), ""),
            ("it may be in vain", Some(wanted(2)), Some(does(Engine::Refused)), "Stop"),
            ("who has left is claimed for, as it is", Some(wanted(2)), Some(does(Engine::Free)), "Claim"),
            ("it waits for its peers like others", Some(wanted(1)), Some(does(Engine::Free)), ""),
            (
                "and for its files",
                Some(Wanted { files: false, ..ready.clone() }),
                Some(does(Engine::Free)),
                "",
            ),
            ("then it is told to form", Some(ready.clone()), Some(does(Engine::Free)), "Form"),
            ("once", Some(ready.clone()), Some(does(Engine::Forming)), ""),
            ("also if the epoch rises meanwhile", Some(wanted(2)), Some(does(Engine::Forming)), ""),
            ("and if it does not, it goes", Some(ready.clone()), Some(does(Engine::Refused)), "Stop"),
            (
                "where it listens moves with its machine",
                Some(wanted(1)),
                Some(Held { place: Place::Old, ..does(Engine::Free) }),
                "Claim",
            ),
            (
                "a rank that has lost its group waits for a higher epoch",
                Some(ready.clone()),
                Some(failed(Engine::Free)),
                "",
            ),
            ("also while it leaves", Some(ready.clone()), Some(failed(Engine::Leaving)), ""),
            ("but not if it cannot", Some(ready.clone()), Some(failed(Engine::Refused)), "Stop"),
            ("a deleted Shard's engine without a group goes", None, Some(failed(Engine::Free)), "Stop"),
            ("whatever it was asked", None, Some(does(Engine::Forming)), "Stop"),
            ("a serving engine is left alone", Some(ready.clone()), Some(does(Engine::Loaded)), ""),
            ("a deleted Shard's serving engine answers", None, Some(does(Engine::Loaded)), "Drain"),
            ("once", Some(wanted(2)), Some(stopping.clone()), ""),
            ("and is claimed when it is gone", Some(wanted(2)), Some(held(1)), "Claim"),
            ("even after a failure", Some(wanted(2)), Some(Held { failed: true, ..held(1) }), "Claim"),
            (
                "a lower epoch is old news",
                Some(wanted(1)),
                Some(Held { engine: Engine::Alive, ..held(2) }),
                "",
            ),
            (
                "a failed rank waits for a higher epoch",
                Some(ready.clone()),
                Some(Held { failed: true, ..held(1) }),
                "",
            ),
            (
                "but its process goes",
                Some(ready.clone()),
                Some(Held { failed: true, ..alive.clone() }),
                "Stop",
            ),
            (
                "a deleted Shard's failed engine has nothing to answer",
                None,
                Some(Held { failed: true, ..alive.clone() }),
                "Stop",
            ),
            ("a deleted Shard's engine answers what runs", None, Some(alive), "Drain"),
            ("keeps its memory until it is gone", None, Some(stopping), ""),
            ("and is then forgotten", None, Some(held(1)), "Forget"),
        ] {
            let wanted: BTreeMap<String, Wanted> =
                wanted.map(|wanted| ("u".to_owned(), wanted)).into_iter().collect();
            let held: BTreeMap<String, Held> = held.map(|held| ("u".to_owned(), held)).into_iter().collect();
            let actions = decide(Some(&wanted), &held);
            let names: Vec<String> = actions
                .iter()
                .map(|action| format!("{action:?}").split(' ').next().unwrap_or_default().to_owned())
                .collect();
            assert_eq!(names.join(" "), action, "{story}: {actions:?}");
        }
    }

    #[test]
    fn nothing_is_deleted_before_the_api_server_was_heard() {
        let held = BTreeMap::from([("u".to_owned(), Held { engine: Engine::Alive, ..held(1) })]);
        assert_eq!(decide(None, &held), vec![]);
    }
}
