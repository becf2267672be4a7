//! The caches and what a change in one of them wakes: one watch a kind, shared by all controllers.
//! Waking too much is harmless, waking too little is a stall, so the rules here are generous.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::future::Future;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use futures::{FutureExt as _, StreamExt as _};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::core::{DeserializeGuard, Resource};
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{ObjectRef, store};
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt as _, watcher as watch};
use kube::{Api, Client, ResourceExt as _};
use parking_lot::Mutex;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{
    Approval, InferenceNode, Model, ModelCopy, ModelDeployment, ModelDeploymentStatus, ModelRoute, NodePool,
    Scheduling, Shard, ShardGroup, ShardingStrategy, Tier, names,
};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc::{self, UnboundedSender};

use crate::accounts::Credential;
use crate::context::{Context, Stores};
use crate::metrics::Metrics;
use crate::reconcile::{Queue, drive};
use crate::{approval, authority, csr, deployment, group, model, node, pool, route, scale, strategy, tier};

/// The generation of a deployment, and its status, as they were when it last mattered.
type Look = (Option<i64>, ModelDeploymentStatus);

/// What a controller is told to look at.
struct Wake {
    stores: Stores,
    nodes: UnboundedSender<ObjectRef<InferenceNode>>,
    pools: UnboundedSender<ObjectRef<NodePool>>,
    strategies: UnboundedSender<ObjectRef<ShardingStrategy>>,
    tiers: UnboundedSender<ObjectRef<Tier>>,
    approvals: UnboundedSender<ObjectRef<Approval>>,
    models: UnboundedSender<ObjectRef<Model>>,
    deployments: UnboundedSender<ObjectRef<ModelDeployment>>,
    scales: UnboundedSender<ObjectRef<ModelDeployment>>,
    groups: UnboundedSender<ObjectRef<ShardGroup>>,
    routes: UnboundedSender<ObjectRef<ModelRoute>>,
    requests: UnboundedSender<ObjectRef<CertificateSigningRequest>>,
    /// What the planner last saw of each node; agents report more often than it matters.
    seen_nodes: Mutex<BTreeMap<String, String>>,
    /// Deployments without their demand, of which gateways report more often than it matters to others.
    seen_deployments: Mutex<HashMap<ObjectRef<ModelDeployment>, Look>>,
}

/// Something happened to an object.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    /// It is there, new or changed.
    Applied,
    /// It is gone.
    Deleted,
}

