//! Demand for each deployment at this gateway: requests held until a replica is ready, within limits, and
//! requests in flight to replicas. Not here: which request is held and for how long, see `dispatch`.

mod keep_alive;
mod report;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::error::{ErrorKind, GatewayError, RETRY_AFTER};
use crate::keys::Caller;
use crate::metrics::{DeploymentGauges, Metrics};
use crate::routes::{Deployment, IdleLimits};
use keep_alive::KeepAlives;
pub(crate) use report::DemandReporter;

/// Limits on held requests; their total bytes are limited by the body budget.
#[derive(Clone, Copy, Debug)]
pub struct HoldLimits {
    /// Held requests in total: far more than the engines' queues hold, and more than a listener has
    /// connections.
    pub max_requests: u32,
    /// Held requests of one deployment: as many as the queues of four engines, so that they do not
    /// overload a replica that has just become ready.
    pub max_per_deployment: u32,
    /// Bytes of one deployment's held requests: half of the body budget.
    pub max_bytes_per_deployment: usize,
}

impl Default for HoldLimits {
    fn default() -> Self {
        Self { max_requests: 1024, max_per_deployment: 256, max_bytes_per_deployment: 128 * 1024 * 1024 }
    }
}

/// Samples of the time to first token older than this are ignored.
const TTFT_WINDOW: Duration = Duration::from_secs(60);
/// Samples of the time to first token per deployment; older ones are dropped.
const MAX_TTFT_SAMPLES: usize = 256;

/// A deployment's namespace and name.
type DeploymentKey = (String, String);

/// Tracks the requests of all deployments.
pub struct DemandTracker {
    loads: Mutex<BTreeMap<DeploymentKey, DeploymentLoad>>,
    limits: HoldLimits,
    metrics: Arc<Metrics>,
    /// Notified when the first request is held for a deployment.
    hold_started: Notify,
}

/// The requests of one deployment.
#[derive(Clone, Debug, Default)]
struct DeploymentLoad {
    waiting: u32,
    bytes: usize,
    active: u32,
    gauges: Option<DeploymentGauges>,
    last_request: Option<Timestamp>,
    ttft: VecDeque<(Instant, Duration)>,
    /// How long its callers want it, where it scales to zero.
    keep_alives: KeepAlives,
}

impl DeploymentLoad {
    /// The 90th percentile of the time to first token in the last minute, rounded down to two digits, because
    /// status is not telemetry.
    fn ttft_milliseconds(&self, now: Instant) -> Option<u32> {
        let recent = self.ttft.iter().filter(|(time, _)| now.saturating_duration_since(*time) <= TTFT_WINDOW);
        let mut millis: Vec<u128> = recent.map(|(_, ttft)| ttft.as_millis()).collect();
        millis.sort_unstable();
        let index = (millis.len() * 9).div_ceil(10).checked_sub(1)?;
        let millis = u32::try_from(*millis.get(index)?).unwrap_or(u32::MAX);
        let step = 10_u32.pow(millis.checked_ilog10().unwrap_or(0).saturating_sub(1));
        Some((millis / step).saturating_mul(step))
    }
}

/// One held request; it stops counting on drop.
pub(crate) struct HeldRequest {
    demand: Arc<DemandTracker>,
    key: DeploymentKey,
    bytes: usize,
    since: Instant,
}

/// One request that was sent to a replica; it stops counting on drop.
pub(crate) struct ActiveRequest {
    demand: Arc<DemandTracker>,
    key: DeploymentKey,
    since: Instant,
}

/// A request that says how long its deployment stays loaded after it; that counts from the drop on.
pub(crate) struct KeepAliveRequest {
    demand: Arc<DemandTracker>,
    key: DeploymentKey,
    caller: String,
    keep_alive: Option<Duration>,
}

impl DemandTracker {
    /// No requests yet.
    pub fn new(limits: HoldLimits, metrics: Arc<Metrics>) -> Self {
        Self { loads: Mutex::default(), limits, metrics, hold_started: Notify::new() }
    }

