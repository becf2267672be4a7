//! ShardingStrategies: whether they work, and how many deployments use them. Not here: the split of a replica
//! (`plan`).

mod decide;

use std::sync::Arc;

use jiff::Timestamp;
use kube::runtime::controller::Action;
use kube::{Api, ResourceExt as _};
use russet_crds::ShardingStrategy;
use thiserror::Error;

use crate::context::Context;
use crate::reconcile::requeue_after;
use crate::ssa;

/// Why a strategy could not be reconciled.
#[derive(Debug, Error)]
pub enum Error {
    /// Its status was not written.
    #[error("ShardingStrategy {name}: its status could not be written")]
    Report {
        /// The strategy.
        name: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
}

/// Reconciles one strategy.
pub async fn reconcile(strategy: Arc<ShardingStrategy>, context: Arc<Context>) -> Result<Action, Error> {
    let (deployments, models) = (context.stores.deployments.state(), context.stores.models.state());
    let status = decide::status(&strategy, &deployments, &models, Timestamp::now());
    if strategy.status.as_ref() != Some(&status) {
        let name = strategy.name_any();
        let api: Api<ShardingStrategy> = Api::all(context.client.clone());
        ssa::apply_status(&api, &name, &status).await.map_err(|source| Error::Report { name, source })?;
    }
    Ok(requeue_after([]))
}
