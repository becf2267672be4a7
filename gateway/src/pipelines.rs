//! Pipeline controller: watches PipelineRuns, runs the steps of each, and writes how far it is to its status. What the steps
//! make stays in the gateway's store. Not here: what a step does, see `action`, and how a run goes on, see `run`.
//!
//! ```text
//! PipelineRun ─(a gateway claims it)─▶ Running ─▶ Finished
//!      ▲                                 │  └───▶ Failed ──(attempt is raised)──▶ Running, from the failed step
//!      └─ its gateway is gone for long ──┘
//! ```
//!
//! Of several gateways one runs it: every status is written against the resource version that was read, so of two gateways
//! that claim the same run one gets a conflict. A gateway that starts again knows its own runs by the name in its store.

mod action;
mod approval;
mod calls;
mod check;
mod record;
mod references;
mod requested;
mod run;
mod schema;
mod start;
mod status;
mod step;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use jiff::Timestamp;
use kube::{Client, ResourceExt as _};
use parking_lot::Mutex;
use russet_crds::conditions::Reason;
use russet_crds::{Approval, HttpEndpoint, Pipeline, PipelineRun, PipelineRunStatus, names};
use russet_rpc::cache_status::CacheStatus;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::audit::AuditLog;
use crate::claims::{SeenVersions, replace_status};
use crate::metrics::Metrics;
use crate::offline::{Interruption, OfflineContext};
use crate::providers::SecretReader;
use crate::response_store::{ResponseStore, ResponseStoreError};
use crate::routes::RoutingTable;
use crate::watch::{Reflected, changes};
use crate::zone_client::ZoneClients;
use record::RunRecord;
pub(crate) use requested::{RequestedRuns, RunAnswer, unfit_text};
use run::PipelineRunner;
use status::RunCondition;

/// Time between two looks when nothing happens.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Time between two heartbeats in the status of a run in which nothing happens.
const RENEW_INTERVAL: Duration = Duration::from_secs(10);
/// Shortest time between two statuses of a run in which much happens.
const MIN_STATUS_INTERVAL: Duration = Duration::from_millis(500);
/// A gateway without a heartbeat for this long is considered lost.
const RUNNER_TIMEOUT: Duration = Duration::from_secs(60);
/// A run does nothing more where its gateway has not renewed its claim for so long: another one may have it soon.
const LEASE: Duration = Duration::from_secs(40);
/// Runs of this gateway at once, those that wait for a person left out.
const MAX_RUNNING: usize = 32;
/// The same of one namespace.
const MAX_RUNNING_PER_NAMESPACE: usize = 16;
/// Runs that begin at once, with those that wait for a person or for others.
const MAX_OPEN: usize = 256;
/// Time between two tries to start a run that cannot start.
const START_INTERVAL: Duration = Duration::from_secs(5);
/// How often a run may stop before its end: more, and it is what stops it.
const MAX_STOPS: u32 = 5;

/// What runs of Pipelines need of the gateway.
#[derive(Clone)]
pub(crate) struct PipelineContext {
    pub(crate) client: Client,
    pub(crate) offline: OfflineContext,
    pub(crate) store: Arc<ResponseStore>,
    pub(crate) table: watch::Receiver<Arc<RoutingTable>>,
    pub(crate) clients: ZoneClients,
    pub(crate) secrets: Arc<SecretReader>,
    pub(crate) audit: Option<AuditLog>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) requested: Arc<RequestedRuns>,
    objects: watch::Receiver<Arc<PipelineObjects>>,
}

/// The objects that runs look at.
#[derive(Clone, Debug, Default)]
struct PipelineObjects {
    /// Whether all of them were listed once.
    listed: bool,
    pipelines: Arc<BTreeMap<(String, String), Pipeline>>,
    endpoints: Arc<BTreeMap<(String, String), HttpEndpoint>>,
    approvals: Arc<BTreeMap<(String, String), Approval>>,
}

impl PipelineContext {
    /// What runs need, which look at the objects of a controller.
    pub(crate) fn new(
        requested: Arc<RequestedRuns>,
        offline: OfflineContext,
        table: watch::Receiver<Arc<RoutingTable>>,
        (clients, secrets): (ZoneClients, Arc<SecretReader>),
        audit: Option<AuditLog>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let objects = requested.objects.subscribe();
        let (client, store) = (requested.client.clone(), requested.store.clone());
        Self { client, offline, store, table, clients, secrets, audit, metrics, requested, objects }
    }

