//! Reporter of this machine's InferenceNode, which the operator created at the join: keeps its status up to
//! date. The owner's memory bounds are read from the same responses.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::names::AGENT_MANAGER;
use russet_crds::{
    ENGINE_OPTIONS, GROUP, InferenceNode, InferenceNodeStatus, Link, MeasuredPower, NodeDisk, NodeMemory,
    NodeMemoryLimits, VERSION,
};
use russet_plan::quantity;
use serde_json::json;
use tokio::sync::{oneshot, watch};

use crate::address::Address;
use crate::fabric::measure::LinkMeasurements;
use crate::fabric::probe::PortScan;
use crate::grants::MemoryLimits;
use crate::hardware::{self, Hardware};
use crate::helper::reconcile::{CONDITION_TYPES, HelperCondition, HelperSpec};
use crate::metrics::AgentMetrics;
use crate::store::{DiskUsage, Store};
use crate::transfer_limits::TransferLimiters;

/// Report interval of an agent when nothing changes.
pub const REPORT_INTERVAL: Duration = Duration::from_secs(10);
/// Less available memory than this is pressure, whatever the size of the machine.
const MEMORY_PRESSURE_BYTES: u64 = 512 << 20;
/// Consecutive "not found" responses before the node counts as removed.
const MISSING_BEFORE_REMOVAL: u32 = 3;
/// Disk space is reported in steps; otherwise every log line would update the object.
const MAX_DISK_STEP_BYTES: u64 = 256 << 20;
/// Step size on a nearly full disk, where a small model more or less counts.
const MIN_DISK_STEP_BYTES: u64 = 1 << 20;

/// The reporter's end of [`memory_channel`].
pub(crate) struct ReporterChannel {
    granted: watch::Receiver<u64>,
    limits: watch::Sender<MemoryLimits>,
}

impl ReporterChannel {
    /// Bytes granted.
    pub fn granted(&self) -> watch::Receiver<u64> {
        self.granted.clone()
    }
}

/// The supervisor's end of [`memory_channel`].
pub(crate) struct SupervisorChannel {
    granted: watch::Sender<u64>,
    limits: watch::Receiver<MemoryLimits>,
}

impl SupervisorChannel {
    /// The last known bounds.
    pub fn limits(&self) -> MemoryLimits {
        *self.limits.borrow()
    }

    /// Publishes how many bytes are granted.
    pub fn set_granted(&self, bytes: u64) {
        self.granted.send_if_modified(|granted| std::mem::replace(granted, bytes) != bytes);
    }

