//! Power of this machine while engines compute and while none does, from samples of all that it draws, and what that
//! makes in joules. Pure: samples come in with what engines did meanwhile. Not here: the samples (`machine_load`), and
//! watts of a GPU alone, which say too little of a machine: they are a metric and nothing else.
//!
//! ```text
//! engines ─heartbeats─▶ SampledWork ─┐
//! macmon ─watts─────────────────────▶ PowerAverages ─▶ status.energy, when it has moved by a tenth,
//!                                                      and nothing any more when samples end
//! ```

use std::time::{Duration, Instant};

use russet_crds::{MAX_NODE_WATTS, MeasuredPower};

use crate::engine_activity::SampledWork;

/// Samples before an average is reported: a minute of either.
const MIN_SAMPLES: u32 = 6;
/// Samples over which an average forgets: ten minutes of either.
const MEMORY_SAMPLES: u32 = 64;
/// Time between two reports: a status is no telemetry.
pub const MIN_REPORT_INTERVAL: Duration = Duration::from_secs(300);
/// Change that is reported, as a share of what was reported last.
const MIN_CHANGE: f64 = 0.1;
/// Time without a sample of watts after which averages are no longer reported: they count before what the owner
/// declares, and the machine may be another one by now, or have lost its sensor.
pub const MAX_SAMPLE_AGE: Duration = Duration::from_secs(600);
/// Longest time between two samples that is counted in joules: beyond it the machine slept, or the tool hung.
const MAX_SAMPLE_GAP: Duration = Duration::from_secs(60);

/// Watts that are a machine's, of what a tool says.
pub fn plausible(watts: f64) -> Option<f64> {
    (watts > 0.0 && watts <= f64::from(MAX_NODE_WATTS)).then_some(watts)
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

    /// The average, once it has enough samples.
    fn known(self) -> Option<f64> {
        (self.samples >= MIN_SAMPLES).then_some(self.watts)
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
    /// When the machine said last what it draws; at first, when this began.
    sampled_at: Instant,
    /// Averages as they were when they were reported, not rounded.
    reported: ReportedPower,
    reported_at: Option<Instant>,
}

/// Watts while no engine computes, and while one does.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct ReportedPower {
    idle: Option<f64>,
    busy: Option<f64>,
}

impl PowerAverages {
    /// Goes on from what the node's status says.
    pub fn restored(reported: Option<MeasuredPower>, now: Instant) -> Self {
        let MeasuredPower { idle_watts, busy_watts } = reported.unwrap_or_default();
        let reported = ReportedPower { idle: idle_watts.map(f64::from), busy: busy_watts.map(f64::from) };
        let (busy, idle) = (busy_watts.into(), idle_watts.into());
        Self { busy, idle, sampled_at: now, reported, reported_at: None }
    }

    /// Takes a sample.
    pub fn add(&mut self, watts: f64, work: SampledWork, now: Instant) {
        self.sampled_at = now;
        match work {
            SampledWork::Busy => self.busy.add(watts),
            SampledWork::Idle => self.idle.add(watts),
            SampledWork::Mixed => {}
        }
    }

    /// Whether there is news to report: [`Self::reported`] then has it.
    pub fn has_news(&mut self, now: Instant) -> bool {
        if now.saturating_duration_since(self.sampled_at) > MAX_SAMPLE_AGE {
            let had_figures = self.reported != ReportedPower::default();
            *self = Self { sampled_at: self.sampled_at, ..Self::restored(None, now) };
            return had_figures;
        }
        let ReportedPower { idle, busy } = self.reported;
        let power = ReportedPower { idle: self.idle.known(), busy: self.busy.known() };
        let has_moved = has_moved(idle, power.idle) || has_moved(busy, power.busy);
        let is_early =
            self.reported_at.is_some_and(|at| now.saturating_duration_since(at) < MIN_REPORT_INTERVAL);
        if !has_moved || is_early {
            return false;
        }
        (self.reported, self.reported_at) = (power, Some(now));
        true
    }

    /// What was reported last; none where nothing is known, or no longer.
    pub fn reported(&self) -> Option<MeasuredPower> {
        let ReportedPower { idle, busy } = self.reported;
        let (idle_watts, busy_watts) = (idle.map(whole_watts), busy.map(whole_watts));
        let power = MeasuredPower { idle_watts, busy_watts };
        (power != MeasuredPower::default()).then_some(power)
    }
}

fn whole_watts(watts: f64) -> u32 {
    (watts.round() as u32).max(1)
}

