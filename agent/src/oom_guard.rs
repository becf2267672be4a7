//! OOM guard: kills a rank before the machine runs out of memory. An out-of-memory kernel kills arbitrary
//! processes, and a Mac panics when the GPU's memory is exhausted (ml-explore/mlx#3186). After two panics
//! under the same deployment the guard refuses it further memory ([`panics`]).
//!
//! Decisions here are pure; `run` samples the system once a second.

pub mod panics;

use std::collections::BTreeMap;
use std::time::Duration;

use russet_crds::conditions::Reason;
use russet_plan::quantity;
use tokio::sync::watch;

use crate::hardware;

/// Between two checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Consecutive checks that must fail before a kill.
const CHECKS_BEFORE_KILL: u32 = 3;
/// An engine may exceed its grant by an eighth and this. Loading holds the largest tensor twice.
const GRANT_MARGIN_BYTES: u64 = 1 << 30;
/// Available memory below a 64th of the machine is too little, within these bounds.
const FLOOR_BYTES: (u64, u64) = (256 << 20, 2 << 30);

/// Remaining memory of the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Headroom {
    /// Installed bytes.
    pub total: u64,
    /// Bytes that the system could allocate now.
    pub available: u64,
    /// Whether the system reports critical memory pressure.
    pub critical: bool,
}

impl Headroom {
    /// Bytes below which the kernel may kill or panic at any moment.
    fn floor(&self) -> u64 {
        (self.total / 64).clamp(FLOOR_BYTES.0, FLOOR_BYTES.1)
    }

    fn is_short(&self) -> bool {
        // Pressure alone may come from a program that swaps on purpose.
        self.available < self.floor() || (self.critical && self.available < 4 * self.floor())
    }
}

/// A rank of this machine with a running engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankUsage {
    /// UID of its Shard.
    pub shard: String,
    /// Bytes its engine uses.
    pub used: u64,
    /// Bytes granted.
    pub granted: u64,
    /// Time since its claim.
    pub age: Duration,
}

impl RankUsage {
    fn max_bytes(&self) -> u64 {
        self.granted.saturating_add(self.granted / 8).saturating_add(GRANT_MARGIN_BYTES)
    }
}

/// A rank to kill, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kill {
    /// UID of its Shard.
    pub shard: String,
    /// Reason for conditions and metrics.
    pub reason: Reason,
    /// Message for users.
    pub message: String,
}

/// Results of the last checks.
#[derive(Debug, Default)]
pub struct OomGuard {
    checks_over_grant: BTreeMap<String, u32>,
    checks_short: u32,
}

impl OomGuard {
    /// Runs one check. `ranks` are those not yet being killed; while a killed one's process still exists
    /// (`ending`), its memory is about to be freed.
    pub fn check(&mut self, headroom: &Headroom, ranks: &[RankUsage], ending: bool) -> Option<Kill> {
        let over = ranks.iter().filter(|rank| rank.used > rank.max_bytes());
        let over = over.map(|rank| {
            (rank.shard.clone(), self.checks_over_grant.get(&rank.shard).map_or(1, |seen| seen + 1))
        });
        self.checks_over_grant = over.collect();
        self.checks_short = if headroom.is_short() && !ending { self.checks_short + 1 } else { 0 };
        if let Some(rank) =
            ranks.iter().find(|rank| self.checks_over_grant.get(&rank.shard) >= Some(&CHECKS_BEFORE_KILL))
        {
            self.checks_over_grant.remove(&rank.shard);
            return Some(Kill {
                shard: rank.shard.clone(),
                reason: Reason::MemoryExceeded,
                message: format!(
                    "its engine holds {} and was granted {}; the agent killed it before it took memory of other engines. Lower its context or its sequences; if that does not help it leaks memory, see `russet logs`",
                    quantity::show(rank.used),
                    quantity::show(rank.granted)
                ),
            });
        }
        if self.checks_short < CHECKS_BEFORE_KILL {
            return None;
        }
        // First the rank furthest over its grant, then the newest: the others had enough memory until it
        // came.
        let above = |rank: &RankUsage| rank.used.saturating_sub(rank.granted);
        let rank = ranks.iter().max_by_key(|rank| (above(rank), std::cmp::Reverse(rank.age)))?;
        self.checks_short = 0;
        let why = match above(rank) {
            0 => "it claimed last".to_owned(),
            bytes => format!("it holds {} more than it was granted", quantity::show(bytes)),
        };
        Some(Kill {
            shard: rank.shard.clone(),
            reason: Reason::MemoryShort,
            message: format!(
                "this machine had only {} of memory left; the agent killed this rank, because {why}. Close other programs, or raise the node's spec.memory.userReserve",
                quantity::show(headroom.available)
            ),
        })
    }
}

