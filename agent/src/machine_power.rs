//! Power of this machine while engines compute and while none does, from samples of all that it draws, and what that
//! makes in joules. Pure: samples come in with what engines did meanwhile. Not here: the samples (`machine_load`), and
//! watts of a GPU alone, which say too little of a machine: they are a metric and nothing else.
//!
//! ```text
//! engines ─heartbeats─▶ EngineActivity ─┐
//! macmon ─watts────────────────────────▶ PowerAverages ─▶ status.energy, when it has moved by a tenth
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use russet_crds::{MAX_NODE_WATTS, MeasuredPower};
use russet_rpc::engine as pb;

/// Samples before an average is reported: a minute of either.
const MIN_SAMPLES: u32 = 6;
/// Samples over which an average forgets: ten minutes of either.
const MEMORY_SAMPLES: u32 = 64;
/// Share of a sample's time in which engines compute that makes it a busy one. Heartbeats round it by a quarter.
const MIN_BUSY_SHARE: f64 = 0.75;
/// Load of the GPU beyond which somebody else uses it: such a machine does not wait.
const MAX_IDLE_GPU: f64 = 0.2;
/// Time between two reports: a status is no telemetry.
pub const MIN_REPORT_INTERVAL: Duration = Duration::from_secs(300);
/// Change that is reported, as a share of what was reported last.
const MIN_CHANGE: f64 = 0.1;
/// Longest time between two samples that is counted in joules: beyond it the machine slept, or the tool hung.
const MAX_SAMPLE_GAP: Duration = Duration::from_secs(60);

/// Watts that are a machine's, of what a tool says.
pub fn plausible(watts: f64) -> Option<f64> {
    (watts > 0.0 && watts <= f64::from(MAX_NODE_WATTS)).then_some(watts)
}

/// What the engines of this machine do, from their heartbeats; clones share it.
#[derive(Clone, Debug, Default)]
pub struct EngineActivity(Arc<ActivityCounters>);

#[derive(Debug, Default)]
struct ActivityCounters {
    computing_milliseconds: AtomicU64,
    loading_milliseconds: AtomicU64,
}

/// What engines have done so far, in milliseconds of all of them together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActivityTotals {
    computing: u64,
    loading: u64,
}

/// Reads the heartbeats of one engine.
#[derive(Debug, Default)]
pub struct HeartbeatReader {
    batches_ended: Option<u64>,
}

impl HeartbeatReader {
    /// Counts a heartbeat: the time since the one before it, in which the engine computed, loaded or waited.
    pub fn read(&mut self, state: &pb::EngineState, activity: &EngineActivity) {
        let before = self.batches_ended.replace(state.batches_ended);
        let ended = before.is_some_and(|before| before != state.batches_ended);
        let is_loading = matches!(state.phase(), pb::Phase::Loading | pb::Phase::Loaded);
        let is_computing = ended || state.batch_estimate_seconds > 0.0;
        let ActivityCounters { computing_milliseconds, loading_milliseconds } = &*activity.0;
        let counter = match (is_loading, is_computing) {
            (true, _) => loading_milliseconds,
            (false, true) => computing_milliseconds,
            (false, false) => return,
        };
        counter.fetch_add(state.heartbeat_milliseconds.into(), Ordering::Relaxed);
    }
}

impl EngineActivity {
    /// Totals up to now.
    pub fn totals(&self) -> ActivityTotals {
        let ActivityCounters { computing_milliseconds, loading_milliseconds } = &*self.0;
        ActivityTotals {
            computing: computing_milliseconds.load(Ordering::Relaxed),
            loading: loading_milliseconds.load(Ordering::Relaxed),
        }
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
    /// Of a sample that took `window`, with what engines had done before and after it, and the load of the GPU.
    pub fn of(before: ActivityTotals, after: ActivityTotals, window: Duration, gpu: Option<f64>) -> Self {
        let computing = after.computing.saturating_sub(before.computing);
        let loading = after.loading.saturating_sub(before.loading);
        let share = computing as f64 / (window.as_millis() as f64).max(1.0);
        match (computing, loading) {
            _ if share >= MIN_BUSY_SHARE => Self::Busy,
            (0, 0) if gpu.is_none_or(|gpu| gpu <= MAX_IDLE_GPU) => Self::Idle,
            _ => Self::Mixed,
        }
    }
}

/// Average watts of one kind of sample.
#[derive(Clone, Copy, Debug, Default)]
struct Average {
    samples: u32,
    watts: f64,
}

impl Average {
    fn add(&mut self, watts: f64) {
        self.samples = self.samples.saturating_add(1).min(MEMORY_SAMPLES);
        self.watts += (watts - self.watts) / f64::from(self.samples);
    }

