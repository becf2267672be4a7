//! Engine watchdog: distinguishes a hung engine from a busy one, from outside its process. Pure: heartbeats
//! and checks come in with their times. Not here: the kill (`supervise/engine_events`).
//!
//! An engine sends a heartbeat four times a second, from threads that never wait for MLX. Missing heartbeats
//! mean that the whole process stands still (SIGSTOP, a machine that pages). Heartbeats with the same batch
//! running on and on mean that MLX waits for a peer that does not answer, or is stuck itself. The engine
//! forecasts a batch's duration before it runs. Five times the forecast, and at least two seconds, is beyond
//! noise; a prefill of ten seconds is forecast as ten. Before it serves it is at least a minute: the batches of
//! the smoke prompt compile kernels.
//!
//! Killing a rank that would have recovered costs its group a restart, so every doubt that concerns this side
//! favours the engine. Neither silence nor a batch is timed by the clock, but by checks and heartbeats that
//! came in time ([`SilenceDetector`]). On a machine without a free core checks come late and count for less,
//! and it takes seven in a row. After a suspension of the agent all timers restart. An engine whose socket
//! does not exist yet may still be loading its libraries, and one that does not serve yet may be wiring a
//! hundred gigabytes. Both get longer, as long as the system does not report that a signal stopped them.

use std::time::{Duration, Instant};

use russet_crds::conditions::Reason;
use russet_rpc::engine as pb;
use russet_rpc::failure_detector::{BUSY_TIMEOUT, HEARTBEAT_INTERVAL, IDLE_TIMEOUT, SilenceDetector};
use thiserror::Error;

/// Between two checks: as often as engines send heartbeats.
pub const CHECK_INTERVAL: Duration = HEARTBEAT_INTERVAL;

/// Timeout for the socket of a new process: its libraries may come from a cold disk.
const SOCKET_TIMEOUT: Duration = Duration::from_secs(60);

/// A batch hangs when it takes this multiple of its forecast.
const FORECAST_FACTOR: f64 = 5.0;

/// Minimum batch timeout: below it the noise of a machine is larger than the forecast.
const MIN_BATCH_TIMEOUT: Duration = Duration::from_secs(2);

/// The same before an engine serves: the batches of its smoke prompt compile kernels, which no earlier batch
/// forecasts.
const MIN_SMOKE_BATCH_TIMEOUT: Duration = Duration::from_secs(60);

/// Why an engine is killed.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum HangError {
    /// No heartbeats arrive.
    #[error(
        "the engine sent no heartbeat for {:.1} s, where one is due every {} ms, and was killed: its process is frozen, or the machine does not schedule it",
        .silent.as_secs_f64(),
        HEARTBEAT_INTERVAL.as_millis()
    )]
    Silent {
        /// Duration of the silence.
        silent: Duration,
    },
    /// Heartbeats arrive, and a batch does not end.
    #[error(
        "a batch was running for {:.1} s where {:.3} s were forecast, and the engine was killed: it waits for a rank that does not answer, or is stuck",
        .running.as_secs_f64(),
        .forecast.as_secs_f64()
    )]
    Hung {
        /// Duration of the batch so far.
        running: Duration,
        /// Forecast duration.
        forecast: Duration,
    },
}

impl HangError {
    /// Reason for conditions, events and metrics.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Silent { .. } => Reason::EngineSilent,
            Self::Hung { .. } => Reason::EngineHung,
        }
    }
}

/// State of the watchdog for one engine.
#[derive(Debug)]
pub struct Watchdog {
    silence: SilenceDetector,
    /// Silence timeout; `None` for engines of a release without heartbeats.
    silence_timeout: Option<Duration>,
    /// Time since the last batch ended.
    batch: SilenceDetector,
    batches_ended: u64,
    current_batch: Option<RunningBatch>,
}

/// A batch that runs.
#[derive(Clone, Copy, Debug)]
struct RunningBatch {
    forecast: Duration,
    /// How long it may run.
    timeout: Duration,
    /// How long it was seen running.
    running: Duration,
}

impl Watchdog {
    /// Starts with an engine that has sent nothing yet.
    pub fn new(now: Instant) -> Self {
        let (silence, batch) = (SilenceDetector::new(now), SilenceDetector::new(now));
        Self { silence, silence_timeout: Some(SOCKET_TIMEOUT), batch, batches_ended: 0, current_batch: None }
    }

    /// The engine's socket accepts connections (the system accepts them for a frozen process too): heartbeats
    /// are expected from now on.
    pub fn socket_found(&mut self, now: Instant) {
        // Once only: an engine that is found again and again and never sends is still silent.
        if self.silence_timeout == Some(SOCKET_TIMEOUT) {
            self.silence.reset(now);
            self.silence_timeout = Some(IDLE_TIMEOUT);
        }
    }

