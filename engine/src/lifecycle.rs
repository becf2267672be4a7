//! Lifecycle of a rank: the only place that declares its end.
//!
//! ```text
//! Loading ──▶ Loaded ──▶ Serving ──▶ stopped (drained, exit 0)
//!    └───────────┴──────────┴──────▶ Failed  (flushed, exit 1)
//! ```
//!
//! The first failure counts: later ones are its consequences. If it was a failure of the group and not of the
//! rank itself, the next formation may reuse the weights ([`Reuse`]).

use tokio::sync::watch;

use crate::tunnel::dial::NeighbourPath;

/// Phase of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Loading weights.
    Loading,
    /// Weights are in memory; waiting for peers and for the smoke prompt.
    Loaded,
    /// Joined, and the smoke prompt has succeeded; rank 0 accepts requests.
    Serving,
    /// Failed for good.
    Failed,
}

/// Cause of a failure, where it maps to a reason of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FailureCause {
    /// Anything else.
    #[default]
    Other,
    /// The group fails the smoke prompt.
    Smoke,
    /// Another rank, or the connection to it, is lost. The weights in memory may be sound.
    Group,
    /// The model's files or the split are refused. Trying again gives the same answer.
    Model,
}

/// Whether a failed rank can join the next formation of its group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reuse {
    /// No; the process exits.
    #[default]
    No,
    /// The MLX thread was asked to leave the group; it may be stuck there.
    Pending,
    /// Yes: it has its weights and no group.
    Yes,
    /// The next formation has started with it; this one reports nothing more.
    Taken,
}

/// Why a rank failed, passed from the code that detects it to the code that reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailureReport {
    /// Cause.
    pub cause: FailureCause,
    /// Reason, as a message.
    pub reason: String,
}

impl FailureReport {
    /// A refusal of the model or its split.
    pub fn model(reason: impl Into<String>) -> Self {
        Self { cause: FailureCause::Model, reason: reason.into() }
    }

    /// A failure of the group.
    pub fn group(reason: impl Into<String>) -> Self {
        Self { cause: FailureCause::Group, reason: reason.into() }
    }
}

impl From<String> for FailureReport {
    fn from(reason: String) -> Self {
        Self { cause: FailureCause::Other, reason }
    }
}

/// Status of this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankStatus {
    /// Current phase.
    pub phase: Phase,
    /// What it waits for, or why it failed; empty if there is nothing to report.
    pub message: String,
    /// Whether it has ever reached `Serving`.
    pub served: bool,
    /// Cause of the failure, once it has failed.
    pub cause: FailureCause,
    /// Whether the next formation can reuse it, once it has failed.
    pub reuse: Reuse,
    /// Why no new requests are accepted, once the rank was asked to stop.
    pub draining: Option<String>,
    /// All requests have ended and the process may exit.
    pub stopped: bool,
    /// Paths by which neighbours with cables were reached.
    pub paths: Vec<NeighbourPath>,
}

/// Shared by all tasks of this process.
#[derive(Clone, Debug)]
pub struct Lifecycle {
    status: watch::Sender<RankStatus>,
    /// Whether this rank can rejoin a re-formed group.
    can_rejoin: bool,
}

impl Default for Lifecycle {
    fn default() -> Self {
        let now = RankStatus {
            phase: Phase::Loading,
            message: String::new(),
            served: false,
            cause: FailureCause::Other,
            reuse: Reuse::No,
            draining: None,
            stopped: false,
            paths: Vec::new(),
        };
        Self { status: watch::Sender::new(now), can_rejoin: false }
    }
}

impl Lifecycle {
    /// A new lifecycle; the argument says whether the rank can rejoin a re-formed group.
    pub fn new(can_rejoin: bool) -> Self {
        Self { can_rejoin, ..Self::default() }
    }

    /// Current status.
    pub fn status(&self) -> RankStatus {
        self.status.borrow().clone()
    }

    /// Subscribes to every change.
    pub fn watch(&self) -> watch::Receiver<RankStatus> {
        self.status.subscribe()
    }

    /// Advances to a later phase, with what it waits for next. No transition leads back, and none out of
    /// `Failed`.
    pub fn advance(&self, phase: Phase, message: &str) {
        self.update(|now| {
            if now.phase != Phase::Failed && now.phase <= phase {
                now.phase = phase;
                now.served |= phase == Phase::Serving;
                message.clone_into(&mut now.message);
            }
        });
    }

    /// Records the path to a neighbour whose node has a cable.
    pub fn add_path(&self, path: NeighbourPath) {
        self.update(|now| now.paths.push(path));
    }

    /// Fails this rank. Only the first reason is kept.
    pub fn fail(&self, reason: impl Into<String>) {
        self.fail_at(FailureCause::Other, reason);
    }

    /// Fails this rank with a cause.
    pub fn fail_at(&self, cause: FailureCause, reason: impl Into<String>) {
        self.update(|now| {
            if now.phase != Phase::Failed && !now.stopped {
                now.phase = Phase::Failed;
                now.message = reason.into();
                now.cause = cause;
                if self.can_rejoin && cause == FailureCause::Group && now.draining.is_none() {
                    now.reuse = Reuse::Pending;
                }
                tracing::error!(reason = now.message, "this rank failed");
            }
        });
    }