    /// Waits until the bounds change.
    pub async fn limits_changed(&mut self) {
        if self.limits.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Connects the reporter and the supervisor of a node.
pub(crate) fn memory_channel(total: u64) -> (ReporterChannel, SupervisorChannel) {
    let (granted_sender, granted) = watch::channel(0);
    let (limits, limits_receiver) = watch::channel(MemoryLimits { total, ..MemoryLimits::default() });
    (
        ReporterChannel { granted, limits },
        SupervisorChannel { granted: granted_sender, limits: limits_receiver },
    )
}

/// State and connections of the reporter.
pub(crate) struct NodeReporter {
    pub client: Client,
    pub name: String,
    pub machine: Hardware,
    pub memory_override: Option<u64>,
    pub address: Address,
    pub metrics_address: Option<String>,
    pub ports: watch::Receiver<PortScan>,
    /// Measurements of its links.
    pub link_measurements: watch::Receiver<LinkMeasurements>,
    /// Power of the machine, as it is to be reported.
    pub power: watch::Receiver<Option<MeasuredPower>>,
    /// Publishes the node's links.
    pub links: watch::Sender<Vec<Link>>,
    /// Port on which other agents reach this one.
    pub peer_port: u16,
    pub store: Store,
    /// Receives quiet hours and transfer limits.
    pub limiters: TransferLimiters,
    pub metrics: AgentMetrics,
    pub ready: Arc<AtomicBool>,
    pub channel: ReporterChannel,
    /// Publishes what the spec asks of the root helper.
    pub helper_spec: watch::Sender<Option<HelperSpec>>,
    /// Conditions of the root helper.
    pub helper_conditions: watch::Receiver<Vec<HelperCondition>>,
    /// Signals that the node was removed from the cluster.
    pub removed: oneshot::Sender<()>,
    /// How often the status is written if nothing changes.
    pub report_interval: Duration,
}

/// The status that the node reported before this agent started.
pub(crate) async fn last_status(client: &Client, node: &str) -> InferenceNodeStatus {
    let nodes: Api<InferenceNode> = Api::all(client.clone());
    // Engines wait for this agent, so it does not wait for an unreachable API server.
    let reply = tokio::time::timeout(Duration::from_secs(1), nodes.get(node)).await;
    reply.ok().and_then(Result::ok).and_then(|node| node.status).unwrap_or_default()
}

/// Reports the InferenceNode's status until the node is removed.
pub(crate) async fn run(mut node: NodeReporter) {
    let mut conditions: Vec<Condition> = Vec::new();
    let mut last: Option<InferenceNodeStatus> = None;
    let (mut missing, mut leaving) = (0, false);
    loop {
        let granted = *node.channel.granted.borrow_and_update();
        let disk = node.store.disk().unwrap_or_default();
        let pressure = pressure(&node, &disk);
        for (kind, (short, message)) in [(Type::MemoryPressure, pressure.0), (Type::DiskPressure, pressure.1)]
        {
            let reason = if short { Reason::Insufficient } else { Reason::Sufficient };
            conditions::set(&mut conditions, kind, short, reason, message, None, Timestamp::now());
        }
        let mut seen = node.ports.borrow_and_update().clone();
        let found = node.link_measurements.borrow_and_update().clone();
        for port in &mut seen.ports {
            port.measured = found.get(&port.interface).copied();
        }
        if seen.scanned {
            let (read, reason, message) = ports_condition(&seen);
            conditions::set(&mut conditions, Type::PortsRead, read, reason, message, None, Timestamp::now());
        }
        let helped = node.helper_conditions.borrow_and_update().clone();
        set_helper_conditions(&mut conditions, helped);
        let limits = *node.channel.limits.borrow();
        let energy = *node.power.borrow_and_update();
        let status = InferenceNodeStatus {
            energy,
            ..status(&node, &limits, granted, &disk, seen, conditions.clone())
        };
        // The operator derives links from ports within a moment.
        let joined = last.as_ref().is_none_or(|last| last.ports != status.ports);
        node.metrics.memory(limits.total, limits.serving_limit(), granted);
        let pause = match publish(&node, &status).await {
            Ok(found) => {
                missing = 0;
                leaving = found.metadata.deletion_timestamp.is_some();
                node.ready.store(true, Ordering::Release);
                let new_limits = bounds(limits.total, &found.spec.memory);
                node.channel
                    .limits
                    .send_if_modified(|limits| std::mem::replace(limits, new_limits) != new_limits);
                let helper_spec = Some(HelperSpec::new(&found.spec, found.metadata.generation));
                node.helper_spec
                    .send_if_modified(|known| std::mem::replace(known, helper_spec.clone()) != helper_spec);
                node.limiters.set(found.spec.transfers.as_ref());
                let reserve = found.spec.disk.reserve.as_deref();
                let other =
                    node.store.disk_reserve().set(reserve.and_then(|text| quantity::parse(text).ok()));
                let links = found.status.map(|status| status.links).unwrap_or_default();
                node.links.send_if_modified(|known| std::mem::replace(known, links.clone()) != links);
                // Changed bounds change what was just reported.
                match new_limits != limits || other {
                    true => Duration::from_millis(10),
                    false if joined => Duration::from_secs(1),
                    false => node.report_interval,
                }
            }
            Err(error) if is_missing(&error, &node.name, leaving) => {
                missing += 1;
                if missing >= MISSING_BEFORE_REMOVAL {
                    tracing::error!(
                        node = node.name,
                        "the cluster does not know this node: it was removed, or the control plane was restored from a backup made before it joined; run `russet leave --force` and join again with a new token"
                    );
                    // The receiver is dropped only with the agent itself.
                    node.removed.send(()).ok();
                    return;
                }
                Duration::from_secs(1)
            }
            Err(error) => {
                if is_unknown(&error) {
                    // Not taken for a removal: a server that lost its keys must not stop running engines.
                    tracing::error!(
                        node = node.name,
                        "the API server no longer knows this machine's credentials; if the node was removed while its agent was away, run `russet leave --force` and join again with a new token"
                    );
                } else if last.is_none() {
                    tracing::warn!(node = node.name, %error, "the node's status could not be written; retrying");
                }
                if is_unknown(&error) { node.report_interval } else { Duration::from_secs(1) }
            }
        };
        last = Some(status);
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            changed = node.channel.granted.changed() => if changed.is_err() { return },
            changed = node.address.changed() => if changed.is_err() { return },
            changed = node.ports.changed() => if changed.is_err() { return },
            changed = node.link_measurements.changed() => if changed.is_err() { return },
            changed = node.power.changed() => if changed.is_err() { return },
            changed = node.helper_conditions.changed() => if changed.is_err() { return },
        }
    }
}

/// Sets the root helper's conditions; removes them where there are none.
fn set_helper_conditions(conditions: &mut Vec<Condition>, helped: Vec<HelperCondition>) {
    conditions.retain(|condition| {
        let of = |kind: &Type| condition.type_ == format!("{kind:?}");
        !CONDITION_TYPES.iter().any(of) || helped.iter().any(|verdict| of(&verdict.kind))
    });
    for HelperCondition { kind, status, reason, message, generation } in helped {
        conditions::set(conditions, kind, status, reason, message, generation, Timestamp::now());
    }
}

async fn publish(node: &NodeReporter, status: &InferenceNodeStatus) -> Result<InferenceNode, kube::Error> {
    let nodes: Api<InferenceNode> = Api::all(node.client.clone());
    let params = PatchParams::apply(AGENT_MANAGER).force();
    let patch =
        json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": "InferenceNode", "status": status});
    nodes.patch_status(&node.name, &params, &Patch::Apply(&patch)).await
}

/// Whether the server answers that the node does not exist. A server that does not serve the kind, or a proxy
/// that finds no server, is another case. A leaving node's credentials are removed with it.
pub(crate) fn is_missing(error: &kube::Error, node: &str, leaving: bool) -> bool {
    match error {
        kube::Error::Api(answer) => {
            let named = answer.details.as_ref().is_some_and(|details| details.name == node);
            (answer.code == 404 && named) || (answer.code == 401 && leaving)
        }
        _ => false,
    }
}

/// Whether the server answers that the credentials are unknown (401).
fn is_unknown(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(answer) if answer.code == 401)
}

