//! What the engines of this machine did while a sample of its power was taken, by their heartbeats. Pure. Not here: the
//! samples (`machine_load`), and what is made of them (`machine_power`).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use russet_rpc::engine as pb;

/// Share of a sample's time in which a batch runs that makes it a busy one: some forty heartbeats say it of ten seconds,
/// and between two batches there are moments without one.
const MIN_BUSY_SHARE: f64 = 0.75;
/// Load of the GPU beyond which somebody else uses it: such a machine does not wait.
const MAX_IDLE_GPU: f64 = 0.2;

/// What the engines of this machine do, from their heartbeats; clones share it.
#[derive(Clone, Debug, Default)]
pub struct EngineActivity(Arc<Mutex<ActivityClocks>>);

#[derive(Debug, Default)]
struct ActivityClocks {
    computing: UnionClock,
    loading: UnionClock,
    ended_batches: u64,
}

/// Time in which at least one engine does something: what several of them say of the same time counts once.
#[derive(Debug, Default)]
struct UnionClock {
    total: Duration,
    counted_until: Option<Instant>,
}

impl UnionClock {
    /// Counts the time from `from` to `until`, less what is counted already; calls come in the order of `until`.
    fn count(&mut self, from: Instant, until: Instant) {
        let from = self.counted_until.map_or(from, |counted| counted.max(from));
        self.total = self.total.saturating_add(until.saturating_duration_since(from));
        self.counted_until = self.counted_until.max(Some(until));
    }
}

/// What engines have done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActivityTotals {
    /// Time in which a batch ran.
    computing: Duration,
    /// Time in which weights were loaded.
    loading: Duration,
    /// Batches that ended.
    ended_batches: u64,
}

/// Reads the heartbeats of one engine.
#[derive(Debug, Default)]
pub struct HeartbeatReader {
    batches_ended: Option<u64>,
}

impl HeartbeatReader {
    /// Counts a heartbeat that arrived `now`: what runs at this moment stands for the time since the one before it.
    /// Batches that ended in between say only that the engine did not wait all the time: they may have been short.
    pub fn read(&mut self, state: &pb::EngineState, now: Instant, activity: &EngineActivity) {
        let before = self.batches_ended.replace(state.batches_ended);
        let ended = before.map_or(0, |before| state.batches_ended.saturating_sub(before));
        let interval = Duration::from_millis(state.heartbeat_milliseconds.into());
        let from = now.checked_sub(interval).unwrap_or(now);
        let mut clocks = activity.0.lock().unwrap_or_else(PoisonError::into_inner);
        clocks.ended_batches = clocks.ended_batches.saturating_add(ended);
        if matches!(state.phase(), pb::Phase::Loading | pb::Phase::Loaded) {
            clocks.loading.count(from, now);
        } else if state.batch_estimate_seconds > 0.0 {
            clocks.computing.count(from, now);
        }
    }
}

impl EngineActivity {
    /// Totals up to now.
    pub fn totals(&self) -> ActivityTotals {
        let clocks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ActivityClocks { computing, loading, ended_batches } = &*clocks;
        ActivityTotals { computing: computing.total, loading: loading.total, ended_batches: *ended_batches }
    }
}

/// What engines did between two samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleWindow {
    length: Duration,
    before: ActivityTotals,
    after: ActivityTotals,
}

/// Cuts time into windows: each reaches from the end of the one before it, so that what a tool averages since its last
/// sample is judged by all that engines did meanwhile, however soon the tool answers.
#[derive(Clone, Copy, Debug)]
pub struct SampleWindows {
    ended: Instant,
    totals: ActivityTotals,
}

impl SampleWindows {
    /// The first window begins now.
    pub fn new(now: Instant, totals: ActivityTotals) -> Self {
        Self { ended: now, totals }
    }

    /// The window that ends now.
    pub fn next(&mut self, now: Instant, totals: ActivityTotals) -> SampleWindow {
        let Self { ended, totals: before } = std::mem::replace(self, Self { ended: now, totals });
        SampleWindow { length: now.saturating_duration_since(ended), before, after: totals }
    }
}

/// What the machine did while a sample was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampledWork {
    /// An engine computed, nearly all the time.
    Busy,
    /// No engine did anything, nor did the GPU.
    Idle,
    /// Some of both, or something else: such a sample counts for neither average.
    Mixed,
}

