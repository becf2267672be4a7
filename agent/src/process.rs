//! One engine process as its agent sees it. The state machine below is pure; starting, watching, killing and
//! adopting the process are in the modules beside it.
//!
//! ```text
//! Starting ─▶ Loading ─▶ Loaded ─▶ Serving
//!     └──────────┴─────────┴──────────┴──▶ Failed (reported by itself, or hung) ─▶ Exited
//!                                     └──▶ Exited (the process ended)
//! ```
//!
//! A process that outlives its group ([`reform`]) starts again at Starting, for the next formation.

pub mod launch;
pub mod record;
pub mod reform;
pub mod spawn;
pub mod stop;
pub mod watch;
pub mod watchdog;

use russet_crds::conditions::Reason;
use russet_rpc::engine as pb;

use self::watchdog::HangError;

/// State of an engine process.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ProcessState {
    /// The process runs and has not reported yet.
    #[default]
    Starting,
    /// Loads weights.
    Loading,
    /// Has loaded its weights; waits for its peers and the smoke prompt.
    Loaded,
    /// Joined its group; rank 0 answers requests.
    Serving,
    /// Reported a fatal failure and its cause, or hung.
    Failed(Reason, String),
    /// The process has exited; the text says how.
    Exited(String),
}

/// An event of an engine.
#[derive(Clone, Debug, PartialEq)]
pub enum ProcessEvent {
    /// It reported its state.
    Reported(Box<pb::EngineState>),
    /// It hangs and cannot be used any more.
    Hung(HangError),
    /// It joins the next formation.
    Reformed,
    /// It refused to leave its group or to reform, for this reason.
    ReformRefused(String),
    /// Its process exited.
    Exited(String),
}

impl ProcessState {
    /// The next state. A process that has ended stays so: a report that was under way when the process exited
    /// must not revive it.
    pub fn step(self, event: &ProcessEvent) -> Self {
        match (self, event) {
            (Self::Exited(how), _) => Self::Exited(how),
            (_, ProcessEvent::Exited(how)) => Self::Exited(how.clone()),
            (Self::Failed(reason, why), _) => Self::Failed(reason, why),
            (state, ProcessEvent::Reformed | ProcessEvent::ReformRefused(_)) => state,
            (_, ProcessEvent::Hung(hang)) => Self::Failed(hang.reason(), hang.to_string()),
            (state, ProcessEvent::Reported(report)) => match report.phase() {
                pb::Phase::Unspecified => state,
                pb::Phase::Loading => Self::Loading,
                pb::Phase::Loaded => Self::Loaded,
                pb::Phase::Serving => Self::Serving,
                pb::Phase::Failed => Self::Failed(reason(report.cause()), report.message.clone()),
            },
        }
    }

    /// Whether the process still exists.
    pub fn alive(&self) -> bool {
        !matches!(self, Self::Exited(_))
    }

    /// Label for metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Loading => "loading",
            Self::Loaded => "loaded",
            Self::Serving => "serving",
            Self::Failed(..) => "failed",
            Self::Exited(_) => "gone",
        }
    }
}

/// Condition reason of an engine's failure.
fn reason(cause: pb::FailureCause) -> Reason {
    match cause {
        pb::FailureCause::Unspecified => Reason::EngineFailed,
        pb::FailureCause::Smoke => Reason::SmokeFailed,
        pb::FailureCause::Group => Reason::PeerLost,
        pb::FailureCause::Model => Reason::ModelRefused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(phase: pb::Phase) -> ProcessEvent {
        failed_at(pb::FailureCause::Unspecified, phase)
    }

    fn failed_at(cause: pb::FailureCause, phase: pb::Phase) -> ProcessEvent {
        ProcessEvent::Reported(Box::new(pb::EngineState {
            phase: phase as i32,
            message: "m".into(),
            cause: cause as i32,
            ..Default::default()
        }))
    }

    #[test]
    fn process_state_moves_forward_and_the_end_is_final() {
        let run = |events: &[ProcessEvent]| {
            events.iter().fold(ProcessState::default(), |state, event| state.step(event))
        };
        let gone = ProcessEvent::Exited("signal 9".into());
        let hang = HangError::Silent { silent: std::time::Duration::from_secs(2) };
        let (stalled, silent) = (ProcessEvent::Hung(hang.clone()), hang.to_string());
        for (events, state) in [
            (vec![], ProcessState::Starting),
            (vec![report(pb::Phase::Unspecified)], ProcessState::Starting),
            (vec![report(pb::Phase::Loading), report(pb::Phase::Loaded)], ProcessState::Loaded),
            (vec![report(pb::Phase::Serving)], ProcessState::Serving),
            (
                vec![report(pb::Phase::Failed), report(pb::Phase::Serving)],
                ProcessState::Failed(Reason::EngineFailed, "m".into()),
            ),
            (
                vec![report(pb::Phase::Loaded), failed_at(pb::FailureCause::Smoke, pb::Phase::Failed)],
                ProcessState::Failed(Reason::SmokeFailed, "m".into()),
            ),
            (
                vec![failed_at(pb::FailureCause::Model, pb::Phase::Failed)],
                ProcessState::Failed(Reason::ModelRefused, "m".into()),
            ),
            (
                vec![failed_at(pb::FailureCause::Group, pb::Phase::Failed)],
                ProcessState::Failed(Reason::PeerLost, "m".into()),
            ),
            (
                vec![stalled.clone(), report(pb::Phase::Serving)],
                ProcessState::Failed(Reason::EngineSilent, silent.clone()),
            ),
            (
                vec![report(pb::Phase::Failed), stalled.clone()],
                ProcessState::Failed(Reason::EngineFailed, "m".into()),
            ),
            (vec![report(pb::Phase::Failed), gone.clone()], ProcessState::Exited("signal 9".into())),
            (vec![stalled.clone(), gone.clone()], ProcessState::Exited("signal 9".into())),
            (vec![gone.clone(), report(pb::Phase::Serving)], ProcessState::Exited("signal 9".into())),
        ] {
            assert_eq!(run(&events), state, "{events:?}");
        }
        assert!(!run(&[gone]).alive());
    }
}
