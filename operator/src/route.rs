//! ModelRoutes: whether every deployment, provider and Pipeline they name exists, one of them answers, and their rules can be
//! read.
//! Not here: routing of requests (`gateway`).

mod decide;

use std::sync::Arc;

use jiff::Timestamp;
use kube::ResourceExt as _;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use russet_crds::{ModelDeployment, ModelProvider, ModelRoute, Pipeline};
use thiserror::Error;

use self::decide::FoundTarget;
use crate::context::Context;
use crate::reconcile::requeue_after;
use crate::ssa;

/// Why a route could not be reconciled.
#[derive(Debug, Error)]
pub enum Error {
    /// Its status was not written.
    #[error("ModelRoute {name}: its status could not be written")]
    Report {
        /// The route.
        name: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
}

/// Reconciles one route.
pub async fn reconcile(route: Arc<ModelRoute>, context: Arc<Context>) -> Result<Action, Error> {
    let namespace = route.namespace().unwrap_or_default();
    let deployment = |name: &str| {
        let key: ObjectRef<ModelDeployment> = ObjectRef::new(name).within(&namespace);
        context.stores.deployments.get(&key)
    };
    let provider = |name: &str| {
        let key: ObjectRef<ModelProvider> = ObjectRef::new(name).within(&namespace);
        context.stores.providers.get(&key)
    };
    let pipeline = |name: &str| {
        let key: ObjectRef<Pipeline> = ObjectRef::new(name).within(&namespace);
        context.stores.pipelines.get(&key)
    };
    let find = |target| FoundTarget::of(target, deployment, provider, pipeline);
    let targets: Vec<FoundTarget> = route.spec.all_targets().filter_map(find).collect();
    let status = decide::status(&route, &targets, Timestamp::now());
    if route.status.as_ref() != Some(&status) {
        let name = route.name_any();
        let api = ssa::namespaced_api(&context.client, route.as_ref());
        ssa::apply_status::<ModelRoute>(&api, &name, &status)
            .await
            .map_err(|source| Error::Report { name, source })?;
    }
    Ok(requeue_after([]))
}
