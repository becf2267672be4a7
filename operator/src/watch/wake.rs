//! Who looks again when something changes. Waking too much is harmless, waking too little is a stall, so the rules
//! here are generous.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::coordination::v1::Lease;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Resource, ResourceExt as _};
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{
    Approval, InferenceNode, Model, ModelCopy, ModelDeployment, ModelDeploymentStatus, ModelRoute, NodePool,
    Scheduling, Shard, ShardGroup, ShardingStrategy, Tier, names,
};

use crate::context::Stores;
use crate::queue::Sender;
use crate::{model, node};

/// What a controller is told to look at.
pub struct Wake {
    pub stores: Stores,
    pub nodes: Sender<InferenceNode>,
    pub pools: Sender<NodePool>,
    pub strategies: Sender<ShardingStrategy>,
    pub tiers: Sender<Tier>,
    pub approvals: Sender<Approval>,
    pub models: Sender<Model>,
    pub deployments: Sender<ModelDeployment>,
    pub scales: Sender<ModelDeployment>,
    pub groups: Sender<ShardGroup>,
    pub routes: Sender<ModelRoute>,
    pub requests: Sender<CertificateSigningRequest>,
    /// Whether the caches were full once; whoever was woken before would be woken again then.
    pub began: AtomicBool,
}

/// Something happened to an object.
pub enum Change<K> {
    /// It is there, and was this before, if it was there before.
    Applied(Option<Arc<K>>),
    /// It is gone.
    Deleted,
}

impl<K> Change<K> {
    /// Whether others care. They do where it is new or gone; else `differs` tells by what it was.
    fn matters(&self, differs: impl Fn(&K) -> bool) -> bool {
        !matches!(self, Self::Applied(Some(_))) || self.differs(differs)
    }

    /// Whether it was there before and was something else.
    fn differs(&self, differs: impl Fn(&K) -> bool) -> bool {
        matches!(self, Self::Applied(Some(before)) if differs(before))
    }

    fn is_deletion(&self) -> bool {
        matches!(self, Self::Deleted)
    }
}

/// Has the controller of these objects look at those for which `whom` is true.
fn wake<K>(store: &Store<K>, queue: &Sender<K>, whom: impl Fn(&K) -> bool)
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    for object in store.state().iter().filter(|object| whom(object.as_ref())) {
        queue.put(ObjectRef::from_obj(object.as_ref()));
    }
}

/// What a rank says of the ways to its neighbours.
fn over_cables(shard: &Shard) -> Option<(&str, &str)> {
    let condition = conditions::get(&shard.status.as_ref()?.conditions, Type::OverCables)?;
    Some((&condition.status, &condition.message))
}

impl Wake {
    /// Everything is looked at once: what happened before nobody knows.
    pub fn everything(&self) {
        let Self { stores, .. } = self;
        wake(&stores.nodes, &self.nodes, |_| true);
        wake(&stores.approvals, &self.approvals, |_| true);
        wake(&stores.deployments, &self.scales, |_| true);
        wake(&stores.groups, &self.groups, |_| true);
        wake(&stores.routes, &self.routes, |_| true);
        wake(&stores.requests, &self.requests, |_| true);
        self.all_pools();
        self.all_strategies();
        self.all_tiers();
        self.all_models();
        self.all_deployments();
    }

    pub fn node(&self, node: &InferenceNode, change: Change<InferenceNode>) {
        self.nodes.put(ObjectRef::from_obj(node));
        // Who sees it over a cable, or saw it.
        if change.matters(|before| node::joins_otherwise(before, node)) {
            wake(&self.stores.nodes, &self.nodes, node::has_ports);
        }
        // Agents report more often than it matters.
        if !change.matters(|before| node::fingerprint(before) != node::fingerprint(node)) {
            return;
        }
        let name = node.name_any();
        self.all_deployments();
        self.all_pools();
        self.all_tiers();
        self.all_models();
        wake(&self.stores.groups, &self.groups, |group| {
            group.spec.plan.members.iter().any(|member| member.node_name == name)
        });
    }

