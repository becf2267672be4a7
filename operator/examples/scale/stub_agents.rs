//! Simulated agents of all nodes: they renew Leases, read headers, fetch files, grant memory and serve, as
//! far as the API can see; and they count their writes, to separate them from the operator's.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::StreamExt as _;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{Patch, PatchParams};
use kube::runtime::watcher::{Config, Event, watcher};
use kube::{Api, Client, ResourceExt as _};
use parking_lot::Mutex;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{
    CopyMode, InferenceNode, ModelCopy, ModelCopyStatus, NodeMemory, Rendezvous, Shard, ShardStatus, names,
};
use russet_model::shape::ModelShape;
use serde_json::{Value, json};

use crate::Error;

const GIB: u64 = 1 << 30;
/// A Lease expires after 20 seconds.
const RENEW: Duration = Duration::from_secs(8);

/// When dropped, they stop renewing.
pub struct StubAgents {
    shared: Arc<AgentState>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

struct AgentState {
    client: Client,
    written: AtomicU64,
    /// Bytes granted on every node, by Shard.
    granted: Mutex<BTreeMap<String, BTreeMap<String, u64>>>,
}

impl Drop for StubAgents {
    fn drop(&mut self) {
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

impl StubAgents {
    /// Starts without any machine.
    pub fn start(client: Client) -> Self {
        let shared = Arc::new(AgentState { client, written: AtomicU64::new(0), granted: Mutex::default() });
        let tasks = vec![
            tokio::spawn(renew(shared.clone())),
            tokio::spawn(copies(shared.clone())),
            tokio::spawn(shards(shared.clone())),
        ];
        Self { shared, tasks }
    }

    /// Counts a write of the bench itself.
    pub fn wrote(&self) {
        self.shared.written.fetch_add(1, Ordering::Relaxed);
    }

    /// Writes of the benchmark itself, without Leases.
    pub fn written(&self) -> u64 {
        self.shared.written.load(Ordering::Relaxed)
    }

    /// Adds a machine.
    pub async fn join(&self, node: &str) -> Result<(), Error> {
        self.shared.granted.lock().insert(node.to_owned(), BTreeMap::new());
        self.shared.lease(node).await?;
        self.shared.node(node).await
    }
}

impl AgentState {
    async fn lease(&self, node: &str) -> Result<(), Error> {
        let api: Api<Lease> = Api::namespaced(self.client.clone(), names::SYSTEM_NAMESPACE);
        let name = names::node_lease(node);
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name},
            "spec": {"holderIdentity": format!("boot-{node}"), "leaseDurationSeconds": 20,
                     "renewTime": format!("{:.6}", Timestamp::now())},
        });
        api.patch(&name, &apply(), &Patch::Apply(lease)).await?;
        Ok(())
    }

    /// Half of the machines are large.
    async fn node(&self, node: &str) -> Result<(), Error> {
        let granted = self.granted.lock().get(node).map_or(0, |granted| granted.values().sum());
        let large = node.bytes().last().is_some_and(|digit| digit % 2 == 0);
        let bytes = if large { 480 * GIB } else { 96 * GIB };
        let memory = NodeMemory {
            total_bytes: bytes,
            serving_limit_bytes: bytes,
            granted_bytes: granted,
            ..NodeMemory::default()
        };
        let status = json!({
            "chip": if large { "Apple M3 Ultra" } else { "Apple M4 Max" }, "memory": memory,
            "bootId": format!("boot-{node}"), "engineBuild": "1", "backends": ["ring"],
            "shardingModes": ["Tensor"],
        });
        self.status::<InferenceNode>("InferenceNode", &Api::all(self.client.clone()), node, &status).await
    }

    async fn status<K>(&self, kind: &str, api: &Api<K>, name: &str, status: &Value) -> Result<(), Error>
    where
        K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
    {
        let patch = json!({
            "apiVersion": "russet.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "status": status,
        });
        self.written.fetch_add(1, Ordering::Relaxed);
        api.patch_status(name, &apply(), &Patch::Apply(patch)).await?;
        Ok(())
    }

    async fn copy(&self, copy: &ModelCopy) -> Result<(), Error> {
        let before = copy.status.clone().unwrap_or_default();
        let mut status = ModelCopyStatus { shape: Some(shape(&copy.spec.source.uri)), ..before.clone() };
        set(&mut status.conditions, Type::Resolved, Reason::HeadersRead);
        if copy.spec.want == CopyMode::Files {
            set(&mut status.conditions, Type::Ready, Reason::Verified);
        }
        if status == before {
            return Ok(());
        }
        let api: Api<ModelCopy> = Api::all(self.client.clone());
        self.status("ModelCopy", &api, &copy.name_any(), &json!(status)).await
    }

