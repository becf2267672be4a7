//! Leader election: of several operators one acts, the others stand by. The holder of the Lease
//! `russet-system/russet-operator` acts; the rules are in [`rules`], requests are here.
//!
//! ```text
//! standing by ──the Lease is free, ours, or expired──▶ acting
//!      ▲                                                 │
//!      └── another holder, or no renewal by the deadline ┘
//! ```
//!
//! # Why there are never two leaders
//!
//! A holder stops at [`Timing::deadline`] after the start of its last successful renewal. Another process
//! takes the Lease only after it saw no renewal for [`Timing::duration`], counted from a time when that last
//! renewal was already stored, which is later. The difference covers requests that the old holder had sent
//! and the server had not yet answered; the embedded API server executes no write of a request later than
//! that (any other is trusted as far as every Kubernetes controller trusts it). Clocks of different machines
//! are never compared: each measures on its own. The old holder checks its clock before every step of its
//! work, not only when a timer fires, so a process that was frozen does nothing after it resumes. It uses the
//! longer of the monotonic and the wall clock, because the former stops while a machine sleeps. The Lease
//! itself is written by compare-and-swap.

mod rules;
#[cfg(test)]
mod tests;

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant, SystemTime};

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use parking_lot::Mutex;
use rules::{LeaseAction, ObservedLease};
use russet_crds::names;

/// Name of the Lease.
pub const LEASE: &str = "russet-operator";

/// The periods of the election.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// A Lease without renewal for this long is free.
    pub duration: Duration,
    /// A holder without a successful renewal for this long stops acting.
    pub deadline: Duration,
    /// Interval of reads of the Lease, and of renewals.
    pub retry: Duration,
}

/// The usual periods of Kubernetes controllers, except for a deadline two seconds earlier: the embedded API
/// server may work on a request for up to six seconds, including its checks and all retries of its write.
pub const DEFAULT_TIMING: Timing = Timing {
    duration: Duration::from_secs(15),
    deadline: Duration::from_secs(8),
    retry: Duration::from_secs(2),
};

/// Runs the future made by `act` while this process holds the Lease, and drops it as soon as that is no
/// longer certain; then stands by until it may act again. Returns the result of `act`, or `None` once
/// `shutdown` completes; the Lease is then released, so that another process need not wait.
///
/// `identity` names this process among its peers. It must stay the same over restarts, because a restarted
/// holder takes its own Lease again at once, and no two processes may share it. `ready` is true while another
/// process is seen to lead; while this process leads, `act` sets it.
pub async fn run_as_leader<T, F: Future<Output = T>>(
    client: Client,
    identity: &str,
    timing: Timing,
    ready: &AtomicBool,
    shutdown: impl Future<Output = ()>,
    mut act: impl FnMut() -> F,
) -> Option<T> {
    let api = Api::namespaced(client, names::SYSTEM_NAMESPACE);
    let election = Election { api, identity, timing };
    let mut shutdown = pin!(shutdown);
    loop {
        let held = tokio::select! {
            () = &mut shutdown => return None,
            held = election.acquire(ready) => held,
        };
        ready.store(false, Ordering::Release);
        tracing::info!(identity, "this operator leads");
        let ended = tokio::select! {
            () = &mut shutdown => Some(None),
            () = election.renew(&held) => None,
            result = held.while_held(timing.deadline, act()) => result.map(Some),
        };
        ready.store(false, Ordering::Release);
        match ended {
            Some(result) => {
                election.release(&held).await;
                return result;
            }
            None => tracing::warn!(identity, "this operator no longer leads and has stopped acting"),
        }
    }
}

/// A point in time on both clocks.
#[derive(Clone, Copy, Debug)]
struct Moment {
    monotonic: Instant,
    wall: SystemTime,
}

impl Moment {
    fn now() -> Self {
        Self { monotonic: Instant::now(), wall: SystemTime::now() }
    }

    /// The longer of the elapsed times of both clocks.
    fn elapsed(&self) -> Duration {
        self.monotonic.elapsed().max(self.wall.elapsed().unwrap_or_default())
    }
}

/// The Lease as this process last wrote it, and when that write started.
struct HeldLease(Mutex<(Moment, Lease)>);

impl HeldLease {
    fn expired(&self, deadline: Duration) -> bool {
        self.0.lock().0.elapsed() >= deadline
    }

    /// Polls `act` only while the Lease is certainly held; `None` once it is not.
    async fn while_held<T>(&self, deadline: Duration, act: impl Future<Output = T>) -> Option<T> {
        let mut act = pin!(act);
        poll_fn(|context| {
            if self.expired(deadline) {
                return Poll::Ready(None);
            }
            act.as_mut().poll(context).map(Some)
        })
        .await
    }
}

/// One candidate.
struct Election<'a> {
    api: Api<Lease>,
    identity: &'a str,
    timing: Timing,
}

