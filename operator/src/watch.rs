//! The caches: one watch per kind, shared by all controllers. Not here: what a change triggers (`triggers`).

mod triggers;

use std::fmt::Debug;
use std::future::Future;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use futures::{FutureExt as _, StreamExt as _};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::core::Resource;
use kube::runtime::reflector::store::{Writer, WriterDropped};
use kube::runtime::reflector::{ObjectRef, Store, store};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use russet_crds::conditions::Reason;
use russet_crds::names;
use russet_rpc::cache_status::CacheStatus;
use russet_rpc::informer;
use russet_rpc::list_item::{ListItem, UndecodableObject};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

use self::triggers::{ObjectChange, Triggers, enqueue};
use crate::context::Context;
use crate::metrics::OperatorMetrics;
use crate::node_accounts::Credential;
use crate::reconcile::run_controller;
use crate::stores::Stores;
use crate::work_queue::{QueueSender, WorkQueue, work_queue};
use crate::{
    approval, autoscaling, ca, csr, deployment, group, model, node, pipeline_run, pool, route, strategy, tier,
};

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
    let (providers, providers_writer) = store();
    let (pipelines, pipelines_writer) = store();
    let (pipeline_runs, pipeline_runs_writer) = store();
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
        providers,
        pipelines,
        pipeline_runs,
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
    let (run_sender, run_queue) = work_queue();
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
        pipeline_runs: run_sender,
        requests: request_sender,
    });
    let memories = Arc::<autoscaling::ScalingMemories>::default();
    let scale = move |deployment, context| autoscaling::reconcile(deployment, memories.clone(), context);
    let (status, _leading) = metrics.caches.lead();
    let context = Context::new(client.clone(), stores.clone(), metrics, credential);

    let (events, undecodable) = mpsc::channel(MAX_QUEUED_EVENTS);
    let watching = Watching { client: client.clone(), wake: wake.clone(), status: status.clone(), events };
    let watches = futures::future::join_all([
        reflect(&watching, nodes_writer, Triggers::node).boxed(),
        reflect(&watching, pools_writer, Triggers::pool).boxed(),
        reflect(&watching, strategies_writer, Triggers::strategy).boxed(),
        reflect(&watching, tiers_writer, Triggers::tier).boxed(),
        reflect(&watching, approvals_writer, Triggers::approval).boxed(),
        reflect(&watching, models_writer, Triggers::model).boxed(),
        reflect(&watching, copies_writer, Triggers::copy).boxed(),
        reflect(&watching, deployments_writer, Triggers::deployment).boxed(),
        reflect(&watching, groups_writer, Triggers::group).boxed(),
        reflect(&watching, shards_writer, Triggers::shard).boxed(),
        reflect(&watching, routes_writer, Triggers::route).boxed(),
        reflect(&watching, providers_writer, Triggers::provider).boxed(),
        reflect(&watching, pipelines_writer, Triggers::pipeline).boxed(),
        reflect(&watching, pipeline_runs_writer, Triggers::pipeline_run).boxed(),
        reflect_in(
            &watching,
            Api::namespaced(client.clone(), names::SYSTEM_NAMESPACE),
            leases_writer,
            Triggers::lease,
        )
        .boxed(),
        reflect(&watching, requests_writer, Triggers::request).boxed(),
    ]);
    // A controller that decides on partly filled caches would place over groups that it does not see yet, so
    // each waits for the kinds it reads, and for no others.
    let run = Controllers { context: &context };
    let controllers = async {
        tokio::select! {
            () = ca::run(client) => "authority",
            () = run.start("node", stores.node_kinds(), &stores.nodes, &wake.nodes, node_queue, node::reconcile) => "node controller",
            () = run.start("pool", stores.placement_kinds(), &stores.pools, &wake.pools, pool_queue, pool::reconcile) => "pool controller",
            () = run.start("strategy", stores.placement_kinds(), &stores.strategies, &wake.strategies, strategy_queue, strategy::reconcile) => "strategy controller",
            () = run.start("tier", stores.placement_kinds(), &stores.tiers, &wake.tiers, tier_queue, tier::reconcile) => "tier controller",
            () = run.start("approval", stores.approvals.wait_until_ready(), &stores.approvals, &wake.approvals, approval_queue, approval::reconcile) => "approval controller",
            () = run.start("model", stores.placement_kinds(), &stores.models, &wake.models, model_queue, model::reconcile) => "model controller",
            () = run.start("deployment", stores.placement_kinds(), &stores.deployments, &wake.deployments, deployment_queue, deployment::reconcile) => "deployment controller",
            () = run.start("scale", stores.placement_kinds(), &stores.deployments, &wake.scales, scale_queue, scale) => "scale controller",
            () = run.start("group", stores.placement_kinds(), &stores.groups, &wake.groups, group_queue, group::reconcile) => "group controller",
            () = run.start("route", stores.route_kinds(), &stores.routes, &wake.routes, route_queue, route::reconcile) => "route controller",
            () = run.start("pipeline run", stores.pipeline_runs.wait_until_ready(), &stores.pipeline_runs, &wake.pipeline_runs, run_queue, pipeline_run::reconcile) => "pipeline run controller",
            () = run.start("csr", stores.request_kinds(), &stores.requests, &wake.requests, request_queue, csr::reconcile) => "csr controller",
        }
    };
    let all_synced = async {
        if stores.all_kinds().await.is_err() {
            return "watches";
        }
        let _shown = context.metrics.caches.publish(&stores);
        ready.store(true, Ordering::Release);
        std::future::pending().await
    };
    tokio::select! {
        _ = watches => "watches",
        ended = controllers => ended,
        ended = all_synced => ended,
        () = status.report() => "cache report",
        () = record_undecodable(&context, undecodable) => "event recorder",
    }
}