/// Watches everything and runs every controller; returns the name of the first that ends.
pub async fn run(
    client: Client,
    metrics: Metrics,
    credential: Credential,
    ready: &AtomicBool,
) -> &'static str {
    let (nodes, nodes_writer) = store();
    let (pools, pools_writer) = store();
    let (strategies, strategies_writer) = store();
    let (tiers, tiers_writer) = store();
    let (approvals, approvals_writer) = store();
    let (models, models_writer) = store();
    let (copies, copies_writer) = store();
    let (deployments, deployments_writer) = store();
    let (groups, groups_writer) = store();
    let (shards, shards_writer) = store();
    let (routes, routes_writer) = store();
    let (leases, leases_writer) = store();
    let (requests, requests_writer) = store();
    let stores = Stores {
        nodes,
        pools,
        strategies,
        tiers,
        approvals,
        models,
        copies,
        deployments,
        groups,
        shards,
        routes,
        leases,
        requests,
        changes: Arc::new(AtomicU64::new(0)),
    };

    let (node_sender, node_queue) = mpsc::unbounded_channel();
    let (pool_sender, pool_queue) = mpsc::unbounded_channel();
    let (strategy_sender, strategy_queue) = mpsc::unbounded_channel();
    let (tier_sender, tier_queue) = mpsc::unbounded_channel();
    let (approval_sender, approval_queue) = mpsc::unbounded_channel();
    let (model_sender, model_queue) = mpsc::unbounded_channel();
    let (deployment_sender, deployment_queue) = mpsc::unbounded_channel();
    let (scale_sender, scale_queue) = mpsc::unbounded_channel();
    let (group_sender, group_queue) = mpsc::unbounded_channel();
    let (route_sender, route_queue) = mpsc::unbounded_channel();
    let (request_sender, request_queue) = mpsc::unbounded_channel();
    let wake = Arc::new(Wake {
        stores: stores.clone(),
        nodes: node_sender,
        pools: pool_sender,
        strategies: strategy_sender,
        tiers: tier_sender,
        approvals: approval_sender,
        models: model_sender,
        deployments: deployment_sender,
        scales: scale_sender,
        groups: group_sender,
        routes: route_sender,
        requests: request_sender,
        seen_nodes: Mutex::default(),
        seen_deployments: Mutex::default(),
    });
    let memories = Arc::<scale::Memories>::default();
    let scale = move |deployment, context| scale::reconcile(deployment, memories.clone(), context);
    let context = Context::new(client.clone(), stores.clone(), metrics, credential);

    let watches = futures::future::join_all([
        reflect(Api::all(client.clone()), nodes_writer, wake.clone(), Wake::node).boxed(),
        reflect(Api::all(client.clone()), pools_writer, wake.clone(), Wake::pool).boxed(),
        reflect(Api::all(client.clone()), strategies_writer, wake.clone(), Wake::strategy).boxed(),
        reflect(Api::all(client.clone()), tiers_writer, wake.clone(), Wake::tier).boxed(),
        reflect(Api::all(client.clone()), approvals_writer, wake.clone(), Wake::approval).boxed(),
        reflect(Api::all(client.clone()), models_writer, wake.clone(), Wake::model).boxed(),
        reflect(Api::all(client.clone()), copies_writer, wake.clone(), Wake::copy).boxed(),
        reflect(Api::all(client.clone()), deployments_writer, wake.clone(), Wake::deployment).boxed(),
        reflect(Api::all(client.clone()), groups_writer, wake.clone(), Wake::group).boxed(),
        reflect(Api::all(client.clone()), shards_writer, wake.clone(), Wake::shard).boxed(),
        reflect(Api::all(client.clone()), routes_writer, wake.clone(), Wake::route).boxed(),
        reflect(
            Api::namespaced(client.clone(), names::SYSTEM_NAMESPACE),
            leases_writer,
            wake.clone(),
            Wake::lease,
        )
        .boxed(),
        reflect(Api::all(client.clone()), requests_writer, wake.clone(), Wake::request).boxed(),
    ]);
    let controllers = async {
        // A controller that decides on half-filled caches would place over what it does not see yet.
        if filled(&stores).await.is_err() {
            return "watches";
        }
        let _shown = context.metrics.watched.show(&stores);
        ready.store(true, Ordering::Release);
        tokio::select! {
            () = authority::keep(client) => "authority",
            () = controller("node", &context, &stores.nodes, node_queue, node::reconcile) => "node controller",
            () = controller("pool", &context, &stores.pools, pool_queue, pool::reconcile) => "pool controller",
            () = controller("strategy", &context, &stores.strategies, strategy_queue, strategy::reconcile) => "strategy controller",
            () = controller("tier", &context, &stores.tiers, tier_queue, tier::reconcile) => "tier controller",
            () = controller("approval", &context, &stores.approvals, approval_queue, approval::reconcile) => "approval controller",
            () = controller("model", &context, &stores.models, model_queue, model::reconcile) => "model controller",
            () = controller("deployment", &context, &stores.deployments, deployment_queue, deployment::reconcile) => "deployment controller",
            () = controller("scale", &context, &stores.deployments, scale_queue, scale) => "scale controller",
            () = controller("group", &context, &stores.groups, group_queue, group::reconcile) => "group controller",
            () = controller("route", &context, &stores.routes, route_queue, route::reconcile) => "route controller",
            () = controller("csr", &context, &stores.requests, request_queue, csr::reconcile) => "csr controller",
        }
    };
    tokio::select! {
        _ = watches => "watches",
        ended = controllers => ended,
    }
}