    /// An HTTPEndpoint as it is now.
    fn endpoint(&self, namespace: &str, name: &str) -> Option<HttpEndpoint> {
        self.objects.borrow().endpoints.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }
}

/// Whether a run is still that of its gateway, which renews this with each status that it writes.
#[derive(Clone)]
struct RunnerLease(Arc<Mutex<(Instant, Timestamp)>>);

impl RunnerLease {
    fn new() -> Self {
        Self(Arc::new(Mutex::new((Instant::now(), Timestamp::now()))))
    }

    fn renew(&self) {
        *self.0.lock() = (Instant::now(), Timestamp::now());
    }

    /// Since when it was not renewed: by the clock that stands still while the machine sleeps, and by the one that can be set.
    fn age(&self) -> Duration {
        let (instant, time) = *self.0.lock();
        let by_time = Timestamp::now().duration_since(time).try_into().unwrap_or_default();
        instant.elapsed().max(by_time)
    }

    /// Waits until the claim was renewed lately.
    async fn valid(&self, offline: &OfflineContext) -> Result<(), Interruption> {
        while self.age() > LEASE {
            offline.wait(POLL_INTERVAL).await?;
        }
        if offline.stopping.is_cancelled() { Err(Interruption::Stopping) } else { Ok(()) }
    }
}

/// A run that this gateway runs. Dropping it stops it.
struct ActiveRun {
    name: (String, String),
    lease: RunnerLease,
    progress: watch::Receiver<Arc<RunRecord>>,
    written: Instant,
    task: JoinHandle<()>,
}

impl Drop for ActiveRun {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The runs of this gateway.
struct PipelineController {
    context: PipelineContext,
    /// The name of this gateway in `status.runner`.
    name: String,
    active: BTreeMap<String, ActiveRun>,
    seen: SeenVersions,
    /// Runs in the store, once it was looked at.
    stored: Option<Vec<String>>,
    /// Runs that cannot start, and when they are looked at again.
    not_before: BTreeMap<String, Instant>,
    /// How often runs stopped before their ends.
    stops: BTreeMap<String, u32>,
    /// The resource versions from which statuses were written that the watch has not delivered yet: until then the objects are
    /// those of before.
    outdated: Mutex<BTreeMap<String, Option<String>>>,
    places: Arc<Semaphore>,
    own_places: BTreeMap<String, Arc<Semaphore>>,
}

/// Runs PipelineRuns until `context.offline.stopping`; runs that are not at their end go on when the gateway starts again.
pub(crate) async fn run(context: PipelineContext, caches: CacheStatus) {
    let name = match context.store.read(|store| store.gateway_name()).await {
        Ok(name) => name,
        Err(error) => return tracing::error!(%error, "no Pipelines are run: the store has no name"),
    };
    let client = context.client.clone();
    let mut run_changes = changes::<PipelineRun, _>(&client, &caches, |event| event);
    let mut pipeline_changes = changes::<Pipeline, _>(&client, &caches, |event| event);
    let mut endpoint_changes = changes::<HttpEndpoint, _>(&client, &caches, |event| event);
    let mut approval_changes = changes::<Approval, _>(&client, &caches, |event| event);
    let mut runs = Reflected::<PipelineRun>::default();
    let mut pipelines = Reflected::<Pipeline>::default();
    let mut endpoints = Reflected::<HttpEndpoint>::default();
    let mut approvals = Reflected::<Approval>::default();
    let mut seen = PipelineObjects::default();
    let _ = context.requested.gateway.set(name.clone());
    let requested = context.requested.clone();
    let stopping = context.offline.stopping.clone();
    let mut poll = tokio::time::interval(POLL_INTERVAL);
    poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut controller = PipelineController {
        context,
        name,
        active: BTreeMap::new(),
        seen: SeenVersions::default(),
        stored: None,
        not_before: BTreeMap::new(),
        stops: BTreeMap::new(),
        outdated: Mutex::default(),
        places: Arc::new(Semaphore::new(MAX_RUNNING)),
        own_places: BTreeMap::new(),
    };
    loop {
        // The streams never end: a watcher reconnects forever.
        let changed = tokio::select! {
            biased;
            () = stopping.cancelled() => break,
            Some(event) = run_changes.next() => { runs.apply(event); false }
            Some(event) = pipeline_changes.next() => {
                pipelines.apply(event);
                seen.pipelines = by_name(&pipelines);
                true
            }
            Some(event) = endpoint_changes.next() => {
                endpoints.apply(event);
                seen.endpoints = by_name(&endpoints);
                true
            }
            Some(event) = approval_changes.next() => {
                approvals.apply(event);
                seen.approvals = by_name(&approvals);
                true
            }
            () = controller.progressed() => false,
            _ = poll.tick() => false,
        };
        if changed {
            seen.listed = pipelines.listed && endpoints.listed && approvals.listed;
            requested.objects.send_replace(Arc::new(seen.clone()));
        }
        let is_synced = runs.listed && seen.listed && controller.is_synced();
        if is_synced {
            let existing = runs.iter().filter(|run| run.metadata.deletion_timestamp.is_none());
            let unreadable: Vec<_> = runs.undecodable().cloned().collect();
            controller.reconcile(&existing.collect::<Vec<_>>(), &unreadable).await;
        }
    }
    controller.stop().await;
}

fn by_name<K: kube::Resource<DynamicType = ()> + Clone + std::fmt::Debug>(
    objects: &Reflected<K>,
) -> Arc<BTreeMap<(String, String), K>> {
    let key = |object: &K| (object.namespace().unwrap_or_default(), object.name_any());
    Arc::new(objects.iter().map(|object| (key(object), object.clone())).collect())
}

impl PipelineController {
    /// Whether the gateway knows its keys and routes.
    fn is_synced(&self) -> bool {
        self.context.offline.keyring.borrow().synced && self.context.table.borrow().synced
    }

