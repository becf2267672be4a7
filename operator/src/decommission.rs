//! Decommissioning of a node: deleting an InferenceNode drains it first, then all objects that were created
//! for the node are deleted, then the object itself.
//!
//! ```text
//! joined ── deleted ──▶ leaving (drains) ── empty (after 12 s), or unreachable, or 5 min ──▶ gone
//! ```

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, ResourceExt as _};
use russet_crds::conditions::{Type, is_true};
use russet_crds::{InferenceNode, ModelCopy, names};

use crate::context::Context;
use crate::{node_accounts, ssa};

/// Finalizer on InferenceNodes: the node is drained first.
const FINALIZER: &str = "russet.dev/leave";
/// An agent reports every ten seconds; by then it has seen the deletion, and does not take the end of its
/// credentials for a failure of the server.
const MIN_DRAIN_TIME: Duration = Duration::from_secs(12);
/// Drain timeout: afterwards the node is removed although it is not empty.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(300);
/// Interval of checks of a draining node.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The next step for a node.
#[derive(Clone, Debug, PartialEq, Eq)]
enum DecommissionStep {
    /// Nothing: it stays, and has its finalizer.
    Stay,
    /// Add the finalizer, so that it cannot be deleted without draining.
    Guard,
    /// There are still replicas on it.
    Wait,
    /// Remove the finalizer.
    Release,
}

/// Maintains the finalizer of one node and decommissions it; returns when to requeue.
pub async fn reconcile(context: &Context, node: &InferenceNode) -> Result<Option<Duration>, kube::Error> {
    let name = node.name_any();
    let ranks = context.stores.shards.state().iter().filter(|shard| shard.spec.node_name == name).count();
    let nodes: Api<InferenceNode> = Api::all(context.client.clone());
    match step(node, ranks, Timestamp::now()) {
        DecommissionStep::Stay => Ok(None),
        DecommissionStep::Wait => Ok(Some(POLL_INTERVAL)),
        DecommissionStep::Guard => {
            let guarded = node.finalizers().iter().cloned().chain([FINALIZER.to_owned()]).collect();
            set(&nodes, node, guarded).await.map(|done| (!done).then_some(POLL_INTERVAL))
        }
        DecommissionStep::Release => {
            if ranks > 0 {
                tracing::warn!(
                    node = name,
                    ranks,
                    "the node is removed although ranks are still bound to it"
                );
            }
            delete_node_objects(context, &name).await?;
            let rest = node.finalizers().iter().filter(|it| *it != FINALIZER).cloned().collect();
            if !set(&nodes, node, rest).await? {
                return Ok(Some(POLL_INTERVAL));
            }
            // Last, because the agent creates its Lease again for as long as its node exists.
            delete_lease(context, &name).await?;
            tracing::info!(node = name, "the node has left");
            Ok(None)
        }
    }
}

/// Replaces the finalizers; `false` if the node has changed since, which is frequent because of its agent's
/// reports.
async fn set(
    nodes: &Api<InferenceNode>,
    node: &InferenceNode,
    finalizers: Vec<String>,
) -> Result<bool, kube::Error> {
    match ssa::set_finalizers(nodes, node, finalizers).await {
        Ok(()) => Ok(true),
        Err(error) if ssa::is_code(&error, 409) => Ok(false),
        Err(error) => Err(error),
    }
}

fn step(node: &InferenceNode, ranks: usize, now: Timestamp) -> DecommissionStep {
    let guarded = node.finalizers().iter().any(|it| it == FINALIZER);
    let Some(since) = &node.metadata.deletion_timestamp else {
        return if guarded { DecommissionStep::Stay } else { DecommissionStep::Guard };
    };
    if !guarded {
        return DecommissionStep::Stay;
    }
    let alive = node.status.as_ref().is_some_and(|status| is_true(&status.conditions, Type::Reachable));
    let age = now.duration_since(since.0).unsigned_abs();
    let busy = ranks > 0 && age < DRAIN_TIMEOUT;
    if alive && (busy || age < MIN_DRAIN_TIME) { DecommissionStep::Wait } else { DecommissionStep::Release }
}

/// Deletes the objects that were created for a node.
async fn delete_node_objects(context: &Context, node: &str) -> Result<(), kube::Error> {
    let copies: Api<ModelCopy> = Api::all(context.client.clone());
    for copy in context.stores.copies.state().iter().filter(|copy| copy.spec.node_name == node) {
        ssa::delete(&copies, copy.as_ref()).await?;
    }
    node_accounts::remove_account(&context.client, node).await
}

/// Deletes a node's Lease.
async fn delete_lease(context: &Context, node: &str) -> Result<(), kube::Error> {
    context.memory.leases.lock().remove(node);
    let leases: Api<Lease> = Api::namespaced(context.client.clone(), names::SYSTEM_NAMESPACE);
    match leases.delete(&names::node_lease(node), &Default::default()).await {
        Ok(_) => Ok(()),
        Err(error) if ssa::is_code(&error, 404) => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use russet_crds::conditions::{self, Reason};
    use russet_crds::{InferenceNodeSpec, InferenceNodeStatus};

    use super::*;

    #[test]
    fn node_is_removed_when_empty_unreachable_or_timed_out() {
        let at = |second: i64| Timestamp::from_second(1_000_000 + second).unwrap();
        for (story, guarded, deleted, alive, ranks, expected) in [
            ("new", false, None, true, 0, DecommissionStep::Guard),
            ("joined", true, None, true, 3, DecommissionStep::Stay),
            ("leaving, has not noticed", true, Some(0), true, 0, DecommissionStep::Wait),
            ("leaving, ranks run there", true, Some(-299), true, 1, DecommissionStep::Wait),
            ("leaving, empty", true, Some(-12), true, 0, DecommissionStep::Release),
            ("leaving, silent", true, Some(0), false, 1, DecommissionStep::Release),
            ("leaving, never emptied", true, Some(-300), true, 1, DecommissionStep::Release),
            ("leaving, another's finalizer keeps it", false, Some(0), true, 0, DecommissionStep::Stay),
        ] {
            let mut node = InferenceNode::new("a", InferenceNodeSpec::default());
            node.metadata.finalizers = guarded.then(|| vec![FINALIZER.to_owned()]);
            node.metadata.deletion_timestamp = deleted.map(|second| Time(at(second)));
            let mut status = InferenceNodeStatus::default();
            let reason = Reason::LeaseRenewed;
            conditions::set(&mut status.conditions, Type::Reachable, alive, reason, "", None, at(0));
            node.status = Some(status);
            assert_eq!(step(&node, ranks, at(0)), expected, "{story}");
        }
    }
}