/// The owner's bounds; an unparsable bound is ignored rather than taken for unlimited.
fn bounds(total: u64, memory: &NodeMemoryLimits) -> MemoryLimits {
    // The wired limit belongs to the root helper.
    let NodeMemoryLimits { serving_limit, user_reserve, wired_limit: _ } = memory;
    let read = |text: &Option<String>| text.as_deref().and_then(|text| quantity::parse(text).ok());
    MemoryLimits { total, serving: read(serving_limit), user_reserve: read(user_reserve) }
}

/// Rounds bytes of disk for reports: within a sixteenth, and never more than the true value.
fn round_disk(bytes: u64) -> u64 {
    let exact = (bytes / 16).clamp(MIN_DISK_STEP_BYTES, MAX_DISK_STEP_BYTES);
    let step = 1_u64 << exact.ilog2();
    bytes / step * step
}

fn status(
    node: &NodeReporter,
    limits: &MemoryLimits,
    granted: u64,
    disk: &DiskUsage,
    seen: PortScan,
    conditions: Vec<Condition>,
) -> InferenceNodeStatus {
    let Hardware { chip, cores, memory: _, os, boot_id } = node.machine.clone();
    let best = *node.address.borrow();
    let mut addresses = vec![best];
    addresses.extend(hardware::interface_addresses().into_iter().filter(|other| *other != best));
    addresses.truncate(16);
    InferenceNodeStatus {
        chip,
        cores: Some(cores),
        os: Some(os),
        boot_id: Some(boot_id),
        memory: Some(NodeMemory {
            total_bytes: limits.total,
            serving_limit_bytes: limits.serving_limit(),
            granted_bytes: granted,
            serving_limit: quantity::write(limits.serving_limit()),
            granted: quantity::write(granted),
        }),
        disk: Some(NodeDisk {
            total_bytes: disk.total,
            free_bytes: round_disk(disk.free),
            reserve_bytes: Some(disk.reserve),
            models_limit_bytes: Some(round_disk(disk.limit())),
            free: Some(quantity::write(round_disk(disk.free))),
            models_limit: Some(quantity::write(round_disk(disk.limit()))),
        }),
        addresses: addresses.iter().map(IpAddr::to_string).collect(),
        sharding_modes: ["Single", "Pipeline", "Tensor", "Hybrid"].map(str::to_owned).to_vec(),
        engine_options: ENGINE_OPTIONS.iter().map(|option| (*option).to_owned()).collect(),
        backends: backends(seen.rdma),
        ports: seen.ports,
        // The operator knows the node at the other end.
        links: Vec::new(),
        peer_port: Some(node.peer_port.into()),
        agent_version: Some(env!("CARGO_PKG_VERSION").into()),
        engine_build: Some(russet_rpc::ENGINE_BUILD.into()),
        metrics_address: node.metrics_address.clone(),
        // The caller's: it waits for changes.
        energy: None,
        conditions,
    }
}