    /// Waits until a run is further than its status says, and may say it.
    async fn progressed(&mut self) {
        let waits = self.active.values_mut().map(|run| {
            Box::pin(async move {
                let due = run.written + MIN_STATUS_INTERVAL;
                // The sender goes with the task. One that stopped before its end goes on at a later poll.
                if run.progress.changed().await.is_err() && run.progress.borrow().finished.is_none() {
                    std::future::pending::<()>().await;
                }
                // Looking has marked it as seen.
                run.progress.mark_changed();
                tokio::time::sleep_until(due).await;
            })
        });
        let waits: Vec<_> = waits.collect();
        if waits.is_empty() {
            return std::future::pending().await;
        }
        futures::future::select_all(waits).await;
    }

    /// Brings all runs forward; `unreadable` are there too, and nobody knows more of them.
    async fn reconcile(&mut self, all: &[&PipelineRun], unreadable: &[(String, String)]) {
        let uids: BTreeSet<String> = all.iter().filter_map(|run| run.uid()).collect();
        let gone: Vec<String> = self
            .active
            .iter()
            .filter(|(uid, run)| !uids.contains(*uid) && !unreadable.contains(&run.name))
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in gone {
            if let Some(mut run) = self.active.remove(&uid) {
                run.task.abort();
                let _ = (&mut run.task).await;
            }
        }
        self.seen.observe(all);
        self.not_before.retain(|uid, _| uids.contains(uid));
        self.stops.retain(|uid, _| uids.contains(uid));
        self.outdated.lock().retain(|uid, _| uids.contains(uid));
        self.own_places.retain(|_, places| Arc::strong_count(places) > 1);
        if unreadable.is_empty() {
            self.forget_deleted(&uids).await;
        }
        let now = Instant::now();
        for (_, run) in self.active.iter_mut().filter(|(uid, _)| !uids.contains(*uid)) {
            // Its object cannot be read, so nothing of it can be written.
            run.written = now;
        }
        self.context.requested.observe(all.iter().copied(), |run| self.is_of_another(run));
        let expected = self.context.requested.expected(all).await;
        for run in all {
            let uid = run.uid().unwrap_or_default();
            let is_expected = expected.contains(&full_name(run));
            let has_ended = |run: &ActiveRun| run.progress.borrow().finished.is_some();
            if self.context.requested.is_abandoned(run)
                && !is_expected
                && !self.is_of_another(run)
                && !self.active.get(&uid).is_some_and(has_ended)
            {
                // It stops here; what is kept of it goes once the watch says that it is deleted.
                self.active.remove(&uid);
                RequestedRuns::delete(self.context.client.clone(), run).await;
                continue;
            }
            if self.outdated.lock().get(&uid) == Some(&run.resource_version()) {
                continue;
            }
            if self.active.contains_key(&uid) {
                self.advance(&uid, run).await;
                continue;
            }
            if self.is_of_another(run) {
                self.forget(&uid).await;
            }
            if is_over(run) && self.context.requested.is_awaited(run) {
                self.context.requested.ended_before(run).await;
            }
            // What has no claim may not be kept, and its text comes with its request.
            let lacks_text = is_expected && runner(run).is_none();
            if !is_over(run) && !lacks_text && self.may_start(&uid, run) && !self.start(&uid, run).await {
                self.not_before.insert(uid, Instant::now() + START_INTERVAL);
            }
        }
    }

