//! Models: has an agent read the headers, shows their content, preloads files, evicts others for them,
//! chooses the sources of copies, grants fetching nodes the source's Secret, and deletes the copies with the
//! Model. Not here: files for replicas, which deployments request.

mod apply;
mod decide;
mod inventory;
mod preload;
mod secret_access;
mod source_selection;

use std::sync::Arc;

use jiff::Timestamp;
use kube::ResourceExt as _;
use kube::runtime::controller::Action;
use russet_crds::conditions::{Type, is_true};
use russet_crds::{
    CopyMode, Model, ModelCopy, ModelCopySpec, NamespacedReference, PreloadPolicy, Retention, names,
};
use russet_plan::cluster::{availability, resolve_pools};
use russet_plan::copies::CopyPlan;
use russet_plan::snapshot::Availability;
use thiserror::Error;

pub use self::apply::request_files;
use self::inventory::InventoryObjects;
pub use self::inventory::{has_disk_pressure, is_ready};
use self::preload::FilesPlan;
use crate::context::Context;
use crate::planner::{PlanError, PlanKey};
use crate::reconcile::requeue_after;
use crate::snapshot;

/// Why a Model could not be reconciled.
#[derive(Debug, Error)]
pub enum Error {
    /// It was not planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A copy was not written or deleted.
    #[error("Model {model}: its copy {copy} could not be changed")]
    Copy {
        /// The Model.
        model: String,
        /// The ModelCopy.
        copy: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// The RoleBinding for the Secret of its source was not written.
    #[error("Model {model}: its RoleBinding {binding} could not be changed")]
    Grant {
        /// The Model.
        model: String,
        /// The RoleBinding.
        binding: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// The running groups could not be listed.
    #[error("Model {model}: its ShardGroups and ModelCopies could not be listed")]
    Observe {
        /// The Model.
        model: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// The finalizer was not set or removed.
    #[error("Model {model}: its finalizer could not be changed")]
    Finalizer {
        /// The Model.
        model: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// The status was not written.
    #[error("Model {model}: its status could not be written")]
    Report {
        /// The Model.
        model: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
}

/// Reconciles one Model.
pub async fn reconcile(model: Arc<Model>, context: Arc<Context>) -> Result<Action, Error> {
    let now = Timestamp::now();
    let (namespace, name) = (model.namespace().unwrap_or_default(), model.name_any());
    let mut copies = context.stores.copies.state();
    copies.retain(|copy| copy.spec.model_ref.namespace == namespace && copy.spec.model_ref.name == name);
    let mut nodes: Vec<decide::HeaderReader> = context
        .stores
        .nodes
        .state()
        .iter()
        .map(|node| {
            let availability = availability(node, now);
            decide::HeaderReader {
                name: node.name_any(),
                reachable: node
                    .status
                    .as_ref()
                    .is_some_and(|status| is_true(&status.conditions, Type::Reachable)),
                open: availability == Availability::Open,
            }
        })
        .collect();
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    let users: Vec<String> = context
        .stores
        .groups
        .state()
        .iter()
        .filter(|group| group.namespace().as_deref() == Some(&namespace))
        .filter(|group| group.spec.plan.files(&group.spec.model_ref.name).any(|(model, _)| model == name))
        .map(|group| group.name_any())
        .collect();
    let decision = decide::decide(&model, &copies, &nodes, &users, now);
    let key = PlanKey { kind: "Model", namespace: namespace.clone(), name: name.clone() };
    let plan = {
        let (context, model) = (context.clone(), model.clone());
        move || plan_files(cached_objects(&context), &model, now).0
    };
    let choice = context.planner.plan(key.clone(), plan).await?;
    if choice.is_settled() {
        finish(&context, &model, &copies, decision, &choice, now).await?;
        return Ok(requeue_after([]));
    }
    // Files are evicted or fetched: no replica may get a reservation on those nodes meanwhile, and the caches
    // may lag behind a reservation just made.
    let observe = || async {
        live_objects(&context).await.map_err(|source| Error::Observe { model: name.clone(), source })
    };
    let decide = {
        let model = model.clone();
        move |seen| plan_files(seen, &model, now)
    };
    let every_node = |_: &_| context.stores.nodes.state().iter().map(|node| node.name_any()).collect();
    let ((choice, all), mut turn) = context.planner.plan_in_turn(key, observe, decide, every_node).await?;
    turn.note_write(None);
    let own = |copy: &&Arc<ModelCopy>| {
        let model_ref = &copy.spec.model_ref;
        (model_ref.namespace.as_str(), model_ref.name.as_str())
            == (namespace.as_str(), model.name_any().as_str())
    };
    let copies: Vec<Arc<ModelCopy>> = all.iter().filter(own).cloned().collect();
    apply::apply_files(&context, &model, &all, &choice).await?;
    finish(&context, &model, &copies, decision, &choice, now).await?;
    Ok(requeue_after([]))
}

async fn finish(
    context: &Context,
    model: &Model,
    copies: &[Arc<ModelCopy>],
    mut decision: decide::ModelDecision,
    choice: &FilesPlan,
    now: Timestamp,
) -> Result<(), Error> {
    if model.metadata.deletion_timestamp.is_none() {
        preload::write_status(model, choice.preload.as_ref(), copies, now, &mut decision.status);
        apply::retention(context, model, &choice.outdated_retention(copies), choice.retention).await?;
    }
    // Also during deletion: running groups may need files that are being fetched.
    let nodes = source_selection::peer_nodes(&context.stores.nodes.state());
    // Before any agent contacts the source.
    let source = &model.spec.source;
    let readers = secret_access::source_readers(source, copies, &nodes, decision.header_node.as_deref());
    let granted = secret_access::apply(context, model, &readers).await;
    apply::supply(context, model, &source_selection::changes(source, copies, &nodes)).await?;
    apply::apply(context, model, copies, &decision).await?;
    apply::report(context, model, &decision).await?;
    granted
}

/// From the caches.
fn cached_objects(context: &Context) -> InventoryObjects {
    let stores = &context.stores;
    let cluster = snapshot::cached(context, stores.models.state());
    InventoryObjects { cluster, copies: stores.copies.state(), deployments: stores.deployments.state() }
}

/// The same with groups and copies as the server has them.
async fn live_objects(context: &Context) -> Result<InventoryObjects, kube::Error> {
    let cluster = snapshot::live(context, context.stores.models.state()).await?;
    let copies = snapshot::list_all::<ModelCopy>(context).await?;
    Ok(InventoryObjects { cluster, copies, deployments: context.stores.deployments.state() })
}

/// The plan for a Model's files, as part of the plan for all Models, and the copies it was made with.
fn plan_files(seen: InventoryObjects, model: &Model, now: Timestamp) -> (FilesPlan, Vec<Arc<ModelCopy>>) {
    let key = inventory::key(model);
    let areas = resolve_pools(&seen.cluster.pools, &seen.cluster.nodes);
    let unplanned = inventory::preload_rule(model, &areas).err();
    let pinned = model.spec.preload.as_ref().is_some_and(|it| it.policy == PreloadPolicy::Pinned);
    let retention =
        Retention { priority: inventory::priority(&key, &seen.deployments, &seen.cluster.tiers), pinned };
    let plan =
        if seen.is_idle() { CopyPlan::default() } else { russet_plan::copies::plan(&seen.inventory(now)) };
    (FilesPlan::for_model(plan, &key, retention, unplanned), seen.copies)
}

/// The copy of a model on a node, as the operator writes it.
pub fn copy_spec(model: &Model, node: &str, mode: CopyMode) -> ModelCopySpec {
    ModelCopySpec {
        model_ref: NamespacedReference {
            namespace: model.namespace().unwrap_or_default(),
            name: model.name_any(),
        },
        source: model.spec.source.clone(),
        commit: model.status.as_ref().and_then(|status| status.commit.clone()),
        node_name: node.to_owned(),
        want: mode,
        retention: None,
        supply: None,
    }
}

/// The copy as an object, with labels for selectors.
pub fn copy_object(spec: ModelCopySpec) -> russet_crds::ModelCopy {
    let name = names::model_copy(&spec.model_ref.namespace, &spec.model_ref.name, &spec.node_name);
    let labels = [
        (names::LABEL_MODEL_NAMESPACE, names::label_value(&spec.model_ref.namespace)),
        (names::LABEL_MODEL, names::label_value(&spec.model_ref.name)),
        (names::LABEL_NODE, names::label_value(&spec.node_name)),
    ];
    let mut copy = russet_crds::ModelCopy::new(&name, spec);
    copy.metadata.labels = Some(labels.into_iter().map(|(key, value)| (key.to_owned(), value)).collect());
    copy
}