async fn controller<K, E, F>(
    name: &'static str,
    context: &Arc<Context>,
    store: &kube::runtime::reflector::Store<K>,
    queue: Queue<K>,
    reconcile: impl Fn(Arc<K>, Arc<Context>) -> F + Send + Sync + 'static,
) where
    K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
    E: std::error::Error + Send + 'static,
    F: Future<Output = Result<kube::runtime::controller::Action, E>> + Send + 'static,
{
    drive(name, context.clone(), store.clone(), queue, reconcile).await;
}

async fn filled(stores: &Stores) -> Result<(), kube::runtime::reflector::store::WriterDropped> {
    stores.nodes.wait_until_ready().await?;
    stores.pools.wait_until_ready().await?;
    stores.strategies.wait_until_ready().await?;
    stores.tiers.wait_until_ready().await?;
    stores.approvals.wait_until_ready().await?;
    stores.models.wait_until_ready().await?;
    stores.copies.wait_until_ready().await?;
    stores.deployments.wait_until_ready().await?;
    stores.groups.wait_until_ready().await?;
    stores.shards.wait_until_ready().await?;
    stores.routes.wait_until_ready().await?;
    stores.leases.wait_until_ready().await?;
    stores.requests.wait_until_ready().await
}

/// Keeps one cache equal to the server and reports every change. An object that cannot be read, say
/// one with a value from a newer version, is left out with a warning; the others live on.
async fn reflect<K>(
    api: Api<DeserializeGuard<K>>,
    mut writer: Writer<K>,
    wake: Arc<Wake>,
    changed: impl Fn(&Wake, &K, Change),
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    ObjectRef<K>: Eq + Hash,
{
    // A server that vanished without closing is noticed when a watch outlives its time: keep it short.
    let events = watch(api, watcher::Config::default().timeout(60)).default_backoff();
    futures::pin_mut!(events);
    while let Some(event) = events.next().await {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                tracing::debug!(kind = %K::kind(&()), %error, "the watch broke and is resumed");
                continue;
            }
        };
        let Some(event) = readable(event) else { continue };
        writer.apply_watcher_event(&event);
        // After the cache, and before anybody is woken to look at it.
        if placed_by(&K::kind(&())) {
            wake.stores.changes.fetch_add(1, Ordering::AcqRel);
        }
        match &event {
            Event::Apply(object) => changed(&wake, object, Change::Applied),
            Event::Delete(object) => changed(&wake, object, Change::Deleted),
            Event::InitDone => {
                for object in writer.as_reader().state() {
                    changed(&wake, &object, Change::Applied);
                }
            }
            Event::Init | Event::InitApply(_) => {}
        }
    }
}

/// Whether a placement may depend on objects of this kind. Those on which none does change most often.
fn placed_by(kind: &str) -> bool {
    !["CertificateSigningRequest", "Lease", "ModelCopy", "ModelRoute"].contains(&kind)
}

fn readable<K>(event: Event<DeserializeGuard<K>>) -> Option<Event<K>>
where
    K: Resource<DynamicType = ()>,
{
    let read = |guard: DeserializeGuard<K>| match guard.0 {
        Ok(object) => Some(object),
        Err(error) => {
            let name = error.metadata.name.unwrap_or_default();
            tracing::warn!(kind = %K::kind(&()), name, error = error.error, "an object cannot be read and is left out");
            None
        }
    };
    Some(match event {
        Event::Apply(object) => Event::Apply(read(object)?),
        Event::Delete(object) => Event::Delete(read(object)?),
        Event::InitApply(object) => Event::InitApply(read(object)?),
        Event::Init => Event::Init,
        Event::InitDone => Event::InitDone,
    })
}

