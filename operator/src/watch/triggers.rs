//! Triggers: which objects are enqueued when another one changes. Enqueueing too much is harmless, enqueueing
//! too little stalls, so the rules are generous.

use std::sync::Arc;

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::coordination::v1::Lease;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Resource, ResourceExt as _};
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{
    Approval, InferenceNode, Model, ModelCopy, ModelDeployment, ModelDeploymentStatus, ModelProvider,
    ModelRoute, NodePool, Pipeline, PipelineRun, RouteTarget, Scheduling, Shard, ShardGroup,
    ShardingStrategy, Tier, names,
};

use crate::stores::Stores;
use crate::work_queue::QueueSender;
use crate::{model, node};

/// The queues of all controllers.
pub struct Triggers {
    pub stores: Stores,
    pub nodes: QueueSender<InferenceNode>,
    pub pools: QueueSender<NodePool>,
    pub strategies: QueueSender<ShardingStrategy>,
    pub tiers: QueueSender<Tier>,
    pub approvals: QueueSender<Approval>,
    pub models: QueueSender<Model>,
    pub deployments: QueueSender<ModelDeployment>,
    pub scales: QueueSender<ModelDeployment>,
    pub groups: QueueSender<ShardGroup>,
    pub routes: QueueSender<ModelRoute>,
    pub pipeline_runs: QueueSender<PipelineRun>,
    pub requests: QueueSender<CertificateSigningRequest>,
}

/// A change of an object.
pub enum ObjectChange<K> {
    /// It exists; with its previous version, if there was one.
    Applied(Option<Arc<K>>),
    /// It was deleted.
    Deleted,
}

impl<K> ObjectChange<K> {
    /// Whether the change is relevant to others: if it is new or deleted, else if `differs` says so of its
    /// previous version.
    fn is_relevant(&self, differs: impl Fn(&K) -> bool) -> bool {
        !matches!(self, Self::Applied(Some(_))) || self.differs(differs)
    }

    /// Whether there was a previous version and it differs.
    fn differs(&self, differs: impl Fn(&K) -> bool) -> bool {
        matches!(self, Self::Applied(Some(before)) if differs(before))
    }

    fn is_deletion(&self) -> bool {
        matches!(self, Self::Deleted)
    }
}

/// Enqueues the objects of a store for which `whom` is true.
pub fn enqueue<K>(store: &Store<K>, queue: &QueueSender<K>, filter: impl Fn(&K) -> bool)
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    for object in store.state().iter().filter(|object| filter(object.as_ref())) {
        queue.add(ObjectRef::from_obj(object.as_ref()));
    }
}

/// A rank's condition on the cables to its neighbours.
fn over_cables(shard: &Shard) -> Option<(&str, &str)> {
    let condition = conditions::get(&shard.status.as_ref()?.conditions, Type::OverCables)?;
    Some((&condition.status, &condition.message))
}

impl Triggers {
    /// Enqueues everything: earlier changes are unknown.
    pub fn enqueue_all(&self) {
        let Self { stores, .. } = self;
        enqueue(&stores.nodes, &self.nodes, |_| true);
        enqueue(&stores.approvals, &self.approvals, |_| true);
        enqueue(&stores.deployments, &self.scales, |_| true);
        enqueue(&stores.groups, &self.groups, |_| true);
        enqueue(&stores.routes, &self.routes, |_| true);
        enqueue(&stores.pipeline_runs, &self.pipeline_runs, |_| true);
        enqueue(&stores.requests, &self.requests, |_| true);
        self.enqueue_pools();
        self.enqueue_strategies();
        self.enqueue_tiers();
        self.enqueue_models();
        self.enqueue_deployments();
    }

    pub fn node(&self, node: &InferenceNode, change: ObjectChange<InferenceNode>) {
        self.nodes.add(ObjectRef::from_obj(node));
        // Nodes that detect it over a cable, or did.
        if change.is_relevant(|before| node::links_changed(before, node)) {
            enqueue(&self.stores.nodes, &self.nodes, node::has_ports);
        }
        let placements = change.is_relevant(|before| node::fingerprint(before) != node::fingerprint(node));
        if placements || change.differs(|before| node::energy_changed(before, node)) {
            let name = node.name_any();
            enqueue(&self.stores.groups, &self.groups, |group| {
                group.spec.plan.members.iter().any(|member| member.node_name == name)
            });
        }
        // Agents report more often than is relevant.
        if !placements {
            return;
        }
        self.enqueue_deployments();
        self.enqueue_pools();
        self.enqueue_tiers();
        self.enqueue_models();
    }

