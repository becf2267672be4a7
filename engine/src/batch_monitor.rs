//! Batch monitor: progress of this rank's batches, for observers outside of MLX. It reports how many batches
//! have ended and how long the oldest running one should take. It is updated where batches start and end, and
//! can be read while the MLX thread blocks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::batch_time::{BatchSize, BatchTimeModel, DEFAULT_ESTIMATE, ScoredWork};
use crate::executor::{BatchProgress, SequenceStep};

/// The batches of one rank; clones share them.
#[derive(Clone, Debug)]
pub struct BatchMonitor(Arc<Mutex<MonitorState>>);

#[derive(Debug)]
struct MonitorState {
    stages: u32,
    /// What rank 0 scored in the last batches, the newest first, where this is another rank.
    scored_before: Option<VecDeque<ScoredWork>>,
    /// The least that a batch is said to take.
    min_estimate: Duration,
    model: BatchTimeModel,
    in_flight: VecDeque<MonitoredBatch>,
    ended: u64,
    /// When the last batch ended.
    last_ended: Option<Instant>,
    /// Whether other work is delaying the batches.
    other_work: bool,
}

#[derive(Debug)]
struct MonitoredBatch {
    size: BatchSize,
    started: Instant,
    estimate: Duration,
}

impl BatchMonitor {
    /// A monitor of a rank in a pipeline of `stages` stages. No batch is said to take less than `min_estimate`.
    pub fn new(stages: u32, min_estimate: Duration) -> Self {
        Self(Arc::new(Mutex::new(MonitorState {
            stages,
            scored_before: None,
            min_estimate,
            model: BatchTimeModel::default(),
            in_flight: VecDeque::new(),
            ended: 0,
            last_ended: None,
            other_work: false,
        })))
    }

    /// The same of a rank that scores nothing itself. While rank 0 scores a batch, the others wait for it in one of those
    /// behind: in the next one, or as many later as activations are on their way between stages.
    #[must_use]
    pub fn of_follower(self) -> Self {
        self.0.lock().scored_before = Some(VecDeque::new());
        self
    }

    /// A batch starts. Batches end in start order.
    pub fn begin(&self, batch: &[SequenceStep]) {
        self.begin_at(batch, Instant::now());
    }

    /// The oldest batch ended; a failed one does not update the model.
    pub fn end(&self, succeeded: bool) {
        self.end_at(succeeded, Instant::now());
    }

    /// Current progress.
    pub fn progress(&self) -> BatchProgress {
        let state = self.0.lock();
        let oldest = state.in_flight.front().map(|oldest| oldest.estimate.max(state.min_estimate));
        BatchProgress {
            ended_batches: state.ended,
            running_estimate: if state.other_work { Some(DEFAULT_ESTIMATE) } else { oldest },
        }
    }

    /// Runs work that is no batch and delays batches, such as filling caches with gigabytes. It is not
    /// predicted, so it gets the default estimate, and batches that waited for it are timed from its end.
    pub fn run_other_work<T>(&self, work: impl FnOnce() -> T) -> T {
        self.0.lock().other_work = true;
        let done = work();
        let mut state = self.0.lock();
        state.other_work = false;
        state.ended += 1;
        state.last_ended = Some(Instant::now());
        done
    }

    pub(crate) fn begin_at(&self, batch: &[SequenceStep], at: Instant) {
        let mut state = self.0.lock();
        let mut size = BatchSize::from_steps(batch);
        let stages = state.stages.max(1) as usize;
        if let Some(scored_before) = &mut state.scored_before {
            size =
                size.with_scored(scored_before.iter().copied().fold(ScoredWork::default(), ScoredWork::max));
            scored_before.push_front(ScoredWork::from_steps(batch));
            scored_before.truncate(stages);
        }
        let estimate = state.model.estimate(size);
        state.in_flight.push_back(MonitoredBatch { size, started: at, estimate });
    }