    pub fn lease(&self, lease: &Lease, _: Change<Lease>) {
        if let Some(node) = lease.name_any().strip_prefix(&names::node_lease("")) {
            self.nodes.put(ObjectRef::new(node));
        }
    }

    pub fn pool(&self, pool: &NodePool, _: Change<NodePool>) {
        self.pools.put(ObjectRef::from_obj(pool));
        let name = pool.name_any();
        wake(&self.stores.deployments, &self.deployments, |deployment| {
            deployment.spec.pool_refs.iter().any(|reference| reference.name == name)
                || deployment.spec.tier_ref.is_some()
        });
        self.all_tiers();
        self.all_models();
    }

    pub fn strategy(&self, strategy: &ShardingStrategy, _: Change<ShardingStrategy>) {
        self.strategies.put(ObjectRef::from_obj(strategy));
        let name = strategy.name_any();
        wake(&self.stores.deployments, &self.deployments, |deployment| {
            deployment.spec.strategy_ref.as_ref().is_some_and(|reference| reference.name == name)
                || deployment.spec.tier_ref.is_some()
        });
        self.all_tiers();
    }

    /// Whose nodes are whose matters to everybody.
    pub fn tier(&self, _: &Tier, _: Change<Tier>) {
        self.all_tiers();
        self.all_models();
        self.all_deployments();
    }

    /// The answer is what its deployment waits for.
    pub fn approval(&self, approval: &Approval, _: Change<Approval>) {
        self.approvals.put(ObjectRef::from_obj(approval));
        let deployment = ObjectRef::new(&approval.spec.deployment_ref.name);
        self.deployments.put(deployment.within(&approval.namespace().unwrap_or_default()));
    }

    pub fn model(&self, model: &Model, _: Change<Model>) {
        self.models.put(ObjectRef::from_obj(model));
        self.all_strategies();
        self.all_tiers();
        self.deployments_of_model(model.namespace().as_deref(), &model.name_any());
        self.models_without_room();
    }

    pub fn copy(&self, copy: &ModelCopy, change: Change<ModelCopy>) {
        let reference = &copy.spec.model_ref;
        let pinned = |copy: &ModelCopy| copy.spec.retention.unwrap_or_default().pinned;
        // Its room may be what another model's files wait for, and a replica for them. A new one only takes.
        if change.is_deletion() || change.differs(|before| pinned(before) != pinned(copy)) {
            self.all_models();
            self.all_deployments();
        }
        self.models.put(ObjectRef::new(&reference.name).within(&reference.namespace));
        // A transfer tells of itself every few seconds; what others wait for is that it comes to an end.
        if change.matters(|before| model::is_ready(before) != model::is_ready(copy)) {
            self.deployments_of_model(Some(&reference.namespace), &reference.name);
        }
        // How far it has come is told where its model is to run.
        for group in self.stores.groups.state() {
            let here = (reference.name.as_str(), copy.spec.node_name.as_str());
            if group.namespace().as_deref() == Some(&reference.namespace)
                && group.spec.plan.files(&group.spec.model_ref.name).any(|files| files == here)
            {
                let deployment = ObjectRef::new(&group.spec.deployment_ref.name);
                self.deployments.put(deployment.within(&reference.namespace));
                self.groups.put(ObjectRef::from_obj(group.as_ref()));
            }
        }
    }

    pub fn deployment(&self, deployment: &ModelDeployment, change: Change<ModelDeployment>) {
        self.deployments.put(ObjectRef::from_obj(deployment));
        self.scales.put(ObjectRef::from_obj(deployment));
        // Gateways report demand more often than it matters to others.
        let told = |deployment: &ModelDeployment| {
            let status = deployment.status.clone().unwrap_or_default();
            (deployment.metadata.generation, ModelDeploymentStatus { demand: Vec::new(), ..status })
        };
        if !change.matters(|before| told(before) != told(deployment)) {
            return;
        }
        self.outweighed();
        // How long files are kept, and where they are worth most, is also its deployments' business.
        let namespace = deployment.namespace().unwrap_or_default();
        for model in deployment.spec.models() {
            self.models.put(ObjectRef::new(model).within(&namespace));
        }
        // Also those it named before, which nobody remembers.
        self.all_strategies();
        self.all_tiers();
        wake(&self.stores.routes, &self.routes, |route| {
            route.namespace() == deployment.namespace()
                && route.spec.targets.iter().any(|target| target.deployment_ref.name == deployment.name_any())
        });
    }

