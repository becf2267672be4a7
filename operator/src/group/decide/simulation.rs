//! Random simulation of a group: agents claim, start, fail, move and restart in any order; the operator
//! crashes between its writes and reads lagging caches. Invariants are checked after every step; once the
//! faults end, the group serves.

use std::collections::BTreeMap;
use std::sync::Arc;

use russet_crds::conditions;
use russet_crds::{Rendezvous, ShardGroup};

use super::tests::{at, observed};
use super::*;

const RANKS: u32 = 2;

struct SimRng(u64);

impl SimRng {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

/// The API server's objects, and older versions of them for lagging caches.
struct SimulatedServer {
    groups: Vec<Arc<ShardGroup>>,
    shards: Vec<BTreeMap<u32, Arc<Shard>>>,
    ports: u32,
    bumps: usize,
    /// State in the operator's memory; lost on a crash.
    peer_table: Option<(i64, PeerTable)>,
}

impl SimulatedServer {
    fn new() -> Self {
        Self {
            groups: vec![observed(1).group],
            shards: vec![BTreeMap::new()],
            ports: 0,
            bumps: 0,
            peer_table: None,
        }
    }

    fn group(&self) -> &ShardGroup {
        self.groups.last().unwrap()
    }

    fn now(&self) -> BTreeMap<u32, Arc<Shard>> {
        self.shards.last().unwrap().clone()
    }

    /// The operator reconciles on the latest or on older versions, and makes some or all of its writes.
    fn operate(&mut self, seen: &mut (usize, usize), writes: usize) {
        let mut view = observed(1);
        view.group = self.groups[seen.0].clone();
        view.shards = self.shards[seen.1].clone();
        if view.is_stale() {
            return;
        }
        let epoch = view.group.spec.epoch;
        view.peer_table = self.peer_table.clone().filter(|table| table.0 == epoch).map(|table| table.1);
        let planned = decide(&view, at(0));
        if let Some(shard) = planned.shards.iter().find(|shard| !shard.peers.is_empty()) {
            self.peer_table =
                Some((planned.epoch, PeerTable { peers: shard.peers.clone(), transport: shard.transport }));
        }
        let mut left = writes;
        let mut version = seen.0;
        if view.group.status.as_ref() != Some(&planned.status) {
            let status = Some(planned.status.clone());
            let Some(written) = self.write(version, ShardGroup { status, ..self.group().clone() }) else {
                return;
            };
            version = written;
            left -= 1;
        }
        if planned.bump.is_some() && left > 0 {
            let mut group = self.group().clone();
            group.spec.epoch = planned.epoch;
            if self.write(version, group).is_none() {
                return;
            }
            self.bumps += 1;
            left -= 1;
        } else if planned.bump.is_some() {
            return;
        }
        let mut shards = self.now();
        for spec in planned.shards.into_iter().take(left) {
            let rank = spec.rank;
            let name = russet_crds::names::shard("g", rank);
            let shard = match shards.get(&rank) {
                Some(there) if there.spec.epoch > spec.epoch => continue,
                Some(there) => Shard { spec, ..there.as_ref().clone() },
                None => Shard::new(&name, spec),
            };
            shards.insert(rank, Arc::new(shard));
        }
        self.check(&shards);
        self.shards.push(shards);
    }

    /// Writes the group on the version it was made from; returns the new version, or `None` if there is a newer one.
    fn write(&mut self, on: usize, group: ShardGroup) -> Option<usize> {
        (on + 1 == self.groups.len()).then(|| self.groups.push(Arc::new(group)))?;
        let group = self.group();
        let says = group.status.as_ref().is_some_and(|status| status.last_loss.is_some());
        assert!(group.spec.epoch == 1 || says, "epoch {} began, and nothing says why", group.spec.epoch);
        Some(self.groups.len() - 1)
    }