impl SampledWork {
    /// Of a sample of this window, with the load of the GPU.
    pub fn of(window: SampleWindow, gpu: Option<f64>) -> Self {
        let SampleWindow { length, before, after } = window;
        let computing = after.computing.saturating_sub(before.computing);
        let is_busy = !length.is_zero() && computing >= length.mul_f64(MIN_BUSY_SHARE);
        match before == after {
            _ if is_busy => Self::Busy,
            true if gpu.is_none_or(|gpu| gpu <= MAX_IDLE_GPU) => Self::Idle,
            _ => Self::Mixed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heartbeat(phase: pb::Phase, ended: u64, estimate: f64) -> pb::EngineState {
        pb::EngineState {
            phase: phase as i32,
            batches_ended: ended,
            batch_estimate_seconds: estimate,
            heartbeat_milliseconds: 250,
            ..pb::EngineState::default()
        }
    }

    /// What an engine says in a heartbeat: its phase, batches that have ended, and the estimate of one that runs.
    type Beat = (pb::Phase, u64, f64);

    /// Feeds heartbeats of engines that beat in turn, one of each every 250 ms, and returns what the machine did.
    fn work(engines: &[Vec<Beat>], gpu: f64) -> SampledWork {
        let (activity, start) = (EngineActivity::default(), Instant::now());
        let mut windows = SampleWindows::new(start, activity.totals());
        let mut readers: Vec<_> = engines.iter().map(|_| HeartbeatReader::default()).collect();
        for reader in &mut readers {
            reader.read(&heartbeat(pb::Phase::Serving, 0, 0.0), start, &activity);
        }
        let beats = engines.iter().map(Vec::len).max().unwrap_or(4);
        let mut in_order: Vec<(u64, usize, Beat)> = engines
            .iter()
            .enumerate()
            .flat_map(|(engine, own)| {
                let offset = 250 * (engine + 1) / engines.len();
                own.iter().enumerate().map(move |(at, beat)| ((250 * at + offset) as u64, engine, *beat))
            })
            .collect();
        in_order.sort_by_key(|(milliseconds, ..)| *milliseconds);
        for (milliseconds, engine, (phase, ended, estimate)) in in_order {
            let at = start + Duration::from_millis(milliseconds);
            readers[engine].read(&heartbeat(phase, ended, estimate), at, &activity);
        }
        let end = start + Duration::from_millis(250 * beats as u64);
        SampledWork::of(windows.next(end, activity.totals()), Some(gpu))
    }

    #[test]
    fn heartbeats_tell_busy_samples_from_idle_ones() {
        use pb::Phase::{Loading, Serving};
        let (waits, runs) = ((Serving, 0, 0.0), (Serving, 0, 0.1));
        for (story, engines, gpu, expected) in [
            (
                "batch after batch",
                vec![vec![(Serving, 1, 0.1), (Serving, 9, 0.1), (Serving, 12, 0.1), (Serving, 15, 0.1)]],
                0.9,
                SampledWork::Busy,
            ),
            ("one long batch", vec![vec![(Serving, 0, 9.0); 4]], 0.9, SampledWork::Busy),
            ("one that waits", vec![vec![waits; 4]], 0.01, SampledWork::Idle),
            ("no engine at all", vec![], 0.0, SampledWork::Idle),
            ("no engine, and a game", vec![], 0.8, SampledWork::Mixed),
            (
                "short batches, far apart",
                vec![vec![(Serving, 1, 0.0), (Serving, 2, 0.0), (Serving, 3, 0.0), (Serving, 4, 0.0)]],
                0.1,
                SampledWork::Mixed,
            ),
            (
                "a short answer",
                vec![vec![waits, runs, (Serving, 2, 0.0), (Serving, 2, 0.0)]],
                0.3,
                SampledWork::Mixed,
            ),
            ("weights are loaded", vec![vec![(Loading, 0, 0.0); 4]], 0.0, SampledWork::Mixed),
            (
                "two that compute half of the time, at once",
                vec![vec![runs, runs, waits, waits], vec![runs, runs, waits, waits]],
                0.5,
                SampledWork::Mixed,
            ),
            (
                "two that compute in turn",
                vec![vec![runs, runs, waits, waits], vec![waits, waits, runs, runs]],
                0.9,
                SampledWork::Busy,
            ),
        ] {
            assert_eq!(work(&engines, gpu), expected, "{story}");
        }
    }

    #[test]
    fn a_window_reaches_from_the_sample_before() {
        let (activity, start) = (EngineActivity::default(), Instant::now());
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut windows = SampleWindows::new(start, activity.totals());
        let mut reader = HeartbeatReader::default();
        for beat in 1..=40 {
            reader.read(&heartbeat(pb::Phase::Serving, beat, 0.1), at(250 * beat), &activity);
        }
        // Asked after ten seconds, the tool answers within milliseconds.
        let asked = activity.totals();
        let window = windows.next(at(10_003), asked);
        assert_eq!(
            (window.length, SampledWork::of(window, None)),
            (Duration::from_millis(10_003), SampledWork::Busy)
        );
        let next = windows.next(at(20_001), activity.totals());
        assert_eq!(
            (next.length, SampledWork::of(next, None)),
            (Duration::from_millis(9_998), SampledWork::Idle)
        );
        let nothing = windows.next(at(20_001), activity.totals());
        assert_eq!(SampledWork::of(nothing, Some(0.9)), SampledWork::Mixed, "no time, and a GPU that works");
    }
}
