//! Tells an engine that hangs from one that has much to do, from outside of it. Pure: beats and looks come in with
//! their times.
//!
//! An engine beats four times a second from threads that never wait for MLX. So beats that end say that the whole
//! process stands still (SIGSTOP, a machine that pages); and beats that go on while the same batch runs and runs say
//! that MLX waits for somebody who does not come, or is stuck itself. How long a batch may take the engine says
//! before it runs: five times that, and never less than two seconds, is more than noise, and a prompt that is
//! read for ten seconds is expected to take ten.
//!
//! Killing a rank that would have come back costs its group a new start, so an engine has the benefit of every doubt
//! that concerns this side. Neither silence nor a batch is timed by the clock, but by looks and beats that came in time
//! ([`Lull`]): on a machine without a free core looks come late and count for less, and it takes seven of them in a
//! row; an agent that was itself suspended gives everybody fresh time. An engine whose socket is not there yet may still
//! be loading its libraries, and one that serves nobody yet may be wiring a hundred gigabytes; both get longer, as long
//! as the system does not say that a signal stopped them.

use std::time::{Duration, Instant};

use russet_crds::conditions::Reason;
use russet_rpc::engine as pb;
use russet_rpc::failure_detector::{HEARTBEAT_INTERVAL, BUSY_TIMEOUT, IDLE_TIMEOUT, SilenceDetector};
use thiserror::Error;

/// Between two looks: as often as engines beat.
pub const CHECK_INTERVAL: Duration = HEARTBEAT_INTERVAL;

/// For the socket of a process that was just started: its libraries may come from a cold disk.
const SOCKET_TIMEOUT: Duration = Duration::from_secs(60);

/// A batch hangs when it takes so many times its forecast.
const FORECAST_FACTOR: f64 = 5.0;

/// And no batch hangs sooner: below it the noise of a machine is larger than what was forecast.
const MIN_BATCH_TIMEOUT: Duration = Duration::from_secs(2);

/// Why an engine is given up.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum HangError {
    /// It does not beat.
    #[error(
        "the engine was silent for {:.1} s, though it beats every {} ms, and was killed: its process is frozen, or the machine does not let it run",
        .silent.as_secs_f64(),
        HEARTBEAT_INTERVAL.as_millis()
    )]
    Silent {
        /// For so long.
        silent: Duration,
    },
    /// It beats, and a batch does not end.
    #[error(
        "a batch was running for {:.1} s where {:.3} s were forecast, and the engine was killed: it waits for a rank that does not answer, or is stuck",
        .running.as_secs_f64(),
        .forecast.as_secs_f64()
    )]
    Hung {
        /// For so long.
        running: Duration,
        /// What it should have taken.
        forecast: Duration,
    },
}

impl HangError {
    /// For conditions, events and metrics.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Silent { .. } => Reason::EngineSilent,
            Self::Hung { .. } => Reason::EngineHung,
        }
    }
}

/// What is known of one engine.
#[derive(Debug)]
pub struct Watchdog {
    silence: SilenceDetector,
    /// How long silence is borne; `None` for engines of a release that does not beat.
    silence_timeout: Option<Duration>,
    /// Since the last batch ended.
    batch: SilenceDetector,
    batches_ended: u64,
    /// What runs now, by its forecast, and for how long it was seen to.
    current_batch: Option<(Duration, Duration)>,
}

impl Watchdog {
    /// Begins with an engine that was not heard yet.
    pub fn new(now: Instant) -> Self {
        let (silence, batch) = (SilenceDetector::new(now), SilenceDetector::new(now));
        Self { silence, silence_timeout: Some(SOCKET_TIMEOUT), batch, batches_ended: 0, current_batch: None }
    }

    /// Its socket takes connections, which the system does for a frozen process too: from now on it can speak.
    pub fn socket_found(&mut self, now: Instant) {
        // Once: who is found again and again and never speaks is silent all the same.
        if self.silence_timeout == Some(SOCKET_TIMEOUT) {
            self.silence.reset(now);
            self.silence_timeout = Some(IDLE_TIMEOUT);
        }
    }

