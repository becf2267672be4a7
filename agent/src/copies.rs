//! Controller of this node's ModelCopies: one task each, which reads headers or copies files, from the source
//! or from other nodes as the operator says. It reports progress and retries for as long as the object
//! exists.

mod progress;
mod secret;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBuilder};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{Client, ResourceExt as _};
use russet_crds::conditions::Reason;
use russet_crds::{CopyMode, CopyPeer, CopySource, Link, ModelCopy, ModelCopySpec, ModelCopyStatus};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;

use self::progress::{REPORT_INTERVAL, Throttle};
use crate::address::Address;
use crate::metrics::AgentMetrics;
use crate::peer_download::{self, PeerDownloader};
use crate::status;
use crate::status_writer::StatusQueue;
use crate::store::{
    self, Credentials, Published, SourceScope, SourceSpec, Store, StoreError, TransferProgress,
};
use crate::transfer_limits::{TransferLimiter, TransferLimiters};

/// Poll interval for free disk space; each poll is one file system call.
const SPACE_POLL_INTERVAL: Duration = Duration::from_secs(5);
/// Between two reports that files are in use: files in use are never removed in between.
const USE_REPORT_INTERVAL: SignedDuration = SignedDuration::from_mins(10);
/// Failed attempts with other nodes before the source is used.
const MAX_PEER_ATTEMPTS: u32 = 3;
/// Maximum backoff between two attempts of a copy that failed as a whole.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Backoff between two attempts of a copy that failed as a whole; it doubles.
const BACKOFF: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_secs(1))
    .with_max_delay(MAX_BACKOFF)
    .without_max_times();

/// The status last reported; the downloading task and the supervisor both update it.
type SharedStatus = Arc<Mutex<ModelCopyStatus>>;
type ReadyCopies = Arc<Mutex<BTreeMap<String, Published>>>;

/// How this agent connects to other agents.
#[derive(Clone)]
pub(crate) struct PeerAccess {
    pub downloader: PeerDownloader,
    pub address: Address,
    pub links: watch::Receiver<Vec<Link>>,
}

/// All copies that this node should have.
pub(crate) struct Copies {
    shared: CopyContext,
    tasks: BTreeMap<String, Task>,
    no_gc_marker: PathBuf,
}

struct Task {
    uid: Option<String>,
    /// The spec, whatever should become of the files afterwards.
    spec: ModelCopySpec,
    status: SharedStatus,
    /// Names of the copy in the store; unknown until its commit is.
    keys: Option<BTreeSet<String>>,
    supply: watch::Sender<Option<CopySource>>,
    handle: AbortHandle,
}

#[derive(Clone)]
struct CopyContext {
    client: Client,
    store: Store,
    peer_access: PeerAccess,
    status_queue: StatusQueue,
    metrics: AgentMetrics,
    ready: ReadyCopies,
    changed: Arc<Notify>,
    /// Notified when files were removed.
    space_freed: Arc<Notify>,
    /// One writer per source: two Models may use the same one.
    writers: Arc<Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>>>,
    limiters: TransferLimiters,
}

impl Copies {
    /// `no_gc_marker` is a file whose presence disables removal of files.
    pub fn new(
        client: Client,
        reach: PeerAccess,
        paces: TransferLimiters,
        outbox: StatusQueue,
        metrics: AgentMetrics,
        no_gc_marker: PathBuf,
    ) -> Self {
        let shared = CopyContext {
            limiters: paces,
            client,
            store: reach.downloader.store.clone(),
            peer_access: reach,
            status_queue: outbox,
            metrics,
            ready: ReadyCopies::default(),
            changed: Arc::default(),
            space_freed: Arc::default(),
            writers: Arc::default(),
        };
        Self { shared, tasks: BTreeMap::new(), no_gc_marker }
    }