    /// Fails this rank with a failure that other code detected.
    pub fn fail_with(&self, FailureReport { cause, reason }: FailureReport) {
        self.fail_at(cause, reason);
    }

    /// Records whether a failed rank whose group is lost can be reused.
    pub fn set_reuse(&self, reuse: Reuse) {
        self.update(|now| {
            if now.phase == Phase::Failed {
                now.reuse = reuse;
            }
        });
    }

    /// Claims a reusable rank for the next formation; returns whether it was available.
    pub fn claim(&self) -> bool {
        self.status.send_if_modified(|now| {
            let there = now.reuse == Reuse::Yes;
            if there {
                now.reuse = Reuse::Taken;
            }
            there
        })
    }

    /// Drains: accepts no new requests, finishes the running ones, then stops.
    pub fn drain(&self, reason: &str) {
        self.update(|now| {
            if now.draining.is_none() {
                tracing::info!(reason, "draining");
                now.draining = Some(reason.to_owned());
            }
        });
    }

    /// All requests have ended.
    pub fn stop(&self) {
        self.update(|now| now.stopped |= now.phase != Phase::Failed);
    }

    /// Why this rank accepts no requests; `None` while it does.
    pub fn unavailable_reason(&self) -> Option<String> {
        let now = self.status.borrow();
        match (now.phase, &now.draining) {
            (Phase::Failed, _) => Some(now.message.clone()),
            (_, Some(reason)) => Some(format!("this engine is stopping: {reason}")),
            (Phase::Serving, None) => None,
            (Phase::Loading, None) => Some("this engine is still loading its weights".into()),
            (Phase::Loaded, None) => {
                Some("this engine is still waiting for its peers or its smoke prompt".into())
            }
        }
    }

    /// Waits until `condition` holds.
    pub async fn wait_until(&self, condition: impl FnMut(&RankStatus) -> bool) -> RankStatus {
        let mut watch = self.status.subscribe();
        // The sender lives in `self`, so the channel cannot be closed while this waits.
        let now = watch.wait_for(condition).await.map(|now| now.clone());
        now.unwrap_or_else(|_| self.status())
    }

    /// Waits for a failure; returns its reason.
    pub async fn wait_failed(&self) -> String {
        self.wait_until(|now| now.phase == Phase::Failed).await.message
    }

    /// Waits for the end: stopped or failed.
    pub async fn wait_ended(&self) {
        self.wait_until(|now| now.phase == Phase::Failed || now.stopped).await;
    }

    fn update(&self, change: impl FnOnce(&mut RankStatus)) {
        self.status.send_if_modified(|now| {
            let before = now.clone();
            change(now);
            *now != before
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_is_the_one_that_counts() {
        let life = Lifecycle::default();
        life.advance(Phase::Loaded, "waiting for rank 1");
        life.fail("rank 1 is gone");
        life.fail_at(FailureCause::Smoke, "a consequence");
        life.advance(Phase::Serving, "");
        life.stop();
        let now = life.status();
        assert_eq!((now.phase, now.message.as_str(), now.stopped), (Phase::Failed, "rank 1 is gone", false));
        assert_eq!(now.cause, FailureCause::Other);
    }

    #[test]
    fn only_a_rank_that_lost_its_group_may_rejoin() {
        for (outlives, cause, draining, reuse) in [
            (true, FailureCause::Group, false, Reuse::Pending),
            (true, FailureCause::Group, true, Reuse::No),
            (true, FailureCause::Other, false, Reuse::No),
            (true, FailureCause::Smoke, false, Reuse::No),
            (true, FailureCause::Model, false, Reuse::No),
            (false, FailureCause::Group, false, Reuse::No),
        ] {
            let life = Lifecycle::new(outlives);
            life.set_reuse(Reuse::Yes);
            assert_eq!(life.status().reuse, Reuse::No, "it has not failed yet");
            if draining {
                life.drain("SIGTERM");
            }
            life.fail_at(cause, "rank 1 is gone");
            assert_eq!(life.status().reuse, reuse, "{outlives} {cause:?} {draining}");
            assert!(!life.claim(), "nobody knows yet");
        }
    }

    #[test]
    fn reusable_rank_is_claimed_once() {
        let life = Lifecycle::new(true);
        life.fail_at(FailureCause::Group, "rank 1 is gone");
        life.set_reuse(Reuse::Yes);
        assert_eq!([life.claim(), life.claim()], [true, false]);
        assert_eq!(life.status().reuse, Reuse::Taken);
    }

    #[test]
    fn requests_are_rejected_before_serving_and_while_draining() {
        let life = Lifecycle::default();
        assert_eq!(life.unavailable_reason().as_deref(), Some("this engine is still loading its weights"));
        life.advance(Phase::Loaded, "");
        assert_eq!(
            life.unavailable_reason().as_deref(),
            Some("this engine is still waiting for its peers or its smoke prompt")
        );
        life.advance(Phase::Serving, "");
        assert_eq!(life.unavailable_reason(), None);
        life.drain("SIGTERM");
        assert_eq!(life.unavailable_reason().as_deref(), Some("this engine is stopping: SIGTERM"));
    }
}
