//! InferenceNodes: whether a machine's agent is alive, labels from what it measured, and the links that its ports and
//! those of others make. The rest of a node's status is its agent's.

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

/// Why a node could not be looked after.
#[derive(Debug, Error)]
pub enum Error {
    /// Its status was not written.
    #[error("InferenceNode {name}: its conditions and links could not be written")]
    Report {
        /// The node.
        name: String,
        /// The server's answer.
        #[source]
        source: kube::Error,
    },
    /// Its coming or going was not carried out.
    #[error("InferenceNode {name}: it could not be guarded or let go")]
    Leave {
        /// The node.
        name: String,
        /// The server's answer.
        #[source]
        source: kube::Error,
    },
    /// Its labels were not written.
    #[error("InferenceNode {name}: its labels could not be written")]
    Apply {
        /// The node.
        name: String,
        /// The server's answer.
        #[source]
        source: kube::Error,
    },
}

/// Looks after one node.
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

/// Whether other nodes' links may depend on what changed.
pub fn links_changed(before: &InferenceNode, now: &InferenceNode) -> bool {
    cables::ports(before) != cables::ports(now)
        || cables::os(before) != cables::os(now)
        || cables::peer_port(before) != cables::peer_port(now)
}

/// Whether a node has ports.
pub fn has_ports(node: &InferenceNode) -> bool {
    !cables::ports(node).is_empty()
}

/// Everything about a node that a placement, a pool, a group or the supply of a copy may depend on, as one text to
/// compare.
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
        // What is measured moves all the time, and is looked at when something is placed anyway.
        status.links.into_iter().map(|link| Link { measured: None, ..link }).collect::<Vec<_>>()
    )
}