    async fn shard(&self, shard: &Shard) -> Result<(), Error> {
        let epoch = shard.spec.epoch;
        let before = shard.status.clone().unwrap_or_default();
        let mut status = match before.observed_epoch == Some(epoch) {
            true => before.clone(),
            false => ShardStatus { observed_epoch: Some(epoch), ..ShardStatus::default() },
        };
        if status.rendezvous.is_none() {
            let address = |port: u32| format!("127.0.0.1:{port}");
            status.rendezvous =
                Some(Rendezvous { rpc: address(20_000), ring: address(20_001), tensor: address(20_002) });
            set(&mut status.conditions, Type::Claimed, Reason::MemoryGranted);
            self.grant(shard, Some(shard.spec.reserved_bytes())).await?;
        } else if !shard.spec.peers.is_empty() {
            for kind in [Type::Loaded, Type::Joined, Type::Serving, Type::Ready] {
                set(&mut status.conditions, kind, Reason::Serving);
            }
        }
        if status == before {
            return Ok(());
        }
        let namespace = shard.namespace().unwrap_or_default();
        let api: Api<Shard> = Api::namespaced(self.client.clone(), &namespace);
        self.status("Shard", &api, &shard.name_any(), &json!(status)).await
    }

    /// Grants a Shard its memory, or releases it.
    async fn grant(&self, shard: &Shard, bytes: Option<u64>) -> Result<(), Error> {
        {
            let mut granted = self.granted.lock();
            let own = granted.entry(shard.spec.node_name.clone()).or_default();
            let uid = shard.uid().unwrap_or_default();
            let before = match bytes {
                Some(bytes) => own.insert(uid, bytes),
                None => own.remove(&uid),
            };
            if before == bytes {
                return Ok(());
            }
        }
        self.node(&shard.spec.node_name).await
    }
}

async fn renew(shared: Arc<AgentState>) {
    loop {
        let nodes: Vec<String> = shared.granted.lock().keys().cloned().collect();
        for node in &nodes {
            log_error(shared.lease(node).await);
        }
        tokio::time::sleep(RENEW).await;
    }
}

async fn copies(shared: Arc<AgentState>) {
    let mut events = watcher(Api::<ModelCopy>::all(shared.client.clone()), Config::default()).boxed();
    while let Some(event) = events.next().await {
        if let Ok(Event::Apply(copy) | Event::InitApply(copy)) = event {
            log_error(shared.copy(&copy).await);
        }
    }
}

async fn shards(shared: Arc<AgentState>) {
    let mut events = watcher(Api::<Shard>::all(shared.client.clone()), Config::default()).boxed();
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Apply(shard) | Event::InitApply(shard)) => log_error(shared.shard(&shard).await),
            Ok(Event::Delete(shard)) => log_error(shared.grant(&shard, None).await),
            _ => {}
        }
    }
}

/// An object may be deleted before its agent writes.
fn log_error(result: Result<(), Error>) {
    if let Err(error) = result {
        eprintln!("a played agent was refused: {error}");
    }
}

fn apply() -> PatchParams {
    PatchParams::apply(names::AGENT_MANAGER).force()
}

fn set(conditions: &mut Vec<Condition>, kind: Type, reason: Reason) {
    conditions::set(conditions, kind, true, reason, "", None, Timestamp::now());
}

/// `file:///played/NUMBER` is one of four sizes.
fn shape(uri: &str) -> ModelShape {
    let number: usize = uri.rsplit('/').next().and_then(|text| text.parse().ok()).unwrap_or(0);
    let (layers, gib) = [(32, 5), (80, 40), (64, 20), (126, 220)][number % 4];
    ModelShape {
        architecture: "llama".to_owned(),
        layers,
        layer_bytes: vec![gib * GIB / u64::from(layers); layers as usize],
        hidden_size: 8192,
        attention_heads: 64,
        key_value_heads: 8,
        head_dim: 128,
        intermediate_size: 28672,
        vocabulary: 128_256,
        parameters: gib * GIB * 2,
        kv_bytes_per_token_per_layer: 4096,
        context_length: 8192,
        ..ModelShape::default()
    }
}