impl Election<'_> {
    /// Stands by until the Lease is ours.
    async fn acquire(&self, ready: &AtomicBool) -> HeldLease {
        let mut seen: Option<(ObservedLease, Moment)> = None;
        loop {
            let started = Moment::now();
            match self.try_acquire(&mut seen).await {
                Ok(Some(lease)) => return HeldLease(Mutex::new((started, lease))),
                Ok(None) => ready.store(true, Ordering::Release),
                Err(error) => {
                    ready.store(false, Ordering::Release);
                    tracing::debug!(%error, "the operator's Lease cannot be read or written; retrying");
                }
            }
            tokio::time::sleep(self.timing.retry).await;
        }
    }

    /// One attempt; returns the Lease if it is ours now.
    async fn try_acquire(
        &self,
        seen: &mut Option<(ObservedLease, Moment)>,
    ) -> Result<Option<Lease>, kube::Error> {
        let Some(lease) = self.with_timeout(self.api.get_opt(LEASE)).await? else {
            let lease = Lease {
                metadata: ObjectMeta { name: Some(LEASE.to_owned()), ..ObjectMeta::default() },
                spec: Some(self.acquired_spec(&LeaseSpec::default())),
            };
            return acquired(self.with_timeout(self.api.create(&PostParams::default(), &lease)).await);
        };
        let now = ObservedLease::from_lease(&lease);
        // What counts is how long this state has been observed here, not the time in the Lease.
        let since = match seen {
            Some((before, since)) if *before == now => *since,
            _ => Moment::now(),
        };
        let verdict = rules::decide(&now, self.identity, since.elapsed(), self.timing.duration);
        *seen = Some((now, since));
        match verdict {
            LeaseAction::Wait => Ok(None),
            LeaseAction::Take => {
                let spec = self.acquired_spec(&lease.spec.clone().unwrap_or_default());
                acquired(self.write(lease, spec).await)
            }
        }
    }

    /// Renews until the Lease is lost: another holder, or the deadline passed.
    async fn renew(&self, held: &HeldLease) {
        loop {
            tokio::time::sleep(self.timing.retry.min(self.timing.deadline / 3)).await;
            if held.expired(self.timing.deadline) {
                return;
            }
            let started = Moment::now();
            let mine = held.0.lock().1.clone();
            let spec = self.renewed_spec(&mine.spec.clone().unwrap_or_default());
            let left = self.timing.deadline.saturating_sub(held.0.lock().0.elapsed());
            let renewed = tokio::time::timeout(left, self.write(mine, spec)).await;
            match renewed {
                Ok(Ok(lease)) => *held.0.lock() = (started, lease),
                Ok(Err(error)) if is_conflict(&error) => match self.with_timeout(self.api.get(LEASE)).await {
                    // The response to our own write was lost: the Lease is ours.
                    Ok(lease) if ObservedLease::from_lease(&lease).holder == self.identity => {
                        held.0.lock().1 = lease
                    }
                    Ok(_) => return,
                    Err(error) => tracing::warn!(%error, "the operator's Lease cannot be read"),
                },
                Ok(Err(error)) => tracing::warn!(%error, "the operator's Lease could not be renewed"),
                Err(_) => return,
            }
        }
    }

    /// Releases the Lease. `act` has ended before.
    async fn release(&self, held: &HeldLease) {
        let mine = held.0.lock().1.clone();
        let mut spec = self.renewed_spec(&mine.spec.clone().unwrap_or_default());
        spec.holder_identity = Some(String::new());
        if let Err(error) = self.write(mine, spec).await {
            tracing::debug!(%error, "the operator's Lease was not released; it expires");
        }
    }

    async fn write(&self, mut lease: Lease, spec: LeaseSpec) -> Result<Lease, kube::Error> {
        lease.spec = Some(spec);
        self.with_timeout(self.api.replace(LEASE, &PostParams::default(), &lease)).await
    }

    /// A request that hangs counts as failed.
    async fn with_timeout<T>(
        &self,
        request: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, kube::Error> {
        match tokio::time::timeout(self.timing.deadline / 2, request).await {
            Ok(result) => result,
            Err(elapsed) => Err(kube::Error::Service(Box::new(elapsed))),
        }
    }

    fn renewed_spec(&self, spec: &LeaseSpec) -> LeaseSpec {
        LeaseSpec { renew_time: Some(MicroTime(Timestamp::now())), ..spec.clone() }
    }

    fn acquired_spec(&self, before: &LeaseSpec) -> LeaseSpec {
        let changes = before.holder_identity.as_deref() != Some(self.identity);
        let mut spec = self.renewed_spec(before);
        spec.holder_identity = Some(self.identity.to_owned());
        spec.lease_duration_seconds =
            Some(i32::try_from(self.timing.duration.as_secs().max(1)).unwrap_or(i32::MAX));
        if changes {
            spec.acquire_time.clone_from(&spec.renew_time);
            spec.lease_transitions = Some(before.lease_transitions.unwrap_or(0).saturating_add(1));
        }
        spec
    }
}

/// A conflicting write is no error: the next read sees it.
fn acquired(written: Result<Lease, kube::Error>) -> Result<Option<Lease>, kube::Error> {
    match written {
        Ok(lease) => Ok(Some(lease)),
        Err(error) if is_conflict(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}
