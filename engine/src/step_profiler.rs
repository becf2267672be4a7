//! Step profiler of one rank: bytes exchanged between ranks, and how long a batch computes, waits for other
//! ranks and samples. MLX overlaps these parts, so their times are visible only if the rank waits for each
//! part by itself; it does so for one batch in [`BATCHES_PER_TIMING`], which then takes a little longer.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

/// One batch in this many is timed.
pub const BATCHES_PER_TIMING: u64 = 64;

/// Kind of data exchanged between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Sums over the tensor ranks of a stage.
    AllSum,
    /// Hidden states to the next stage.
    Send,
    /// Hidden states from the previous stage.
    Receive,
}

/// Phase of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepPhase {
    /// Layers.
    Forward,
    /// Communication between ranks, including waiting for them.
    Collective,
    /// Head and sampling.
    Sample,
}

/// Labels of [`Collective`], in its order.
pub const COLLECTIVES: [&str; 3] = ["all_sum", "send", "receive"];
/// Labels of [`StepPhase`], in its order.
pub const PHASES: [&str; 3] = ["forward", "collective", "sample"];

/// Totals since the rank started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTotals {
    /// Bytes by [`Collective`].
    pub bytes: [u64; 3],
    /// Seconds of the timed batches, by [`StepPhase`].
    pub seconds: [f64; 3],
    /// Number of timed batches.
    pub timed_batches: u64,
}

/// The profiler of one rank; clones share it.
#[derive(Clone, Debug, Default)]
pub struct StepProfiler(Arc<Mutex<ProfilerState>>);

#[derive(Debug, Default)]
struct ProfilerState {
    batches: u64,
    timing: bool,
    totals: StepTotals,
}

impl StepProfiler {
    /// Totals so far.
    pub fn totals(&self) -> StepTotals {
        self.0.lock().totals
    }

    /// Starts a batch; returns whether it is timed. All ranks of a group time the same ones.
    pub fn begin_batch(&self) -> bool {
        let mut state = self.0.lock();
        state.batches += 1;
        state.timing = state.batches.is_multiple_of(BATCHES_PER_TIMING);
        state.totals.timed_batches += u64::from(state.timing);
        state.timing
    }

    /// Whether the batch started last is timed.
    pub fn is_timing(&self) -> bool {
        self.0.lock().timing
    }

    /// Counts exchanged bytes.
    pub fn count_bytes(&self, collective: Collective, bytes: usize) {
        self.0.lock().totals.bytes[collective as usize] += bytes as u64;
    }

    /// Records the time of a phase of the timed batch.
    pub fn record_time(&self, phase: StepPhase, time: Duration) {
        self.0.lock().totals.seconds[phase as usize] += time.as_secs_f64();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_batch_in_many_is_timed_and_all_are_counted() {
        let meter = StepProfiler::default();
        let timed: Vec<u64> = (1..=200).filter(|_| meter.begin_batch()).collect();
        assert_eq!(timed, [64, 128, 192]);
        assert!(!meter.is_timing());
        meter.count_bytes(Collective::Send, 8);
        meter.count_bytes(Collective::Send, 8);
        meter.count_bytes(Collective::AllSum, 3);
        meter.record_time(StepPhase::Sample, Duration::from_millis(500));
        let totals = StepTotals { bytes: [3, 16, 0], seconds: [0.0, 0.0, 0.5], timed_batches: 3 };
        assert_eq!(meter.clone().totals(), totals);
    }
}
