//! Queue limit: bounded waiting. Beyond the limit, another group or a later retry serves the client better. A
//! newcomer of higher priority takes the place of the lowest-priority, newest waiting request.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use russet_wire::event::{FailureKind, GenerationFailure};

use crate::metrics::EngineMetrics;

/// Waiting requests by number. Requests that have begun to decode are never refused.
type WaitingRequests = BTreeMap<u64, WaitingRequest>;

#[derive(Clone, Copy, Debug)]
struct WaitingRequest {
    priority: i32,
    has_output: bool,
}

/// The waiting request that a newcomer of this priority replaces: lowest priority, then newest.
fn lowest_below(taken: &WaitingRequests, priority: i32) -> Option<u64> {
    let lower = taken.iter().filter(|(_, holder)| !holder.has_output && holder.priority < priority);
    lower
        .min_by_key(|(number, holder)| (holder.priority, std::cmp::Reverse(**number)))
        .map(|(number, _)| *number)
}

/// The queue limit.
#[derive(Clone)]
pub(super) struct QueueLimit {
    waiting: Arc<Mutex<WaitingRequests>>,
    slots: u32,
    /// Maximum waiting requests while no slot is free.
    max_waiting: usize,
    metrics: EngineMetrics,
}

/// A queue ticket; returned when dropped.
pub(super) struct QueueTicket {
    number: u64,
    priority: i32,
    limit: QueueLimit,
}

impl QueueLimit {
    /// Queue limit of an engine with `slots` slots, for which `max_waiting` more requests may wait.
    pub(super) fn new(metrics: EngineMetrics, slots: u32, max_waiting: u32) -> Self {
        let max_waiting = usize::try_from(max_waiting).unwrap_or(usize::MAX);
        Self { waiting: Arc::default(), slots, max_waiting, metrics }
    }

    /// Requests that get a slot before the next batch do not count against the limit: many may arrive during
    /// one batch.
    fn max_waiting(&self) -> usize {
        let free = i64::from(self.slots) - self.metrics.running.get();
        self.max_waiting.saturating_add(usize::try_from(free).unwrap_or(0))
    }

    /// A ticket for a newcomer.
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

    /// A ticket for a preempted request; always granted.
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
    /// The rejection, once a request of higher priority has taken the place.
    pub(super) fn displaced(&self) -> Option<GenerationFailure> {
        let lost = !self.limit.waiting.lock().contains_key(&self.number);
        let (most, priority) = (self.limit.max_waiting, self.priority);
        lost.then(|| {
            overloaded(format!(
                "{most} requests were waiting, which is the most, and one of higher priority than this one's {priority} took its place; try again later"
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

/// A failure for want of room.
pub(crate) fn overloaded(message: String) -> GenerationFailure {
    GenerationFailure { kind: FailureKind::Overloaded, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_queue_displaces_its_newest_lowest_priority_request() {
        let waits = |priority| WaitingRequest { priority, has_output: false };
        let started = |priority| WaitingRequest { priority, has_output: true };
        for (story, holders, priority, expected) in [
            ("nobody waits", vec![], 5, None),
            ("an equal has no right", vec![waits(0), waits(0)], 0, None),
            ("nor has a lower one", vec![waits(3)], 2, None),
            ("the newest of equals", vec![waits(0), waits(0), waits(5)], 1, Some(1)),
            ("the lowest before the newest", vec![waits(-1), waits(0), waits(0)], 9, Some(0)),
            ("who has begun to answer stays", vec![started(-1), waits(0), started(0)], 9, Some(1)),
            ("also if only such are left", vec![started(-1)], 9, None),
        ] {
            let taken =
                holders.into_iter().enumerate().map(|(number, holder)| (number as u64, holder)).collect();
            assert_eq!(lowest_below(&taken, priority), expected, "{story}");
        }
    }

    #[test]
    fn queue_tickets_are_bounded_and_returned() {
        let metrics = EngineMetrics::new("m", 0, 16, 64).unwrap();
        let limit = QueueLimit::new(metrics.clone(), 0, 64);
        let mut held: Vec<QueueTicket> = (0..64).map(|number| limit.acquire(number, 0).unwrap()).collect();
        let refused = limit.acquire(64, 0).err().unwrap();
        assert_eq!(refused.kind, FailureKind::Overloaded);
        assert!(refused.message.contains("0 requests are running and 64 are waiting"), "{}", refused.message);
        let higher = limit.acquire(65, 1).unwrap();
        assert!(higher.displaced().is_none());
        let lost = held.pop().unwrap();
        assert!(lost.displaced().unwrap().message.contains("higher priority than this one's 0"));
        drop(lost);
        assert_eq!(metrics.waiting.get(), 64);
        // A preempted request gets a ticket in any case; newcomers need a free one.
        let back = limit.acquire_preempted(66, -7);
        assert_eq!(metrics.waiting.get(), 65);
        assert!(limit.acquire(67, 0).is_err());
        drop((higher, held.pop()));
        assert!(limit.acquire(68, 0).is_ok());
        drop((held, back));
        assert_eq!(metrics.waiting.get(), 0);
    }
    #[test]
    fn a_queue_for_nobody_admits_what_gets_a_slot() {
        let metrics = EngineMetrics::new("m", 0, 16, 64).unwrap();
        let limit = QueueLimit::new(metrics.clone(), 2, 0);
        let held = [limit.acquire(0, 0).unwrap(), limit.acquire(1, 0).unwrap()];
        let refused = limit.acquire(2, 0).err().unwrap();
        assert!(refused.message.contains("0 requests are running and 2 are waiting"), "{}", refused.message);
        // Both have slots now, and a third one has none to wait for.
        drop(held);
        metrics.running.set(2);
        assert!(limit.acquire(3, 0).is_err());
        metrics.running.set(1);
        assert!(limit.acquire(4, 0).is_ok());
    }
}