    /// Takes a heartbeat of the engine.
    pub fn heartbeat(&mut self, state: &pb::EngineState, now: Instant) {
        self.silence.reset(now);
        self.silence_timeout = match state.phase() {
            _ if state.heartbeat_milliseconds == 0 => None,
            pb::Phase::Serving => Some(BUSY_TIMEOUT),
            _ => Some(IDLE_TIMEOUT),
        };
        let forecast = Duration::try_from_secs_f64(state.batch_estimate_seconds).unwrap_or_default();
        let same = self.current_batch.is_some() && self.batches_ended == state.batches_ended;
        self.batches_ended = state.batches_ended;
        if !same {
            self.batch.reset(now);
        }
        // A failed engine ends its batches itself, or is ended.
        let judged = !forecast.is_zero() && state.phase() != pb::Phase::Failed;
        let min_timeout = match state.phase() {
            pb::Phase::Serving => MIN_BATCH_TIMEOUT,
            _ => MIN_SMOKE_BATCH_TIMEOUT,
        };
        let timeout = min_timeout.max(forecast.mul_f64(FORECAST_FACTOR));
        self.current_batch =
            judged.then(|| RunningBatch { forecast, timeout, running: self.batch.tick(now) });
    }

    /// Returns why the engine is hung, if it is. `stopped` asks the system whether the process is stopped; it
    /// is called only for a silent engine.
    pub fn check(&mut self, now: Instant, stopped: impl FnOnce() -> bool) -> Option<HangError> {
        let silent = self.silence.tick(now);
        if let Some(patience) = self.silence_timeout
            && silent >= patience.min(BUSY_TIMEOUT)
            && (silent >= patience || stopped())
        {
            return Some(HangError::Silent { silent });
        }
        let RunningBatch { forecast, timeout, running } = self.current_batch?;
        (running >= timeout).then_some(HangError::Hung { running, forecast })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Activity of an engine for some seconds.
    #[derive(Clone, Copy)]
    enum EngineActivity {
        /// Sends heartbeats in this phase; batches of this forecast end all the time.
        RunsBatch(pb::Phase, f64),
        /// Sends heartbeats; one batch of this forecast runs all the time.
        BatchHangs(pb::Phase, f64),
        /// Sends heartbeats; nothing runs.
        Idle(pb::Phase),
        /// Sends one state, as releases before heartbeats did.
        Old,
        /// Sends nothing.
        Nothing,
        /// Sends nothing, and the system reports that a signal stopped the process.
        Stopped,
        /// The agent is suspended.
        Suspended,
        /// Its socket accepts connections, and it sends nothing.
        Listens,
        /// Works; heartbeats and checks come this late, because no process gets a core in time.
        Starves(f64),
    }
    use EngineActivity::*;

    /// Runs the story; returns the first error, and how many seconds after the last activity began.
    fn simulate(story: &[(f64, EngineActivity)]) -> Option<(&'static str, f64)> {
        let mut now = Instant::now();
        let (mut watchdog, mut ended) = (Watchdog::new(now), 0);
        for (seconds, does) in story {
            let (start, end) = (now, now + Duration::from_secs_f64(*seconds));
            // No batch spans two activities.
            ended += 1;
            let step = match does {
                Suspended => *seconds,
                Starves(late) => *late,
                _ => CHECK_INTERVAL.as_secs_f64(),
            };
            while now < end {
                now += Duration::from_secs_f64(step);
                let state = |phase: pb::Phase, ended, forecast| pb::EngineState {
                    phase: phase as i32,
                    batches_ended: ended,
                    batch_estimate_seconds: forecast,
                    heartbeat_milliseconds: 250,
                    ..Default::default()
                };
                let beat = match does {
                    RunsBatch(phase, forecast) => {
                        ended += 1;
                        Some(state(*phase, ended, *forecast))
                    }
                    BatchHangs(phase, forecast) => Some(state(*phase, ended, *forecast)),
                    Idle(phase) => Some(state(*phase, ended, 0.0)),
                    Old => Some(pb::EngineState {
                        heartbeat_milliseconds: 0,
                        ..state(pb::Phase::Serving, 0, 0.0)
                    }),
                    Starves(_) => Some(state(pb::Phase::Serving, ended, 0.02)),
                    Nothing | Stopped | Listens | Suspended => None,
                };
                if matches!(does, Listens) {
                    watchdog.socket_found(now);
                }
                if let Some(beat) = beat {
                    watchdog.heartbeat(&beat, now);
                }
                if let Some(trouble) = watchdog.check(now, || matches!(does, Stopped)) {
                    let kind = match trouble {
                        HangError::Silent { .. } => "silent",
                        HangError::Hung { .. } => "hung",
                    };
                    return Some((kind, (now - start).as_secs_f64()));
                }
            }
        }
        None
    }

    #[test]
    fn watchdog_detects_hangs_in_time_without_false_positives() {
        let (loading, loaded, serving) = (pb::Phase::Loading, pb::Phase::Loaded, pb::Phase::Serving);
        let works = (5.0, RunsBatch(serving, 0.02));
        for (story, lives, seen) in [
            ("who works is well", vec![(600.0, RunsBatch(serving, 0.02))], None),
            ("who rests is well", vec![(600.0, Idle(serving))], None),
            ("frozen in the middle of an answer", vec![works, (9.0, Nothing)], Some(("silent", 1.75))),
            ("frozen while nobody asks", vec![(5.0, Idle(serving)), (9.0, Nothing)], Some(("silent", 1.75))),
            (
                "frozen in a long prompt",
                vec![(5.0, BatchHangs(serving, 10.0)), (9.0, Nothing)],
                Some(("silent", 1.75)),
            ),
            ("hung in a collective", vec![works, (9.0, BatchHangs(serving, 0.02))], Some(("hung", 2.25))),
            ("ten seconds of a healthy prompt", vec![works, (10.0, BatchHangs(serving, 10.0)), works], None),
            (
                "a prompt on a machine that got five times slower",
                vec![works, (49.0, BatchHangs(serving, 10.0)), works],
                None,
            ),
            ("hung in a long prompt", vec![works, (90.0, BatchHangs(serving, 10.0))], Some(("hung", 50.25))),
            (
                "the first step ever",
                vec![(5.0, Idle(loaded)), (120.0, BatchHangs(loaded, 60.0)), works],
                None,
            ),
            ("hung in the first step ever", vec![(400.0, BatchHangs(loaded, 60.0))], Some(("hung", 300.25))),
            (
                "a kernel is compiled in a short step of the smoke prompt",
                vec![(5.0, Idle(loaded)), (59.0, BatchHangs(loaded, 0.004)), works],
                None,
            ),
            ("hung in a later step of it", vec![(90.0, BatchHangs(loaded, 0.004))], Some(("hung", 60.25))),
            ("a gigabyte a second for minutes", vec![(300.0, Idle(loading)), works], None),
            (
                "a pause of seven seconds while loading",
                vec![(5.0, Idle(loading)), (7.0, Nothing), works],
                None,
            ),
            ("stuck while loading", vec![(5.0, Idle(loading)), (60.0, Nothing)], Some(("silent", 8.0))),
            ("libraries from a cold disk", vec![(50.0, Nothing), works], None),
            ("stuck before it listens", vec![(90.0, Nothing)], Some(("silent", 60.0))),
            ("stopped while loading", vec![(5.0, Idle(loading)), (60.0, Stopped)], Some(("silent", 1.75))),
            ("stopped before it listens", vec![(90.0, Stopped)], Some(("silent", 1.75))),
            ("stopped before its first word", vec![(5.0, Listens), (9.0, Stopped)], Some(("silent", 0.25))),
            ("stopped in an answer", vec![works, (9.0, Stopped)], Some(("silent", 1.75))),
            ("stopped for a second, again and again", [works, (1.5, Stopped)].repeat(9), None),
            ("an old release is stopped", vec![(0.25, Old), (600.0, Stopped)], None),
            ("stuck before its first word", vec![(50.0, Nothing), (90.0, Listens)], Some(("silent", 8.25))),
            ("a slow first word", vec![(50.0, Nothing), (7.0, Listens), works], None),
            (
                "a release before beats is slow to speak",
                vec![(7.0, Listens), (0.25, Old), (600.0, Listens)],
                None,
            ),
            ("who spoke and is found again", vec![works, (9.0, Listens)], Some(("silent", 1.75))),
            ("this agent was suspended", vec![works, (30.0, Suspended), works], None),
            (
                "twice, with a look between",
                vec![works, (30.0, Suspended), (1.0, Nothing), (30.0, Suspended), works],
                None,
            ),
            (
                "and a batch seemed to run for long",
                vec![(1.0, BatchHangs(serving, 0.02)), (30.0, Suspended), works],
                None,
            ),
            (
                "but the engine is frozen",
                vec![works, (30.0, Suspended), (9.0, Nothing)],
                Some(("silent", 1.75)),
            ),
            ("a missed beat, again and again", [works, (1.5, Nothing)].repeat(9), None),
            (
                "nobody on this machine gets a core",
                vec![works, (6.0, Starves(0.9)), works, (6.0, Starves(1.4))],
                None,
            ),
            ("and for long: nothing says that it hangs", vec![works, (600.0, Starves(1.4))], None),
            (
                "a rank that has lost its group leaves its batch",
                vec![(1.0, BatchHangs(serving, 0.02)), (9.0, BatchHangs(pb::Phase::Failed, 0.02))],
                None,
            ),
            (
                "or is frozen",
                vec![works, (1.0, Idle(pb::Phase::Failed)), (9.0, Nothing)],
                Some(("silent", 8.0)),
            ),
            ("an engine of the release before", vec![(0.25, Old), (600.0, Nothing)], None),
        ] {
            assert_eq!(simulate(&lives), seen, "{story}");
        }
    }

    #[test]
    fn hang_errors_show_the_numbers() {
        let silent = HangError::Silent { silent: Duration::from_millis(1750) };
        assert!(
            silent.to_string().contains("sent no heartbeat for 1.8 s, where one is due every 250 ms"),
            "{silent}"
        );
        let (running, forecast) = (Duration::from_millis(2250), Duration::from_millis(21));
        let hung = HangError::Hung { running, forecast };
        assert!(hung.to_string().contains("running for 2.2 s where 0.021 s were forecast"), "{hung}");
    }
}
