//! Metrics of the API server, under the names Kubernetes uses.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use prometheus::{
    Encoder, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    TextEncoder,
};

use crate::flow_control::fair_queue::QueueError;
use crate::flow_control::{PriorityLevel, UserClass};
use crate::store::Store;

/// The metrics of one server.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Registry,
    requests: IntCounterVec,
    durations: HistogramVec,
    watches: IntGauge,
    connections: IntGaugeVec,
    closed_connections: IntCounterVec,
    dispatched: IntCounterVec,
    rejected: IntCounterVec,
    executing: IntGaugeVec,
    queued: IntGaugeVec,
    waits: HistogramVec,
    objects: IntGaugeVec,
    object_bytes: IntGaugeVec,
    commits: IntCounter,
    revision: IntGauge,
}

/// Counts a watch as open for as long as it lives.
#[derive(Debug)]
pub struct OpenWatch(IntGauge);

impl Drop for OpenWatch {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Metrics {
    /// Registers the metrics.
    pub fn new(registry: Registry) -> Result<Self, prometheus::Error> {
        let requests = IntCounterVec::new(
            Opts::new("apiserver_request_total", "Requests answered."),
            &["verb", "resource", "code"],
        )?;
        let durations = HistogramVec::new(
            HistogramOpts::new(
                "apiserver_request_duration_seconds",
                "Time to answer a request, watches excepted.",
            )
            .buckets(vec![0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0]),
            &["verb", "resource"],
        )?;
        let watches = IntGauge::new("apiserver_longrunning_requests", "Watches open now.")?;
        let connections = IntGaugeVec::new(
            Opts::new("apiserver_connections", "Connections open now, by who their client is."),
            &["class"],
        )?;
        let closed_connections = IntCounterVec::new(
            Opts::new(
                "apiserver_closed_connections_total",
                "Connections closed because as many were open as may be.",
            ),
            &["class"],
        )?;
        let counter = |name: &str, help: &str, labels: &[&str]| {
            IntCounterVec::new(Opts::new(format!("apiserver_flowcontrol_{name}"), help), labels)
        };
        let gauge = |name: &str, help: &str| {
            IntGaugeVec::new(Opts::new(format!("apiserver_flowcontrol_{name}"), help), &["priority_level"])
        };
        let dispatched = counter(
            "dispatched_requests_total",
            "Requests let in by priority and fairness.",
            &["priority_level"],
        )?;
        let rejected = counter(
            "rejected_requests_total",
            "Requests rejected by priority and fairness.",
            &["priority_level", "reason"],
        )?;
        let executing = gauge("current_executing_requests", "Requests handled now.")?;
        let queued = gauge("current_inqueue_requests", "Requests that wait now.")?;
        let waits = HistogramVec::new(
            HistogramOpts::new(
                "apiserver_flowcontrol_request_wait_duration_seconds",
                "Time requests waited in their queue.",
            )
            .buckets(vec![0.001, 0.01, 0.1, 1.0, 5.0, 15.0]),
            &["priority_level"],
        )?;
        let objects =
            IntGaugeVec::new(Opts::new("apiserver_storage_objects", "Objects stored."), &["resource"])?;
        let object_bytes = IntGaugeVec::new(
            Opts::new("apiserver_resource_size_estimate_bytes", "Bytes of the objects stored."),
            &["resource"],
        )?;
        let commits =
            IntCounter::new("apiserver_storage_commits_total", "Commits since start, one fsync each.")?;
        let revision = IntGauge::new("apiserver_storage_revision", "The newest revision.")?;
        registry.register(Box::new(requests.clone()))?;
        registry.register(Box::new(durations.clone()))?;
        registry.register(Box::new(commits.clone()))?;
        registry.register(Box::new(waits.clone()))?;
        for counters in [&closed_connections, &dispatched, &rejected] {
            registry.register(Box::new(counters.clone()))?;
        }
        for gauges in [&connections, &executing, &queued, &objects, &object_bytes] {
            registry.register(Box::new(gauges.clone()))?;
        }
        for gauge in [&watches, &revision] {
            registry.register(Box::new(gauge.clone()))?;
        }
        // A series that begins at zero is there before anything is rejected: its rate is known from the first time on.
        for class in UserClass::ALL {
            closed_connections.with_label_values(&[class.name()]);
        }
        for (level, error) in
            PriorityLevel::LIMITED.into_iter().flat_map(|level| QueueError::ALL.map(|error| (level, error)))
        {
            rejected.with_label_values(&[level.name(), error.reason()]);
        }
        Ok(Self {
            registry,
            requests,
            durations,
            watches,
            connections,
            closed_connections,
            dispatched,
            rejected,
            executing,
            queued,
            waits,
            objects,
            object_bytes,
            commits,
            revision,
        })
    }

    /// Counts a request that was let in after waiting this long.
    pub fn dispatched(&self, priority_level: &str, waited: Duration) {
        self.dispatched.with_label_values(&[priority_level]).inc();
        self.waits.with_label_values(&[priority_level]).observe(waited.as_secs_f64());
    }

    /// Counts a request that was not let in.
    pub fn rejected(&self, priority_level: &str, reason: &str) {
        self.rejected.with_label_values(&[priority_level, reason]).inc();
    }

    /// The gauges of a queue: requests handled now, and requests that wait now.
    pub fn queue(&self, priority_level: &str) -> [IntGauge; 2] {
        [&self.executing, &self.queued].map(|gauges| gauges.with_label_values(&[priority_level]))
    }

    /// Sets the number of stored objects and their bytes, by resource.
    pub fn storage(&self, resources: &BTreeMap<String, (usize, usize)>) {
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        // What is no longer served has no series.
        self.objects.reset();
        self.object_bytes.reset();
        for (resource, (objects, bytes)) in resources {
            self.objects.with_label_values(&[resource]).set(number(*objects));
            self.object_bytes.with_label_values(&[resource]).set(number(*bytes));
        }
    }

    /// The gauge of open connections.
    pub fn connections(&self, class: &str) -> IntGauge {
        self.connections.with_label_values(&[class])
    }

    /// Counts a connection that was closed because as many were open as may be.
    pub fn closed_connection(&self, class: &str) {
        self.closed_connections.with_label_values(&[class]).inc();
    }

    /// Counts a response.
    pub fn request(&self, verb: &str, resource: &str, code: u16, took: Duration) {
        self.requests.with_label_values(&[verb, resource, &code.to_string()]).inc();
        if verb != "watch" {
            self.durations.with_label_values(&[verb, resource]).observe(took.as_secs_f64());
        }
    }

    /// Counts a watch until the guard is dropped.
    pub fn open_watch(&self) -> OpenWatch {
        self.watches.inc();
        OpenWatch(self.watches.clone())
    }

    /// All metrics of the registry as text.
    pub fn render(&self, store: &Arc<dyn Store>) -> String {
        self.commits.inc_by(store.commits().saturating_sub(self.commits.get()));
        self.revision.set(i64::try_from(store.revision()).unwrap_or(i64::MAX));
        let mut text = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&self.registry.gather(), &mut text) {
            return format!("# the metrics could not be written: {error}\n");
        }
        String::from_utf8_lossy(&text).into_owned()
    }
}