    pub(crate) fn end_at(&self, succeeded: bool, at: Instant) {
        let mut state = self.0.lock();
        state.ended += 1;
        let before = state.last_ended.replace(at);
        let Some(MonitoredBatch { size, started, .. }) = state.in_flight.pop_front() else {
            return;
        };
        if !succeeded {
            return;
        }
        // The model learns the time of a batch by itself, from the first stage to the last. Behind other
        // batches the measured time is longer, by all of theirs; counted from the end of the previous batch
        // it may be as short as one stage's share. That share times the number of stages is never too little.
        let whole = at.saturating_duration_since(started);
        let share = at.saturating_duration_since(before.map_or(started, |before| before.max(started)));
        let stages = state.stages.max(1);
        state.model.record(size, whole.min(share * stages));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::ScoreSpec;

    fn work(tokens: usize) -> [SequenceStep; 1] {
        let tokens = vec![1; tokens];
        [SequenceStep { slot: 0, offset: 0, tokens, draft_tokens: 0, adapter: 0, sample: None, score: None }]
    }

    fn scored(tokens: usize) -> [SequenceStep; 1] {
        let score = Some(ScoreSpec { tokens: vec![1; tokens], top: 0 });
        work(tokens).map(|step| SequenceStep { score: score.clone(), ..step })
    }

    #[test]
    fn a_follower_expects_to_wait_behind_a_scored_batch() {
        let start = Instant::now();
        for (stages, waits) in [(1, [true, false, false]), (2, [true, true, false])] {
            let rank_0 = BatchMonitor::new(stages, Duration::ZERO);
            let follower = BatchMonitor::new(stages, Duration::ZERO).of_follower();
            let mut now = start;
            let mut run = |monitor: &BatchMonitor, batch: &[SequenceStep], milliseconds| {
                monitor.begin_at(batch, now);
                let estimate = monitor.progress().running_estimate.unwrap();
                now += Duration::from_millis(milliseconds);
                monitor.end_at(true, now);
                estimate
            };
            let quick = Duration::from_millis(10 * u64::from(stages));
            for monitor in [&rank_0, &follower] {
                for tokens in [1, 64].repeat(10) {
                    run(monitor, &work(tokens), 10);
                }
            }
            // On rank 0 the batch itself takes longer, on others one behind it.
            assert!(run(&rank_0, &scored(64), 10) > quick);
            assert!(run(&rank_0, &work(1), 10) <= quick);
            assert!(run(&follower, &scored(64), 10) <= quick);
            for waits in waits {
                let takes = if waits { 100 } else { 10 };
                assert_eq!(run(&follower, &work(1), takes) > quick, waits, "{stages} stages");
            }
        }
    }

    #[test]
    fn batch_monitor_reports_the_estimate_of_the_oldest_batch() {
        let (batches, start) = (BatchMonitor::new(1, Duration::ZERO), Instant::now());
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        assert_eq!(batches.progress(), BatchProgress::default());
        batches.begin_at(&work(1), at(0));
        batches.begin_at(&work(300), at(5));
        assert_eq!(
            batches.progress(),
            BatchProgress { ended_batches: 0, running_estimate: Some(Duration::from_secs(60)) }
        );
        batches.end_at(true, at(20));
        assert_eq!(batches.progress().ended_batches, 1);
        batches.end_at(true, at(120));
        assert_eq!(batches.progress(), BatchProgress { ended_batches: 2, running_estimate: None });
        // The wait for the previous batch is excluded.
        batches.begin_at(&work(300), at(500));
        assert_eq!(batches.progress().running_estimate, Some(Duration::from_millis(100)));
        batches.end_at(false, at(60_000));
        let filling = batches.clone();
        assert_eq!(
            batches.run_other_work(|| filling.progress().running_estimate),
            Some(Duration::from_secs(60))
        );
        assert_eq!(batches.progress().ended_batches, 4, "waiting work is not distinguished from later work");
        batches.begin_at(&work(1), at(60_000));
        batches.begin_at(&work(300), at(60_000));
        assert_eq!(batches.progress().running_estimate, Some(Duration::from_millis(20)));
        batches.end_at(true, at(60_015));
        assert_eq!(
            batches.progress().running_estimate,
            Some(Duration::from_millis(100)),
            "a failed batch taught something"
        );
    }

    #[test]
    fn no_estimate_is_below_the_least() {
        let (batches, start) = (BatchMonitor::new(1, Duration::from_secs(12)), Instant::now());
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        batches.begin_at(&work(1), at(0));
        assert_eq!(batches.progress().running_estimate, Some(Duration::from_secs(60)));
        batches.end_at(true, at(20));
        assert_eq!(batches.progress().running_estimate, None);
        // Four seconds for what takes 20 ms alone: other programs had the cores.
        batches.begin_at(&work(1), at(30));
        assert_eq!(batches.progress().running_estimate, Some(Duration::from_secs(12)));
    }

    #[test]
    fn batch_estimate_covers_all_pipeline_stages() {
        let (batches, start) = (BatchMonitor::new(4, Duration::ZERO), Instant::now());
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        // Four in flight, one ends every 10 ms; each is in flight for 40 ms.
        (0..4).for_each(|_| batches.begin_at(&work(1), at(0)));
        for round in 1..400 {
            batches.end_at(true, at(30 + 10 * round));
            batches.begin_at(&work(1), at(30 + 10 * round));
        }
        let forecast = batches.progress().running_estimate.unwrap();
        assert!(forecast >= Duration::from_millis(40), "{forecast:?}");
        assert!(forecast < Duration::from_millis(60), "{forecast:?}");
    }
}
