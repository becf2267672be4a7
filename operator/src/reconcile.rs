//! The shared driver of all controllers: takes references from a queue, passes the cached object to the
//! controller, records counts and durations, and retries failures with exponential backoff. Not here: the
//! reconciliation itself.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt::Debug;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt as _, StreamExt as _};
use kube::Resource;
use kube::runtime::applier;
use kube::runtime::controller::{Action, Config, Error as RunError};
use kube::runtime::reflector::{ObjectRef, Store};
use parking_lot::Mutex;
use russet_telemetry::errors;

use crate::context::Context;
use crate::planner::panic_message;
use crate::work_queue::WorkQueue;

/// Initial backoff after a failure; most are write conflicts, which resolve at once.
const INITIAL_BACKOFF: Duration = Duration::from_millis(100);
/// Maximum backoff.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Resync interval: every object is reconciled this often, whatever a watch may have missed.
pub const RESYNC_INTERVAL: Duration = Duration::from_secs(300);

/// The longest reconciliation. One makes dozens of requests at most, of which each is answered within seconds
/// or fails by the client's read timeout.
const RECONCILE_LIMIT: Duration = Duration::from_secs(300);

/// Runs one controller until its queue ends.
pub async fn run_controller<K, E, F>(
    controller: &'static str,
    context: Arc<Context>,
    store: Store<K>,
    queue: WorkQueue<K>,
    reconcile: impl Fn(Arc<K>, Arc<Context>) -> F + Send + Sync + 'static,
) where
    K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
    E: std::error::Error + Send + 'static,
    F: Future<Output = Result<Action, E>> + Send + 'static,
{
    let queue = queue.stream().map(Ok::<_, Infallible>);
    let failures: Arc<Mutex<HashMap<ObjectRef<K>, u32>>> = Arc::default();
    let counted = failures.clone();
    // Exported as 0 from the start, so that the first increase counts.
    context.metrics.failures.with_label_values(&[controller]);
    let run = move |object: Arc<K>, context: Arc<Context>| {
        let reference = ObjectRef::from_obj(object.as_ref());
        let failures = counted.clone();
        let work = bounded(RECONCILE_LIMIT, reconcile(object, context.clone()));
        async move {
            let timer = context.metrics.durations.with_label_values(&[controller]).start_timer();
            let result = work.await;
            timer.observe_duration();
            match &result {
                Ok(_) => {
                    failures.lock().remove(&reference);
                    context.metrics.reconciles.with_label_values(&[controller, "ok"]).inc();
                }
                Err(error) => {
                    context.metrics.reconciles.with_label_values(&[controller, &error.label()]).inc();
                    context.metrics.failures.with_label_values(&[controller]).inc();
                    let chain = errors::chain(error);
                    if is_conflict(error) {
                        tracing::debug!(controller, object = %reference, error = %chain, "the object was changed meanwhile; it is retried");
                    } else {
                        tracing::warn!(controller, object = %reference, error = %chain, "reconciliation failed; it is retried");
                    }
                }
            }
            result
        }
        .boxed()
    };
    let retry = move |object: Arc<K>, _: &ReconcileError<E>, _: Arc<Context>| {
        let mut failures = failures.lock();
        let count = failures.entry(ObjectRef::from_obj(object.as_ref())).or_default();
        *count += 1;
        Action::requeue(backoff(*count))
    };
    let outcomes = applier(run, retry, context, store, queue, Config::default());
    futures::pin_mut!(outcomes);
    while let Some(outcome) = outcomes.next().await {
        match outcome {
            // Failures were logged where they occurred; a missing object was deleted meanwhile.
            Ok(_) | Err(RunError::ReconcilerFailed(..) | RunError::ObjectNotFound(_)) => {}
            Err(error) => tracing::warn!(controller, %error, "the controller's queue failed"),
        }
    }
}

/// Why a reconciliation failed.
#[derive(Debug, thiserror::Error)]
enum ReconcileError<E: std::error::Error + 'static> {
    /// As the controller says.
    #[error(transparent)]
    Failed(E),
    /// It panicked; the other objects go on.
    #[error("the reconciliation panicked, which is a bug: {0}")]
    Panicked(String),
    /// It did not end.
    #[error("the reconciliation did not end within {} s", limit.as_secs())]
    TimedOut {
        /// The longest one.
        limit: Duration,
    },
}

impl<E: std::error::Error + 'static> ReconcileError<E> {
    fn label(&self) -> String {
        match self {
            Self::Failed(error) => variant(error),
            Self::Panicked(_) | Self::TimedOut { .. } => variant(self),
        }
    }
}

