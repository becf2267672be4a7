//! InferenceNodes: reachability, labels from measurements, and the links made by its ports and those of other
//! nodes. Not here: the rest of a node's status, which is its agent's.

mod apply;
mod cables;
mod decide;
mod observe;

use std::sync::Arc;

use kube::ResourceExt as _;
use kube::runtime::controller::Action;
use russet_crds::conditions::{self, Type};
use russet_crds::{InferenceNode, Link};
use thiserror::Error;

use crate::context::Context;
use crate::decommission;
use crate::reconcile::requeue_after;

/// Why a node could not be reconciled.
#[derive(Debug, Error)]
pub enum Error {
    /// Its status was not written.
    #[error("InferenceNode {name}: its conditions and links could not be written")]
    Report {
        /// The node.
        name: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// Its finalizer was not maintained, or it was not decommissioned.
    #[error("InferenceNode {name}: it could not be guarded or let go")]
    Leave {
        /// The node.
        name: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// Its labels were not written.
    #[error("InferenceNode {name}: its labels could not be written")]
    Apply {
        /// The node.
        name: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
}

/// Reconciles one node.
pub async fn reconcile(node: Arc<InferenceNode>, context: Arc<Context>) -> Result<Action, Error> {
    let seen = observe::observe(&context, &node);
    let decision = decide::decide(&node, &seen, jiff::Timestamp::now());
    apply::labels(&context, &node, &decision).await?;
    apply::status(&context, &node, &decision).await?;
    let leaving = decommission::reconcile(&context, &node)
        .await
        .map_err(|source| Error::Leave { name: node.name_any(), source })?;
    Ok(requeue_after([decision.requeue_after, leaving]))
}

/// Whether links of other nodes may depend on the change.
pub fn links_changed(before: &InferenceNode, now: &InferenceNode) -> bool {
    cables::ports(before) != cables::ports(now)
        || cables::os(before) != cables::os(now)
        || cables::peer_port(before) != cables::peer_port(now)
}

/// Whether the power of its groups may depend on the change.
pub fn energy_changed(before: &InferenceNode, now: &InferenceNode) -> bool {
    let measured = |node: &InferenceNode| node.status.as_ref().and_then(|status| status.energy);
    before.spec.energy != now.spec.energy || measured(before) != measured(now)
}

/// Whether a node has ports.
pub fn has_ports(node: &InferenceNode) -> bool {
    !cables::ports(node).is_empty()
}

/// Everything about a node that a placement, a pool, a group or the supply of a copy may depend on, as one
/// text for comparison.
pub fn fingerprint(node: &InferenceNode) -> String {
    let status = node.status.clone().unwrap_or_default();
    let memory = status.memory.as_ref().map(|memory| (memory.serving_limit_bytes, memory.granted_bytes));
    let disk = status.disk.as_ref().and_then(|disk| disk.models_limit_bytes);
    let verdict = |kind| conditions::get(&status.conditions, kind).map(|condition| condition.status.clone());
    let (reachable, ready) = (verdict(Type::Reachable), verdict(Type::Ready));
    let deleting = node.metadata.deletion_timestamp.is_some();
    format!(
        "{:?} {:?} {memory:?} {disk:?} {reachable:?} {ready:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?} {deleting}",
        node.labels(),
        node.spec.scheduling,
        status.engine_build,
        status.backends,
        status.sharding_modes,
        status.engine_options,
        status.addresses,
        status.peer_port,
        // Measurements change all the time, and every placement reads them anyway.
        status.links.into_iter().map(|link| Link { measured: None, ..link }).collect::<Vec<_>>()
    )
}
