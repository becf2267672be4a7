//! Reports demand: writes this gateway's entry to the status of each ModelDeployment. Status is not
//! telemetry: held requests are written at once, because the deployment may have to scale up from zero;
//! everything else every 15 s, and only while there are requests.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource as _};
use russet_crds::{DEMAND_INTERVAL, GatewayDemand as Entry, ModelDeployment, names};
use serde_json::json;
use tokio::sync::watch;

use super::{DemandTracker, DeploymentKey, DeploymentLoad};
use crate::api_timeout::{WriteError, with_timeout};
use crate::routes::RoutingTable;

/// Time between two checks for entries to write.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Age at which entries of other gateways are removed: a new pod has another name.
const STALE_ENTRY_AGE: SignedDuration = SignedDuration::from_hours(24);
/// Longest name of a gateway in the schema.
const MAX_NAME_LENGTH: usize = 63;

/// Writes the entries of this gateway under its name.
#[derive(Clone)]
pub(crate) struct DemandReporter {
    client: Client,
    gateway: String,
}

impl DemandReporter {
    /// A reporter whose name is this machine's or pod's host name and the port.
    pub(crate) fn new(client: Client, port: u16) -> Self {
        let mut machine = hostname();
        machine.retain(|character| character.is_ascii_graphic());
        let port = format!(":{port}");
        machine.truncate(MAX_NAME_LENGTH - port.len());
        Self { client, gateway: machine + &port }
    }

    /// Writes entries until the future is dropped.
    pub(crate) async fn run(self, demand: Arc<DemandTracker>, table: watch::Receiver<Arc<RoutingTable>>) {
        let mut poll = tokio::time::interval(POLL_INTERVAL);
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut written = BTreeMap::new();
        // Logged once each time writing begins to fail, not at every check.
        let mut failing = false;
        loop {
            tokio::select! {
                _ = poll.tick() => {}
                () = demand.hold_started.notified() => {}
            }
            demand.remove_deleted(&table.borrow().clone());
            for (key, entry) in demand.due(&self.gateway, &written, Timestamp::now()) {
                match with_timeout(self.write(&key, &entry)).await {
                    Ok(()) => {
                        written.insert(key, entry);
                        failing = false;
                    }
                    Err(WriteError { cause, timed_out, .. }) => {
                        if !std::mem::replace(&mut failing, true) {
                            tracing::warn!(
                                deployment = format!("{}/{}", key.0, key.1),
                                "cannot write the demand of the ModelDeployment: {cause}"
                            );
                        }
                        if timed_out {
                            break;
                        }
                    }
                }
            }
            written.retain(|key, _| demand.loads.lock().contains_key(key));
        }
    }

    /// Reports that no requests wait here any more; for shutdown, when there is no later write.
    pub(crate) async fn final_report(&self, demand: &DemandTracker) {
        let loads = demand.loads.lock().clone();
        for (key, load) in loads {
            let entry =
                entry(&self.gateway, &DeploymentLoad { waiting: 0, active: 0, ..load }, Timestamp::now());
            if let Err(error) = self.write(&key, &entry).await {
                tracing::debug!("cannot write the final demand of {}/{}: {error}", key.0, key.1);
                return;
            }
        }
    }

    async fn write(&self, (namespace, name): &DeploymentKey, entry: &Entry) -> Result<(), kube::Error> {
        let api: Api<ModelDeployment> = Api::namespaced(self.client.clone(), namespace);
        let patch = json!({
            "apiVersion": ModelDeployment::api_version(&()),
            "kind": ModelDeployment::kind(&()),
            "metadata": {"name": name},
            "status": {"demand": [entry]},
        });
        // Force: the entry belongs to this gateway, even if another manager edited it.
        let params = PatchParams::apply(&names::gateway_manager(&self.gateway)).force();
        let deployment = match api.patch_status(name, &params, &Patch::Apply(patch)).await {
            Ok(deployment) => deployment,
            // The object was deleted in the meantime: nothing reads the entry any more.
            Err(kube::Error::Api(error)) if error.code == 404 => return Ok(()),
            Err(error) => return Err(error),
        };
        let entries = deployment.status.map(|status| status.demand).unwrap_or_default();
        let Some(removal) = stale_entry_patch(&entries, Timestamp::now()) else { return Ok(()) };
        let path = format!("{}/{name}/status", ModelDeployment::url_path(&(), Some(namespace)));
        let request = axum::http::Request::patch(path)
            .header("content-type", "application/json-patch+json")
            .body(removal.to_string().into_bytes())
            .map_err(kube::Error::HttpError)?;
        match self.client.request::<ModelDeployment>(request).await {
            // Another writer changed the list; the next write checks again.
            Err(kube::Error::Api(error)) if matches!(error.code, 404 | 409 | 422) => Ok(()),
            other => other.map(|_| ()),
        }
    }
}

