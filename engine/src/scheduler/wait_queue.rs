//! Wait queue: ordered by priority, aged by waiting time, then by arrival. Pure.

use std::time::Duration;

/// Waiting time worth one priority level. Outputs of some hundred tokens take about as long: a request
/// overtakes requests one level below that arrived during such an output, and none that arrived before.
/// Priorities are bounded, so the time during which others may overtake is bounded too.
pub const AGEING_INTERVAL: Duration = Duration::from_secs(10);

/// What determines a request's position in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePosition {
    /// As requested; higher first.
    pub priority: i32,
    /// Arrival time, since the engine started.
    pub arrived: Duration,
    /// Arrival number; later requests have higher ones.
    pub number: u64,
}

impl QueuePosition {
    /// Sort key. All requests age at the same rate, so their order never changes: one priority level counts
    /// as an arrival that much earlier.
    fn rank(&self) -> (i128, u64) {
        let micros = |time: Duration| time.as_micros() as i128;
        (micros(self.arrived) - i128::from(self.priority) * micros(AGEING_INTERVAL), self.number)
    }

    /// Whether it goes before another one.
    pub fn precedes(&self, other: &Self) -> bool {
        self.rank() < other.rank()
    }
}

/// Waiting requests in queue order.
#[derive(Debug)]
pub struct WaitQueue<T> {
    waiting: Vec<(QueuePosition, T)>,
}

impl<T> Default for WaitQueue<T> {
    fn default() -> Self {
        Self { waiting: Vec::new() }
    }
}

impl<T> WaitQueue<T> {
    /// Adds a request.
    pub fn push(&mut self, standing: QueuePosition, one: T) {
        let place = self.waiting.partition_point(|(other, _)| other.precedes(&standing));
        self.waiting.insert(place, (standing, one));
    }

    /// The next request.
    pub fn first(&self) -> Option<&T> {
        self.waiting.first().map(|(_, one)| one)
    }

    /// All requests, in queue order.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.waiting.iter().map(|(_, one)| one)
    }

    /// All requests, in queue order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.waiting.iter_mut().map(|(_, one)| one)
    }

    /// Removes the next request.
    pub fn take_first(&mut self) -> Option<T> {
        (!self.waiting.is_empty()).then(|| self.waiting.remove(0).1)
    }

    /// Removes all requests that match, in queue order.
    pub fn take_where(&mut self, mut of: impl FnMut(&T) -> bool) -> Vec<T> {
        let (taken, waiting) = self.waiting.drain(..).partition(|(_, one)| of(one));
        self.waiting = waiting;
        let taken: Vec<(QueuePosition, T)> = taken;
        taken.into_iter().map(|(_, one)| one).collect()
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng as _, SeedableRng as _};

    use super::*;

    /// Their numbers in the order of their turns; each is a priority and the second in which it came.
    fn turns(all: &[(i32, u64)]) -> Vec<u64> {
        let mut queue = WaitQueue::default();
        for (number, (priority, second)) in all.iter().enumerate() {
            let number = number as u64;
            let arrived = Duration::from_secs(*second);
            queue.push(QueuePosition { priority: *priority, arrived, number }, number);
        }
        std::iter::from_fn(|| queue.take_first()).collect()
    }

    #[test]
    fn wait_queue_orders_by_priority_age_and_arrival() {
        for (story, all, expected) in [
            ("nobody", &[][..], &[][..]),
            ("equals go as they came", &[(0, 1), (0, 2), (0, 3)], &[0, 1, 2]),
            ("also those of the same moment", &[(7, 1), (7, 1), (7, 1)], &[0, 1, 2]),
            ("a higher priority passes", &[(0, 1), (1, 2), (2, 3)], &[2, 1, 0]),
            ("and a lower one lets pass", &[(-1, 1), (0, 9)], &[1, 0]),
            ("a level passes what came 10 s before", &[(0, 0), (1, 9)], &[1, 0]),
            ("and no more than that", &[(0, 0), (1, 11)], &[0, 1]),
            ("who came first goes first at the bound", &[(0, 0), (1, 10)], &[0, 1]),
            ("two levels pass 20 s", &[(0, 0), (2, 19), (2, 21), (0, 22)], &[1, 0, 2, 3]),
            ("the lowest is not passed for ever", &[(-100, 0), (100, 1999), (100, 2001)], &[1, 0, 2]),
        ] {
            assert_eq!(turns(all), expected, "{story}");
        }
    }

    #[test]
    fn late_requests_do_not_overtake_aged_ones() {
        let mut random = StdRng::seed_from_u64(1);
        let mut queue = WaitQueue::default();
        let mut waiting: Vec<QueuePosition> = Vec::new();
        let mut now = Duration::ZERO;
        // Twice as many come as have their turn, for as long as they come.
        for number in 0..4000 {
            now += Duration::from_millis(random.random_range(0..2000));
            if number < 2000 {
                let one = QueuePosition { priority: random.random_range(-100..=100), arrived: now, number };
                waiting.push(one);
                queue.push(one, one);
                if number % 2 == 0 {
                    continue;
                }
            }
            let Some(next) = queue.take_first() else { break };
            waiting.retain(|one| *one != next);
            for one in &waiting {
                let levels = u32::try_from(next.priority - one.priority).unwrap_or(0);
                assert!(next.arrived <= one.arrived + AGEING_INTERVAL * levels, "{next:?} passes {one:?}");
            }
        }
        assert!(waiting.is_empty());
    }

    #[test]
    fn wait_queue_keeps_order_when_requests_are_removed() {
        let mut queue = WaitQueue::default();
        for number in [4, 1, 3, 0, 2] {
            queue.push(QueuePosition { priority: 0, arrived: Duration::ZERO, number }, number);
        }
        assert_eq!(queue.take_where(|number| number % 2 == 1), [1, 3]);
        assert_eq!(queue.first(), Some(&0));
        assert_eq!(std::iter::from_fn(|| queue.take_first()).collect::<Vec<_>>(), [0, 2, 4]);
    }
}