    /// Starts tasks of new copies, restarts changed ones and stops those of removed ones.
    pub fn sync(&mut self, copies: &[Arc<ModelCopy>]) {
        let live = copies.iter().filter(|copy| copy.metadata.deletion_timestamp.is_none());
        let desired: BTreeMap<String, &Arc<ModelCopy>> = live.map(|copy| (copy.name_any(), copy)).collect();
        let gone: Vec<String> =
            self.tasks.keys().filter(|name| !desired.contains_key(*name)).cloned().collect();
        for name in gone {
            self.remove(&name);
        }
        for (name, copy) in desired {
            let spec = copy.spec.agent_work();
            let keys = self.shared.store.keys(&source_spec(&copy.spec, copy.status.as_ref()));
            if let Some(task) = self.tasks.get_mut(&name)
                && task.uid == copy.uid()
                && task.spec == spec
            {
                task.keys = keys;
                task.supply.send_if_modified(|known| {
                    let changed = *known != copy.spec.supply;
                    known.clone_from(&copy.spec.supply);
                    changed
                });
                continue;
            }
            self.remove(&name);
            let status = SharedStatus::new(Mutex::new(copy.status.clone().unwrap_or_default()));
            let supply = watch::Sender::new(copy.spec.supply.clone());
            let work = run(self.shared.clone(), copy.clone(), status.clone(), supply.subscribe());
            let handle = tokio::spawn(work).abort_handle();
            self.tasks.insert(name, Task { uid: copy.uid(), spec, status, keys, supply, handle });
        }
    }

    fn remove(&mut self, name: &str) {
        if let Some(task) = self.tasks.remove(name) {
            task.handle.abort();
            locked(&self.shared.ready).remove(name);
            self.shared.metrics.remove_copy(name);
        }
    }

    /// The published directory of a ModelCopy.
    pub fn published(&self, name: &str) -> Option<Published> {
        locked(&self.shared.ready).get(name).cloned()
    }

    /// Records that an engine has the files of a ModelCopy open.
    pub fn note_use(&self, name: &str, now: Timestamp) {
        let Some(task) = self.tasks.get(name) else { return };
        let mut status = locked(&task.status);
        let recent = |time: &Time| now.duration_since(time.0) < USE_REPORT_INTERVAL;
        // Before the first report there is no status to add it to.
        if status.conditions.is_empty() || status.last_used_time.as_ref().is_some_and(recent) {
            return;
        }
        status.last_used_time = Some(Time(now));
        self.shared.status_queue.copy(name, &status);
    }

    /// Waits until a copy is published.
    pub async fn changed(&self) {
        self.shared.changed.notified().await;
    }

