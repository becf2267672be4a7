//! The life of one rank, and the only place that says it is over.
//!
//! ```text
//! Loading ──▶ Loaded ──▶ Serving ──▶ stopped (drained, exit 0)
//!    └───────────┴──────────┴──────▶ Failed  (flushed, exit 1)
//! ```
//!
//! The first failure is the one that counts: what breaks afterwards is its consequence. Where it was the group's and
//! not the rank's own, the weights may be of use to the next group ([`Reuse`]).

use tokio::sync::watch;

use crate::tunnel::dial::NeighbourPath;

/// How far this rank has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Reading weights.
    Loading,
    /// Weights in memory, waiting for peers and for the smoke prompt.
    Loaded,
    /// Joined, and the smoke prompt is answered; rank 0 takes requests.
    Serving,
    /// Of no more use.
    Failed,
}

/// What a rank failed at, where people are told by a reason of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FailureCause {
    /// Anything else.
    #[default]
    Other,
    /// The group does not answer the smoke prompt.
    Smoke,
    /// The group: another rank is lost, or the way to it. What this rank has in memory may be sound.
    Group,
}

/// Whether a rank that failed is of use to the next formation of its group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reuse {
    /// It is not; its process ends.
    #[default]
    No,
    /// MLX's thread was asked to leave the group: nobody knows whether it is stuck there.
    Asked,
    /// It has its weights and no group.
    Yes,
    /// The next formation has begun with it, and this one says nothing more.
    Taken,
}

/// Why a rank is of no more use, where who finds out is not who says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailureReport {
    /// What it failed at.
    pub cause: FailureCause,
    /// Why.
    pub reason: String,
}

impl FailureReport {
    /// At its group.
    pub fn group(reason: impl Into<String>) -> Self {
        Self { cause: FailureCause::Group, reason: reason.into() }
    }
}

impl From<String> for FailureReport {
    fn from(reason: String) -> Self {
        Self { cause: FailureCause::Other, reason }
    }
}

/// What is known of this rank now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankStatus {
    /// How far it has come.
    pub phase: Phase,
    /// What it waits for, or why it failed; empty when there is nothing to say.
    pub message: String,
    /// Whether it has come so far as to serve.
    pub served: bool,
    /// What it failed at, once it did.
    pub cause: FailureCause,
    /// Whether it is of use to the next group, once it failed.
    pub reuse: Reuse,
    /// Why no new requests are taken, once somebody asked the rank to stop.
    pub draining: Option<String>,
    /// Everything is answered and the process may end.
    pub stopped: bool,
    /// How neighbours were reached to whose nodes cables lead.
    pub paths: Vec<NeighbourPath>,
}

/// Shared by everything that runs in this process.
#[derive(Clone, Debug)]
pub struct Lifecycle {
    status: watch::Sender<RankStatus>,
    /// Whether a rank that lost its group may be of use to the next one.
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
    /// Of a rank that may be of use to another group after this one, if it `outlives` it.
    pub fn new(can_rejoin: bool) -> Self {
        Self { can_rejoin, ..Self::default() }
    }

    /// What is known now.
    pub fn status(&self) -> RankStatus {
        self.status.borrow().clone()
    }

    /// To be told of every change.
    pub fn watch(&self) -> watch::Receiver<RankStatus> {
        self.status.subscribe()
    }

    /// One step further, with what it waits for next. Nothing leads back, and nothing out of `Failed`.
    pub fn advance(&self, phase: Phase, message: &str) {
        self.update(|now| {
            if now.phase != Phase::Failed && now.phase <= phase {
                now.phase = phase;
                now.served |= phase == Phase::Serving;
                message.clone_into(&mut now.message);
            }
        });
    }

    /// A neighbour was reached, to whose node a cable leads.
    pub fn add_path(&self, way: NeighbourPath) {
        self.update(|now| now.paths.push(way));
    }

    /// This rank is of no more use. Only the first reason is kept.
    pub fn fail(&self, reason: impl Into<String>) {
        self.fail_at(FailureCause::Other, reason);
    }

    /// The same, with what it failed at.
    pub fn fail_at(&self, cause: FailureCause, reason: impl Into<String>) {
        self.update(|now| {
            if now.phase != Phase::Failed && !now.stopped {
                now.phase = Phase::Failed;
                now.message = reason.into();
                now.cause = cause;
                if self.can_rejoin && cause == FailureCause::Group && now.draining.is_none() {
                    now.reuse = Reuse::Asked;
                }
                tracing::error!(reason = now.message, "this rank failed");
            }
        });
    }

    /// The same, as somebody else found.
    pub fn fail_with(&self, FailureReport { cause, reason }: FailureReport) {
        self.fail_at(cause, reason);
    }

    /// What became of a failed rank whose group is lost.
    pub fn set_reuse(&self, reuse: Reuse) {
        self.update(|now| {
            if now.phase == Phase::Failed {
                now.reuse = reuse;
            }
        });
    }

    /// Gives a rank that is of use to the next formation; whether it was there to be had.
    pub fn claim(&self) -> bool {
        self.status.send_if_modified(|now| {
            let there = now.reuse == Reuse::Yes;
            if there {
                now.reuse = Reuse::Taken;
            }
            there
        })
    }

    /// Take no new requests, answer the running ones, then stop.
    pub fn drain(&self, reason: &str) {
        self.update(|now| {
            if now.draining.is_none() {
                tracing::info!(reason, "draining");
                now.draining = Some(reason.to_owned());
            }
        });
    }

    /// Everything is answered.
    pub fn stop(&self) {
        self.update(|now| now.stopped |= now.phase != Phase::Failed);
    }

    /// Why this rank takes no requests; `None` while it does.
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

    /// Waits for the failure; returns its reason.
    pub async fn wait_failed(&self) -> String {
        self.wait_until(|now| now.phase == Phase::Failed).await.message
    }

    /// Waits until it is over, one way or the other.
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
            (true, FailureCause::Group, false, Reuse::Asked),
            (true, FailureCause::Group, true, Reuse::No),
            (true, FailureCause::Other, false, Reuse::No),
            (true, FailureCause::Smoke, false, Reuse::No),
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