    /// Holds a request of `bytes` bytes for this deployment; an error beyond the limits.
    pub(crate) fn hold(
        self: &Arc<Self>,
        deployment: &Deployment,
        bytes: usize,
    ) -> Result<HeldRequest, GatewayError> {
        let key = deployment_key(deployment);
        let mut loads = self.loads.lock();
        let total: u32 = loads.values().map(|load| load.waiting).sum();
        let load = loads.entry(key.clone()).or_default();
        let HoldLimits { max_requests, max_per_deployment, max_bytes_per_deployment } = self.limits;
        if load.waiting >= max_per_deployment
            || load.bytes.saturating_add(bytes) > max_bytes_per_deployment
            || total >= max_requests
        {
            const MIB: usize = 1024 * 1024;
            let message = format!(
                "model {} is not ready, and this gateway already holds {} of {max_per_deployment} requests and {} of \
                 {} MiB for it ({total} of {max_requests} requests for all models); send the request again later",
                deployment.full_name(),
                load.waiting,
                load.bytes / MIB,
                max_bytes_per_deployment / MIB
            );
            return Err(GatewayError::new(ErrorKind::GatewayFull, message).retry_after(RETRY_AFTER));
        }
        load.waiting += 1;
        load.bytes += bytes;
        load.last_request = Some(Timestamp::now());
        self.publish(&key, load);
        if load.waiting == 1 {
            self.hold_started.notify_one();
        }
        Ok(HeldRequest { demand: self.clone(), key, bytes, since: Instant::now() })
    }

    /// Counts a request that is sent to a replica of this deployment.
    pub(crate) fn start(self: &Arc<Self>, deployment: &Deployment) -> ActiveRequest {
        let key = deployment_key(deployment);
        self.change(&key, |load| load.active += 1);
        ActiveRequest { demand: self.clone(), key, since: Instant::now() }
    }

    /// Counts how long the deployment stays loaded after a request of this caller; `None` where it does not scale to
    /// zero. `keep_alive` is what the request itself says.
    pub(crate) fn keep_alive(
        self: &Arc<Self>,
        deployment: &Deployment,
        caller: &Caller,
        keep_alive: Option<Duration>,
    ) -> Option<KeepAliveRequest> {
        deployment.idle_limits?;
        let (demand, key, caller) = (self.clone(), deployment_key(deployment), caller_name(caller));
        Some(KeepAliveRequest { demand, key, caller, keep_alive })
    }

    /// Lets the deployment go to sleep as far as this caller is concerned. It is no request.
    pub(crate) fn unload(&self, deployment: &Deployment, caller: &Caller) {
        if deployment.idle_limits.is_some() {
            let mut loads = self.loads.lock();
            let load = loads.entry(deployment_key(deployment)).or_default();
            load.keep_alives.ended(&caller_name(caller), Timestamp::now(), Some(Duration::ZERO));
        }
    }

    /// When the deployment scales to zero if this gateway gets no further request for it; `None` where it does not, or
    /// where no request has come since the gateway started.
    pub(crate) fn expires(&self, deployment: &Deployment) -> Option<Timestamp> {
        let limits = deployment.idle_limits?;
        let loads = self.loads.lock();
        let load = loads.get(&deployment_key(deployment))?;
        load.expires(limits, Timestamp::now())
    }

    /// Changes what waits for a deployment or runs on it.
    fn change(&self, key: &DeploymentKey, change: impl FnOnce(&mut DeploymentLoad)) {
        let mut loads = self.loads.lock();
        let load = match loads.get_mut(key) {
            Some(load) => load,
            None => loads.entry(key.clone()).or_default(),
        };
        change(load);
        load.last_request = Some(Timestamp::now());
        self.publish(key, load);
    }

    fn publish(&self, (namespace, name): &DeploymentKey, load: &mut DeploymentLoad) {
        let gauges = load.gauges.get_or_insert_with(|| self.metrics.deployment(namespace, name));
        gauges.set(load.waiting, load.active);
    }
}

impl DeploymentLoad {
    fn expires(&self, limits: IdleLimits, now: Timestamp) -> Option<Timestamp> {
        let running =
            (self.waiting > 0 || self.active > 0).then(|| now.checked_add(limits.idle).unwrap_or(now));
        running.into_iter().chain(self.keep_alives.expires(limits)).max()
    }
}