    pub fn group(&self, group: &ShardGroup, change: Change<ShardGroup>) {
        self.groups.put(ObjectRef::from_obj(group));
        // Pools show what is promised, and a group promises the same for as long as it lives.
        if change.is_deletion() || group.status.is_none() {
            self.all_pools();
            self.all_tiers();
            self.outweighed();
            // What a replica reads stays, and what nobody reads any more may make room.
            self.all_models();
        }
        if change.is_deletion() {
            // Its memory may be what another deployment waits for.
            self.all_deployments();
        } else {
            let deployment = ObjectRef::new(&group.spec.deployment_ref.name);
            self.deployments.put(deployment.within(&group.namespace().unwrap_or_default()));
        }
    }

    pub fn shard(&self, shard: &Shard, change: Change<Shard>) {
        let group = ObjectRef::new(&shard.spec.group_ref.name);
        self.groups.put(group.within(&shard.namespace().unwrap_or_default()));
        // A draining node shows what is still bound to it, and any node what meets others beside its cables.
        let node = ObjectRef::new(&shard.spec.node_name);
        let draining = |node: &InferenceNode| node.spec.scheduling == Scheduling::Draining;
        let other_way = change.matters(|before| over_cables(before) != over_cables(shard));
        if other_way || self.stores.nodes.get(&node).is_some_and(|node| draining(&node)) {
            self.nodes.put(node);
        }
        if change.is_deletion() {
            self.all_deployments();
            self.all_pools();
            self.all_tiers();
            self.all_models();
        }
    }

    pub fn route(&self, route: &ModelRoute, _: Change<ModelRoute>) {
        self.routes.put(ObjectRef::from_obj(route));
    }

    pub fn request(&self, request: &CertificateSigningRequest, _: Change<CertificateSigningRequest>) {
        self.requests.put(ObjectRef::from_obj(request));
    }

    fn all_pools(&self) {
        wake(&self.stores.pools, &self.pools, |_| true);
    }

    fn all_tiers(&self) {
        wake(&self.stores.tiers, &self.tiers, |_| true);
    }

    fn all_models(&self) {
        wake(&self.stores.models, &self.models, |_| true);
    }

    /// What one model asks for no longer, another may have.
    fn models_without_room(&self) {
        wake(&self.stores.models, &self.models, |model| {
            let preloaded =
                model.status.as_ref().and_then(|it| conditions::get(&it.conditions, Type::Preloaded));
            preloaded.and_then(conditions::reason) == Some(Reason::DiskPressure)
        });
        for copy in self.stores.copies.state().iter().filter(|copy| model::lacks_room(copy)) {
            let reference = &copy.spec.model_ref;
            self.models.put(ObjectRef::new(&reference.name).within(&reference.namespace));
        }
    }

    fn all_strategies(&self) {
        wake(&self.stores.strategies, &self.strategies, |_| true);
    }

    fn all_deployments(&self) {
        wake(&self.stores.deployments, &self.deployments, |_| true);
    }

    /// Those that wait for others to have their places.
    fn outweighed(&self) {
        let reason = format!("{:?}", Reason::Outweighed);
        wake(&self.stores.deployments, &self.deployments, |deployment| {
            let status = deployment.status.as_ref();
            status.is_some_and(|status| status.conditions.iter().any(|condition| condition.reason == reason))
        });
    }

    fn deployments_of_model(&self, namespace: Option<&str>, model: &str) {
        wake(&self.stores.deployments, &self.deployments, |deployment| {
            deployment.namespace().as_deref() == namespace
                && deployment.spec.models().any(|named| named == model)
        });
    }
}