    fn whole_watts(self) -> Option<u32> {
        (self.samples >= MIN_SAMPLES).then(|| (self.watts.round() as u32).max(1))
    }
}

impl From<Option<u32>> for Average {
    fn from(watts: Option<u32>) -> Self {
        watts.map_or_else(Self::default, |watts| Self { samples: MIN_SAMPLES, watts: watts.into() })
    }
}

/// Averages of the machine's power, and what was reported of them.
#[derive(Debug)]
pub struct PowerAverages {
    busy: Average,
    idle: Average,
    reported: Option<MeasuredPower>,
    reported_at: Option<Instant>,
}

impl PowerAverages {
    /// Goes on from what the node's status says.
    pub fn restored(reported: Option<MeasuredPower>) -> Self {
        let MeasuredPower { idle_watts, busy_watts } = reported.unwrap_or_default();
        Self { busy: busy_watts.into(), idle: idle_watts.into(), reported, reported_at: None }
    }

    /// Takes a sample.
    pub fn add(&mut self, watts: f64, work: SampledWork) {
        match work {
            SampledWork::Busy => self.busy.add(watts),
            SampledWork::Idle => self.idle.add(watts),
            SampledWork::Mixed => {}
        }
    }

    /// What is to be reported now, if that is news.
    pub fn report(&mut self, now: Instant) -> Option<MeasuredPower> {
        let power =
            MeasuredPower { idle_watts: self.idle.whole_watts(), busy_watts: self.busy.whole_watts() };
        let MeasuredPower { idle_watts, busy_watts } = self.reported.unwrap_or_default();
        let is_news = has_moved(idle_watts, power.idle_watts) || has_moved(busy_watts, power.busy_watts);
        let is_early =
            self.reported_at.is_some_and(|at| now.saturating_duration_since(at) < MIN_REPORT_INTERVAL);
        if !is_news || is_early {
            return None;
        }
        (self.reported, self.reported_at) = (Some(power), Some(now));
        Some(power)
    }
}

/// Whether watts differ by so much that it is reported.
fn has_moved(reported: Option<u32>, now: Option<u32>) -> bool {
    match (reported, now) {
        (_, None) => false,
        (None, Some(_)) => true,
        (Some(reported), Some(now)) => {
            let change = f64::from(now.abs_diff(reported));
            change > 0.0 && change >= MIN_CHANGE * f64::from(reported)
        }
    }
}

/// Sums up what a series of watts makes in joules.
#[derive(Clone, Copy, Debug, Default)]
pub struct JouleIntegral {
    last: Option<(Instant, f64)>,
}

impl JouleIntegral {
    /// Joules since the sample before, at the mean of both. A sample without watts begins anew.
    pub fn add(&mut self, watts: Option<f64>, now: Instant) -> f64 {
        let before = std::mem::replace(&mut self.last, watts.map(|watts| (now, watts)));
        let (Some((at, before)), Some(watts)) = (before, watts) else { return 0.0 };
        let elapsed = now.saturating_duration_since(at);
        if elapsed > MAX_SAMPLE_GAP { 0.0 } else { (before + watts) / 2.0 * elapsed.as_secs_f64() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::macos::load;

    /// A second of macmon, in the words of its releases.
    fn sample(watts: f64, gpu: f64) -> (f64, Option<f64>) {
        let line = format!(
            r#"{{"all_power":1.5,"gpu_active_ratio":{gpu},"memory":{{"ram_usage":1}},"sys_power":{watts}}}"#
        );
        let found = load::load(line.as_bytes()).unwrap();
        (found.watts.unwrap(), found.gpu)
    }

    fn heartbeat(phase: pb::Phase, ended: u64, estimate: f64) -> pb::EngineState {
        pb::EngineState {
            phase: phase as i32,
            batches_ended: ended,
            batch_estimate_seconds: estimate,
            heartbeat_milliseconds: 250,
            ..pb::EngineState::default()
        }
    }

    #[test]
    fn heartbeats_tell_busy_samples_from_idle_ones() {
        use pb::Phase::{Loading, Serving};
        let second = Duration::from_secs(1);
        for (story, beats, gpu, expected) in [
            (
                "batches end",
                vec![(Serving, 1, 0.0), (Serving, 2, 0.0), (Serving, 3, 0.0), (Serving, 4, 0.1)],
                0.9,
                SampledWork::Busy,
            ),
            ("one long batch", vec![(Serving, 0, 9.0); 4], 0.9, SampledWork::Busy),
            ("one that waits", vec![(Serving, 0, 0.0); 4], 0.01, SampledWork::Idle),
            ("no engine at all", vec![], 0.0, SampledWork::Idle),
            ("no engine, and a game", vec![], 0.8, SampledWork::Mixed),
            (
                "a short answer",
                vec![(Serving, 0, 0.0), (Serving, 0, 0.1), (Serving, 2, 0.0)],
                0.3,
                SampledWork::Mixed,
            ),
            ("weights are loaded", vec![(Loading, 0, 0.0); 4], 0.0, SampledWork::Mixed),
        ] {
            let (activity, mut reader) = (EngineActivity::default(), HeartbeatReader::default());
            reader.read(&heartbeat(Serving, 0, 0.0), &activity);
            let before = activity.totals();
            for (phase, ended, estimate) in beats {
                reader.read(&heartbeat(phase, ended, estimate), &activity);
            }
            assert_eq!(SampledWork::of(before, activity.totals(), second, Some(gpu)), expected, "{story}");
        }
    }

    #[test]
    fn power_is_reported_once_known_and_once_it_moves() {
        let (start, mut power) = (Instant::now(), PowerAverages::restored(None));
        let at = |minute: u64| start + Duration::from_secs(60 * minute);
        let feed = |power: &mut PowerAverages, count, watts, work| {
            for _ in 0..count {
                power.add(sample(watts, 0.5).0, work);
            }
        };
        feed(&mut power, 5, 10.4, SampledWork::Idle);
        feed(&mut power, 50, 500.0, SampledWork::Mixed);
        assert_eq!(power.report(at(1)), None, "too little");
        feed(&mut power, 1, 10.4, SampledWork::Idle);
        let idle = MeasuredPower { idle_watts: Some(10), busy_watts: None };
        assert_eq!(power.report(at(1)), Some(idle));
        feed(&mut power, 6, 96.0, SampledWork::Busy);
        assert_eq!(power.report(at(5)), None, "too early");
        let both = MeasuredPower { idle_watts: Some(10), busy_watts: Some(96) };
        assert_eq!(power.report(at(6)), Some(both));
        feed(&mut power, 300, 104.0, SampledWork::Busy);
        assert_eq!(power.report(at(60)), None, "less than a tenth more");
        feed(&mut power, 300, 110.0, SampledWork::Busy);
        assert_eq!(power.report(at(61)).and_then(|power| power.busy_watts), Some(110));
        // An agent that starts again goes on from there.
        let mut restored = PowerAverages::restored(Some(both));
        assert_eq!(restored.report(at(0)), None);
        feed(&mut restored, 300, 40.0, SampledWork::Busy);
        assert_eq!(
            restored.report(at(0)),
            Some(MeasuredPower { idle_watts: Some(10), busy_watts: Some(40) })
        );
    }

    #[test]
    fn joules_are_watts_over_the_time_between_samples() {
        let (start, mut integral) = (Instant::now(), JouleIntegral::default());
        for (story, second, watts, expected) in [
            ("the first", 0, Some(10.0), 0.0),
            ("ten seconds at 15 on average", 10, Some(20.0), 150.0),
            ("a tool that says nothing", 20, None, 0.0),
            ("and does again", 30, Some(20.0), 0.0),
            ("ten seconds", 40, Some(20.0), 200.0),
            ("the machine slept", 4000, Some(20.0), 0.0),
            ("and is awake", 4010, Some(20.0), 200.0),
        ] {
            assert_eq!(integral.add(watts, start + Duration::from_secs(second)), expected, "{story}");
        }
        for (watts, expected) in
            [(10.5, Some(10.5)), (0.0, None), (-1.0, None), (f64::NAN, None), (1e9, None)]
        {
            assert_eq!(plausible(watts), expected);
        }
    }
}