/// Has the controller of these objects look at those for which `whom` is true.
fn wake<K>(
    store: &kube::runtime::reflector::Store<K>,
    queue: &UnboundedSender<ObjectRef<K>>,
    whom: impl Fn(&K) -> bool,
) where
    K: kube::Resource<DynamicType = ()> + Clone + 'static,
{
    for object in store.state().iter().filter(|object| whom(object.as_ref())) {
        let _ = queue.send(ObjectRef::from_obj(object.as_ref()));
    }
}

/// A send fails only when the controllers have ended, and then nobody needs waking.
impl Wake {
    fn node(&self, node: &InferenceNode, change: Change) {
        let name = node.name_any();
        let _ = self.nodes.send(ObjectRef::from_obj(node));
        let matters = match change {
            Change::Deleted => self.seen_nodes.lock().remove(&name).is_some(),
            Change::Applied => {
                let now = node::fingerprint(node);
                self.seen_nodes.lock().insert(name.clone(), now.clone()).is_none_or(|before| before != now)
            }
        };
        if !matters {
            return;
        }
        self.all_deployments();
        self.all_pools();
        self.all_tiers();
        self.all_models();
        wake(&self.stores.groups, &self.groups, |group| {
            group.spec.plan.members.iter().any(|member| member.node_name == name)
        });
    }

    fn lease(&self, lease: &Lease, _: Change) {
        if let Some(node) = lease.name_any().strip_prefix(&names::node_lease("")) {
            let _ = self.nodes.send(ObjectRef::new(node));
        }
    }

    fn pool(&self, pool: &NodePool, _: Change) {
        let _ = self.pools.send(ObjectRef::from_obj(pool));
        let name = pool.name_any();
        wake(&self.stores.deployments, &self.deployments, |deployment| {
            deployment.spec.pool_refs.iter().any(|reference| reference.name == name)
                || deployment.spec.tier_ref.is_some()
        });
        self.all_tiers();
        self.all_models();
    }

    fn strategy(&self, strategy: &ShardingStrategy, _: Change) {
        let _ = self.strategies.send(ObjectRef::from_obj(strategy));
        let name = strategy.name_any();
        wake(&self.stores.deployments, &self.deployments, |deployment| {
            deployment.spec.strategy_ref.as_ref().is_some_and(|reference| reference.name == name)
                || deployment.spec.tier_ref.is_some()
        });
        self.all_tiers();
    }

    /// Whose nodes are whose matters to everybody.
    fn tier(&self, _: &Tier, _: Change) {
        self.all_tiers();
        self.all_models();
        self.all_deployments();
    }

    /// The answer is what its deployment waits for.
    fn approval(&self, approval: &Approval, _: Change) {
        let _ = self.approvals.send(ObjectRef::from_obj(approval));
        let deployment = ObjectRef::new(&approval.spec.deployment_ref.name);
        let _ = self.deployments.send(deployment.within(&approval.namespace().unwrap_or_default()));
    }

    fn model(&self, model: &Model, _: Change) {
        let _ = self.models.send(ObjectRef::from_obj(model));
        self.all_strategies();
        self.all_tiers();
        self.deployments_of_model(model.namespace().as_deref(), &model.name_any());
        self.models_without_room();
    }

    fn copy(&self, copy: &ModelCopy, change: Change) {
        let reference = &copy.spec.model_ref;
        if change == Change::Deleted {
            // Its room may be what another model's files wait for.
            self.all_models();
        }
        let _ = self.models.send(ObjectRef::new(&reference.name).within(&reference.namespace));
        // What a copy has fetched matters where its model runs; headers come by the Model.
        for group in self.stores.groups.state() {
            if group.namespace().as_deref() == Some(&reference.namespace)
                && group.spec.model_ref.name == reference.name
                && group.spec.plan.members.iter().any(|member| member.node_name == copy.spec.node_name)
            {
                let deployment = ObjectRef::new(&group.spec.deployment_ref.name);
                let _ = self.deployments.send(deployment.within(&reference.namespace));
                let _ = self.groups.send(ObjectRef::from_obj(group.as_ref()));
            }
        }
    }