    pub fn lease(&self, lease: &Lease, _: ObjectChange<Lease>) {
        if let Some(node) = lease.name_any().strip_prefix(&names::node_lease("")) {
            self.nodes.add(ObjectRef::new(node));
        }
    }

    pub fn pool(&self, pool: &NodePool, _: ObjectChange<NodePool>) {
        self.pools.add(ObjectRef::from_obj(pool));
        let name = pool.name_any();
        enqueue(&self.stores.deployments, &self.deployments, |deployment| {
            deployment.spec.pool_refs.iter().any(|reference| reference.name == name)
                || deployment.spec.tier_ref.is_some()
        });
        self.enqueue_tiers();
        self.enqueue_models();
    }

    pub fn strategy(&self, strategy: &ShardingStrategy, _: ObjectChange<ShardingStrategy>) {
        self.strategies.add(ObjectRef::from_obj(strategy));
        let name = strategy.name_any();
        enqueue(&self.stores.deployments, &self.deployments, |deployment| {
            deployment.spec.strategy_ref.as_ref().is_some_and(|reference| reference.name == name)
                || deployment.spec.tier_ref.is_some()
        });
        self.enqueue_tiers();
    }

    /// The assignment of nodes is relevant to all.
    pub fn tier(&self, _: &Tier, _: ObjectChange<Tier>) {
        self.enqueue_tiers();
        self.enqueue_models();
        self.enqueue_deployments();
    }

    /// Its deployment waits for the decision.
    pub fn approval(&self, approval: &Approval, _: ObjectChange<Approval>) {
        self.approvals.add(ObjectRef::from_obj(approval));
        if let Some(deployment) = approval.spec.deployment() {
            let namespace = approval.namespace().unwrap_or_default();
            self.deployments.add(ObjectRef::new(deployment).within(&namespace));
        }
    }

    pub fn model(&self, model: &Model, _: ObjectChange<Model>) {
        self.models.add(ObjectRef::from_obj(model));
        self.enqueue_strategies();
        self.enqueue_tiers();
        self.deployments_of_model(model.namespace().as_deref(), &model.name_any());
        self.enqueue_models_without_space();
    }

    pub fn copy(&self, copy: &ModelCopy, change: ObjectChange<ModelCopy>) {
        let reference = &copy.spec.model_ref;
        let pinned = |copy: &ModelCopy| copy.spec.retention.unwrap_or_default().pinned;
        // Its space may be what another model's files wait for, and a replica for them. A new copy only takes
        // space.
        if change.is_deletion() || change.differs(|before| pinned(before) != pinned(copy)) {
            self.enqueue_models();
            self.enqueue_deployments();
        }
        self.models.add(ObjectRef::new(&reference.name).within(&reference.namespace));
        // A transfer reports every few seconds; only its end is relevant to others.
        if change.is_relevant(|before| model::is_ready(before) != model::is_ready(copy)) {
            self.deployments_of_model(Some(&reference.namespace), &reference.name);
        }
        // Groups that wait for it report its progress.
        for group in self.stores.groups.state() {
            let here = (reference.name.as_str(), copy.spec.node_name.as_str());
            if group.namespace().as_deref() == Some(&reference.namespace)
                && group.spec.plan.files(&group.spec.model_ref.name).any(|files| files == here)
            {
                let deployment = ObjectRef::new(&group.spec.deployment_ref.name);
                self.deployments.add(deployment.within(&reference.namespace));
                self.groups.add(ObjectRef::from_obj(group.as_ref()));
            }
        }
    }

    pub fn deployment(&self, deployment: &ModelDeployment, change: ObjectChange<ModelDeployment>) {
        self.deployments.add(ObjectRef::from_obj(deployment));
        self.scales.add(ObjectRef::from_obj(deployment));
        // Gateways report demand more often than is relevant to others.
        let without_demand = |deployment: &ModelDeployment| {
            let status = deployment.status.clone().unwrap_or_default();
            (deployment.metadata.generation, ModelDeploymentStatus { demand: Vec::new(), ..status })
        };
        if !change.is_relevant(|before| without_demand(before) != without_demand(deployment)) {
            return;
        }
        self.enqueue_outweighed();
        // Retention of files, and where they are needed most, depend on its deployments.
        let namespace = deployment.namespace().unwrap_or_default();
        for model in deployment.spec.models() {
            self.models.add(ObjectRef::new(model).within(&namespace));
        }
        // Also those that it named before, which are not recorded.
        self.enqueue_strategies();
        self.enqueue_tiers();
        self.enqueue_routes(deployment, RouteTarget::deployment_name);
    }

