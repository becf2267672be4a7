//! The caches of everything the operator watches. Not here: what it keeps in memory besides (`memory`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::coordination::v1::Lease;
use kube::runtime::reflector::Store;
use kube::runtime::reflector::store::WriterDropped;
use russet_crds::{
    Approval, InferenceNode, Model, ModelCopy, ModelDeployment, ModelProvider, ModelRoute, NodePool,
    Pipeline, PipelineRun, Shard, ShardGroup, ShardingStrategy, Tier,
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
    /// Servers outside of the cluster.
    pub providers: Store<ModelProvider>,
    /// Pipelines.
    pub pipelines: Store<Pipeline>,
    /// Runs of them.
    pub pipeline_runs: Store<PipelineRun>,
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

    /// Resolves once everything was listed that a placement depends on.
    pub async fn placement_kinds(&self) -> Result<(), WriterDropped> {
        self.nodes.wait_until_ready().await?;
        self.pools.wait_until_ready().await?;
        self.strategies.wait_until_ready().await?;
        self.tiers.wait_until_ready().await?;
        self.approvals.wait_until_ready().await?;
        self.models.wait_until_ready().await?;
        self.copies.wait_until_ready().await?;
        self.deployments.wait_until_ready().await?;
        self.groups.wait_until_ready().await?;
        self.shards.wait_until_ready().await
    }

    /// The same of a node's state, and of its removal.
    pub async fn node_kinds(&self) -> Result<(), WriterDropped> {
        self.nodes.wait_until_ready().await?;
        self.leases.wait_until_ready().await?;
        self.copies.wait_until_ready().await?;
        self.shards.wait_until_ready().await
    }

    /// The same of a route.
    pub async fn route_kinds(&self) -> Result<(), WriterDropped> {
        self.deployments.wait_until_ready().await?;
        self.providers.wait_until_ready().await?;
        self.pipelines.wait_until_ready().await?;
        self.routes.wait_until_ready().await
    }

    /// The same of a certificate request.
    pub async fn request_kinds(&self) -> Result<(), WriterDropped> {
        self.nodes.wait_until_ready().await?;
        self.requests.wait_until_ready().await
    }

    /// The same of everything.
    pub async fn all_kinds(&self) -> Result<(), WriterDropped> {
        self.placement_kinds().await?;
        self.node_kinds().await?;
        self.route_kinds().await?;
        self.request_kinds().await?;
        self.pipeline_runs.wait_until_ready().await
    }
}