    /// Deletes what is kept of runs that are deleted.
    async fn forget_deleted(&mut self, uids: &BTreeSet<String>) {
        if self.stored.is_none() {
            self.stored = self.context.store.read(|store| store.run_ids()).await.ok();
        }
        let gone = |id: &&String| !uids.contains(*id);
        for id in self.stored.iter().flatten().filter(gone).cloned().collect::<Vec<_>>() {
            self.forget(&id).await;
        }
    }

    /// Deletes what is kept of a run, if anything is.
    async fn forget(&mut self, id: &str) {
        let Some(stored) = self.stored.as_mut().filter(|stored| stored.iter().any(|known| known == id))
        else {
            return;
        };
        match self.context.store.delete_run(id).await {
            Ok(()) => stored.retain(|known| known != id),
            Err(error) => tracing::warn!(run = id, %error, "what a run made is still there"),
        }
    }

    /// Whether another gateway has claimed it: what is kept of it here is of a claim that was lost.
    fn is_of_another(&self, run: &PipelineRun) -> bool {
        runner(run).is_some_and(|runner| *runner != self.name)
    }

    /// Whether a run that this gateway does not run may start now. One of its own goes on in any case.
    fn may_start(&self, uid: &str, run: &PipelineRun) -> bool {
        let is_own = runner(run) == Some(&self.name);
        if self.is_asked_for_elsewhere(run) {
            return false;
        }
        let is_due = self.not_before.get(uid).is_none_or(|time| *time <= Instant::now());
        is_due && !self.runs_elsewhere(run) && (is_own || self.active.len() < MAX_OPEN)
    }

    /// Whether a request of another gateway waits for it, which begins it, unless that is gone.
    fn is_asked_for_elsewhere(&self, run: &PipelineRun) -> bool {
        let by = run.labels().get(names::LABEL_GATEWAY);
        let created = run.metadata.creation_timestamp.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0);
        let age = Duration::try_from(Timestamp::now().duration_since(created)).unwrap_or_default();
        runner(run).is_none() && by.is_some_and(|by| *by != self.name) && age < RUNNER_TIMEOUT
    }

    /// Whether another gateway with a recent heartbeat runs it.
    fn runs_elsewhere(&self, run: &PipelineRun) -> bool {
        let uid = run.uid().unwrap_or_default();
        self.is_of_another(run) && self.seen.is_newer_than(&uid, RUNNER_TIMEOUT)
    }

    /// Claims it and goes on with it, or says why it cannot begin; false where it is looked at again later.
    async fn start(&mut self, uid: &str, run: &PipelineRun) -> bool {
        let now = Timestamp::now();
        let objects = self.context.objects.borrow().clone();
        let started = match start::record(&self.context, &objects, (run, &self.name), now).await {
            Ok(started) => started,
            Err(start::StartError::NotYet(reason, message)) => {
                self.context.requested.refused(run, &message);
                let status = status::waiting(run, RunCondition::Stalled, reason, &message, now);
                self.write_status(run, &status).await;
                return false;
            }
            Err(start::StartError::Never(message)) => {
                self.context.requested.refused(run, &message);
                let status = status::waiting(run, RunCondition::Stalled, Reason::Failed, &message, now);
                return self.write_status(run, &status).await;
            }
            Err(start::StartError::Store(error)) => return self.waits_for_store(run, &error).await,
        };
        let mut record = started.record.clone();
        let stops = self.stops.get(uid).copied().unwrap_or_default();
        if stops >= MAX_STOPS && record.finished.is_none() {
            let why = format!("it stopped {stops} times before its end; the gateway's log says why");
            let failure = record.failure.take();
            let failure = failure.map_or_else(|| why.clone(), |failure| format!("{failure}; {why}"));
            record = record.failed(failure, now);
        }
        // Kept before it is claimed: what has a claim is there.
        let started = start::StartedRun { record: record.clone(), ..started };
        if let Err(error) = start::save(&self.context, started).await {
            return self.waits_for_store(run, &error).await;
        }
        if record.finished.is_some() {
            self.stops.remove(uid);
        }
        if let Some(stored) = &mut self.stored
            && !stored.iter().any(|id| id == uid)
        {
            stored.push(uid.to_owned());
        }
        let is_claimed = self.write_status(run, &status::of_record(run, &record, &self.name, now)).await;
        if record.finished.is_some() {
            self.context.requested.ended(&record).await;
        }
        if !is_claimed || record.finished.is_some() {
            return is_claimed;
        }
        tracing::info!(
            run = run.name_any(),
            attempt = record.attempt,
            "a run of a Pipeline starts or goes on"
        );
        let own = self.own_places.entry(record.namespace.clone());
        let own = own.or_insert_with(|| Arc::new(Semaphore::new(MAX_RUNNING_PER_NAMESPACE))).clone();
        let (publish, progress) = watch::channel(Arc::new(record.clone()));
        let lease = RunnerLease::new();
        let name = (record.namespace.clone(), record.name.clone());
        let places = [own, self.places.clone()];
        let runner = PipelineRunner::new(self.context.clone(), record, publish, lease.clone(), places);
        let shown = run.name_any();
        let task = tokio::spawn(async move {
            if let Err(interruption) = runner.run().await {
                tracing::info!(run = shown, ?interruption, "a run of a Pipeline stops before its end");
            }
        });
        self.active
            .insert(uid.to_owned(), ActiveRun { name, lease, progress, written: Instant::now(), task });
        true
    }

