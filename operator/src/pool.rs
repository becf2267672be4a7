//! NodePools: their nodes, free memory, and fabric domains. Not here: the use of a pool (`plan`).

mod decide;

use std::sync::Arc;

use jiff::Timestamp;
use kube::runtime::controller::Action;
use kube::{Api, ResourceExt as _};
use russet_crds::NodePool;
use thiserror::Error;

use crate::context::Context;
use crate::reconcile::requeue_after;
use crate::snapshot;
use crate::ssa;

pub use decide::memory;

/// Why a pool could not be reconciled.
#[derive(Debug, Error)]
pub enum Error {
    /// Its status was not written.
    #[error("NodePool {name}: its status could not be written")]
    Report {
        /// The pool.
        name: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
}

/// Reconciles one pool.
pub async fn reconcile(pool: Arc<NodePool>, context: Arc<Context>) -> Result<Action, Error> {
    let now = Timestamp::now();
    let status =
        decide::status(&pool, &context.stores.nodes.state(), &snapshot::snapshot(&context, now), now);
    if pool.status.as_ref() != Some(&status) {
        let name = pool.name_any();
        let api: Api<NodePool> = Api::all(context.client.clone());
        ssa::apply_status(&api, &name, &status).await.map_err(|source| Error::Report { name, source })?;
    }
    Ok(requeue_after([]))
}
