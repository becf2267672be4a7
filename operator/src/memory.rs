//! What the operator keeps in memory between reconciliations and writes to no object. A new leader starts
//! without it: it makes its own snapshot, waits a grace period before a node counts as silent, and takes the
//! peer table from the Shards. Not here: the caches of the API server's objects (`stores`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use jiff::Timestamp;
use parking_lot::Mutex;
use russet_crds::{Peer, Transport};
use russet_plan::Snapshot;

/// The memory of one process.
#[derive(Default)]
pub struct Memory {
    /// The last snapshot of the caches for the planner.
    pub snapshot: Mutex<Option<CachedSnapshot>>,
    /// When each node's Lease was last seen to change.
    pub leases: Mutex<BTreeMap<String, LeaseObservation>>,
    /// Recent epochs of each group, by UID.
    pub epochs: Mutex<BTreeMap<String, EpochHistory>>,
}

/// A snapshot that many reconciliations share.
#[derive(Clone, Debug)]
pub struct CachedSnapshot {
    /// [`Stores::generation`](crate::stores::Stores::generation) before the caches were read.
    pub generation: u64,
    /// When it was made.
    pub at: Timestamp,
    /// When time alone makes it outdated.
    pub until: Option<Timestamp>,
    /// The snapshot.
    pub view: Arc<Snapshot>,
}

impl CachedSnapshot {
    /// Whether it still describes the caches.
    pub fn is_current(&self, generation: u64, now: Timestamp) -> bool {
        self.generation == generation && self.at <= now && self.until.is_none_or(|until| now < until)
    }
}

/// A Lease as this process observed it. The clocks of machines differ, so what counts is when a change was
/// observed here, not the time in the Lease.
#[derive(Clone, Debug)]
pub struct LeaseObservation {
    /// Its renewal time, as written by the agent.
    pub renewed: Option<Timestamp>,
    /// When that was first observed here.
    pub at: Instant,
    /// Whether it changed since this process first observed it.
    pub changed: bool,
}

/// Epochs of a group.
#[derive(Clone, Debug, Default)]
pub struct EpochHistory {
    /// When recent epochs began.
    pub epoch_starts: Vec<Timestamp>,
    /// The epoch being formed, and since when.
    pub forming: Option<(i64, Instant)>,
    /// The peer table of an epoch as it was written to the ranks. The caches may not show it yet, and no
    /// other table may be written for the same epoch.
    pub peer_table: Option<(i64, PeerTable)>,
}

/// The peer table of an epoch, written to its ranks once and constant for the epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerTable {
    /// Addresses of the ranks, in rank order.
    pub peers: Vec<Peer>,
    /// Whether they connect through tunnels.
    pub transport: Transport,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshot_is_cached_until_an_object_or_the_time_changes_it() {
        let at = |second: i64| Timestamp::from_second(second).unwrap();
        for (story, generation, now, until, holds) in [
            ("the same moment", 1, 10, None, true),
            ("later", 1, 1000, None, true),
            ("before something is over", 1, 19, Some(20), true),
            ("when it is over", 1, 20, Some(20), false),
            ("after a change", 2, 10, None, false),
            ("a clock that was set back", 1, 9, None, false),
        ] {
            let cached =
                CachedSnapshot { generation: 1, at: at(10), until: until.map(at), view: Arc::default() };
            assert_eq!(cached.is_current(generation, at(now)), holds, "{story}");
        }
    }
}
