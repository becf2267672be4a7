//! PipelineRuns that are to be deleted some time after their end, as Kubernetes does with Jobs. Not here: what runs them
//! (`gateway`).

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt as _;
use kube::runtime::controller::Action;
use russet_crds::PipelineRun;
use thiserror::Error;

use crate::context::Context;
use crate::reconcile::requeue_after;
use crate::ssa;

/// Why a run could not be reconciled.
#[derive(Debug, Error)]
pub enum Error {
    /// It was not deleted.
    #[error("PipelineRun {name}: it could not be deleted after its end")]
    Delete {
        /// The run.
        name: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
}

/// Deletes a run whose time is over.
pub async fn reconcile(run: Arc<PipelineRun>, context: Arc<Context>) -> Result<Action, Error> {
    match time_left(&run, Timestamp::now()) {
        Some(Duration::ZERO) => {
            let api = ssa::namespaced_api(&context.client, run.as_ref());
            let failed = |source| Error::Delete { name: run.name_any(), source };
            // One that was resumed meanwhile is another version.
            ssa::delete_version(&api, run.as_ref()).await.map_err(failed)?;
            Ok(requeue_after([]))
        }
        left => Ok(requeue_after([left])),
    }
}

/// Time until a run is deleted; none for one that stays, or is not at its end.
fn time_left(run: &PipelineRun, now: Timestamp) -> Option<Duration> {
    let seconds = run.spec.ttl_seconds_after_finished?;
    let status = run.status.as_ref()?;
    // One that is resumed has not ended.
    let finished = status.finished_at.as_ref().filter(|_| status.attempt >= Some(run.spec.attempt))?;
    let due = finished.0.checked_add(SignedDuration::from_secs(seconds.into())).ok()?;
    Some(Duration::try_from(due.duration_since(now)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use russet_crds::{PipelineRunSpec, PipelineRunStatus};

    use super::*;

    #[test]
    fn a_run_is_deleted_when_its_time_is_over() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let run = |ttl, finished: Option<i64>, attempts: (u32, u32)| {
            let spec = PipelineRunSpec {
                ttl_seconds_after_finished: ttl,
                attempt: attempts.0,
                ..PipelineRunSpec::default()
            };
            let mut run = PipelineRun::new("run", spec);
            let finished_at = finished.map(|second| Time(at(second)));
            let attempt = Some(attempts.1);
            run.status = Some(PipelineRunStatus { finished_at, attempt, ..PipelineRunStatus::default() });
            run
        };
        let left = |run: PipelineRun| time_left(&run, at(1000)).map(|left| left.as_secs());
        for (story, run, expected) in [
            ("it stays", run(None, Some(900), (1, 1)), None),
            ("it runs", run(Some(60), None, (1, 1)), None),
            ("it has ended", run(Some(160), Some(900), (1, 1)), Some(60)),
            ("its time is over", run(Some(60), Some(900), (1, 1)), Some(0)),
            ("at once", run(Some(0), Some(1000), (1, 1)), Some(0)),
            ("it is resumed", run(Some(60), Some(900), (2, 1)), None),
            ("a clock ahead of this one", run(Some(60), Some(2000), (1, 1)), Some(1060)),
        ] {
            assert_eq!(left(run), expected, "{story}");
        }
        let without_status = PipelineRun::new("run", PipelineRunSpec::default());
        assert_eq!(left(without_status), None);
    }
}
