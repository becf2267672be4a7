//! The caches of everything the operator watches. Not here: what it keeps in memory besides (`memory`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::coordination::v1::Lease;
use kube::runtime::reflector::Store;
use russet_crds::{
    Approval, InferenceNode, Model, ModelCopy, ModelDeployment, ModelRoute, NodePool, Shard, ShardGroup,
    ShardingStrategy, Tier,
};

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
    /// Leases of [`SYSTEM_NAMESPACE`](russet_crds::names::SYSTEM_NAMESPACE).
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