    /// An agent does its next step, or a fault happens to it.
    fn agent(&mut self, rank: u32, trouble: u64) {
        let mut shards = self.now();
        let Some(shard) = shards.get_mut(&rank) else { return };
        let shard = Arc::make_mut(shard);
        let epoch = shard.spec.epoch;
        let mut status =
            shard.status.clone().filter(|it| it.observed_epoch == Some(epoch)).unwrap_or_default();
        status.observed_epoch = Some(epoch);
        let mut set = |kind, value| {
            conditions::set(&mut status.conditions, kind, value, Reason::EngineExited, "", None, at(0));
        };
        match trouble {
            0 => {
                set(Type::Serving, false);
                status.failure = Some("killed".to_owned());
            }
            1 => {
                shards.remove(&rank);
                self.shards.push(shards);
                return;
            }
            // The agent restarted and allocates new addresses.
            2 => status.rendezvous = None,
            _ if status.rendezvous.is_none() => {
                set(Type::Claimed, true);
                self.ports += 3;
                let address = |port: u32| format!("{rank}:{port}");
                status.rendezvous = Some(Rendezvous {
                    rpc: address(self.ports),
                    ring: address(self.ports + 1),
                    tensor: address(self.ports + 2),
                });
            }
            _ if status.failure.is_none() && shard.spec.peers.len() == RANKS as usize => {
                for kind in [Type::Loaded, Type::Joined, Type::Serving] {
                    set(kind, true);
                }
            }
            _ => {}
        }
        shard.status = Some(status);
        self.shards.push(shards);
    }

    fn check(&self, shards: &BTreeMap<u32, Arc<Shard>>) {
        let before = self.now();
        for (rank, shard) in shards {
            let was = before.get(rank).map_or(0, |shard| shard.spec.epoch);
            assert!(shard.spec.epoch >= was, "an epoch went back");
            assert!(shard.spec.epoch <= self.group().spec.epoch, "a Shard is ahead of its group");
        }
        let peer_table: Vec<_> = shards.values().filter(|shard| !shard.spec.peers.is_empty()).collect();
        for (one, other) in peer_table.iter().zip(peer_table.iter().skip(1)) {
            let agree = one.spec.epoch != other.spec.epoch || one.spec.peers == other.spec.peers;
            assert!(agree, "ranks of one epoch got different peers");
        }
    }
}

#[test]
fn group_serves_again_after_any_sequence_of_failures() {
    let mut bumps = 0;
    for seed in 0..3000 {
        let mut seeded = SimRng(seed);
        let mut world = SimulatedServer::new();
        // Versions in the operator's caches; each cache lags separately, but never goes back.
        let mut seen = (0, 0);
        for _ in 0..40 {
            match seeded.below(3) {
                0 if seeded.below(8) == 0 => {
                    // Another operator starts; it lists everything before it decides.
                    world.peer_table = None;
                    seen = (world.groups.len() - 1, world.shards.len() - 1);
                }
                0 => {
                    let lag =
                        |latest: usize, seen: usize, by: u64| latest.saturating_sub(by as usize).max(seen);
                    seen.0 = lag(world.groups.len() - 1, seen.0, seeded.below(3));
                    seen.1 = lag(world.shards.len() - 1, seen.1, seeded.below(4));
                    let writes = 1 + seeded.below(4) as usize;
                    world.operate(&mut seen, writes);
                }
                _ => world.agent(seeded.below(u64::from(RANKS)) as u32, seeded.below(16)),
            }
        }
        for _ in 0..12 {
            let mut latest = (world.groups.len() - 1, world.shards.len() - 1);
            world.operate(&mut latest, usize::MAX);
            (0..RANKS).for_each(|rank| world.agent(rank, u64::MAX));
        }
        let mut view = observed(1);
        view.group = world.groups.last().unwrap().clone();
        view.shards = world.now();
        let planned = decide(&view, at(0));
        let first = view.shards[&0].status.as_ref().and_then(|status| status.rendezvous.clone()).unwrap();
        assert_eq!(planned.status.endpoint.map(|endpoint| endpoint.address), Some(first.rpc), "seed {seed}");
        assert!(planned.bump.is_none() && planned.shards.is_empty(), "seed {seed}: no rest");
        bumps += world.bumps;
    }
    assert!(bumps > 3000, "only {bumps} epochs were begun: the simulation has no trouble in it");
}
