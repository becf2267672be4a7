//! The caches: one watch per kind, shared by all controllers. Not here: what a change triggers (`triggers`).

mod triggers;

use std::fmt::Debug;
use std::future::Future;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use futures::{FutureExt as _, StreamExt as _};
use kube::core::{DeserializeGuard, Resource};
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{ObjectRef, store};
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt as _, watcher as watch};
use kube::{Api, Client};
use russet_crds::names;
use serde::de::DeserializeOwned;

use self::triggers::{ObjectChange, Triggers};
use crate::context::Context;
use crate::metrics::OperatorMetrics;
use crate::node_accounts::Credential;
use crate::reconcile::run_controller;
use crate::stores::Stores;
use crate::work_queue::{WorkQueue, work_queue};
use crate::{approval, autoscaling, ca, csr, deployment, group, model, node, pool, route, strategy, tier};

/// Watches everything and runs every controller; returns the name of the first that ends.
pub async fn run(
    client: Client,
    metrics: OperatorMetrics,
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

    let (node_sender, node_queue) = work_queue();
    let (pool_sender, pool_queue) = work_queue();
    let (strategy_sender, strategy_queue) = work_queue();
    let (tier_sender, tier_queue) = work_queue();
    let (approval_sender, approval_queue) = work_queue();
    let (model_sender, model_queue) = work_queue();
    let (deployment_sender, deployment_queue) = work_queue();
    let (scale_sender, scale_queue) = work_queue();
    let (group_sender, group_queue) = work_queue();
    let (route_sender, route_queue) = work_queue();
    let (request_sender, request_queue) = work_queue();
    let wake = Arc::new(Triggers {
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
        synced: AtomicBool::new(false),
    });
    let memories = Arc::<autoscaling::ScalingHistories>::default();
    let scale = move |deployment, context| autoscaling::reconcile(deployment, memories.clone(), context);
    let context = Context::new(client.clone(), stores.clone(), metrics, credential);

    let watches = futures::future::join_all([
        reflect(Api::all(client.clone()), nodes_writer, wake.clone(), Triggers::node).boxed(),
        reflect(Api::all(client.clone()), pools_writer, wake.clone(), Triggers::pool).boxed(),
        reflect(Api::all(client.clone()), strategies_writer, wake.clone(), Triggers::strategy).boxed(),
        reflect(Api::all(client.clone()), tiers_writer, wake.clone(), Triggers::tier).boxed(),
        reflect(Api::all(client.clone()), approvals_writer, wake.clone(), Triggers::approval).boxed(),
        reflect(Api::all(client.clone()), models_writer, wake.clone(), Triggers::model).boxed(),
        reflect(Api::all(client.clone()), copies_writer, wake.clone(), Triggers::copy).boxed(),
        reflect(Api::all(client.clone()), deployments_writer, wake.clone(), Triggers::deployment).boxed(),
        reflect(Api::all(client.clone()), groups_writer, wake.clone(), Triggers::group).boxed(),
        reflect(Api::all(client.clone()), shards_writer, wake.clone(), Triggers::shard).boxed(),
        reflect(Api::all(client.clone()), routes_writer, wake.clone(), Triggers::route).boxed(),
        reflect(
            Api::namespaced(client.clone(), names::SYSTEM_NAMESPACE),
            leases_writer,
            wake.clone(),
            Triggers::lease,
        )
        .boxed(),
        reflect(Api::all(client.clone()), requests_writer, wake.clone(), Triggers::request).boxed(),
    ]);
    let controllers = async {
        // A controller that decides on partly filled caches would place over groups that it does not see yet.
        if wait_for_caches(&stores).await.is_err() {
            return "watches";
        }
        let _shown = context.metrics.caches.publish(&stores);
        wake.synced.store(true, Ordering::Release);
        wake.enqueue_all();
        ready.store(true, Ordering::Release);
        tokio::select! {
            () = ca::run(client) => "authority",
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
    queue: WorkQueue<K>,
    reconcile: impl Fn(Arc<K>, Arc<Context>) -> F + Send + Sync + 'static,
) where
    K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
    E: std::error::Error + Send + 'static,
    F: Future<Output = Result<kube::runtime::controller::Action, E>> + Send + 'static,
{
    run_controller(name, context.clone(), store.clone(), queue, reconcile).await;
}

async fn wait_for_caches(stores: &Stores) -> Result<(), kube::runtime::reflector::store::WriterDropped> {
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

/// Keeps one cache in sync with the server and reports every change. An object that cannot be parsed, for
/// example one with a value from a newer version, is left out with a warning; the others are kept.
async fn reflect<K>(
    api: Api<DeserializeGuard<K>>,
    mut writer: Writer<K>,
    wake: Arc<Triggers>,
    changed: impl Fn(&Triggers, &K, ObjectChange<K>),
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    ObjectRef<K>: Eq + Hash,
{
    // A server that vanished without closing is noticed when a watch exceeds its timeout: keep it short.
    let events = watch(api, watcher::Config::default().timeout(60)).default_backoff();
    let cache = writer.as_reader();
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
        let before = match &event {
            Event::Apply(object) => cache.get(&ObjectRef::from_obj(object)),
            _ => None,
        };
        writer.apply_watcher_event(&event);
        // After the cache, and before any reconciliation is triggered.
        if affects_placement(&K::kind(&())) {
            wake.stores.changes.fetch_add(1, Ordering::AcqRel);
        }
        match &event {
            Event::Apply(object) => changed(&wake, object, ObjectChange::Applied(before)),
            Event::Delete(object) => changed(&wake, object, ObjectChange::Deleted),
            Event::InitDone if wake.synced.load(Ordering::Acquire) => wake.enqueue_all(),
            Event::InitDone | Event::Init | Event::InitApply(_) => {}
        }
    }
}

/// Whether a placement may depend on objects of this kind. Leases, on which none does, change most often.
fn affects_placement(kind: &str) -> bool {
    !["CertificateSigningRequest", "Lease", "ModelRoute"].contains(&kind)
}

fn readable<K>(event: Event<DeserializeGuard<K>>) -> Option<Event<K>>
where
    K: Resource<DynamicType = ()>,
{
    let read = |guard: DeserializeGuard<K>| match guard.0 {
        Ok(mut object) => {
            // Managed fields are not used here, and are half of an object's size.
            object.meta_mut().managed_fields = None;
            Some(object)
        }
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