impl DemandTracker {
    /// The entries that are due to be written.
    fn due(
        &self,
        gateway: &str,
        written: &BTreeMap<DeploymentKey, Entry>,
        now: Timestamp,
    ) -> Vec<(DeploymentKey, Entry)> {
        let loads = self.loads.lock();
        let due = loads.iter().filter_map(|(key, load)| {
            let entry = entry(gateway, load, now);
            is_due(written.get(key), &entry, now).then(|| (key.clone(), entry))
        });
        due.collect()
    }

    /// Removes deleted deployments that have no requests here.
    fn remove_deleted(&self, table: &RoutingTable) {
        let listed = |(namespace, name): &DeploymentKey| {
            table.deployments.iter().any(|one| one.namespace == *namespace && one.name == *name)
        };
        self.loads.lock().retain(|key, load| {
            let keep = load.waiting > 0 || load.active > 0 || listed(key);
            if !keep {
                self.metrics.remove_deployment(&key.0, &key.1);
            }
            keep
        });
    }
}

fn entry(gateway: &str, load: &DeploymentLoad, now: Timestamp) -> Entry {
    let busy = load.waiting > 0 || load.active > 0;
    Entry {
        gateway: gateway.to_owned(),
        reported_at: Time(now),
        last_request_time: if busy { Some(Time(now)) } else { load.last_request.map(Time) },
        waiting: load.waiting,
        active: load.active,
        ttft_milliseconds: load.ttft_milliseconds(Instant::now()),
        keep_alive: load.keep_alives.report(),
    }
}

/// Whether the entry has changes and the last write is long enough ago.
fn is_due(written: Option<&Entry>, entry: &Entry, now: Timestamp) -> bool {
    let Some(written) = written else { return true };
    if written.waiting == 0 && entry.waiting > 0 {
        return true;
    }
    let changed = entry.waiting > 0
        || entry.active > 0
        || (written.waiting, written.active) != (0, 0)
        || written.last_request_time != entry.last_request_time
        || written.keep_alive != entry.keep_alive;
    let age = Duration::try_from(now.duration_since(written.reported_at.0)).unwrap_or(DEMAND_INTERVAL);
    changed && age >= DEMAND_INTERVAL
}

/// A patch that removes one stale entry of another gateway, if there is one; it fails if the list has changed
/// in the meantime.
fn stale_entry_patch(entries: &[Entry], now: Timestamp) -> Option<serde_json::Value> {
    let is_stale = |entry: &Entry| now.duration_since(entry.reported_at.0) > STALE_ENTRY_AGE;
    let (index, entry) = entries.iter().enumerate().find(|(_, entry)| is_stale(entry))?;
    let path = format!("/status/demand/{index}");
    Some(json!([
        {"op": "test", "path": path, "value": entry},
        {"op": "remove", "path": path},
    ]))
}

