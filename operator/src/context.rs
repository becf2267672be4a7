//! State shared by all controllers: the client, the caches, the event recorder and the little state that must
//! be kept between reconciliations. Not here: decisions.

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

use crate::group::PeerTable;
use crate::metrics::OperatorMetrics;
use crate::node_accounts::Credential;
use crate::snapshot::CachedSnapshot;

/// Shared by all controllers.
pub struct Context {
    /// The API.
    pub client: Client,
    /// Everything the operator watches.
    pub stores: Stores,
    /// Counters.
    pub metrics: OperatorMetrics,
    /// How the API server authenticates nodes.
    pub credential: Credential,
    /// Held from the last read of all groups until a new one is written: placements are serialised, so that
    /// no two of them reserve the same memory.
    pub placement_lock: tokio::sync::Mutex<()>,
    /// The last snapshot of the caches for the planner.
    pub snapshot: Mutex<Option<CachedSnapshot>>,
    /// When each node's Lease was last seen to change.
    pub leases: Mutex<BTreeMap<String, LeaseObservation>>,
    /// Recent epochs of each group, by UID.
    pub epochs: Mutex<BTreeMap<String, EpochHistory>>,
    recorder: Recorder,
}

/// One cache per kind.
#[derive(Clone)]
pub struct Stores {
    /// Machines.
    pub nodes: Store<InferenceNode>,
    /// Pools of machines.
    pub pools: Store<NodePool>,
    /// Sharding strategies.
    pub strategies: Store<ShardingStrategy>,
    /// Tiers.
    pub tiers: Store<Tier>,
    /// Approvals.
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
    /// Counts changes of objects that a placement may depend on.
    pub changes: Arc<AtomicU64>,
}

impl Stores {
    /// A number that differs after every change of an object that a placement may depend on.
    pub fn generation(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }
}

/// A Lease as this process observed it. The clocks of machines differ, so what counts is when a change was
/// observed here, not the time in the Lease.
#[derive(Clone, Debug)]
pub struct LeaseObservation {
    /// Its renewal time, as written by the agent.
    pub renewed: Option<Timestamp>,
    /// When that was first observed here.
    pub at: Instant,
    /// Whether it changed since this process first observed it.
    pub changed: bool,
}

/// Epochs of a group.
#[derive(Clone, Debug, Default)]
pub struct EpochHistory {
    /// When recent epochs began.
    pub epoch_starts: Vec<Timestamp>,
    /// The epoch being formed, and since when.
    pub forming: Option<(i64, Instant)>,
    /// The peer table of an epoch as it was written to the ranks. The caches may not show it yet, and no
    /// other table may be written for the same epoch.
    pub peer_table: Option<(i64, PeerTable)>,
}

impl Context {
    /// A context over full or filling caches.
    pub fn new(
        client: Client,
        stores: Stores,
        metrics: OperatorMetrics,
        credential: Credential,
    ) -> Arc<Self> {
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

    /// Records an event about `about`. Events are best effort: the condition says the same, so a failure is
    /// only logged.
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