/// Whether averages differ by so much that it is reported. They are not rounded here: of a machine that draws less than
/// ten watts, half a watt would flip a tenth.
fn has_moved(reported: Option<f64>, now: Option<f64>) -> bool {
    match (reported, now) {
        (_, None) => false,
        (None, Some(_)) => true,
        (Some(reported), Some(now)) => {
            whole_watts(now) != whole_watts(reported) && (now - reported).abs() >= MIN_CHANGE * reported
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

    #[test]
    fn power_is_reported_once_known_and_once_it_moves() {
        let start = Instant::now();
        let at = |minute: u64| start + Duration::from_secs(60 * minute);
        let mut power = PowerAverages::restored(None, start);
        let feed = |power: &mut PowerAverages, minute, count, watts, work| {
            for _ in 0..count {
                power.add(sample(watts, 0.5).0, work, at(minute));
            }
        };
        let report = |power: &mut PowerAverages, minute| {
            power.has_news(at(minute)).then(|| power.reported()).flatten()
        };
        feed(&mut power, 1, 5, 10.4, SampledWork::Idle);
        feed(&mut power, 1, 50, 500.0, SampledWork::Mixed);
        assert_eq!(report(&mut power, 1), None, "too little");
        feed(&mut power, 1, 1, 10.4, SampledWork::Idle);
        let idle = MeasuredPower { idle_watts: Some(10), busy_watts: None };
        assert_eq!(report(&mut power, 1), Some(idle));
        feed(&mut power, 5, 6, 96.0, SampledWork::Busy);
        assert_eq!(report(&mut power, 5), None, "too early");
        let both = MeasuredPower { idle_watts: Some(10), busy_watts: Some(96) };
        assert_eq!(report(&mut power, 6), Some(both));
        feed(&mut power, 60, 300, 104.0, SampledWork::Busy);
        assert_eq!(report(&mut power, 60), None, "less than a tenth more");
        feed(&mut power, 61, 300, 110.0, SampledWork::Busy);
        assert_eq!(report(&mut power, 61).and_then(|power| power.busy_watts), Some(110));
        // An agent that starts again goes on from there.
        let mut restored = PowerAverages::restored(Some(both), start);
        assert_eq!(report(&mut restored, 0), None);
        feed(&mut restored, 0, 300, 40.0, SampledWork::Busy);
        assert_eq!(
            report(&mut restored, 0),
            Some(MeasuredPower { idle_watts: Some(10), busy_watts: Some(40) })
        );
    }

    #[test]
    fn watts_that_round_to_another_number_are_no_news() {
        let start = Instant::now();
        let at = |minute: u64| start + Duration::from_secs(60 * minute);
        let mut power = PowerAverages::restored(None, start);
        for (minute, watts, expected) in
            [(1, 4.4, Some(4)), (10, 4.6, None), (20, 4.4, None), (30, 4.9, Some(5)), (40, 4.45, None)]
        {
            for _ in 0..2000 {
                power.add(watts, SampledWork::Idle, at(minute));
            }
            let report = power.has_news(at(minute)).then(|| power.reported()).flatten();
            assert_eq!(report.and_then(|power| power.idle_watts), expected, "{watts} W");
        }
    }

    #[test]
    fn watts_without_a_sample_for_minutes_are_dropped() {
        let start = Instant::now();
        let at = |second: u64| start + Duration::from_secs(second);
        let old = MeasuredPower { idle_watts: Some(10), busy_watts: Some(96) };
        let age = MAX_SAMPLE_AGE.as_secs();
        let mut silent = PowerAverages::restored(Some(old), start);
        assert!(!silent.has_news(at(age)) && silent.reported() == Some(old), "not yet");
        assert!(
            silent.has_news(at(age + 1)) && silent.reported().is_none(),
            "of a machine that says nothing"
        );
        assert!(!silent.has_news(at(age + 20)), "once");
        for _ in 0..MIN_SAMPLES {
            silent.add(12.0, SampledWork::Idle, at(age + 30));
        }
        let new = MeasuredPower { idle_watts: Some(12), busy_watts: None };
        assert!(silent.has_news(at(age + 30)) && silent.reported() == Some(new), "of new samples alone");
        let mut sampled = PowerAverages::restored(Some(old), start);
        sampled.add(10.0, SampledWork::Mixed, at(age));
        assert!(!sampled.has_news(at(age + 1)), "it says what it draws, if for no average");
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
