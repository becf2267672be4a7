//! Places to wait in, of which there are few: beyond them another group, or later, is the better place. Who comes
//! with a higher priority than one of those that wait takes the place of the lowest and newest.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use russet_wire::event::{GenerationFailure, FailureKind};

use crate::metrics::EngineMetrics;

/// Most requests that wait while no slot is free.
pub const MAX_WAITING_REQUESTS: usize = 64;

/// Who waits, by number. Those that have begun to answer are not sent away any more.
type WaitingRequests = BTreeMap<u64, WaitingRequest>;

#[derive(Clone, Copy, Debug)]
struct WaitingRequest {
    priority: i32,
    has_output: bool,
}

/// Who has to give up a place for a newcomer of this priority: the lowest, and of those the newest.
fn lowest_below(taken: &WaitingRequests, priority: i32) -> Option<u64> {
    let lower = taken.iter().filter(|(_, holder)| !holder.has_output && holder.priority < priority);
    lower
        .min_by_key(|(number, holder)| (holder.priority, std::cmp::Reverse(**number)))
        .map(|(number, _)| *number)
}

/// All places.
#[derive(Clone)]
pub(super) struct QueueLimit {
    waiting: Arc<Mutex<WaitingRequests>>,
    slots: u32,
    metrics: EngineMetrics,
}

/// One of them, given back when dropped.
pub(super) struct QueueTicket {
    number: u64,
    priority: i32,
    limit: QueueLimit,
}

impl QueueLimit {
    /// Those of an engine with so many slots.
    pub(super) fn new(metrics: EngineMetrics, slots: u32) -> Self {
        Self { waiting: Arc::default(), slots, metrics }
    }

    /// Who will have a slot before the next batch waits in nobody's way: many may come at once while one runs.
    fn max_waiting(&self) -> usize {
        let free = i64::from(self.slots) - self.metrics.running.get();
        MAX_WAITING_REQUESTS + usize::try_from(free).unwrap_or(0)
    }

    /// A place for a newcomer.
    pub(super) fn acquire(&self, number: u64, priority: i32) -> Result<QueueTicket, GenerationFailure> {
        let mut taken = self.waiting.lock();
        if taken.len() >= self.max_waiting() {
            let Some(lowest) = lowest_below(&taken, priority) else {
                let running = self.metrics.running.get();
                let waiting = taken.len();
                return Err(overloaded(format!(
                    "{running} requests are running and {waiting} are waiting, which is the most; try again later"
                )));
            };
            taken.remove(&lowest);
        }
        Ok(self.insert(&mut taken, number, WaitingRequest { priority, has_output: false }))
    }

    /// A place for one that has begun to answer and waits again: there always is one.
    pub(super) fn acquire_preempted(&self, number: u64, priority: i32) -> QueueTicket {
        self.insert(&mut self.waiting.lock(), number, WaitingRequest { priority, has_output: true })
    }

    fn insert(&self, taken: &mut WaitingRequests, number: u64, holder: WaitingRequest) -> QueueTicket {
        taken.insert(number, holder);
        self.metrics.waiting.set(taken.len() as i64);
        QueueTicket { number, priority: holder.priority, limit: self.clone() }
    }
}

impl QueueTicket {
    /// The refusal, once somebody else has taken it.
    pub(super) fn displaced(&self) -> Option<GenerationFailure> {
        let lost = !self.limit.waiting.lock().contains_key(&self.number);
        let priority = self.priority;
        lost.then(|| {
            overloaded(format!(
                "{MAX_WAITING_REQUESTS} requests were waiting, which is the most, and one of higher priority than this one's {priority} took its place; try again later"
            ))
        })
    }
}

impl Drop for QueueTicket {
    fn drop(&mut self) {
        let mut taken = self.limit.waiting.lock();
        taken.remove(&self.number);
        self.limit.metrics.waiting.set(taken.len() as i64);
    }
}

fn overloaded(message: String) -> GenerationFailure {
    GenerationFailure { kind: FailureKind::Overloaded, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_queue_displaces_its_newest_lowest_priority_request() {
        let waits = |priority| WaitingRequest { priority, has_output: false };
        let begun = |priority| WaitingRequest { priority, has_output: true };
        for (story, holders, priority, expected) in [
            ("nobody waits", vec![], 5, None),
            ("an equal has no right", vec![waits(0), waits(0)], 0, None),
            ("nor has a lower one", vec![waits(3)], 2, None),
            ("the newest of equals", vec![waits(0), waits(0), waits(5)], 1, Some(1)),
            ("the lowest before the newest", vec![waits(-1), waits(0), waits(0)], 9, Some(0)),
            ("who has begun to answer stays", vec![begun(-1), waits(0), begun(0)], 9, Some(1)),
            ("also if only such are left", vec![begun(-1)], 9, None),
        ] {
            let taken =
                holders.into_iter().enumerate().map(|(number, holder)| (number as u64, holder)).collect();
            assert_eq!(lowest_below(&taken, priority), expected, "{story}");
        }
    }

    #[test]
    fn queue_tickets_are_bounded_and_returned() {
        let metrics = EngineMetrics::new("m", 0, 16, 64).unwrap();
        let places = QueueLimit::new(metrics.clone(), 0);
        let mut held: Vec<QueueTicket> =
            (0..MAX_WAITING_REQUESTS as u64).map(|number| places.acquire(number, 0).unwrap()).collect();
        let refused = places.acquire(64, 0).err().unwrap();
        assert_eq!(refused.kind, FailureKind::Overloaded);
        assert!(refused.message.contains("0 requests are running and 64 are waiting"), "{}", refused.message);
        let higher = places.acquire(65, 1).unwrap();
        assert!(higher.displaced().is_none());
        let lost = held.pop().unwrap();
        assert!(lost.displaced().unwrap().message.contains("higher priority than this one's 0"));
        drop(lost);
        assert_eq!(metrics.waiting.get(), 64);
        // One that comes back finds a place in any case, and newcomers wait for theirs.
        let back = places.acquire_preempted(66, -7);
        assert_eq!(metrics.waiting.get(), 65);
        assert!(places.acquire(67, 0).is_err());
        drop((higher, held.pop()));
        assert!(places.acquire(68, 0).is_ok());
        drop((held, back));
        assert_eq!(metrics.waiting.get(), 0);
    }
}
