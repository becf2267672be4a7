//! A concurrency limit that users share fairly: each has a few permits and a short queue of its own, and free permits
//! go to the queues in turn. Not here: which limit a request belongs to.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus::IntGauge;
use tokio::sync::oneshot;

/// Limits of one queue.
#[derive(Clone, Copy, Debug)]
pub struct QueueLimits {
    /// Requests that are handled at a time.
    pub concurrency: usize,
    /// How many of these one user may have.
    pub per_user: usize,
    /// Requests of one user that wait. A waiting request holds its head and no body.
    pub queued_per_user: usize,
    /// Requests of all users that wait.
    pub queued: usize,
    /// How long a request waits.
    pub timeout: Duration,
}

/// Why a request is not handled; in the words of Kubernetes' metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// As many wait as may.
    #[error("queue-full")]
    Full,
    /// It waited too long.
    #[error("time-out")]
    TimedOut,
}

impl QueueError {
    /// All errors.
    pub const ALL: [Self; 2] = [Self::Full, Self::TimedOut];

    /// The `reason` of the metric `apiserver_flowcontrol_rejected_requests_total`.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Full => "queue-full",
            Self::TimedOut => "time-out",
        }
    }
}

/// A limit shared by users.
#[derive(Debug)]
pub struct FairQueue {
    limits: QueueLimits,
    /// Requests handled now, and requests that wait now.
    gauges: [IntGauge; 2],
    state: Mutex<QueueState>,
}

#[derive(Debug, Default)]
struct QueueState {
    executing: usize,
    waiting: usize,
    /// The users with a request here.
    flows: HashMap<Arc<str>, Flow>,
    /// The users with a queue, in the order of their turns.
    turns: VecDeque<Arc<str>>,
}

#[derive(Debug, Default)]
struct Flow {
    executing: usize,
    queue: VecDeque<oneshot::Sender<QueuePermit>>,
}

/// The right to handle one request; dropping it lets the next one in.
#[derive(Debug)]
pub struct QueuePermit {
    queue: Option<Arc<FairQueue>>,
    user: Arc<str>,
}

impl Drop for QueuePermit {
    fn drop(&mut self) {
        if let Some(queue) = self.queue.take() {
            queue.release(&self.user);
        }
    }
}

impl FairQueue {
    /// An empty queue; the gauges follow the requests handled and those that wait.
    pub fn new(limits: QueueLimits, gauges: [IntGauge; 2]) -> Arc<Self> {
        Arc::new(Self { limits, gauges, state: Mutex::default() })
    }

