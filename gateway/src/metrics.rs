//! Metrics of the gateway. Suffixes follow llm-d's gateway so that its dashboards need only another prefix;
//! the histogram buckets are vLLM's. Values that do not exist are absent, never 0.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus::{
    CounterVec, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry, core::Collector,
};
use russet_crds::Money;

use crate::energy::EnginePart;
use crate::error::{ErrorKind, GatewayError};

/// Maximum distinct model names, and distinct key names, in labels; clients that invent names must not fill
/// the memory of the metrics collector.
const MAX_LABEL_NAMES: usize = 1000;
/// The label of names that resolve to nothing.
const UNKNOWN: &str = "unknown";
/// The label of names beyond [`MAX_LABEL_NAMES`].
const OTHER: &str = "other";

/// Labels of the metrics per deployment, under the names that autoscalers expect.
const DEPLOYMENT: &[&str] = &["namespace", "name"];

const FIRST_TOKEN_BUCKETS: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
const REQUEST_BUCKETS: [f64; 20] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0,
];

/// The gateway's metrics, all under `russet_gateway_`.
pub struct Metrics {
    models: Mutex<HashMap<String, Arc<ModelMetrics>>>,
    keys: Mutex<HashSet<String>>,
    key_requests: IntCounterVec,
    requests: IntCounterVec,
    errors: IntCounterVec,
    cancelled: IntCounterVec,
    retries: IntCounterVec,
    hedged: IntCounterVec,
    continued: IntCounterVec,
    response_cache: IntCounterVec,
    provider_requests: IntCounterVec,
    provider_cost: CounterVec,
    provider_credits: GaugeVec,
    energy: CounterVec,
    electricity: CounterVec,
    budgets: Mutex<HashSet<String>>,
    budget_requests: IntCounterVec,
    inbox_requests: IntCounterVec,
    pipeline_steps: IntCounterVec,
    inbox: IntGaugeVec,
    running: IntGaugeVec,
    queue: IntGaugeVec,
    outcomes: IntCounterVec,
    first_token: HistogramVec,
    duration: HistogramVec,
    prompt_tokens: IntCounterVec,
    cached_tokens: IntCounterVec,
    generation_tokens: IntCounterVec,
    waiting: IntGaugeVec,
    active: IntGaugeVec,
    held: HistogramVec,
}