    /// The engine spoke.
    pub fn heartbeat(&mut self, state: &pb::EngineState, now: Instant) {
        self.silence.reset(now);
        self.silence_timeout = match state.phase() {
            _ if state.beat_milliseconds == 0 => None,
            pb::Phase::Serving => Some(BUSY_TIMEOUT),
            _ => Some(IDLE_TIMEOUT),
        };
        let forecast = Duration::try_from_secs_f64(state.batch_forecast_seconds).unwrap_or_default();
        let same = self.current_batch.is_some() && self.batches_ended == state.batches_ended;
        self.batches_ended = state.batches_ended;
        if !same {
            self.batch.reset(now);
        }
        // One that has failed gives up its batches by itself, or is given up by itself.
        let judged = !forecast.is_zero() && state.phase() != pb::Phase::Failed;
        self.current_batch = judged.then(|| (forecast, self.batch.tick(now)));
    }

    /// What is wrong with it, as far as was heard. Whether the system says that its process is `stopped` is asked only
    /// of one that is silent.
    pub fn check(&mut self, now: Instant, stopped: impl FnOnce() -> bool) -> Option<HangError> {
        let silent = self.silence.tick(now);
        if let Some(patience) = self.silence_timeout
            && silent >= patience.min(BUSY_TIMEOUT)
            && (silent >= patience || stopped())
        {
            return Some(HangError::Silent { silent });
        }
        let (forecast, running) = self.current_batch?;
        (running >= MIN_BATCH_TIMEOUT.max(forecast.mul_f64(FORECAST_FACTOR))).then_some(HangError::Hung { running, forecast })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What happens to an engine for some seconds.
    #[derive(Clone, Copy)]
    enum EngineActivity {
        /// It beats in this phase; batches of this forecast end all the time.
        RunsBatch(pb::Phase, f64),
        /// It beats, and one batch of this forecast runs all the time.
        BatchHangs(pb::Phase, f64),
        /// It beats and nothing runs.
        Idle(pb::Phase),
        /// It speaks once, as a release before beats did.
        Old,
        /// Nothing is heard.
        Nothing,
        /// Nothing is heard, and the system says that a signal stopped the process.
        Stopped,
        /// This agent does not run.
        Suspended,
        /// Its socket takes connections, and nothing is heard.
        Listens,
        /// It works, and so late are beats and looks: nobody on this machine gets a core in time.
        Starves(f64),
    }
    use EngineActivity::*;

    /// Lives through it; says what was wrong first, and how many seconds after the last thing began.
    fn simulate(story: &[(f64, EngineActivity)]) -> Option<(&'static str, f64)> {
        let mut now = Instant::now();
        let (mut watchdog, mut ended) = (Watchdog::new(now), 0);
        for (seconds, does) in story {
            let (start, end) = (now, now + Duration::from_secs_f64(*seconds));
            // No batch goes from one thing to the next.
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
                    batch_forecast_seconds: forecast,
                    beat_milliseconds: 250,
                    ..Default::default()
                };
                let beat = match does {
                    RunsBatch(phase, forecast) => {
                        ended += 1;
                        Some(state(*phase, ended, *forecast))
                    }
                    BatchHangs(phase, forecast) => Some(state(*phase, ended, *forecast)),
                    Idle(phase) => Some(state(*phase, ended, 0.0)),
                    Old => {
                        Some(pb::EngineState { beat_milliseconds: 0, ..state(pb::Phase::Serving, 0, 0.0) })
                    }
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
            ("the first step ever", vec![(5.0, Idle(loaded)), (120.0, BatchHangs(loaded, 60.0)), works], None),
            ("hung in the first step ever", vec![(400.0, BatchHangs(loaded, 60.0))], Some(("hung", 300.25))),
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
        assert!(silent.to_string().contains("silent for 1.8 s, though it beats every 250 ms"), "{silent}");
        let (running, forecast) = (Duration::from_millis(2250), Duration::from_millis(21));
        let hung = HangError::Hung { running, forecast };
        assert!(hung.to_string().contains("running for 2.2 s where 0.021 s were forecast"), "{hung}");
    }
}
