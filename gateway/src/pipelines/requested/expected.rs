//! Which runs that nobody waits for are expected: a request of the inbox, which is sent again after a crash, will wait for them.
//! The inbox is read once a second at most, however much happens meanwhile: it may have thousands of requests.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use parking_lot::Mutex;
use russet_crds::PipelineRun;
use tokio::time::Instant;

use super::super::{RunName, full_name};
use super::repeated_name;
use crate::response_store::{InboxRow, ResponseStoreError};

/// Shortest time between two looks into the inbox.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// What the last look into the inbox said.
#[derive(Default)]
pub(super) struct ExpectedRuns {
    last: Mutex<Option<InboxObservation>>,
}

/// A look into the inbox.
struct InboxObservation {
    at: Instant,
    /// The runs of then that no request will wait for: as many as a gateway has at most.
    unexpected: HashSet<RunName>,
}

impl ExpectedRuns {
    /// Those of these runs, which nobody waits for, that a request will wait for. All of those are that the last look did not
    /// know, until the next one, and all where the inbox cannot be read: what is not known is not deleted.
    pub(super) async fn among<F>(
        &self,
        now: Instant,
        of_nobody: impl Iterator<Item = &PipelineRun>,
        unended: impl FnOnce() -> F,
    ) -> HashSet<RunName>
    where
        F: Future<Output = Result<Vec<InboxRow>, ResponseStoreError>>,
    {
        let mut of_nobody: HashMap<RunName, &str> =
            of_nobody.map(|run| (full_name(run), &*run.spec.pipeline_ref.name)).collect();
        if of_nobody.is_empty() {
            return HashSet::new();
        }
        if self.last.lock().as_ref().is_none_or(|last| now - last.at >= LOOK_INTERVAL) {
            let rows = unended().await;
            if let Err(error) = &rows {
                tracing::warn!(%error, "which runs the requests of the inbox wait for is not known");
            }
            let unexpected = rows.map(|rows| unexpected(&of_nobody, &rows)).unwrap_or_default();
            *self.last.lock() = Some(InboxObservation { at: now, unexpected });
        }
        if let Some(last) = &*self.last.lock() {
            of_nobody.retain(|name, _| !last.unexpected.contains(name));
        }
        of_nobody.into_keys().collect()
    }
}

/// The runs, each with its Pipeline, that none of these requests will wait for.
fn unexpected(of_nobody: &HashMap<RunName, &str>, rows: &[InboxRow]) -> HashSet<RunName> {
    let repeats: Vec<String> = rows.iter().map(InboxRow::repeat).collect();
    let pipelines: HashSet<&str> = of_nobody.values().copied().collect();
    let of = |pipeline| repeats.iter().map(move |repeat| repeated_name(pipeline, repeat));
    let expected: HashSet<String> = pipelines.into_iter().flat_map(of).collect();
    of_nobody.keys().filter(|(_, name)| !expected.contains(name)).cloned().collect()
}
