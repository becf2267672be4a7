//! A stub agent: it registers a machine, renews its Lease, and simulates downloads, claims and serving like a
//! real one; it can be killed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt as _};
use parking_lot::Mutex;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{
    CopyMode, ENGINE_OPTIONS, InferenceNode, MeasuredPower, ModelCopy, ModelCopyStatus, NodeMemory,
    Rendezvous, Shard, ShardStatus, names,
};
use russet_model::adapter::AdapterShape;
use russet_model::shape::ModelShape;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

pub struct StubAgent {
    name: String,
    shared: Arc<AgentControls>,
    task: JoinHandle<()>,
}

/// Engines with this many context tokens never become ready.
pub const FAILING_CONTEXT_TOKENS: u32 = 17;

/// Port on which every agent would serve other agents.
pub const PEER_PORT: u16 = 7946;

/// Content digest of every model.
pub fn content() -> String {
    "5a".repeat(32)
}

#[derive(Default)]
struct AgentControls {
    failing: Mutex<BTreeSet<String>>,
    refusals: AtomicUsize,
    /// Bytes that models may take on its disk; unlimited if `None`.
    disk: Mutex<Option<u64>>,
    /// Power that it measured, if it did.
    power: Mutex<Option<MeasuredPower>>,
    /// The source stalls after the first byte of a model.
    stuck: AtomicBool,
}

struct AgentLoop {
    client: Client,
    name: String,
    bytes: u64,
    shared: Arc<AgentControls>,
    /// Granted bytes, by the Shard's UID.
    granted: BTreeMap<String, u64>,
    reported: Option<(u64, Option<u64>, Option<MeasuredPower>)>,
    ports: u32,
}

