//! This node's ModelCopies: one task each, which reads headers or copies files until done, from their source or from
//! other nodes as the operator says, reports as it goes and tries again for as long as the object is there.

mod progress;
mod secret;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{Client, ResourceExt as _};
use russet_crds::conditions::Reason;
use russet_crds::{CopyPeer, Link, ModelCopy, ModelCopySpec, ModelCopyStatus, Supply, Want};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;

use self::progress::{REPORT, Seldom};
use crate::address::Address;
use crate::metrics::Metrics;
use crate::pace::{Pace, Paces};
use crate::report::Outbox;
use crate::spread::{self, Puller};
use crate::status;
use crate::store::{self, Credentials, Progress, Published, Store, StoreError, Wanted};

/// Between two looks whether there is room now; it costs a question to the file system.
const LOOK: Duration = Duration::from_secs(5);
/// Between two notes that files are still in use: nobody removes them meanwhile anyway.
const USED: SignedDuration = SignedDuration::from_mins(10);
/// So often other nodes are asked in vain before the source is.
const REFUSED: u32 = 3;
/// Longest pause between two tries of a copy that failed as a whole.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// The status last reported; who downloads and who reads the files both add to it.
type Status = Arc<Mutex<ModelCopyStatus>>;
type Ready = Arc<Mutex<BTreeMap<String, Published>>>;

/// How this agent gets to others.
#[derive(Clone)]
pub(crate) struct Reach {
    pub puller: Puller,
    pub address: Address,
    pub links: watch::Receiver<Vec<Link>>,
}

/// Every copy wanted here.
pub(crate) struct Copies {
    shared: Shared,
    tasks: BTreeMap<String, Task>,
    kept: PathBuf,
}

struct Task {
    uid: Option<String>,
    /// The work, whatever is to become of the files afterwards.
    spec: ModelCopySpec,
    status: Status,
    /// What names the copy's bytes; unknown until its commit is.
    key: Option<String>,
    supply: watch::Sender<Option<Supply>>,
    handle: AbortHandle,
}

#[derive(Clone)]
struct Shared {
    client: Client,
    store: Store,
    reach: Reach,
    outbox: Outbox,
    metrics: Metrics,
    ready: Ready,
    changed: Arc<Notify>,
    /// Told when files were removed.
    freed: Arc<Notify>,
    /// One writer per source: two Models may name the same one.
    writers: Arc<Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>>>,
    paces: Paces,
}

impl Copies {
    /// `kept` is the file whose presence says that no files are to be removed, whatever is wanted.
    pub fn new(
        client: Client,
        reach: Reach,
        paces: Paces,
        outbox: Outbox,
        metrics: Metrics,
        kept: PathBuf,
    ) -> Self {
        let shared = Shared {
            paces,
            client,
            store: reach.puller.store.clone(),
            reach,
            outbox,
            metrics,
            ready: Ready::default(),
            changed: Arc::default(),
            freed: Arc::default(),
            writers: Arc::default(),
        };
        Self { shared, tasks: BTreeMap::new(), kept }
    }

    /// Starts what is new, restarts what changed and ends what is gone.
    pub fn sync(&mut self, copies: &[Arc<ModelCopy>]) {
        let live = copies.iter().filter(|copy| copy.metadata.deletion_timestamp.is_none());
        let wanted: BTreeMap<String, &Arc<ModelCopy>> = live.map(|copy| (copy.name_any(), copy)).collect();
        let gone: Vec<String> =
            self.tasks.keys().filter(|name| !wanted.contains_key(*name)).cloned().collect();
        for name in gone {
            self.end(&name);
        }
        for (name, copy) in wanted {
            let spec = copy.spec.work();
            let key = self.shared.store.key(&wanted_of(&copy.spec, copy.status.as_ref()));
            if let Some(task) = self.tasks.get_mut(&name)
                && task.uid == copy.uid()
                && task.spec == spec
            {
                task.key = key;
                task.supply.send_if_modified(|known| {
                    let changed = *known != copy.spec.supply;
                    known.clone_from(&copy.spec.supply);
                    changed
                });
                continue;
            }
            self.end(&name);
            let status = Status::new(Mutex::new(copy.status.clone().unwrap_or_default()));
            let supply = watch::Sender::new(copy.spec.supply.clone());
            let work = run(self.shared.clone(), copy.clone(), status.clone(), supply.subscribe());
            let handle = tokio::spawn(work).abort_handle();
            self.tasks.insert(name, Task { uid: copy.uid(), spec, status, key, supply, handle });
        }
    }