/// MLX backends that the engine can use; those over RDMA exist on macOS only.
fn backends(rdma: bool) -> Vec<String> {
    let names = if rdma && cfg!(target_os = "macos") { &["ring", "jaccl"][..] } else { &["ring"] };
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// Condition that this machine's ports could be read.
fn ports_condition(seen: &PortScan) -> (bool, Reason, String) {
    match &seen.error {
        None => (true, Reason::PortsRead, format!("{} ports", seen.ports.len())),
        Some(error) => {
            (false, Reason::PortsUnreadable, format!("{error}; the ports shown are the last known ones"))
        }
    }
}

/// Memory and disk pressure, with messages. Messages contain no changing numbers: a condition is not a gauge.
fn pressure(node: &NodeReporter, disk: &DiskUsage) -> ((bool, String), (bool, String)) {
    let available = hardware::available_memory().unwrap_or(u64::MAX);
    node.metrics.free_resources(available, disk.free);
    let say = |what: &str, value: u64, least: u64| {
        let least = quantity::write(least);
        match value < quantity::parse(&least).unwrap_or(0) {
            true => (true, format!("less than {least} of {what} left; free some, or move work away")),
            false => (false, format!("at least {least} of {what} left")),
        }
    };
    // A simulated size says nothing of the real machine; its own real memory can run out.
    let memory = match node.memory_override {
        Some(played) if played > node.machine.memory => {
            (false, "the node simulates a larger memory".to_owned())
        }
        _ => say("memory", available, MEMORY_PRESSURE_BYTES),
    };
    // Models leave the whole reserve free; when half of it is used all the same, something else fills the
    // disk.
    (memory, say("disk", disk.free, disk.reserve / 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_is_reported_in_steps_that_suit_how_much_there_is() {
        const MIB: u64 = 1 << 20;
        for (bytes, expected) in [
            (0, 0),
            (MIB - 1, 0),
            (3 * MIB + 7, 3 * MIB),
            (64 * MIB - 1, 62 * MIB),
            (64 * MIB, 64 * MIB),
            (1000 * MIB, 992 * MIB),
            (40_000 * MIB, 39_936 * MIB),
        ] {
            assert_eq!(round_disk(bytes), expected, "{bytes}");
        }
    }

    #[test]
    fn node_is_missing_only_when_the_server_names_it() {
        let answer = |code: u16, name: &str| {
            let details = serde_json::from_value(json!({"name": name})).unwrap();
            let status = kube::core::Status::failure("", "").with_code(code).with_details(details);
            kube::Error::Api(Box::new(status))
        };
        for (story, code, name, leaving, missing) in [
            ("it is gone", 404, "a", false, true),
            ("the kind is not served", 404, "", false, false),
            ("another server does not know the credentials", 401, "", false, false),
            ("they went with the node", 401, "", true, true),
            ("forbidden", 403, "a", true, false),
        ] {
            assert_eq!(is_missing(&answer(code, name), "a", leaving), missing, "{story}");
        }
    }

    #[test]
    fn node_memory_limits_parse_as_quantities() {
        let memory = NodeMemoryLimits {
            serving_limit: Some("6Gi".into()),
            user_reserve: Some("nonsense".into()),
            wired_limit: None,
        };
        let limits = bounds(16 << 30, &memory);
        assert_eq!(
            (limits.serving, limits.user_reserve, limits.serving_limit()),
            (Some(6 << 30), None, 6 << 30)
        );
    }
}