impl Metrics {
    /// The metrics, registered in `registry`; an error when they are registered already.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let model: &[&str] = &["model_name"];
        Ok(Self {
            models: Mutex::default(),
            keys: Mutex::default(),
            key_requests: add(
                registry,
                counter(
                    "key_request_total",
                    "Requests for an answer by the AccessKey they came with, and whether its quota had room.",
                    &["key", "outcome"],
                )?,
            )?,
            requests: add(registry, counter("request_total", "Requests for an answer.", model)?)?,
            errors: add(
                registry,
                counter(
                    "request_error_total",
                    "Requests that got an error instead of an answer or of its end.",
                    &["model_name", "error_code"],
                )?,
            )?,
            cancelled: add(
                registry,
                counter("request_cancelled_total", "Requests whose client left before the end.", model)?,
            )?,
            retries: add(
                registry,
                counter(
                    "request_retry_total",
                    "Times a request was sent again because an engine did not take it or was lost.",
                    model,
                )?,
            )?,
            hedged: add(
                registry,
                counter(
                    "hedged_request_total",
                    "Requests that a second replica got because the first had no first token in time, and which one answered.",
                    &["model_name", "outcome"],
                )?,
            )?,
            continued: add(
                registry,
                counter(
                    "request_continued_total",
                    "Answers whose engine was lost, and whether another one went on with them.",
                    &["model_name", "outcome"],
                )?,
            )?,
            response_cache: add(
                registry,
                counter_from_zero(
                    "response_cache_total",
                    "Requests of routes that keep answers, and whether they got one that is kept (hit, miss).",
                    "outcome",
                    &["hit", "miss"],
                )?,
            )?,
            provider_requests: add(
                registry,
                counter(
                    "provider_request_total",
                    "Requests sent to providers outside of the cluster, and what became of them.",
                    &["provider", "outcome"],
                )?,
            )?,
            provider_cost: add(
                registry,
                CounterVec::new(
                    Opts::new(
                        full_name("provider_cost_total"),
                        "What complete answers of providers cost, by their prices, and without a price as they say.",
                    ),
                    &["provider"],
                )?,
            )?,
            provider_credits: add(
                registry,
                GaugeVec::new(
                    Opts::new(
                        full_name("provider_credits"),
                        "What was left of the credits of a provider's key when the provider was asked last.",
                    ),
                    &["provider"],
                )?,
            )?,
            energy: add(
                registry,
                CounterVec::new(
                    Opts::new(
                        full_name("energy_joules_total"),
                        "Joules of the machines that computed for requests, by whether their watts were measured or declared.",
                    ),
                    &["model_name", "source"],
                )?,
            )?,
            electricity: add(
                registry,
                CounterVec::new(
                    Opts::new(
                        full_name("electricity_cost_total"),
                        "What the electricity of these joules cost, by the prices of the nodes, in the currency of these.",
                    ),
                    model,
                )?,
            )?,
            budgets: Mutex::default(),
            budget_requests: add(
                registry,
                counter(
                    "budget_request_total",
                    "Requests that a Budget counts, and whether it had enough left (reserved, refused).",
                    &["budget", "outcome"],
                )?,
            )?,
            inbox_requests: add(
                registry,
                counter_from_zero(
                    "inbox_request_total",
                    "Requests of the inbox that have ended, and how.",
                    "outcome",
                    &["done", "failed"],
                )?,
            )?,
            pipeline_steps: add(
                registry,
                counter_from_zero(
                    "pipeline_step_total",
                    "Steps of PipelineRuns that are over, and how.",
                    "outcome",
                    &["done", "skipped", "failed"],
                )?,
            )?,
            inbox: add(
                registry,
                gauge(
                    "inbox_queue",
                    "Requests of the inbox that wait (pending) and that run (leased).",
                    &["state"],
                )?,
            )?,
            running: add(registry, gauge("request_running", "Requests being answered now.", model)?)?,
            queue: add(
                registry,
                gauge("flow_control_queue_size", "Requests waiting for an engine now.", model)?,
            )?,
            outcomes: add(
                registry,
                counter_from_zero(
                    "flow_control_requests_total",
                    "Requests by what became of them before an engine took them.",
                    "outcome",
                    &["dispatched", "evicted", "cancelled", "rejected"],
                )?,
            )?,
            first_token: add(
                registry,
                histogram(
                    "request_ttft_seconds",
                    "From the request's arrival to its first token.",
                    &FIRST_TOKEN_BUCKETS,
                    model,
                )?,
            )?,
            duration: add(
                registry,
                histogram(
                    "request_duration_seconds",
                    "From the request's arrival to the end of its answer.",
                    &REQUEST_BUCKETS,
                    model,
                )?,
            )?,
            prompt_tokens: add(
                registry,
                counter("prompt_tokens_total", "Tokens of prompts that were answered.", model)?,
            )?,
            cached_tokens: add(
                registry,
                counter(
                    "cached_tokens_total",
                    "Tokens of prompts that engines had cached, of those in prompt_tokens_total.",
                    model,
                )?,
            )?,
            generation_tokens: add(
                registry,
                counter("generation_tokens_total", "Tokens of complete answers.", model)?,
            )?,
            waiting: add(
                registry,
                gauge("num_requests_waiting", "Requests held until a replica answers.", DEPLOYMENT)?,
            )?,
            active: add(
                registry,
                gauge("num_requests_running", "Requests that replicas are answering.", DEPLOYMENT)?,
            )?,
            held: add(
                registry,
                histogram(
                    "request_queue_time_seconds",
                    "How long a request was held until a replica answered, or it was given up.",
                    &REQUEST_BUCKETS,
                    DEPLOYMENT,
                )?,
            )?,
        })
    }

    /// A request of a route that keeps answers got one that is kept, or did not.
    pub fn response_cache(&self, outcome: &str) {
        self.response_cache.with_label_values(&[outcome]).inc();
    }

    /// A request to a provider ended so.
    pub fn provider_request(&self, provider: &str, outcome: &str) {
        self.provider_requests.with_label_values(&[provider, outcome]).inc();
    }

    /// So much is left of the credits of a provider's key; none where it has no limit, or nobody asks any more.
    pub fn provider_credits(&self, provider: &str, remaining: Option<Money>) {
        match remaining {
            Some(remaining) => {
                self.provider_credits.with_label_values(&[provider]).set(remaining.nanos as f64 / 1e9);
            }
            None => drop(self.provider_credits.remove_label_values(&[provider])),
        }
    }

    /// An answer of a provider cost so much.
    pub fn provider_cost(&self, provider: &str, cost: Money) {
        self.provider_cost.with_label_values(&[provider]).inc_by(cost.nanos as f64 / 1e9);
    }

    /// An engine computed for a request; what is not known of it is not counted.
    pub(crate) fn energy(&self, model: &str, part: EnginePart) {
        let Some((joules, source)) = part.joules() else { return };
        let model = self.model(model);
        self.energy.with_label_values(&[model.label.as_str(), source.as_str()]).inc_by(joules);
        if let Some(cost) = part.cost() {
            self.electricity.with_label_values(&[model.label.as_str()]).inc_by(cost);
        }
    }

    /// A request of the inbox has ended.
    pub fn inbox_ended(&self, outcome: &str) {
        self.inbox_requests.with_label_values(&[outcome]).inc();
    }

    /// A step of a PipelineRun is over.
    pub fn pipeline_step(&self, outcome: &str) {
        self.pipeline_steps.with_label_values(&[outcome]).inc();
    }

    /// So many more requests of the inbox are in this state.
    pub fn inbox_moved(&self, state: &str, more: i64) {
        self.inbox.with_label_values(&[state]).add(more);
    }

    /// Counts a request that a Budget counts, and whether it or another Budget has too little left for it.
    pub fn budget_request(&self, budget: &str, is_refused: bool) {
        let label = bounded_label(&self.budgets, budget);
        let outcome = if is_refused { "refused" } else { "reserved" };
        self.budget_requests.with_label_values(&[label.as_str(), outcome]).inc();
    }

    /// Counts a request of a key, and whether it exceeded the quota.
    pub fn key_request(&self, key: &str, over_quota: bool) {
        let label = bounded_label(&self.keys, key);
        let outcome = if over_quota { "refused" } else { "taken" };
        self.key_requests.with_label_values(&[label.as_str(), outcome]).inc();
    }

    /// Counts a request that is rejected before routing: its key is not accepted, or its model name resolves
    /// to nothing.
    pub fn rejected(&self, error: &GatewayError) {
        self.requests.with_label_values(&[UNKNOWN]).inc();
        self.errors.with_label_values(&[UNKNOWN, error.kind.as_str()]).inc();
        self.outcomes.with_label_values(&["rejected"]).inc();
    }

    /// The gauges of a deployment.
    pub(crate) fn deployment(&self, namespace: &str, name: &str) -> DeploymentGauges {
        let label = [namespace, name];
        DeploymentGauges {
            waiting: self.waiting.with_label_values(&label),
            active: self.active.with_label_values(&label),
        }
    }

    /// Counts a request whose hold has ended, and how long it was held.
    pub fn hold_ended(&self, namespace: &str, name: &str, duration: Duration) {
        self.held.with_label_values(&[namespace, name]).observe(duration.as_secs_f64());
    }

    /// Removes the series of a deployment that is deleted.
    pub fn remove_deployment(&self, namespace: &str, name: &str) {
        let labels = [namespace, name];
        // An error means that there was no series.
        let _ = self.waiting.remove_label_values(&labels);
        let _ = self.active.remove_label_values(&labels);
        let _ = self.held.remove_label_values(&labels);
    }

    /// Starts tracking a request for a known model.
    pub fn request(self: &Arc<Self>, model: &str) -> RequestTracker {
        let model = self.model(model);
        model.requests.inc();
        model.running.inc();
        model.queue.inc();
        RequestTracker {
            metrics: self.clone(),
            model,
            arrived: Instant::now(),
            queued: true,
            first_token: None,
            ended: false,
        }
    }

    /// The metrics of a model; of all others together, where there are too many.
    fn model(&self, name: &str) -> Arc<ModelMetrics> {
        let mut models = self.models.lock();
        if let Some(model) = models.get(name) {
            return model.clone();
        }
        let label = if models.len() < MAX_LABEL_NAMES { name } else { OTHER };
        let of_label = || {
            let labels = [label];
            Arc::new(ModelMetrics {
                label: label.to_owned(),
                requests: self.requests.with_label_values(&labels),
                running: self.running.with_label_values(&labels),
                queue: self.queue.with_label_values(&labels),
                first_token: OnceLock::new(),
                answers: OnceLock::new(),
            })
        };
        models.entry(label.to_owned()).or_insert_with(of_label).clone()
    }
}