/// What every controller has in common.
struct Controllers<'a> {
    context: &'a Arc<Context>,
}

impl Controllers<'_> {
    /// Runs one controller once the kinds it reads are synced. Ends when a watch ended.
    async fn start<K, E, F>(
        &self,
        name: &'static str,
        kinds: impl Future<Output = Result<(), WriterDropped>>,
        store: &Store<K>,
        sender: &QueueSender<K>,
        queue: WorkQueue<K>,
        reconcile: impl Fn(Arc<K>, Arc<Context>) -> F + Send + Sync + 'static,
    ) where
        K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
        E: std::error::Error + Send + 'static,
        F: Future<Output = Result<kube::runtime::controller::Action, E>> + Send + 'static,
    {
        if kinds.await.is_err() {
            return;
        }
        // What changed before is unknown.
        enqueue(store, sender, |_| true);
        run_controller(name, self.context.clone(), store.clone(), queue, reconcile).await;
    }
}

/// What every watch has in common.
struct Watching {
    client: Client,
    wake: Arc<Triggers>,
    status: CacheStatus,
    events: mpsc::Sender<UndecodableEvent>,
}

/// An object that cannot be decoded, for an Event.
struct UndecodableEvent {
    reference: ObjectReference,
    note: String,
}

/// Events that wait to be recorded. The log and the metric have all of them.
const MAX_QUEUED_EVENTS: usize = 64;

/// Records an Event in the namespace of every object that cannot be decoded: its owner does not read this log.
async fn record_undecodable(context: &Context, mut undecodable: mpsc::Receiver<UndecodableEvent>) {
    while let Some(UndecodableEvent { reference, note }) = undecodable.recv().await {
        context.record_about(&reference, false, Reason::Undecodable, "Decode", &note).await;
    }
}

/// Keeps the cache of a kind in sync with the server, in all namespaces.
async fn reflect<K>(watching: &Watching, writer: Writer<K>, changed: impl Fn(&Triggers, &K, ObjectChange<K>))
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    ObjectRef<K>: Eq + Hash,
{
    reflect_in(watching, Api::all(watching.client.clone()), writer, changed).await;
}

/// Keeps one cache in sync with the server and reports every change. An object that cannot be decoded is left
/// out and told; the others are kept.
async fn reflect_in<K>(
    watching: &Watching,
    api: Api<ListItem<K>>,
    mut writer: Writer<K>,
    changed: impl Fn(&Triggers, &K, ObjectChange<K>),
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    ObjectRef<K>: Eq + Hash,
{
    let Watching { wake, status, events, .. } = watching;
    let changes = informer::changes(api, watcher::Config::default(), status.clone());
    let cache = writer.as_reader();
    let mut listed = false;
    futures::pin_mut!(changes);
    while let Some(event) = changes.next().await {
        if let Some(undecodable) = status.observe(&event) {
            // If the queue is full, the log and the metric say it alone.
            let _ = events.try_send(undecodable_event::<K>(undecodable));
        }
        let Some(event) = decoded(event, &cache) else { continue };
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
            Event::Apply(object) => changed(wake, object, ObjectChange::Applied(before)),
            Event::Delete(object) => changed(wake, object, ObjectChange::Deleted),
            // The first list is enqueued when the controllers start.
            Event::InitDone if std::mem::replace(&mut listed, true) => wake.enqueue_all(),
            Event::InitDone | Event::Init | Event::InitApply(_) => {}
        }
    }
}

/// Whether a placement may depend on objects of this kind. Leases, on which none does, change most often.
fn affects_placement(kind: &str) -> bool {
    !["CertificateSigningRequest", "Lease", "ModelProvider", "ModelRoute"].contains(&kind)
}

/// The event with its object decoded, without managed fields: they are not used here, and are half of an
/// object's size. Of an object that cannot be decoded the last version that could be stays until it is deleted.
fn decoded<K>(event: Event<ListItem<K>>, cache: &Store<K>) -> Option<Event<K>>
where
    K: Resource<DynamicType = ()> + Clone,
{
    let lean = |item: ListItem<K>| {
        let mut object = item.0.ok()?;
        object.meta_mut().managed_fields = None;
        Some(object)
    };
    Some(match event {
        Event::Apply(item) => Event::Apply(lean(item)?),
        Event::Delete(item) => {
            let name = item.meta().name.clone().unwrap_or_default();
            let mut known = ObjectRef::new(&name);
            known.namespace = item.meta().namespace.clone();
            match lean(item) {
                Some(object) => Event::Delete(object),
                None => Event::Delete(K::clone(cache.get(&known)?.as_ref())),
            }
        }
        Event::InitApply(item) => Event::InitApply(lean(item)?),
        Event::Init => Event::Init,
        Event::InitDone => Event::InitDone,
    })
}

fn undecodable_event<K: Resource<DynamicType = ()>>(undecodable: &UndecodableObject) -> UndecodableEvent {
    let UndecodableObject { error, metadata } = undecodable;
    let (kind, api_version) = (K::kind(&()).into_owned(), K::api_version(&()).into_owned());
    let note = format!(
        "the operator cannot decode this {kind} and does nothing about it ({error}); correct the object or delete it"
    );
    let reference = ObjectReference {
        api_version: Some(api_version),
        kind: Some(kind),
        name: metadata.name.clone(),
        namespace: metadata.namespace.clone(),
        uid: metadata.uid.clone(),
        ..ObjectReference::default()
    };
    UndecodableEvent { reference, note }
}