/// Whether an object was changed between being read and being written: usual, and over with the next attempt.
fn is_conflict(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    causes.any(|cause| matches!(cause.downcast_ref(), Some(kube::Error::Api(status)) if status.is_conflict()))
}

/// One reconciliation, whose panic or hang is an error of its object and of no other: all of a controller are
/// one task. What may take long without waiting is done by [`crate::planner`], on other threads. They are no
/// tasks of their own, because the leader's work is only polled while it certainly leads (`leader`).
async fn bounded<E: std::error::Error + 'static>(
    limit: Duration,
    reconcile: impl Future<Output = Result<Action, E>>,
) -> Result<Action, ReconcileError<E>> {
    let work = AssertUnwindSafe(reconcile).catch_unwind();
    match tokio::time::timeout(limit, work).await {
        Ok(Ok(result)) => result.map_err(ReconcileError::Failed),
        Ok(Err(panic)) => Err(ReconcileError::Panicked(panic_message(panic.as_ref()))),
        Err(_) => Err(ReconcileError::TimedOut { limit }),
    }
}

/// The backoff after this many failures. Not `backon`, whose delays are an iterator per object and not a
/// function of a count.
fn backoff(failures: u32) -> Duration {
    INITIAL_BACKOFF
        .saturating_mul(1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX))
        .min(MAX_BACKOFF)
}

/// The name of an error's variant, as the metric's label without a table.
fn variant(error: &impl Debug) -> String {
    let text = format!("{error:?}");
    text.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default().to_owned()
}

/// Requeues after the shortest of the delays and the resync interval: timers stand still while a machine sleeps.
pub fn requeue_after(pauses: impl IntoIterator<Item = Option<Duration>>) -> Action {
    Action::requeue(pauses.into_iter().flatten().fold(RESYNC_INTERVAL, Duration::min))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_object_is_looked_at_again_within_the_resync_interval() {
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(requeue_after([]), Action::requeue(RESYNC_INTERVAL));
        assert_eq!(requeue_after([seconds(3600), None]), Action::requeue(RESYNC_INTERVAL));
        assert_eq!(requeue_after([seconds(3600), seconds(7)]), Action::requeue(Duration::from_secs(7)));
    }

    #[test]
    fn reconcile_backoff_grows_to_one_minute_at_most() {
        for (failures, millis) in [(1, 100), (2, 200), (5, 1600), (10, 51_200), (11, 60_000), (500, 60_000)] {
            assert_eq!(backoff(failures), Duration::from_millis(millis), "{failures}");
        }
    }

    #[test]
    fn a_conflict_is_found_among_the_causes() {
        #[derive(Debug, thiserror::Error)]
        #[error("a finalizer")]
        struct Wrapped(#[source] kube::Error);
        for (reason, code, expected) in
            [("Conflict", 409, true), ("AlreadyExists", 409, false), ("Forbidden", 403, false)]
        {
            let status = kube::core::Status::failure("no", reason).with_code(code);
            let error = ReconcileError::Failed(Wrapped(kube::Error::Api(status.boxed())));
            assert_eq!(is_conflict(&error), expected, "{reason}");
        }
        assert!(!is_conflict(&ReconcileError::<Wrapped>::Panicked("a plan".into())));
    }

    #[tokio::test]
    async fn a_panic_or_a_hang_is_an_error_of_its_object() {
        #[derive(Debug, thiserror::Error)]
        #[error("no")]
        struct Refused;
        let done: Result<Action, Refused> = Ok(requeue_after([]));
        assert!(bounded(RECONCILE_LIMIT, std::future::ready(done)).await.is_ok());
        let failed = bounded(RECONCILE_LIMIT, std::future::ready(Err(Refused))).await.unwrap_err();
        assert_eq!((failed.label().as_str(), failed.to_string().as_str()), ("Refused", "no"));
        let panics = async { std::panic::panic_any("a plan") };
        let panicked = bounded::<Refused>(RECONCILE_LIMIT, panics).await;
        let panicked = panicked.unwrap_err();
        assert_eq!(panicked.label(), "Panicked");
        assert!(panicked.to_string().contains("a plan"), "{panicked}");
        let hung =
            bounded(Duration::ZERO, std::future::pending::<Result<Action, Refused>>()).await.unwrap_err();
        assert_eq!(hung.label(), "TimedOut");
    }

    #[test]
    fn the_label_of_an_error_is_its_variant() {
        #[derive(Debug)]
        #[expect(dead_code, reason = "only the names are looked at")]
        enum Error {
            Plain,
            Tuple(u8),
            Fields { name: u8 },
        }
        assert_eq!(variant(&Error::Plain), "Plain");
        assert_eq!(variant(&Error::Tuple(1)), "Tuple");
        assert_eq!(variant(&Error::Fields { name: 1 }), "Fields");
    }
}
