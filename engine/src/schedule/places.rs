//! Places to wait in, of which there are few: beyond them another group, or later, is the better place. Who comes
//! with a higher priority than one of those that wait takes the place of the lowest and newest.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use russet_wire::event::{Failure, FailureKind};

use crate::metrics::Metrics;

/// Most requests that wait while no slot is free.
pub const MOST_WAITING: usize = 64;

/// Who waits, by number. Those that have begun to answer are not sent away any more.
type Taken = BTreeMap<u64, Holder>;

#[derive(Clone, Copy, Debug)]
struct Holder {
    priority: i32,
    begun: bool,
}

/// Who has to give up a place for a newcomer of this priority: the lowest, and of those the newest.
fn outranked(taken: &Taken, priority: i32) -> Option<u64> {
    let lower = taken.iter().filter(|(_, holder)| !holder.begun && holder.priority < priority);
    lower
        .min_by_key(|(number, holder)| (holder.priority, std::cmp::Reverse(**number)))
        .map(|(number, _)| *number)
}

/// All places.
#[derive(Clone)]
pub(super) struct Places {
    taken: Arc<Mutex<Taken>>,
    slots: u32,
    metrics: Metrics,
}

/// One of them, given back when dropped.
pub(super) struct Place {
    number: u64,
    priority: i32,
    places: Places,
}

impl Places {
    /// Those of an engine with so many slots.
    pub(super) fn new(metrics: Metrics, slots: u32) -> Self {
        Self { taken: Arc::default(), slots, metrics }
    }

    /// Who will have a slot before the next batch waits in nobody's way: many may come at once while one runs.
    fn most(&self) -> usize {
        let free = i64::from(self.slots) - self.metrics.running.get();
        MOST_WAITING + usize::try_from(free).unwrap_or(0)
    }

    /// A place for a newcomer.
    pub(super) fn take(&self, number: u64, priority: i32) -> Result<Place, Failure> {
        let mut taken = self.taken.lock();
        if taken.len() >= self.most() {
            let Some(lowest) = outranked(&taken, priority) else {
                let running = self.metrics.running.get();
                let waiting = taken.len();
                return Err(overloaded(format!(
                    "{running} requests are running and {waiting} are waiting, which is the most; try again later"
                )));
            };
            taken.remove(&lowest);
        }
        Ok(self.put(&mut taken, number, Holder { priority, begun: false }))
    }

    /// A place for one that has begun to answer and waits again: there always is one.
    pub(super) fn keep(&self, number: u64, priority: i32) -> Place {
        self.put(&mut self.taken.lock(), number, Holder { priority, begun: true })
    }

    fn put(&self, taken: &mut Taken, number: u64, holder: Holder) -> Place {
        taken.insert(number, holder);
        self.metrics.waiting.set(taken.len() as i64);
        Place { number, priority: holder.priority, places: self.clone() }
    }
}

impl Place {
    /// The refusal, once somebody else has taken it.
    pub(super) fn lost(&self) -> Option<Failure> {
        let lost = !self.places.taken.lock().contains_key(&self.number);
        let priority = self.priority;
        lost.then(|| {
            overloaded(format!(
                "{MOST_WAITING} requests were waiting, which is the most, and one of higher priority than this one's {priority} took its place; try again later"
            ))
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken.lock();
        taken.remove(&self.number);
        self.places.metrics.waiting.set(taken.len() as i64);
    }
}

fn overloaded(message: String) -> Failure {
    Failure { kind: FailureKind::Overloaded, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_and_newest_gives_up_its_place_to_a_higher_one() {
        let waits = |priority| Holder { priority, begun: false };
        let begun = |priority| Holder { priority, begun: true };
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
            assert_eq!(outranked(&taken, priority), expected, "{story}");
        }
    }

    #[test]
    fn places_are_bounded_and_given_back() {
        let metrics = Metrics::new("m", 0, 16, 64).unwrap();
        let places = Places::new(metrics.clone(), 0);
        let mut held: Vec<Place> =
            (0..MOST_WAITING as u64).map(|number| places.take(number, 0).unwrap()).collect();
        let refused = places.take(64, 0).err().unwrap();
        assert_eq!(refused.kind, FailureKind::Overloaded);
        assert!(refused.message.contains("0 requests are running and 64 are waiting"), "{}", refused.message);
        let higher = places.take(65, 1).unwrap();
        assert!(higher.lost().is_none());
        let lost = held.pop().unwrap();
        assert!(lost.lost().unwrap().message.contains("higher priority than this one's 0"));
        drop(lost);
        assert_eq!(metrics.waiting.get(), 64);
        // One that comes back finds a place in any case, and newcomers wait for theirs.
        let back = places.keep(66, -7);
        assert_eq!(metrics.waiting.get(), 65);
        assert!(places.take(67, 0).is_err());
        drop((higher, held.pop()));
        assert!(places.take(68, 0).is_ok());
        drop((held, back));
        assert_eq!(metrics.waiting.get(), 0);
    }
}