    pub fn group(&self, group: &ShardGroup, change: ObjectChange<ShardGroup>) {
        self.groups.add(ObjectRef::from_obj(group));
        // Pools show reservations, and a group's are constant for its lifetime.
        if change.is_deletion() || !group.is_reported() {
            self.enqueue_pools();
            self.enqueue_tiers();
            self.enqueue_outweighed();
            // Files that a replica reads are protected; files that none reads any more may be evicted.
            self.enqueue_models();
        }
        if change.is_deletion() {
            // Its memory may be what another deployment waits for.
            self.enqueue_deployments();
        } else {
            let deployment = ObjectRef::new(&group.spec.deployment_ref.name);
            self.deployments.add(deployment.within(&group.namespace().unwrap_or_default()));
        }
    }

    pub fn shard(&self, shard: &Shard, change: ObjectChange<Shard>) {
        let group = ObjectRef::new(&shard.spec.group_ref.name);
        self.groups.add(group.within(&shard.namespace().unwrap_or_default()));
        // A draining node shows the ranks bound to it, and any node the ranks that do not use its cables.
        let node = ObjectRef::new(&shard.spec.node_name);
        let draining = |node: &InferenceNode| node.spec.scheduling == Scheduling::Draining;
        let cabling_changed = change.is_relevant(|before| over_cables(before) != over_cables(shard));
        if cabling_changed || self.stores.nodes.get(&node).is_some_and(|node| draining(&node)) {
            self.nodes.add(node);
        }
        if change.is_deletion() {
            self.enqueue_deployments();
            self.enqueue_pools();
            self.enqueue_tiers();
            self.enqueue_models();
        }
    }

    pub fn route(&self, route: &ModelRoute, _: ObjectChange<ModelRoute>) {
        self.routes.add(ObjectRef::from_obj(route));
    }

    pub fn provider(&self, provider: &ModelProvider, _: ObjectChange<ModelProvider>) {
        self.enqueue_routes(provider, RouteTarget::provider_name);
    }

    pub fn pipeline(&self, pipeline: &Pipeline, _: ObjectChange<Pipeline>) {
        self.enqueue_routes(pipeline, RouteTarget::pipeline_name);
    }

    pub fn pipeline_run(&self, run: &PipelineRun, _: ObjectChange<PipelineRun>) {
        self.pipeline_runs.add(ObjectRef::from_obj(run));
    }

    /// Routes of which a target is this object.
    fn enqueue_routes<K: Resource>(&self, object: &K, name: fn(&RouteTarget) -> Option<&str>) {
        enqueue(&self.stores.routes, &self.routes, |route| {
            route.namespace() == object.namespace()
                && route.spec.all_targets().any(|target| name(target) == Some(&object.name_any()))
        });
    }

    pub fn request(&self, request: &CertificateSigningRequest, _: ObjectChange<CertificateSigningRequest>) {
        self.requests.add(ObjectRef::from_obj(request));
    }

    fn enqueue_pools(&self) {
        enqueue(&self.stores.pools, &self.pools, |_| true);
    }

    fn enqueue_tiers(&self) {
        enqueue(&self.stores.tiers, &self.tiers, |_| true);
    }

    fn enqueue_models(&self) {
        enqueue(&self.stores.models, &self.models, |_| true);
    }

    /// Space that one model no longer needs may be used by another.
    fn enqueue_models_without_space(&self) {
        enqueue(&self.stores.models, &self.models, |model| {
            let preloaded =
                model.status.as_ref().and_then(|it| conditions::get(&it.conditions, Type::Preloaded));
            preloaded.and_then(conditions::reason) == Some(Reason::DiskPressure)
        });
        for copy in self.stores.copies.state().iter().filter(|copy| model::has_disk_pressure(copy)) {
            let reference = &copy.spec.model_ref;
            self.models.add(ObjectRef::new(&reference.name).within(&reference.namespace));
        }
    }

    fn enqueue_strategies(&self) {
        enqueue(&self.stores.strategies, &self.strategies, |_| true);
    }

    fn enqueue_deployments(&self) {
        enqueue(&self.stores.deployments, &self.deployments, |_| true);
    }

    /// Enqueues deployments that wait until others are placed.
    fn enqueue_outweighed(&self) {
        let reason = format!("{:?}", Reason::Outweighed);
        enqueue(&self.stores.deployments, &self.deployments, |deployment| {
            let status = deployment.status.as_ref();
            status.is_some_and(|status| status.conditions.iter().any(|condition| condition.reason == reason))
        });
    }

    fn deployments_of_model(&self, namespace: Option<&str>, model: &str) {
        enqueue(&self.stores.deployments, &self.deployments, |deployment| {
            deployment.namespace().as_deref() == namespace
                && deployment.spec.models().any(|named| named == model)
        });
    }
}