    fn end(&mut self, name: &str) {
        if let Some(task) = self.tasks.remove(name) {
            task.handle.abort();
            locked(&self.shared.ready).remove(name);
            self.shared.metrics.copy_gone(name);
        }
    }

    /// The published folder of a ModelCopy.
    pub fn published(&self, name: &str) -> Option<Published> {
        locked(&self.shared.ready).get(name).cloned()
    }

    /// Notes that an engine has the files of a ModelCopy open.
    pub fn used(&self, name: &str, now: Timestamp) {
        let Some(task) = self.tasks.get(name) else { return };
        let mut status = locked(&task.status);
        let recent = |time: &Time| now.duration_since(time.0) < USED;
        // Before its first report there is nothing yet that a note could be added to.
        if status.conditions.is_empty() || status.last_used_time.as_ref().is_some_and(recent) {
            return;
        }
        status.last_used_time = Some(Time(now));
        self.shared.outbox.copy(name, &status);
    }

    /// Waits until a copy was published.
    pub async fn changed(&self) {
        self.shared.changed.notified().await;
    }

    /// Removes files that no ModelCopy wants and no engine reads.
    pub async fn collect(&self, mut in_use: BTreeSet<String>) {
        if self.kept.exists() {
            return;
        }
        for task in self.tasks.values() {
            match &task.key {
                Some(key) => drop(in_use.insert(key.clone())),
                // Whose bytes these are is not known yet, so none are removed.
                None => return,
            }
            in_use.extend(task.supply.borrow().as_ref().and_then(|supply| supply.content.clone()));
        }
        let store = self.shared.store.clone();
        match tokio::task::spawn_blocking(move || store.collect(&in_use)).await {
            Ok(Ok(removed)) if !removed.is_empty() => {
                tracing::info!(count = removed.len(), "models nobody wants were removed from this node");
                self.shared.freed.notify_waiters();
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

/// What the store is asked for: the operator's commit, else the one this node resolved before, else
/// the branch. Nothing yet of what opens it.
fn wanted_of(spec: &ModelCopySpec, status: Option<&ModelCopyStatus>) -> Wanted {
    let commit = spec.commit.clone().or_else(|| status.and_then(|status| status.commit.clone()));
    Wanted {
        uri: spec.source.uri.clone(),
        pinned: commit.is_some(),
        revision: commit.or_else(|| spec.source.revision.clone()),
        credentials: Credentials::default(),
        sha256: spec.source.sha256.clone(),
    }
}

/// Why a try ended.
struct Setback {
    reason: Reason,
    message: String,
    /// What lacks room, and how much.
    room: Option<(String, u64)>,
    /// Before this has passed the source wants no other question.
    after: Duration,
}

impl From<(Reason, String)> for Setback {
    fn from((reason, message): (Reason, String)) -> Self {
        Self { reason, message, room: None, after: Duration::ZERO }
    }
}

impl From<StoreError> for Setback {
    fn from(error: StoreError) -> Self {
        let room = match &error {
            StoreError::DiskPressure { key, need, .. } => Some((key.clone(), *need)),
            _ => None,
        };
        Self { reason: error.reason(), message: error.chain(), room, after: error.after() }
    }
}

/// Where a copy's bytes come from.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    /// From their source.
    Fetches,
    /// From nowhere yet: another node fetches them.
    Waits,
    /// From other nodes, under this id.
    Receives(String),
}

impl Part {
    fn of(supply: Option<&Supply>) -> Self {
        match supply.map(|supply| &supply.content) {
            None => Self::Fetches,
            Some(None) => Self::Waits,
            Some(Some(id)) => Self::Receives(id.clone()),
        }
    }
}

/// Works on one copy until it is done.
async fn run(
    shared: Shared,
    copy: Arc<ModelCopy>,
    status: Status,
    mut supply: watch::Receiver<Option<Supply>>,
) {
    let generation = copy.metadata.generation;
    let seldom = Seldom::new(REPORT);
    let job = Job { name: copy.name_any(), generation, status, copy, supply: supply.clone(), shared, seldom };
    loop {
        let part = Part::of(supply.borrow_and_update().as_ref());
        tokio::select! {
            () = job.go_on(&part) => return,
            turned = supply.wait_for(|supply| Part::of(supply.as_ref()) != part) => if turned.is_err() { return },
        }
    }
}

struct Job {
    shared: Shared,
    copy: Arc<ModelCopy>,
    name: String,
    generation: Option<i64>,
    status: Status,
    supply: watch::Receiver<Option<Supply>>,
    /// How seldom it is told how far the files have come.
    seldom: Seldom,
}

impl Job {
    fn status(&self) -> ModelCopyStatus {
        locked(&self.status).clone()
    }

    fn report(&self, copy: &status::Copy<'_>) {
        let mut last = locked(&self.status);
        let status = status::copy(copy, self.copy.spec.want, &last, self.generation, Timestamp::now());
        self.shared.metrics.copy(&self.name, status.bytes_done, status.bytes_total);
        if status != *last {
            self.shared.outbox.copy(&self.name, &status);
            *last = status;
        }
    }

    /// Waits until so many bytes find room, and says how much is missing. The source is not asked again
    /// meanwhile: nothing there would change that.
    async fn wait_for_room(&self, key: &str, need: u64) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK) => {}
                () = self.shared.freed.notified() => {}
            }
            match self.shared.store.room(key, need) {
                Ok(()) => return,
                Err(error) => self.report(&status::Copy::Failed(error.reason(), &error.chain())),
            }
        }
    }

    /// Works until the copy is done, from where its bytes come from now.
    async fn go_on(&self, part: &Part) {
        let mut pause = Duration::from_secs(1);
        let mut refused = 0;
        loop {
            let before = self.status().bytes_done;
            // Where something keeps the machines from each other, the source is better than nothing.
            let part = if refused < REFUSED { part } else { &Part::Fetches };
            if self.is_published() {
                return;
            }
            let tried = tokio::select! {
                biased;
                () = self.hushed(part) => {
                    self.wait_for_hours(part).await;
                    continue;
                }
                tried = self.attempt(part) => tried,
            };
            let Err(Setback { reason, message, room, after }) = tried else { return };
            refused = if self.status().bytes_done > before { 0 } else { refused + 1 };
            tracing::warn!(copy = self.name, ?reason, message, "copy failed; tried again");
            self.report(&status::Copy::Failed(reason, &message));
            if let Some((key, need)) = room {
                self.wait_for_room(&key, need).await;
                continue;
            }
            if self.status().bytes_done > before {
                pause = Duration::from_secs(1);
            }
            tokio::time::sleep(pause.max(after)).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    /// What the store is asked for where the source is not.
    fn offline(&self) -> Wanted {
        wanted_of(&self.copy.spec, Some(&self.status()))
    }

    fn is_published(&self) -> bool {
        let published = self.shared.store.published(&self.offline());
        published.map(|published| self.done(published)).is_some()
    }

    /// What bounds the transfer of files, where they come from another machine.
    fn pace(&self, part: &Part) -> Option<&Pace> {
        let spec = &self.copy.spec;
        match part {
            _ if spec.want != Want::Files || spec.source.is_local() => None,
            Part::Waits => None,
            Part::Fetches => Some(&self.shared.paces.sources),
            Part::Receives(_) => Some(&self.shared.paces.nodes),
        }
    }

    /// Waits for hours in which nothing may come, which may be now.
    async fn hushed(&self, part: &Part) {
        match self.pace(part) {
            Some(pace) => pace.hushed().await,
            None => std::future::pending().await,
        }
    }

    /// Says that these are such hours, and waits for their end.
    async fn wait_for_hours(&self, part: &Part) {
        let Some(pace) = self.pace(part) else { return };
        if let Some(message) = pace.quiet() {
            tracing::info!(copy = self.name, message);
            self.report(&status::Copy::Failed(Reason::QuietHours, &message));
        }
        pace.allowed().await;
    }

    async fn attempt(&self, part: &Part) -> Result<(), Setback> {
        let spec = &self.copy.spec;
        let offline = self.offline();
        if spec.want == Want::Files && *part == Part::Waits {
            self.report(&status::Copy::Waiting);
            // Until the operator says otherwise.
            return std::future::pending().await;
        }
        let writer = {
            let mut writers = locked(&self.shared.writers);
            writers.entry(spec.source.uri.clone()).or_default().clone()
        };
        let _writing = writer.lock().await;
        match spec.want {
            Want::Headers => {
                let wanted = Wanted { credentials: self.credentials().await?, ..offline };
                let headers = self.shared.store.headers(&wanted).await?;
                self.report(&status::Copy::Read(&headers));
            }
            Want::Files => {
                let progress = watch::Sender::new(Progress::default());
                let published = match part {
                    Part::Receives(id) => {
                        let pull = self.shared.reach.puller.pull(&offline, id, || self.ways(), &progress);
                        self.reported(pull, &progress).await?
                    }
                    Part::Fetches | Part::Waits => {
                        let wanted = Wanted { credentials: self.credentials().await?, ..offline };
                        self.reported(self.shared.store.fetch(&wanted, &progress), &progress).await?
                    }
                };
                // Small ones are here before anybody was told where they come from.
                self.report(&status::Copy::Working(&progress.borrow(), 0));
                self.done(published);
            }
            Want::Unknown => {
                let version = env!("CARGO_PKG_VERSION");
                let message = format!(
                    "spec.want is a word of a newer release than this agent's {version}; update the agent"
                );
                return Err((Reason::NewerRelease, message).into());
            }
        }
        Ok(())
    }

    fn done(&self, published: Published) {
        self.report(&status::Copy::Published(&published));
        locked(&self.shared.ready).insert(self.name.clone(), published);
        self.shared.changed.notify_one();
    }

    /// The ways to the nodes that have the files, as they are now.
    fn ways(&self) -> BTreeSet<spread::Way> {
        let Reach { puller: _, address, links } = &self.shared.reach;
        let supply = self.supply.borrow();
        let from: &[CopyPeer] = supply.as_ref().map_or(&[], |supply| &supply.from);
        spread::ways(from, *address.borrow(), &links.borrow())
    }

    /// Reports on files as they come.
    async fn reported(
        &self,
        coming: impl Future<Output = Result<Published, StoreError>>,
        progress: &watch::Sender<Progress>,
    ) -> Result<Published, StoreError> {
        self.seldom.tell(coming, progress, |now, rate| self.report(&status::Copy::Working(now, rate))).await
    }

    /// What opens the source, read only when it is about to be used.
    async fn credentials(&self) -> Result<Credentials, Setback> {
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
    fn the_operators_commit_comes_before_what_this_node_resolved_and_both_before_a_branch() {
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
            let wanted = wanted_of(&spec(commit), status);
            assert_eq!((wanted.revision.as_deref(), wanted.pinned), (Some(revision), pinned));
        }
    }
}