    /// Garbage collection: removes files that no ModelCopy wants and no engine reads.
    pub async fn collect(&self, mut in_use: BTreeSet<String>) {
        if self.no_gc_marker.exists() {
            return;
        }
        for task in self.tasks.values() {
            match &task.keys {
                Some(keys) => in_use.extend(keys.iter().cloned()),
                // The key of this copy is not known yet, so nothing is removed.
                None => return,
            }
            in_use.extend(task.supply.borrow().as_ref().and_then(|supply| supply.content.clone()));
        }
        let store = self.shared.store.clone();
        match tokio::task::spawn_blocking(move || store.collect(&in_use)).await {
            Ok(Ok(removed)) if !removed.is_empty() => {
                tracing::info!(count = removed.len(), "unused models were removed from this node");
                self.shared.space_freed.notify_waiters();
            }
            Ok(Err(error)) => tracing::warn!(%error, "unwanted models could not be removed"),
            Ok(Ok(_)) | Err(_) => {}
        }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.tasks.values().for_each(|task| task.handle.abort());
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The store's spec of a copy: the operator's commit, else the one this node resolved before, else the
/// branch. Without credentials yet.
fn source_spec(spec: &ModelCopySpec, status: Option<&ModelCopyStatus>) -> SourceSpec {
    let commit = spec.commit.clone().or_else(|| status.and_then(|status| status.commit.clone()));
    SourceSpec {
        uri: spec.source.uri.clone(),
        pinned: commit.is_some(),
        revision: commit.or_else(|| spec.source.revision.clone()),
        credentials: Credentials::default(),
        sha256: spec.source.sha256.clone(),
        scope: SourceScope {
            namespace: spec.model_ref.namespace.clone(),
            secret: spec.source.secret_ref.as_ref().map(|secret| secret.name.clone()),
        },
        content: status.and_then(|status| status.content.clone()),
        received: None,
    }
}

/// Why an attempt failed.
struct CopyError {
    reason: Reason,
    message: String,
    /// Key that lacks disk space, and the bytes it needs.
    missing_space: Option<(String, u64)>,
    /// Minimum time until the next request to the source.
    retry_after: Duration,
}

impl From<(Reason, String)> for CopyError {
    fn from((reason, message): (Reason, String)) -> Self {
        Self { reason, message, missing_space: None, retry_after: Duration::ZERO }
    }
}

impl From<StoreError> for CopyError {
    fn from(error: StoreError) -> Self {
        let room = match &error {
            StoreError::DiskPressure { key, need, .. } => Some((key.clone(), *need)),
            _ => None,
        };
        Self {
            reason: error.reason(),
            message: error.chain(),
            missing_space: room,
            retry_after: error.retry_after(),
        }
    }
}

/// Where the bytes of a copy come from.
#[derive(Clone, Debug, PartialEq, Eq)]
enum CopyOrigin {
    /// From the source.
    Source,
    /// Not known yet: another node fetches them.
    Pending,
    /// From other nodes, under this content id.
    Peers(String),
}

impl CopyOrigin {
    fn from_supply(supply: Option<&CopySource>) -> Self {
        match supply.map(|supply| &supply.content) {
            None => Self::Source,
            Some(None) => Self::Pending,
            Some(Some(id)) => Self::Peers(id.clone()),
        }
    }
}

/// Runs one copy until it is complete.
async fn run(
    shared: CopyContext,
    copy: Arc<ModelCopy>,
    status: SharedStatus,
    mut supply: watch::Receiver<Option<CopySource>>,
) {
    let generation = copy.metadata.generation;
    let throttle = Throttle::new(REPORT_INTERVAL);
    let job = CopyWorker {
        name: copy.name_any(),
        generation,
        status,
        copy,
        supply: supply.clone(),
        shared,
        throttle,
    };
    loop {
        let part = CopyOrigin::from_supply(supply.borrow_and_update().as_ref());
        tokio::select! {
            () = job.run(&part) => return,
            turned = supply.wait_for(|supply| CopyOrigin::from_supply(supply.as_ref()) != part) => if turned.is_err() { return },
        }
    }
}

struct CopyWorker {
    shared: CopyContext,
    copy: Arc<ModelCopy>,
    name: String,
    generation: Option<i64>,
    status: SharedStatus,
    supply: watch::Receiver<Option<CopySource>>,
    /// Limits how often progress is reported.
    throttle: Throttle,
}

impl CopyWorker {
    fn status(&self) -> ModelCopyStatus {
        locked(&self.status).clone()
    }

    fn report(&self, copy: &status::CopyState<'_>) {
        let mut last = locked(&self.status);
        let status = status::copy(copy, self.copy.spec.want, &last, self.generation, Timestamp::now());
        self.shared.metrics.copy(&self.name, status.bytes_done, status.bytes_total);
        if status != *last {
            self.shared.status_queue.copy(&self.name, &status);
            *last = status;
        }
    }

    /// Waits until this many bytes fit on the disk, and reports how many are missing. The source is not asked
    /// again in between: nothing there would change that.
    async fn wait_for_space(&self, key: &str, need: u64) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(SPACE_POLL_INTERVAL) => {}
                () = self.shared.space_freed.notified() => {}
            }
            match self.shared.store.check_space(key, need) {
                Ok(()) => return,
                Err(error) => self.report(&status::CopyState::Failed(error.reason(), &error.chain())),
            }
        }
    }

    /// Runs until the copy is complete, from its current origin.
    async fn run(&self, origin: &CopyOrigin) {
        let mut delays = BACKOFF.build();
        let mut refused = 0;
        loop {
            let before = self.status().bytes_done;
            // If the machines cannot reach each other, fall back to the source.
            let part = if refused < MAX_PEER_ATTEMPTS { origin } else { &CopyOrigin::Source };
            if self.is_published().await {
                return;
            }
            // What an earlier release fetched for somebody is shown by the source, not by machines of that release.
            let unscoped = self.shared.store.published_unscoped(&self.source_spec()).is_some();
            let part = if unscoped { &CopyOrigin::Source } else { part };
            let tried = tokio::select! {
                biased;
                () = self.wait_quiet_hours_begin(part) => {
                    self.wait_quiet_hours_end(part).await;
                    continue;
                }
                tried = self.attempt(part) => tried,
            };
            let Err(CopyError { reason, message, missing_space: room, retry_after: after }) = tried else {
                return;
            };
            if reason == Reason::SourceUnreachable
                && let Some(published) = self.shared.store.published_unscoped(&self.source_spec())
            {
                tracing::warn!(
                    copy = self.name,
                    message,
                    "an earlier release fetched this copy, and its source does not answer now; it is used as it is"
                );
                return self.finish(self.shared.store.read_anew(published).await);
            }
            refused = if self.status().bytes_done > before { 0 } else { refused + 1 };
            tracing::warn!(copy = self.name, ?reason, message, "copy failed; retrying");
            self.report(&status::CopyState::Failed(reason, &message));
            if let Some((key, need)) = room {
                self.wait_for_space(&key, need).await;
                continue;
            }
            if self.status().bytes_done > before {
                delays = BACKOFF.build();
            }
            // A host that asks for a pause says how long, and the condition says until when.
            let pause = match after {
                Duration::ZERO => delays.next().unwrap_or(MAX_BACKOFF),
                asked => asked,
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// The store's spec where no request to the source is needed.
    fn source_spec(&self) -> SourceSpec {
        source_spec(&self.copy.spec, Some(&self.status()))
    }

    async fn is_published(&self) -> bool {
        let store = &self.shared.store;
        let Some(published) = store.published(&self.source_spec()) else { return false };
        self.finish(store.read_anew(published).await);
        true
    }

    /// The rate limiter for this origin, if it has one.
    fn limiter(&self, origin: &CopyOrigin) -> Option<&TransferLimiter> {
        let spec = &self.copy.spec;
        match origin {
            _ if spec.want != CopyMode::Files || spec.source.is_local() => None,
            CopyOrigin::Pending => None,
            CopyOrigin::Source => Some(&self.shared.limiters.sources),
            CopyOrigin::Peers(_) => Some(&self.shared.limiters.nodes),
        }
    }

    /// Waits until quiet hours begin, which may be now.
    async fn wait_quiet_hours_begin(&self, origin: &CopyOrigin) {
        match self.limiter(origin) {
            Some(pace) => pace.wait_until_quiet().await,
            None => std::future::pending().await,
        }
    }

    /// Reports quiet hours, and waits until they end.
    async fn wait_quiet_hours_end(&self, origin: &CopyOrigin) {
        let Some(pace) = self.limiter(origin) else { return };
        if let Some(message) = pace.quiet_message() {
            tracing::info!(copy = self.name, message);
            self.report(&status::CopyState::Failed(Reason::QuietHours, &message));
        }
        pace.wait_until_allowed().await;
    }

    async fn attempt(&self, origin: &CopyOrigin) -> Result<(), CopyError> {
        let spec = &self.copy.spec;
        let offline = self.source_spec();
        if spec.want == CopyMode::Files && *origin == CopyOrigin::Pending {
            self.report(&status::CopyState::Waiting);
            // Until the operator sets another origin.
            return std::future::pending().await;
        }
        let writer = {
            let mut writers = locked(&self.shared.writers);
            writers.entry(spec.source.uri.clone()).or_default().clone()
        };
        let _writing = writer.lock().await;
        match spec.want {
            CopyMode::Headers => {
                let source = SourceSpec { credentials: self.credentials().await?, ..offline };
                let headers = self.shared.store.headers(&source).await?;
                self.report(&status::CopyState::HeadersRead(&headers));
            }
            CopyMode::Files => {
                let progress = watch::Sender::new(TransferProgress::default());
                let published = match origin {
                    CopyOrigin::Peers(id) => {
                        let pull = self.shared.peer_access.downloader.download(
                            &offline,
                            id,
                            || self.paths(),
                            &progress,
                        );
                        self.with_progress(pull, &progress).await?
                    }
                    CopyOrigin::Source | CopyOrigin::Pending => {
                        // What other nodes sent before they stopped sending.
                        let received = self.supply.borrow().as_ref().and_then(|it| it.content.clone());
                        let credentials = self.credentials().await?;
                        let source = SourceSpec { credentials, received, ..offline };
                        self.with_progress(self.shared.store.fetch(&source, &progress), &progress).await?
                    }
                };
                // Small models are complete before the origin was reported.
                self.report(&status::CopyState::Transferring(&progress.borrow(), 0));
                self.finish(published);
            }
            CopyMode::Unknown => {
                let version = env!("CARGO_PKG_VERSION");
                let message = format!(
                    "spec.want has a value of a newer release than this agent's {version}; update the agent"
                );
                return Err((Reason::NewerRelease, message).into());
            }
        }
        Ok(())
    }

    fn finish(&self, published: Published) {
        self.report(&status::CopyState::Published(&published));
        locked(&self.shared.ready).insert(self.name.clone(), published);
        self.shared.changed.notify_one();
    }

    /// Current paths to the nodes that have the files.
    fn paths(&self) -> BTreeSet<peer_download::PeerPath> {
        let PeerAccess { downloader: _, address, links } = &self.shared.peer_access;
        let supply = self.supply.borrow();
        let from: &[CopyPeer] = supply.as_ref().map_or(&[], |supply| &supply.from);
        peer_download::paths(from, *address.borrow(), &links.borrow())
    }

    /// Reports progress while files are transferred.
    async fn with_progress(
        &self,
        coming: impl Future<Output = Result<Published, StoreError>>,
        progress: &watch::Sender<TransferProgress>,
    ) -> Result<Published, StoreError> {
        self.throttle
            .report_while(coming, progress, |now, rate| {
                self.report(&status::CopyState::Transferring(now, rate))
            })
            .await
    }

    /// Credentials of the source, read only when they are about to be used.
    async fn credentials(&self) -> Result<Credentials, CopyError> {
        let source = &self.copy.spec.source;
        let keys = store::scheme_of(&source.uri)?.keys;
        let Some(reference) = source.secret_ref.as_ref().filter(|_| !keys.is_empty()) else {
            return Ok(Credentials::default());
        };
        let namespace = &self.copy.spec.model_ref.namespace;
        Ok(secret::read(self.shared.client.clone(), namespace, &reference.name, keys).await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use russet_crds::ModelSource;

    #[test]
    fn operator_commit_precedes_resolved_commit_and_branch() {
        let source =
            ModelSource { uri: "hf://a/b".into(), revision: Some("main".into()), ..ModelSource::default() };
        let spec = |commit: Option<&str>| ModelCopySpec {
            source: source.clone(),
            commit: commit.map(str::to_owned),
            ..ModelCopySpec::default()
        };
        let status = ModelCopyStatus { commit: Some("mine".into()), ..ModelCopyStatus::default() };
        for (commit, status, revision, pinned) in [
            (Some("theirs"), Some(&status), "theirs", true),
            (None, Some(&status), "mine", true),
            (None, None, "main", false),
        ] {
            let source = source_spec(&spec(commit), status);
            assert_eq!((source.revision.as_deref(), source.pinned), (Some(revision), pinned));
        }
    }
}