impl HeldRequest {
    /// Whether the request is held for this deployment.
    pub(crate) fn is_for(&self, deployment: &Deployment) -> bool {
        (self.key.0.as_str(), self.key.1.as_str())
            == (deployment.namespace.as_str(), deployment.name.as_str())
    }
}

impl ActiveRequest {
    /// Records the time to first token.
    pub(crate) fn first_token(&self) {
        let now = Instant::now();
        // It is among those that run, so there is one.
        if let Some(load) = self.demand.loads.lock().get_mut(&self.key) {
            if load.ttft.len() >= MAX_TTFT_SAMPLES {
                load.ttft.pop_front();
            }
            load.ttft.push_back((now, now.duration_since(self.since)));
        }
    }
}

impl Drop for HeldRequest {
    fn drop(&mut self) {
        self.demand.change(&self.key, |load| {
            load.waiting -= 1;
            load.bytes -= self.bytes;
        });
        self.demand.metrics.hold_ended(&self.key.0, &self.key.1, self.since.elapsed());
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.demand.change(&self.key, |load| load.active -= 1);
    }
}

impl Drop for KeepAliveRequest {
    fn drop(&mut self) {
        let Self { demand, key, caller, keep_alive } = self;
        demand.change(key, |load| load.keep_alives.ended(caller, Timestamp::now(), *keep_alive));
    }
}

/// The name by which callers are told apart; programs without a key have one together.
fn caller_name(caller: &Caller) -> String {
    match caller {
        Caller::Anonymous => String::new(),
        Caller::Key(key) => key.full_name().to_owned(),
    }
}

fn deployment_key(deployment: &Deployment) -> DeploymentKey {
    (deployment.namespace.clone(), deployment.name.clone())
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;
    use crate::routes::fixtures;

    pub(super) fn demand(limits: HoldLimits) -> Arc<DemandTracker> {
        Arc::new(DemandTracker::new(limits, Arc::new(Metrics::new(&Registry::new()).unwrap())))
    }

    pub(super) fn deployment(name: &str) -> Deployment {
        fixtures::deployment("default", name)
    }

    #[test]
    fn held_requests_are_bounded_and_freed_permits_are_reused() {
        let demand =
            demand(HoldLimits { max_requests: 3, max_per_deployment: 2, max_bytes_per_deployment: 100 });
        let (one, other) = (deployment("one"), deployment("other"));
        let hold = |deployment: &Deployment, bytes| demand.hold(deployment, bytes);
        let first = hold(&one, 60).unwrap();
        let error = hold(&one, 41).err().unwrap();
        assert_eq!(error.kind, ErrorKind::GatewayFull);
        assert!(error.message.contains("holds 1 of 2 requests and 0 of 0 MiB"), "{error}");
        let _second = hold(&one, 40).unwrap();
        assert!(hold(&one, 0).is_err(), "two of one deployment");
        let _third = hold(&other, 100).unwrap();
        assert!(hold(&other, 0).is_err(), "three of all");
        drop(first);
        assert!(hold(&one, 60).is_ok());
    }

    #[test]
    fn ttft_is_the_90th_percentile_of_a_minute_to_two_digits() {
        let now = Instant::now() + TTFT_WINDOW * 2;
        let ttft = |millis: &[u64], old: &[u64]| {
            let at = |at: Instant| move |&millis: &u64| (at, Duration::from_millis(millis));
            let old = old.iter().map(at(now - TTFT_WINDOW - Duration::from_secs(1)));
            let ttft = old.chain(millis.iter().map(at(now))).collect();
            DeploymentLoad { ttft, ..DeploymentLoad::default() }.ttft_milliseconds(now)
        };
        for (millis, old, expected) in [
            (vec![], vec![900], None),
            (vec![0], vec![], Some(0)),
            (vec![7], vec![], Some(7)),
            (vec![1239], vec![900_000], Some(1200)),
            (vec![10, 20, 30, 40, 50, 60, 70, 80, 90, 9000], vec![], Some(90)),
            (vec![10, 20, 30, 40, 50, 60, 70, 80, 9001], vec![], Some(9000)),
        ] {
            assert_eq!(ttft(&millis, &old), expected, "{millis:?}");
        }
    }
}