impl StubAgent {
    pub async fn start(client: Client, name: &str, bytes: u64) -> Self {
        let shared = Arc::new(AgentControls::default());
        let mut machine = AgentLoop {
            client,
            name: name.to_owned(),
            bytes,
            shared: shared.clone(),
            granted: BTreeMap::new(),
            reported: None,
            ports: 20_000,
        };
        let task = tokio::spawn(async move {
            let mut lease = tokio::time::interval(Duration::from_secs(5));
            let mut work = tokio::time::interval(Duration::from_millis(40));
            loop {
                tokio::select! {
                    _ = lease.tick() => machine.renew().await,
                    _ = work.tick() => machine.work().await,
                }
            }
        });
        Self { name: name.to_owned(), shared, task }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Kills the engine of this Shard, once.
    pub fn fail(&self, shard: &str) {
        self.shared.failing.lock().insert(shard.to_owned());
    }

    /// Limits the bytes that models may take on its disk.
    pub fn limit_disk(&self, bytes: u64) {
        *self.shared.disk.lock() = Some(bytes);
    }

    /// It measures this power of its machine.
    pub fn measure_power(&self, power: MeasuredPower) {
        *self.shared.power.lock() = Some(power);
    }

    /// Sets whether the source stalls after the first byte of a model.
    pub fn stall_source(&self, stuck: bool) {
        self.shared.stuck.store(stuck, Ordering::Relaxed);
    }

    pub fn refusals(&self) -> usize {
        self.shared.refusals.load(Ordering::Relaxed)
    }
}

impl Drop for StubAgent {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl AgentLoop {
    async fn renew(&self) {
        let api: Api<Lease> = Api::namespaced(self.client.clone(), names::SYSTEM_NAMESPACE);
        let name = names::node_lease(&self.name);
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name},
            "spec": {"holderIdentity": format!("boot-{}", self.name), "leaseDurationSeconds": 20,
                     "renewTime": format!("{:.6}", Timestamp::now())},
        });
        self.report(api.patch(&name, &apply(), &Patch::Apply(lease)).await);
    }

    async fn work(&mut self) {
        let mine = ListParams::default().fields(&format!("spec.nodeName={}", self.name));
        let copies: Api<ModelCopy> = Api::all(self.client.clone());
        if let Some(list) = self.report(copies.list(&mine).await) {
            for copy in &list.items {
                let others = list.items.iter().filter(|other| other.name_any() != copy.name_any());
                let taken = others.filter_map(|other| Some(other.status.as_ref()?.bytes_done)).sum();
                self.copy(copy, taken).await;
            }
        }
        let shards: Api<Shard> = Api::all(self.client.clone());
        let Some(list) = self.report(shards.list(&mine).await) else { return };
        let alive: BTreeSet<String> = list.items.iter().filter_map(|shard| shard.uid()).collect();
        self.granted.retain(|uid, _| alive.contains(uid));
        for shard in list.items {
            self.shard(&shard).await;
        }
        self.node().await;
    }

    async fn node(&mut self) {
        let granted = self.granted.values().sum();
        let (disk, power) = (*self.shared.disk.lock(), *self.shared.power.lock());
        if self.reported == Some((granted, disk, power)) {
            return;
        }
        let api: Api<InferenceNode> = Api::all(self.client.clone());
        let memory = NodeMemory {
            total_bytes: self.bytes,
            serving_limit_bytes: self.bytes,
            granted_bytes: granted,
            ..NodeMemory::default()
        };
        let mut node = json!({
            "apiVersion": "russet.dev/v1alpha1", "kind": "InferenceNode", "metadata": {"name": self.name},
            "status": {"chip": "Played CPU", "memory": memory, "bootId": format!("boot-{}", self.name),
                       "engineBuild": "1", "backends": ["ring"], "shardingModes": ["Tensor"],
                       "engineOptions": ENGINE_OPTIONS,
                       "addresses": ["127.0.0.1"], "peerPort": PEER_PORT},
        });
        if let Some(power) = power {
            node["status"]["energy"] = json!(power);
        }
        if let Some(limit) = disk {
            node["status"]["disk"] =
                json!({"totalBytes": limit, "freeBytes": limit, "modelsLimitBytes": limit});
        }
        if self.report(api.patch_status(&self.name, &apply(), &Patch::Apply(&node)).await).is_some() {
            self.reported = Some((granted, disk, power));
        }
    }

    /// `taken` are the bytes of other copies here.
    async fn copy(&self, copy: &ModelCopy, taken: u64) {
        let before = copy.status.clone().unwrap_or_default();
        let shape = shape(&copy.spec.source.uri);
        let bytes_total = shape.total_bytes();
        let mut status = ModelCopyStatus { shape: Some(shape), bytes_total, ..before.clone() };
        set(&mut status.conditions, Type::Resolved, true, Reason::HeadersRead);
        let fits = self.shared.disk.lock().is_none_or(|limit| taken + bytes_total <= limit);
        // Verified files stay, whatever their supply is changed to.
        let there = conditions::is_true(&before.conditions, Type::Ready) && before.content.is_some();
        let waits = copy.spec.supply.as_ref().is_some_and(|supply| supply.content.is_none());
        let stuck = copy.spec.supply.is_none() && self.shared.stuck.load(Ordering::Relaxed);
        if copy.spec.want != CopyMode::Files || there {
        } else if !fits {
            set(&mut status.conditions, Type::Ready, false, Reason::DiskPressure);
        } else if waits {
            set(&mut status.conditions, Type::Ready, false, Reason::WaitingForPeer);
        } else if stuck {
            status.bytes_done = 1;
            set(&mut status.conditions, Type::Ready, false, Reason::Downloading);
        } else {
            status.bytes_done = bytes_total;
            status.content = Some(content());
            set(&mut status.conditions, Type::Ready, true, Reason::Verified);
        }
        if status != before {
            let api: Api<ModelCopy> = Api::all(self.client.clone());
            self.status("ModelCopy", &api, &copy.name_any(), &json!(status)).await;
        }
    }

    async fn shard(&mut self, shard: &Shard) {
        let epoch = shard.spec.epoch;
        let before = shard.status.clone().unwrap_or_default();
        let mut status = if before.observed_epoch == Some(epoch) {
            before.clone()
        } else {
            ShardStatus { observed_epoch: Some(epoch), ..ShardStatus::default() }
        };
        if status.rendezvous.is_none() {
            let uid = shard.uid().unwrap_or_default();
            let others: u64 =
                self.granted.iter().filter(|(other, _)| **other != uid).map(|(_, bytes)| bytes).sum();
            if others + shard.spec.reserved_bytes() > self.bytes {
                self.shared.refusals.fetch_add(1, Ordering::Relaxed);
                set(&mut status.conditions, Type::Claimed, false, Reason::MemoryRefused);
            } else {
                self.granted.insert(uid, shard.spec.reserved_bytes());
                self.ports += 3;
                let address = |port: u32| format!("127.0.0.1:{port}");
                status.rendezvous = Some(Rendezvous {
                    rpc: address(self.ports),
                    ring: address(self.ports + 1),
                    tensor: address(self.ports + 2),
                });
                set(&mut status.conditions, Type::Claimed, true, Reason::MemoryGranted);
            }
        } else if shard.spec.context_tokens == FAILING_CONTEXT_TOKENS && !shard.spec.peers.is_empty() {
            status.failure = Some("out of luck".to_owned());
        } else if status.failure.is_none() && !shard.spec.peers.is_empty() {
            for kind in [Type::Loaded, Type::Joined, Type::Serving, Type::Ready] {
                set(&mut status.conditions, kind, true, Reason::Serving);
            }
        }
        if self.shared.failing.lock().remove(&shard.name_any()) {
            status.failure = Some("the engine was killed by signal 9".to_owned());
            for kind in [Type::Serving, Type::Ready] {
                set(&mut status.conditions, kind, false, Reason::EngineExited);
            }
        }
        if status != before {
            let api: Api<Shard> =
                Api::namespaced(self.client.clone(), &shard.namespace().unwrap_or_default());
            self.status("Shard", &api, &shard.name_any(), &json!(status)).await;
        }
    }

    async fn status<K>(&self, kind: &str, api: &Api<K>, name: &str, status: &Value)
    where
        K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
    {
        let patch = json!({"apiVersion": "russet.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "status": status});
        self.report(api.patch_status(name, &apply(), &Patch::Apply(patch)).await);
    }

    fn report<T>(&self, result: Result<T, kube::Error>) -> Option<T> {
        result
            .inspect_err(|error| tracing::warn!(agent = self.name, %error, "a played agent was refused"))
            .ok()
    }
}

fn apply() -> PatchParams {
    PatchParams::apply(names::AGENT_MANAGER).force()
}

fn set(
    conditions: &mut Vec<k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition>,
    kind: Type,
    value: bool,
    reason: Reason,
) {
    conditions::set(conditions, kind, value, reason, "", None, Timestamp::now());
}

/// `file:///played/ARCHITECTURE/LAYERS/BYTES` as a shape; of the architecture `lora` that of an adapter.
fn shape(uri: &str) -> ModelShape {
    let parts: Vec<&str> = uri.rsplit('/').collect();
    let (bytes, layers, architecture) = (parts[0].parse().unwrap(), parts[1].parse().unwrap(), parts[2]);
    if architecture == "lora" {
        let adapter = AdapterShape { layers, bytes, ..AdapterShape::default() };
        let architecture = architecture.to_owned();
        return ModelShape {
            architecture,
            head_bytes: bytes,
            adapter: Some(adapter),
            ..ModelShape::default()
        };
    }
    ModelShape {
        architecture: architecture.to_owned(),
        layers,
        layer_bytes: vec![bytes; layers as usize],
        context_length: 1024,
        attention_heads: 8,
        key_value_heads: 4,
        head_dim: 16,
        intermediate_size: 256,
        ..ModelShape::default()
    }
}