    /// Waits for a permit.
    pub async fn acquire(self: &Arc<Self>, user: &str) -> Result<QueuePermit, QueueError> {
        let granted = {
            let mut state = self.state();
            state.forget_cancelled(user);
            let (executing, queued) =
                state.flows.get(user).map_or((0, 0), |flow| (flow.executing, flow.queue.len()));
            if queued == 0 && executing < self.limits.per_user && state.executing < self.limits.concurrency {
                let user: Arc<str> = user.into();
                state.executing += 1;
                state.flows.entry(user.clone()).or_default().executing += 1;
                self.report(&state);
                return Ok(QueuePermit { queue: Some(self.clone()), user });
            }
            if queued >= self.limits.queued_per_user || state.waiting >= self.limits.queued {
                return Err(QueueError::Full);
            }
            let granted = state.enqueue(user);
            self.report(&state);
            granted
        };
        match tokio::time::timeout(self.limits.timeout, granted).await {
            Ok(Ok(permit)) => Ok(permit),
            // The sender is in the queue, which this call borrows: it is not dropped unsent.
            Ok(Err(_)) | Err(_) => Err(QueueError::TimedOut),
        }
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn release(self: &Arc<Self>, user: &Arc<str>) {
        let mut state = self.state();
        state.executing = state.executing.saturating_sub(1);
        if let Some(flow) = state.flows.get_mut(user) {
            flow.executing = flow.executing.saturating_sub(1);
        }
        self.dispatch(&mut state);
        state.forget_idle(user);
        self.report(&state);
    }

    fn report(&self, state: &QueueState) {
        for (gauge, count) in self.gauges.iter().zip([state.executing, state.waiting]) {
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// Hands free permits to those that wait, one user after the other.
    fn dispatch(self: &Arc<Self>, state: &mut QueueState) {
        let mut passed = 0;
        while state.executing < self.limits.concurrency && passed < state.turns.len() {
            let Some(user) = state.turns.pop_front() else { return };
            let Some(flow) = state.flows.get_mut(&user) else { continue };
            if flow.executing >= self.limits.per_user {
                state.turns.push_back(user);
                passed += 1;
                continue;
            }
            let mut granted = false;
            while let Some(waiting) = flow.queue.pop_front() {
                state.waiting = state.waiting.saturating_sub(1);
                let permit = QueuePermit { queue: Some(self.clone()), user: user.clone() };
                match waiting.send(permit) {
                    Ok(()) => {
                        granted = true;
                        break;
                    }
                    // Its client is gone. The permit was never counted, so it is not given back either.
                    Err(mut permit) => permit.queue = None,
                }
            }
            if granted {
                flow.executing += 1;
                state.executing += 1;
                passed = 0;
            }
            if flow.queue.is_empty() {
                state.forget_idle(&user);
            } else {
                state.turns.push_back(user);
            }
        }
    }
}

impl QueueState {
    fn enqueue(&mut self, user: &str) -> oneshot::Receiver<QueuePermit> {
        let (sender, receiver) = oneshot::channel();
        let user: Arc<str> = user.into();
        let flow = self.flows.entry(user.clone()).or_default();
        if flow.queue.is_empty() {
            self.turns.push_back(user);
        }
        flow.queue.push_back(sender);
        self.waiting += 1;
        receiver
    }

    /// Removes the requests of a user whose clients are gone.
    fn forget_cancelled(&mut self, user: &str) {
        let Some(flow) = self.flows.get_mut(user) else { return };
        let before = flow.queue.len();
        flow.queue.retain(|waiting| !waiting.is_closed());
        let (after, gone) = (flow.queue.len(), before - flow.queue.len());
        self.waiting = self.waiting.saturating_sub(gone);
        if gone > 0 && after == 0 {
            self.turns.retain(|turn| **turn != *user);
        }
    }

    /// Removes a user without requests.
    fn forget_idle(&mut self, user: &str) {
        if self.flows.get(user).is_some_and(|flow| flow.executing == 0 && flow.queue.is_empty()) {
            self.flows.remove(user);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: QueueLimits = QueueLimits {
        concurrency: 3,
        per_user: 2,
        queued_per_user: 2,
        queued: 4,
        timeout: Duration::from_secs(3600),
    };

    fn queue_of(limits: QueueLimits) -> Arc<FairQueue> {
        FairQueue::new(limits, ["executing", "queued"].map(|name| IntGauge::new(name, name).unwrap()))
    }

    /// Requests that are handled, and requests that wait.
    fn load(queue: &FairQueue) -> (usize, usize) {
        let state = queue.state();
        (state.executing, state.waiting)
    }

    async fn admitted(queue: &Arc<FairQueue>, user: &str) -> QueuePermit {
        queue.acquire(user).await.unwrap()
    }

    /// Starts a request that has to wait, and returns once it does.
    async fn waiting(
        queue: &Arc<FairQueue>,
        user: &'static str,
    ) -> tokio::task::JoinHandle<Result<QueuePermit, QueueError>> {
        let (started, has_started) = oneshot::channel();
        let task = tokio::spawn({
            let queue = queue.clone();
            async move {
                let _ = started.send(());
                queue.acquire(user).await
            }
        });
        // Tests have one thread: what waits for the start runs once the task waits.
        has_started.await.unwrap();
        task
    }

    #[tokio::test]
    async fn a_flood_of_one_user_leaves_permits_for_others() {
        let queue = queue_of(LIMITS);
        let first = admitted(&queue, "flood").await;
        let second = admitted(&queue, "flood").await;
        let queued = [waiting(&queue, "flood").await, waiting(&queue, "flood").await];
        assert_eq!(queue.acquire("flood").await.unwrap_err(), QueueError::Full);
        assert_eq!(load(&queue), (2, 2));
        let other = admitted(&queue, "other").await;
        let late = waiting(&queue, "other").await;
        // The flood has waited longer, and gets one; then it is the other's turn.
        drop(first);
        let [next, last] = queued;
        let next = next.await.unwrap().unwrap();
        drop(other);
        let late = late.await.unwrap().unwrap();
        assert!(!last.is_finished(), "the flood has its two");
        drop((next, late));
        drop(last.await.unwrap().unwrap());
        drop(second);
        assert_eq!(load(&queue), (0, 0));
        assert!(queue.state().flows.is_empty() && queue.state().turns.is_empty(), "nothing is kept of users");
    }

    #[tokio::test]
    async fn a_request_whose_client_left_takes_no_permit() {
        let queue = queue_of(LIMITS);
        let held = [admitted(&queue, "a").await, admitted(&queue, "a").await];
        for _ in 0..10 {
            let gone = waiting(&queue, "a").await;
            gone.abort();
            assert!(gone.await.unwrap_err().is_cancelled());
        }
        let patient = waiting(&queue, "a").await;
        drop(held);
        drop(patient.await.unwrap().unwrap());
        assert_eq!(load(&queue), (0, 0));
        let brief = queue_of(QueueLimits { timeout: Duration::ZERO, ..LIMITS });
        let held = [admitted(&brief, "a").await, admitted(&brief, "a").await];
        assert_eq!(brief.acquire("a").await.unwrap_err(), QueueError::TimedOut);
        drop(held);
        assert_eq!(load(&brief).0, 0);
        drop(admitted(&brief, "a").await);
        assert_eq!(load(&brief), (0, 0));
    }
}