/// The host name of this machine or pod.
fn hostname() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok().or_else(|| {
        let output = std::process::Command::new("hostname").output().ok()?;
        String::from_utf8(output.stdout).ok()
    });
    name.filter(|name| !name.trim().is_empty()).unwrap_or_else(|| "gateway".to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::HoldLimits;
    use super::super::tests::{demand, deployment};
    use super::*;
    use crate::keys::Caller;
    use crate::routes::IdleLimits;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn held_requests_are_reported_at_once_others_every_15_seconds() {
        let mut written: Option<Entry> = None;
        let mut writes = Vec::new();
        let mut last = None;
        for second in 0..120 {
            // One request waits and finishes; a minute later another one takes no time.
            let (waiting, active) = match second {
                0..3 => (1, 0),
                3..40 => (0, 1),
                _ => (0, 0),
            };
            if waiting + active > 0 || second == 100 {
                last = Some(at(second));
            }
            let load = DeploymentLoad { waiting, active, last_request: last, ..DeploymentLoad::default() };
            if last.is_none() {
                continue;
            }
            let entry = entry("g:1", &load, at(second));
            if is_due(written.as_ref(), &entry, at(second)) {
                let last_request = entry.last_request_time.as_ref().unwrap().0.as_second();
                writes.push((second, entry.waiting, entry.active, last_request));
                written = Some(entry);
            }
        }
        assert_eq!(writes, [(0, 1, 0, 0), (15, 0, 1, 15), (30, 0, 1, 30), (45, 0, 0, 39), (100, 0, 0, 100)]);
        // A held request is reported without delay.
        let waiting = entry("g:1", &DeploymentLoad { waiting: 1, ..DeploymentLoad::default() }, at(101));
        assert!(is_due(written.as_ref(), &waiting, at(101)));
        assert!(!is_due(Some(&waiting), &waiting, at(102)));
    }

    #[test]
    fn an_unload_is_reported_though_it_is_no_request() {
        let demand = demand(HoldLimits::default());
        let mut one = deployment("m");
        let limit = Duration::from_secs(600);
        demand.unload(&one, &Caller::Anonymous);
        assert!(demand.loads.lock().is_empty(), "it does not scale to zero");
        one.idle_limits = Some(IdleLimits { idle: limit, max_idle: limit });
        let now = Timestamp::now();
        drop(demand.keep_alive(&one, &Caller::Anonymous, None));
        let (key, first) = demand.due("g:1", &BTreeMap::new(), now).remove(0);
        assert!(first.last_request_time.is_some() && first.keep_alive.is_none());
        let written = BTreeMap::from([(key, first.clone())]);
        let later = now + SignedDuration::from_secs(60);
        assert!(demand.due("g:1", &written, later).is_empty(), "nothing has changed");
        demand.unload(&one, &Caller::Anonymous);
        let (_, entry) = demand.due("g:1", &written, later).remove(0);
        assert_eq!(entry.last_request_time, first.last_request_time);
        let keep_alive = entry.keep_alive.unwrap();
        assert!(keep_alive.until.0 <= Timestamp::now() && keep_alive.other_request_time.is_none());
        drop(demand.keep_alive(&one, &Caller::Anonymous, Some(limit)));
        assert!(demand.expires(&one).unwrap() > Timestamp::now());
    }

    #[test]
    fn deleted_deployment_is_dropped_once_it_has_no_requests() {
        let demand = demand(HoldLimits::default());
        let held = demand.hold(&deployment("m"), 1).unwrap();
        let due = demand.due("g:1", &BTreeMap::new(), Timestamp::now());
        assert_eq!((due[0].0.1.as_str(), due[0].1.waiting), ("m", 1));
        demand.remove_deleted(&RoutingTable::default());
        assert_eq!(demand.loads.lock().len(), 1);
        drop(held);
        demand
            .remove_deleted(&RoutingTable { deployments: vec![deployment("m")], ..RoutingTable::default() });
        assert_eq!(demand.loads.lock().len(), 1);
        demand.remove_deleted(&RoutingTable::default());
        assert!(demand.loads.lock().is_empty());
    }

    #[test]
    fn demand_entry_of_a_gateway_gone_for_a_day_is_removed() {
        let entry = |second| entry("g:1", &DeploymentLoad::default(), at(second));
        let entries = [entry(90_000), entry(1), entry(2)];
        let removal = stale_entry_patch(&entries, at(90_000)).unwrap();
        assert_eq!(removal[1], json!({"op": "remove", "path": "/status/demand/1"}));
        assert_eq!(removal[0]["value"], json!(entries[1]));
        assert_eq!(super::stale_entry_patch(&entries[..1], at(90_000)), None);
    }
}