/// What each request for a model counts, found once: to find one by its labels takes longer than to count.
struct ModelMetrics {
    label: String,
    requests: IntCounter,
    running: IntGauge,
    queue: IntGauge,
    /// From the first one on.
    first_token: OnceLock<Histogram>,
    answers: OnceLock<AnswerMetrics>,
}

/// What each complete answer of a model counts.
struct AnswerMetrics {
    duration: Histogram,
    prompt_tokens: IntCounter,
    cached_tokens: IntCounter,
    generation_tokens: IntCounter,
}

impl AnswerMetrics {
    fn new(metrics: &Metrics, label: &str) -> Self {
        Self {
            duration: metrics.duration.with_label_values(&[label]),
            prompt_tokens: metrics.prompt_tokens.with_label_values(&[label]),
            cached_tokens: metrics.cached_tokens.with_label_values(&[label]),
            generation_tokens: metrics.generation_tokens.with_label_values(&[label]),
        }
    }
}

/// The requests of a deployment.
#[derive(Clone, Debug)]
pub(crate) struct DeploymentGauges {
    waiting: IntGauge,
    active: IntGauge,
}

impl DeploymentGauges {
    /// So many are held, and in flight.
    pub(crate) fn set(&self, waiting: u32, active: u32) {
        self.waiting.set(waiting.into());
        self.active.set(active.into());
    }
}

