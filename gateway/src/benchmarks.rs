//! Benchmark controller: watches Benchmarks, sends the load to the engines of the deployment that one names,
//! and writes the result to its status. The load uses the gateway's own channels to the engines, so nothing
//! else needs new permissions; it bypasses keys and quotas. Deleting a Benchmark cancels its run with all its
//! requests.
//!
//! ```text
//! waiting ──(its deployment is ready, and its turn comes)──▶ claimed by one gateway ─▶ Running ─▶ Finished
//!                                  ▲                                        │   └──────────────────▶ Failed
//!                                  └─── the gateway no longer renews it ────┘
//! ```
//!
//! Of several gateways one runs it: every status is written against the resource version that was read, so of
//! two gateways that claim the same Benchmark one gets a conflict.

mod decide;
mod load;
mod statistics;
mod status;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use jiff::Timestamp;
use kube::{Api, Client, ResourceExt as _};
use russet_crds::{Benchmark, BenchmarkStatus, ModelDeployment, ShardGroup};
use russet_rpc::cache_status::CacheStatus;
use tokio::sync::{oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::backends::Backends;
use crate::claims::{SeenVersions, replace_status};
use crate::routes::{Endpoint, RoutingTable};
use crate::watch::{Reflected, changes};
use decide::{NextStep, next_step};
use statistics::BenchmarkStatistics;
use status::{BenchmarkSubject, RunProgress};

/// Time between two reconciliations when nothing happens.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Time between two heartbeats in the status, which also report progress.
const RENEW_INTERVAL: Duration = Duration::from_secs(5);
/// A gateway without a heartbeat for this long is considered lost.
const RUNNER_TIMEOUT: Duration = Duration::from_secs(30);

/// A Benchmark that this gateway runs. Dropping it cancels its requests.
struct BenchmarkRun {
    subject: BenchmarkSubject,
    started: Timestamp,
    progress: watch::Receiver<u32>,
    renewed: Instant,
    /// The result; `None` while it runs.
    outcome: Option<Result<BenchmarkStatistics, String>>,
    result: oneshot::Receiver<Result<BenchmarkStatistics, String>>,
    task: AbortHandle,
}

impl Drop for BenchmarkRun {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The Benchmarks that this gateway runs.
struct BenchmarkRunner {
    client: Client,
    backends: Arc<Backends>,
    event_timeout: Duration,
    /// The name of this gateway in `status.runner`.
    name: String,
    runs: BTreeMap<String, BenchmarkRun>,
    seen: SeenVersions,
}

/// Runs Benchmarks until the future is dropped.
pub(crate) async fn run(
    client: Client,
    caches: CacheStatus,
    mut table: watch::Receiver<Arc<RoutingTable>>,
    backends: Backends,
    event_timeout: Duration,
) {
    let mut changes = changes::<Benchmark, _>(&client, &caches, |event| event);
    let mut benchmarks = Reflected::default();
    let mut poll = tokio::time::interval(POLL_INTERVAL);
    poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut runner = BenchmarkRunner {
        client,
        backends: Arc::new(backends),
        event_timeout,
        name: format!("{:016x}", rand::random::<u64>()),
        runs: BTreeMap::new(),
        seen: SeenVersions::default(),
    };
    loop {
        tokio::select! {
            // The stream never ends: a watcher reconnects forever.
            Some(event) = changes.next() => benchmarks.apply(event),
            _ = poll.tick() => {}
        }
        let table = table.borrow_and_update().clone();
        if benchmarks.listed && table.synced {
            let existing =
                benchmarks.iter().filter(|benchmark| benchmark.metadata.deletion_timestamp.is_none());
            runner.reconcile(&table, &existing.collect::<Vec<_>>()).await;
        }
    }
}

impl BenchmarkRunner {
    async fn reconcile(&mut self, table: &RoutingTable, all: &[&Benchmark]) {
        let uids: Vec<String> = all.iter().filter_map(|benchmark| benchmark.uid()).collect();
        self.runs.retain(|uid, _| uids.contains(uid));
        self.seen.observe(all);
        for benchmark in all {
            let uid = benchmark.uid().unwrap_or_default();
            if self.runs.contains_key(&uid) {
                self.advance(&uid, benchmark, all).await;
                continue;
            }
            let runs = |other: &Benchmark| self.runs_elsewhere(other);
            match next_step(benchmark, all, table, runs) {
                NextStep::Nothing => {}
                NextStep::Wait(waiting) => {
                    self.write_status(benchmark, &status::waiting(benchmark, &waiting, Timestamp::now()))
                        .await;
                }
                NextStep::Start(endpoints) => self.start(&uid, benchmark, endpoints).await,
            }
        }
    }

    /// Whether a gateway runs it: this one, or another with a recent heartbeat.
    fn runs_elsewhere(&self, benchmark: &Benchmark) -> bool {
        let uid = benchmark.uid().unwrap_or_default();
        let runner = benchmark.status.as_ref().and_then(|status| status.runner.as_ref());
        let is_alive = || self.seen.is_newer_than(&uid, RUNNER_TIMEOUT);
        // The watch may not have delivered this gateway's claim yet.
        self.runs.contains_key(&uid) || runner.is_some_and(|runner| *runner != self.name && is_alive())
    }

    /// Claims it and starts the load.
    async fn start(&mut self, uid: &str, benchmark: &Benchmark, endpoints: Vec<Endpoint>) {
        let started = Timestamp::now();
        let subject = match self.subject(benchmark, &endpoints).await {
            Ok(subject) => subject,
            Err(error) => {
                return tracing::warn!(
                    benchmark = benchmark.name_any(),
                    "cannot read the deployment of the Benchmark: {error}"
                );
            }
        };
        let progress = RunProgress { runner: &self.name, started, completed: 0 };
        if !self.write_status(benchmark, &status::running(benchmark, &progress, started)).await {
            return;
        }
        tracing::info!(
            benchmark = benchmark.name_any(),
            requests = benchmark.spec.requests(),
            "the Benchmark starts"
        );
        let (completed, progress) = watch::channel(0);
        let (sender, result) = oneshot::channel();
        let plan = load::LoadPlan {
            name: format!("{}/{}", benchmark.namespace().unwrap_or_default(), benchmark.name_any()),
            spec: benchmark.spec.clone(),
            endpoints,
            backends: self.backends.clone(),
            event_timeout: self.event_timeout,
        };
        let task = tokio::spawn(async move {
            // The receiver is dropped once the Benchmark is deleted.
            let _ = sender.send(load::run(plan, completed).await);
        });
        let (renewed, task) = (Instant::now(), task.abort_handle());
        let run = BenchmarkRun { subject, started, progress, renewed, outcome: None, result, task };
        self.runs.insert(uid.to_owned(), run);
    }

    /// Writes the progress or the result.
    async fn advance(&mut self, uid: &str, benchmark: &Benchmark, all: &[&Benchmark]) {
        let Some(mut run) = self.runs.remove(uid) else { return };
        let runner = benchmark.status.as_ref().and_then(|status| status.runner.as_ref());
        if runner.is_some_and(|runner| *runner != self.name) {
            // Another gateway saw no heartbeat of this one for too long and started over.
            return tracing::warn!(
                benchmark = benchmark.name_any(),
                "another gateway runs the Benchmark now"
            );
        }
        if run.outcome.is_none() {
            run.outcome = match run.result.try_recv() {
                Ok(outcome) => Some(outcome),
                Err(oneshot::error::TryRecvError::Empty) => None,
                Err(oneshot::error::TryRecvError::Closed) => {
                    Some(Err("an internal error of the gateway ended the run; see its log".to_owned()))
                }
            };
        }
        let (now, completed) = (Timestamp::now(), *run.progress.borrow());
        let progress = RunProgress { runner: &self.name, started: run.started, completed };
        match &run.outcome {
            None => {
                if run.renewed.elapsed() >= RENEW_INTERVAL
                    && self.write_status(benchmark, &status::running(benchmark, &progress, now)).await
                {
                    run.renewed = Instant::now();
                }
            }
            Some(outcome) => {
                let status = match outcome {
                    Ok(statistics) => {
                        status::finished(benchmark, &progress, statistics, &run.subject, all, now)
                    }
                    Err(cause) => status::failed(benchmark, &progress, cause, now),
                };
                // The run stays until its result is written: the API server may be unavailable.
                if self.write_status(benchmark, &status).await {
                    return;
                }
            }
        }
        self.runs.insert(uid.to_owned(), run);
    }

    /// The subject of the measurement, as the result names it.
    async fn subject(
        &self,
        benchmark: &Benchmark,
        endpoints: &[Endpoint],
    ) -> Result<BenchmarkSubject, kube::Error> {
        let namespace = benchmark.namespace().unwrap_or_default();
        let deployments: Api<ModelDeployment> = Api::namespaced(self.client.clone(), &namespace);
        let deployment = deployments.get(&benchmark.spec.deployment_ref.name).await?;
        let mut nodes = 0;
        if let Some((_, group)) = endpoints.first().and_then(|endpoint| endpoint.group.split_once('/')) {
            let groups: Api<ShardGroup> = Api::namespaced(self.client.clone(), &namespace);
            nodes = groups.get(group).await?.spec.plan.members.len() as u32;
        }
        let placement = deployment.status.and_then(|status| status.placement);
        let predicted = placement.and_then(|placement| placement.predicted);
        Ok(BenchmarkSubject { model: deployment.spec.model_ref.name, nodes, predicted })
    }

    /// Writes a status if it differs; true if the object now has it.
    async fn write_status(&self, benchmark: &Benchmark, status: &BenchmarkStatus) -> bool {
        if benchmark.status.as_ref() == Some(status) {
            return true;
        }
        replace_status(&self.client, benchmark, status).await.is_some()
    }
}