/// Samples the system until the agent exits.
pub(crate) async fn run(total: u64, headroom: watch::Sender<Headroom>) {
    loop {
        let asked = tokio::task::spawn_blocking(move || {
            // A failed measurement is no reason to kill a rank.
            let available = hardware::available_memory().unwrap_or(u64::MAX);
            Headroom { total, available, critical: hardware::memory_is_critical() }
        });
        if let Ok(now) = asked.await {
            headroom.send_replace(now);
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn rank(shard: &str, holds: u64, granted: u64, age: u64) -> RankUsage {
        RankUsage { shard: shard.to_owned(), used: holds, granted, age: Duration::from_secs(age) }
    }

    fn headroom(available: u64) -> Headroom {
        Headroom { total: 64 * GIB, available, critical: false }
    }

    /// Repeats the same check; returns the kills, each with the number of its check.
    fn check_times(
        guard: &mut OomGuard,
        headroom: Headroom,
        ranks: &[RankUsage],
        times: u32,
    ) -> Vec<(u32, String, Reason)> {
        let seen = (1..=times).filter_map(|look| Some((look, guard.check(&headroom, ranks, false)?)));
        seen.map(|(look, end)| (look, end.shard, end.reason)).collect()
    }

    #[test]
    fn rank_far_over_its_grant_is_killed() {
        let ranks = [rank("a", 9 * GIB, 8 * GIB, 5), rank("b", 10 * GIB + 1, 8 * GIB, 9)];
        let ended = check_times(&mut OomGuard::default(), headroom(30 * GIB), &ranks, 3);
        assert_eq!(ended, [(3, "b".to_owned(), Reason::MemoryExceeded)]);
        let mut guard = OomGuard::default();
        assert!(check_times(&mut guard, headroom(30 * GIB), &ranks, 2).is_empty());
        assert!(check_times(&mut guard, headroom(30 * GIB), &ranks[..1], 1).is_empty());
        assert!(check_times(&mut guard, headroom(30 * GIB), &ranks, 2).is_empty(), "it is counted anew");
        let message = OomGuard { checks_over_grant: BTreeMap::from([("b".to_owned(), 2)]), checks_short: 0 }
            .check(&headroom(GIB), &ranks, false);
        let message = message.unwrap().message;
        assert!(message.starts_with("its engine holds 10") && message.contains("was granted 8"), "{message}");
    }

    #[test]
    fn memory_shortage_kills_one_offending_rank_at_a_time() {
        let ranks = [rank("old", 8 * GIB, 8 * GIB, 500), rank("young", 4 * GIB, 8 * GIB, 5)];
        let ended = check_times(&mut OomGuard::default(), headroom(GIB - 1), &ranks, 5);
        assert_eq!(ended, [(3, "young".to_owned(), Reason::MemoryShort)], "then it has time to go");
        let above = [rank("old", 8 * GIB + 1, 8 * GIB, 500), ranks[1].clone()];
        assert_eq!(check_times(&mut OomGuard::default(), headroom(GIB - 1), &above, 3)[0].1, "old");
        let mut waits = OomGuard::default();
        assert!(
            (0..9).all(|_| waits.check(&headroom(0), &ranks, true).is_none()),
            "one that was ended still goes"
        );
        assert!(
            check_times(&mut OomGuard::default(), headroom(GIB), &ranks, 9).is_empty(),
            "a 64th is enough"
        );
        assert!(
            check_times(&mut OomGuard::default(), headroom(0), &[], 9).is_empty(),
            "nobody of ours is here"
        );
        let mut guard = OomGuard::default();
        for _ in 0..9 {
            assert!(check_times(&mut guard, headroom(0), &ranks, 2).is_empty());
            assert!(check_times(&mut guard, headroom(GIB), &ranks, 1).is_empty(), "a moment is no end");
        }
    }

    #[test]
    fn critical_pressure_counts_only_with_little_memory() {
        let ranks = [rank("a", GIB, GIB, 5)];
        let critical = |available| Headroom { critical: true, ..headroom(available) };
        assert_eq!(check_times(&mut OomGuard::default(), critical(3 * GIB), &ranks, 3).len(), 1);
        assert!(check_times(&mut OomGuard::default(), critical(4 * GIB), &ranks, 9).is_empty());
        for (total, floor) in [(8 * GIB, 256 << 20), (64 * GIB, GIB), (512 * GIB, 2 * GIB)] {
            assert_eq!(Headroom { total, ..Headroom::default() }.floor(), floor);
        }
    }
}
