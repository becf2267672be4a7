//! Metrics of the API server, under the names Kubernetes uses.

use std::sync::Arc;
use std::time::Duration;

use prometheus::{
    Encoder, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry, TextEncoder,
};

use crate::store::Store;

/// The metrics of one server.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Registry,
    requests: IntCounterVec,
    durations: HistogramVec,
    watches: IntGauge,
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
        let commits =
            IntCounter::new("apiserver_storage_commits_total", "Commits since start, one fsync each.")?;
        let revision = IntGauge::new("apiserver_storage_revision", "The newest revision.")?;
        registry.register(Box::new(requests.clone()))?;
        registry.register(Box::new(durations.clone()))?;
        registry.register(Box::new(commits.clone()))?;
        for gauge in [&watches, &revision] {
            registry.register(Box::new(gauge.clone()))?;
        }
        Ok(Self { registry, requests, durations, watches, commits, revision })
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
