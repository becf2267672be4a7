//! What this rank does with its batches just now, told to those who watch it from outside of MLX: how many have
//! ended, and what the oldest of those that have not should take. It is written where batches are handed over and
//! where they end, and read while MLX's thread waits for whatever it waits for.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::compute::Step;
use crate::forecast::{FIRST_GUESS, Forecast, Work};

/// At one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pulse {
    /// Batches that have ended, and what else kept them waiting: tells one from the next.
    pub ended: u64,
    /// What the oldest that has not ended was expected to take, when it was handed over; `None` while none runs.
    pub running: Option<Duration>,
}

/// The batches of one rank; clones share them.
#[derive(Clone, Debug)]
pub struct Batches(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    stages: u32,
    forecast: Forecast,
    begun: VecDeque<Begun>,
    ended: u64,
    /// When the last one ended.
    last: Option<Instant>,
    /// Whether something else is done meanwhile.
    beside: bool,
}

#[derive(Debug)]
struct Begun {
    work: Work,
    at: Instant,
    forecast: Duration,
}

impl Batches {
    /// Of a rank in a pipeline of so many stages.
    pub fn new(stages: u32) -> Self {
        let (forecast, begun) = (Forecast::default(), VecDeque::new());
        Self(Arc::new(Mutex::new(State { stages, forecast, begun, ended: 0, last: None, beside: false })))
    }

    /// A batch is handed over. They end in this order.
    pub fn begin(&self, batch: &[Step]) {
        self.begin_at(Work::of(batch), Instant::now());
    }

    /// The oldest one ended; one that failed teaches nothing.
    pub fn end(&self, well: bool) {
        self.end_at(well, Instant::now());
    }

    /// Now.
    pub fn pulse(&self) -> Pulse {
        let state = self.0.lock();
        let oldest = state.begun.front().map(|oldest| oldest.forecast);
        Pulse { ended: state.ended, running: if state.beside { Some(FIRST_GUESS) } else { oldest } }
    }

    /// Does what is no batch and keeps batches waiting, such as filling caches with gigabytes. Nobody forecasts it, so it
    /// has the time of a first guess, and what waited for it is timed from its end.
    pub fn beside<T>(&self, work: impl FnOnce() -> T) -> T {
        self.0.lock().beside = true;
        let done = work();
        let mut state = self.0.lock();
        state.beside = false;
        state.ended += 1;
        state.last = Some(Instant::now());
        done
    }

    fn begin_at(&self, work: Work, at: Instant) {
        let mut state = self.0.lock();
        let forecast = state.forecast.of(work);
        state.begun.push_back(Begun { work, at, forecast });
    }

    fn end_at(&self, well: bool, at: Instant) {
        let mut state = self.0.lock();
        state.ended += 1;
        let before = state.last.replace(at);
        let Some(Begun { work, at: begun, .. }) = state.begun.pop_front() else { return };
        if !well {
            return;
        }
        // What it takes by itself, from the first stage to the last, is to be learned. Behind others it seems to take
        // longer than that, by all of theirs; or less, as little as one stage's share, counted from the end of the one
        // before. The same counted for each stage is never too little.
        let whole = at.saturating_duration_since(begun);
        let share = at.saturating_duration_since(before.map_or(begun, |before| before.max(begun)));
        let stages = state.stages.max(1);
        state.forecast.learn(work, whole.min(share * stages));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(tokens: usize) -> Work {
        Work::of(&[Step { slot: 0, offset: 0, tokens: vec![1; tokens], guesses: 0, choice: None }])
    }

    #[test]
    fn the_oldest_batch_is_told_with_what_it_should_take() {
        let (batches, start) = (Batches::new(1), Instant::now());
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        assert_eq!(batches.pulse(), Pulse::default());
        batches.begin_at(work(1), at(0));
        batches.begin_at(work(300), at(5));
        assert_eq!(batches.pulse(), Pulse { ended: 0, running: Some(Duration::from_secs(60)) });
        batches.end_at(true, at(20));
        assert_eq!(batches.pulse().ended, 1);
        batches.end_at(true, at(120));
        assert_eq!(batches.pulse(), Pulse { ended: 2, running: None });
        // Waiting for the one before is no part of it.
        batches.begin_at(work(300), at(500));
        assert_eq!(batches.pulse().running, Some(Duration::from_millis(100)));
        batches.end_at(false, at(60_000));
        let filling = batches.clone();
        assert_eq!(batches.beside(|| filling.pulse().running), Some(Duration::from_secs(60)));
        assert_eq!(batches.pulse().ended, 4, "what waited for it is not told from what comes");
        batches.begin_at(work(1), at(60_000));
        batches.begin_at(work(300), at(60_000));
        assert_eq!(batches.pulse().running, Some(Duration::from_millis(20)));
        batches.end_at(true, at(60_015));
        assert_eq!(
            batches.pulse().running,
            Some(Duration::from_millis(100)),
            "a failed batch taught something"
        );
    }

    #[test]
    fn a_batch_alone_in_a_pipeline_is_expected_to_pass_all_stages() {
        let (batches, start) = (Batches::new(4), Instant::now());
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        // Four on their way, one ends every 10 ms; each is 40 ms on its way.
        (0..4).for_each(|_| batches.begin_at(work(1), at(0)));
        for round in 1..400 {
            batches.end_at(true, at(30 + 10 * round));
            batches.begin_at(work(1), at(30 + 10 * round));
        }
        let forecast = batches.pulse().running.unwrap();
        assert!(forecast >= Duration::from_millis(40), "{forecast:?}");
        assert!(forecast < Duration::from_millis(60), "{forecast:?}");
    }
}