    async fn waits_for_store(&self, run: &PipelineRun, error: &ResponseStoreError) -> bool {
        tracing::warn!(run = run.name_any(), %error, "a run of a Pipeline waits for the store");
        let message = format!("the gateway's store takes no run now: {error}");
        let status =
            status::waiting(run, RunCondition::Stalled, Reason::Insufficient, &message, Timestamp::now());
        self.write_status(run, &status).await;
        false
    }

    /// Writes how far it is.
    async fn advance(&mut self, uid: &str, run: &PipelineRun) {
        let Some(mut active) = self.active.remove(uid) else { return };
        if self.is_of_another(run) {
            // Another gateway saw no heartbeat of this one for too long and began anew.
            return tracing::warn!(run = run.name_any(), "another gateway runs the PipelineRun now");
        }
        let (has_ended, since) = (active.task.is_finished(), active.written.elapsed());
        let record = active.progress.borrow().clone();
        let is_over = record.finished.is_some();
        if is_over {
            self.context.requested.ended(&record).await;
        }
        let has_news = is_over || active.progress.has_changed().unwrap_or(false);
        if (has_news && since >= MIN_STATUS_INTERVAL) || since >= RENEW_INTERVAL {
            active.progress.mark_unchanged();
            let status = status::of_record(run, &record, &self.name, Timestamp::now());
            let is_written = self.write_status(run, &status).await;
            active.written = Instant::now();
            match is_written {
                // One that is at its end stays until that is written: the API server may be unavailable.
                true if is_over => return,
                true if has_ended => {
                    *self.stops.entry(uid.to_owned()).or_default() += 1;
                    self.not_before.insert(uid.to_owned(), Instant::now() + START_INTERVAL);
                    return;
                }
                true => active.lease.renew(),
                false => active.progress.mark_changed(),
            }
        }
        self.active.insert(uid.to_owned(), active);
    }

    /// Waits until the runs have stopped.
    async fn stop(mut self) {
        for run in self.active.values_mut() {
            let _ = (&mut run.task).await;
            let record = run.progress.borrow().clone();
            if record.finished.is_some() {
                self.context.requested.ended(&record).await;
            }
        }
        self.context.requested.close();
    }

    /// Writes a status if it differs; true if the object now has it.
    async fn write_status(&self, run: &PipelineRun, status: &PipelineRunStatus) -> bool {
        if run.status.as_ref() == Some(status) {
            return true;
        }
        let Some(now) = replace_status(&self.context.client, run, status).await else { return false };
        if now.resource_version() != run.resource_version() {
            self.outdated.lock().insert(run.uid().unwrap_or_default(), run.resource_version());
        }
        true
    }
}

/// A name of so many characters of another one and a suffix.
fn suffixed(name: &str, most: usize, suffix: &str) -> String {
    let beginning: String = name.chars().take(most).collect();
    // Before a hyphen no name has a dot.
    format!("{}-{suffix}", beginning.trim_end_matches(['.', '-']))
}

/// Namespace and name of a run.
type RunName = (String, String);

fn full_name(run: &PipelineRun) -> RunName {
    (run.namespace().unwrap_or_default(), run.name_any())
}

/// The gateway that runs it, as its status says.
fn runner(run: &PipelineRun) -> Option<&String> {
    run.status.as_ref()?.runner.as_ref()
}

/// Whether its status says that this attempt has ended.
fn is_over(run: &PipelineRun) -> bool {
    let status = run.status.as_ref();
    status.is_some_and(|status| status.finished_at.is_some() && status.attempt >= Some(run.spec.attempt))
}
