//! What every controller shares: the client, the caches, the recorder and the few things that must
//! be remembered between two looks at an object. Nothing here decides.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use jiff::Timestamp;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::runtime::reflector::Store;
use kube::{Client, Resource};
use parking_lot::Mutex;
use russet_crds::conditions::Reason;
use russet_crds::{
    Approval, InferenceNode, Model, ModelCopy, ModelDeployment, ModelRoute, NodePool, Shard, ShardGroup,
    ShardingStrategy, Tier, names,
};

use crate::node_accounts::Credential;
use crate::snapshot::CachedSnapshot;
use crate::group::PeerTable;
use crate::metrics::OperatorMetrics;

/// Shared by all controllers.
pub struct Context {
    /// The API.
    pub client: Client,
    /// Everything the operator watches.
    pub stores: Stores,
    /// Counters.
    pub metrics: OperatorMetrics,
    /// What the API server knows nodes by.
    pub credential: Credential,
    /// Held from the last look at all groups until a new one is written: placements take turns, so
    /// that two of them never promise the same memory.
    pub placement_lock: tokio::sync::Mutex<()>,
    /// What the planner was last shown of the caches.
    pub snapshot: Mutex<Option<CachedSnapshot>>,
    /// When each node's Lease was last seen to change.
    pub leases: Mutex<BTreeMap<String, LeaseObservation>>,
    /// Recent epochs of each group, by UID.
    pub epochs: Mutex<BTreeMap<String, EpochHistory>>,
    recorder: Recorder,
}

/// One cache a kind.
#[derive(Clone)]
pub struct Stores {
    /// Machines.
    pub nodes: Store<InferenceNode>,
    /// Pools of machines.
    pub pools: Store<NodePool>,
    /// Ways to split.
    pub strategies: Store<ShardingStrategy>,
    /// Promises to deployments.
    pub tiers: Store<Tier>,
    /// Questions to persons.
    pub approvals: Store<Approval>,
    /// Models.
    pub models: Store<Model>,
    /// Models on machines.
    pub copies: Store<ModelCopy>,
    /// Deployments.
    pub deployments: Store<ModelDeployment>,
    /// Replicas.
    pub groups: Store<ShardGroup>,
    /// Ranks.
    pub shards: Store<Shard>,
    /// Routes.
    pub routes: Store<ModelRoute>,
    /// Leases of [`names::SYSTEM_NAMESPACE`].
    pub leases: Store<Lease>,
    /// Certificate requests.
    pub requests: Store<CertificateSigningRequest>,
    /// Counts changes of what a placement may depend on.
    pub changes: Arc<AtomicU64>,
}

impl Stores {
    /// A number that is another one after every change of what a placement may depend on.
    pub fn generation(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }
}

/// A Lease as this process saw it change. The clocks of machines differ, so what counts is when the
/// change was seen here, not what time the Lease names.
#[derive(Clone, Debug)]
pub struct LeaseObservation {
    /// Its renewal time, as written by the agent.
    pub renewed: Option<Timestamp>,
    /// When that was first seen here.
    pub at: Instant,
    /// Whether it changed since this process first saw it.
    pub changed: bool,
}

/// Epochs of a group.
#[derive(Clone, Debug, Default)]
pub struct EpochHistory {
    /// When recent epochs were begun.
    pub epoch_starts: Vec<Timestamp>,
    /// The epoch being formed, and since when.
    pub forming: Option<(i64, Instant)>,
    /// What the ranks were told at an epoch. The caches may not show it yet, and nobody may be told
    /// anything else at the same epoch.
    pub peer_table: Option<(i64, PeerTable)>,
}

impl Context {
    /// A context over full or filling caches.
    pub fn new(client: Client, stores: Stores, metrics: OperatorMetrics, credential: Credential) -> Arc<Self> {
        let reporter = Reporter { controller: names::OPERATOR_MANAGER.to_owned(), instance: None };
        Arc::new(Self {
            recorder: Recorder::new(client.clone(), reporter),
            client,
            stores,
            metrics,
            credential,
            placement_lock: tokio::sync::Mutex::default(),
            snapshot: Mutex::default(),
            leases: Mutex::default(),
            epochs: Mutex::default(),
        })
    }

    /// Records an event about `about`. An event is a courtesy: when it cannot be written, the
    /// condition still says the same, so the failure is only logged.
    pub async fn record<K>(&self, about: &K, good: bool, reason: Reason, action: &str, note: &str)
    where
        K: Resource<DynamicType = ()>,
    {
        let event = Event {
            type_: if good { EventType::Normal } else { EventType::Warning },
            reason: format!("{reason:?}"),
            note: Some(names::event_note(note).to_owned()),
            action: action.to_owned(),
            secondary: None,
        };
        let reference: ObjectReference = about.object_ref(&());
        if let Err(error) = self.recorder.publish(&event, &reference).await {
            tracing::warn!(object = ?reference.name, %error, "an event could not be recorded");
        }
    }
}