/// The label for a name: the name itself, until there are too many.
fn bounded_label(known: &Mutex<HashSet<String>>, name: &str) -> String {
    let mut known = known.lock();
    if known.contains(name) {
        name.to_owned()
    } else if known.len() < MAX_LABEL_NAMES {
        known.insert(name.to_owned());
        name.to_owned()
    } else {
        OTHER.to_owned()
    }
}

fn full_name(name: &str) -> String {
    format!("russet_gateway_{name}")
}

fn counter(name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec, prometheus::Error> {
    IntCounterVec::new(Opts::new(full_name(name), help), labels)
}

/// A counter by a label whose values are known: each is shown from the start, as 0, so that the first event is a rise.
fn counter_from_zero(
    name: &str,
    help: &str,
    label: &str,
    values: &[&str],
) -> Result<IntCounterVec, prometheus::Error> {
    let counter = counter(name, help, &[label])?;
    values.iter().for_each(|value| drop(counter.with_label_values(&[value])));
    Ok(counter)
}

fn gauge(name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec, prometheus::Error> {
    IntGaugeVec::new(Opts::new(full_name(name), help), labels)
}

fn histogram(
    name: &str,
    help: &str,
    buckets: &[f64],
    labels: &[&str],
) -> Result<HistogramVec, prometheus::Error> {
    HistogramVec::new(HistogramOpts::new(full_name(name), help).buckets(buckets.to_vec()), labels)
}

fn add<C: Collector + Clone + 'static>(registry: &Registry, collector: C) -> Result<C, prometheus::Error> {
    registry.register(Box::new(collector.clone()))?;
    Ok(collector)
}

/// Tracks one request from arrival to end. Dropped before its end, it counts as cancelled by the client.
pub struct RequestTracker {
    metrics: Arc<Metrics>,
    model: Arc<ModelMetrics>,
    arrived: Instant,
    queued: bool,
    first_token: Option<Duration>,
    ended: bool,
}

impl RequestTracker {
    fn leave_queue(&mut self, outcome: &str) {
        if std::mem::take(&mut self.queued) {
            self.model.queue.dec();
            self.metrics.outcomes.with_label_values(&[outcome]).inc();
        }
    }

    /// An engine sent its first event.
    pub fn dispatched(&mut self) {
        self.leave_queue("dispatched");
    }

    /// The request is retried.
    pub fn retried(&mut self) {
        self.metrics.retries.with_label_values(&[&self.model.label]).inc();
    }

    /// A second replica got the request too; the outcome says which one answered.
    pub fn hedged(&self, outcome: &str) {
        self.metrics.hedged.with_label_values(&[self.model.label.as_str(), outcome]).inc();
    }

    /// The engine of the response was lost, and another engine resumed the response or not.
    pub fn continued(&self, resumed: bool) {
        let outcome = if resumed { "continued" } else { "given_up" };
        self.metrics.continued.with_label_values(&[self.model.label.as_str(), outcome]).inc();
    }

    /// Text of the response arrived.
    pub fn token(&mut self) {
        if self.first_token.is_none() {
            let ttft = self.arrived.elapsed();
            self.first_token = Some(ttft);
            let first_token = &self.metrics.first_token;
            let first_token =
                self.model.first_token.get_or_init(|| first_token.with_label_values(&[&self.model.label]));
            first_token.observe(ttft.as_secs_f64());
        }
    }

    /// The response is complete.
    pub fn finished(&mut self, usage: russet_wire::event::Usage) {
        self.ended = true;
        let answers = self.model.answers.get_or_init(|| AnswerMetrics::new(&self.metrics, &self.model.label));
        answers.duration.observe(self.arrived.elapsed().as_secs_f64());
        answers.prompt_tokens.inc_by(usage.prompt_tokens.into());
        answers.cached_tokens.inc_by(usage.cached_tokens.into());
        answers.generation_tokens.inc_by(usage.completion_tokens.into());
        tracing::info!(
            model = self.model.label,
            prompt_tokens = usage.prompt_tokens,
            completion_tokens = usage.completion_tokens,
            ttft_ms = self.first_token.map(|ttft| ttft.as_millis() as u64),
            ms = self.arrived.elapsed().as_millis() as u64,
            "the response is complete"
        );
    }

    /// The request failed, before or during its response.
    pub fn failed(&mut self, error: &GatewayError) {
        self.ended = true;
        self.leave_queue(match error.kind {
            ErrorKind::ModelNotReady | ErrorKind::EngineLost | ErrorKind::ShuttingDown => "evicted",
            _ => "rejected",
        });
        self.metrics.errors.with_label_values(&[self.model.label.as_str(), error.kind.as_str()]).inc();
        tracing::info!(
            model = self.model.label,
            code = error.kind.as_str(),
            ms = self.arrived.elapsed().as_millis() as u64,
            "the request failed: {}",
            error.message
        );
    }
}

impl Drop for RequestTracker {
    fn drop(&mut self) {
        self.leave_queue("cancelled");
        self.model.running.dec();
        if !self.ended {
            self.metrics.cancelled.with_label_values(&[&self.model.label]).inc();
            tracing::info!(
                model = self.model.label,
                ms = self.arrived.elapsed().as_millis() as u64,
                "the client disconnected"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invented_names_share_one_label_after_the_first_thousand() {
        let registry = Registry::new();
        let metrics = Arc::new(Metrics::new(&registry).unwrap());
        for number in 0..1500 {
            metrics.request(&format!("m{number}")).finished(Default::default());
        }
        metrics.rejected(&GatewayError::new(ErrorKind::ModelNotFound, ""));
        let family = registry
            .gather()
            .into_iter()
            .find(|family| family.name() == "russet_gateway_request_total")
            .unwrap();
        assert_eq!(family.get_metric().len(), MAX_LABEL_NAMES + 2);
        let count = |label: &str| metrics.requests.with_label_values(&[label]).get();
        assert_eq!((count("m0"), count(OTHER), count(UNKNOWN)), (1, 500, 1));
    }

    #[test]
    fn request_gauges_return_to_zero_after_every_outcome() {
        let metrics = Arc::new(Metrics::new(&Registry::new()).unwrap());
        let now = || {
            let queue = metrics.queue.with_label_values(&["m"]).get();
            (queue, metrics.running.with_label_values(&["m"]).get())
        };
        let outcome = |name: &str| metrics.outcomes.with_label_values(&[name]).get();
        let mut tracker = metrics.request("m");
        assert_eq!(now(), (1, 1));
        tracker.dispatched();
        assert_eq!(now(), (0, 1));
        drop(tracker);
        assert_eq!((now(), metrics.cancelled.with_label_values(&["m"]).get()), ((0, 0), 1));
        let mut tracker = metrics.request("m");
        tracker.failed(&GatewayError::new(ErrorKind::EngineLost, "lost"));
        drop(tracker);
        assert_eq!(metrics.errors.with_label_values(&["m", "engine_lost"]).get(), 1);
        drop(metrics.request("m"));
        assert_eq!(now(), (0, 0));
        assert_eq!((outcome("dispatched"), outcome("evicted"), outcome("cancelled")), (1, 1, 1));
    }
}