    fn deployment(&self, deployment: &ModelDeployment, change: Change) {
        let reference = ObjectRef::from_obj(deployment);
        let _ = self.deployments.send(reference.clone());
        let _ = self.scales.send(reference.clone());
        let matters = match change {
            Change::Deleted => {
                self.seen_deployments.lock().remove(&reference);
                true
            }
            Change::Applied => {
                let status = deployment.status.clone().unwrap_or_default();
                let now =
                    (deployment.metadata.generation, ModelDeploymentStatus { demand: Vec::new(), ..status });
                self.seen_deployments.lock().insert(reference, now.clone()).is_none_or(|before| before != now)
            }
        };
        if !matters {
            return;
        }
        self.outweighed();
        // How long files are kept, and where they are worth most, is also its deployments' business.
        let model = ObjectRef::new(&deployment.spec.model_ref.name);
        let _ = self.models.send(model.within(&deployment.namespace().unwrap_or_default()));
        // Also those it named before, which nobody remembers.
        self.all_strategies();
        self.all_tiers();
        wake(&self.stores.routes, &self.routes, |route| {
            route.namespace() == deployment.namespace()
                && route.spec.targets.iter().any(|target| target.deployment_ref.name == deployment.name_any())
        });
    }

    fn group(&self, group: &ShardGroup, change: Change) {
        let _ = self.groups.send(ObjectRef::from_obj(group));
        // Pools show what is promised, and a group promises the same for as long as it lives.
        if change == Change::Deleted || group.status.is_none() {
            self.all_pools();
            self.all_tiers();
            self.outweighed();
            // What a replica reads stays, and what nobody reads any more may make room.
            self.all_models();
        }
        if change == Change::Deleted {
            // Its memory may be what another deployment waits for.
            self.all_deployments();
        } else {
            let deployment = ObjectRef::new(&group.spec.deployment_ref.name);
            let _ = self.deployments.send(deployment.within(&group.namespace().unwrap_or_default()));
        }
    }

    fn shard(&self, shard: &Shard, change: Change) {
        let group = ObjectRef::new(&shard.spec.group_ref.name);
        let _ = self.groups.send(group.within(&shard.namespace().unwrap_or_default()));
        // A draining node shows what is still bound to it.
        let node = ObjectRef::new(&shard.spec.node_name);
        if self.stores.nodes.get(&node).is_some_and(|node| node.spec.scheduling == Scheduling::Draining) {
            let _ = self.nodes.send(node);
        }
        if change == Change::Deleted {
            self.all_deployments();
            self.all_pools();
            self.all_tiers();
            self.all_models();
        }
    }

    fn route(&self, route: &ModelRoute, _: Change) {
        let _ = self.routes.send(ObjectRef::from_obj(route));
    }

    fn request(&self, request: &CertificateSigningRequest, _: Change) {
        let _ = self.requests.send(ObjectRef::from_obj(request));
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
        let said = |all: &[Condition], kind, reason: Reason| {
            conditions::get(all, kind).is_some_and(|it| it.reason == format!("{reason:?}"))
        };
        wake(&self.stores.models, &self.models, |model| {
            model
                .status
                .as_ref()
                .is_some_and(|it| said(&it.conditions, Type::Preloaded, Reason::DiskPressure))
        });
        for copy in self.stores.copies.state() {
            let Some(status) = &copy.status else { continue };
            if said(&status.conditions, Type::Ready, Reason::DiskPressure) {
                let reference = &copy.spec.model_ref;
                let _ = self.models.send(ObjectRef::new(&reference.name).within(&reference.namespace));
            }
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
            deployment.namespace().as_deref() == namespace && deployment.spec.model_ref.name == model
        });
    }
}
