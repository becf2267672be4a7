//! ModelDeployments: a plan for every replica, one ShardGroup each, the files on the chosen nodes, and the
//! reasons in the status. Not here: how a group starts (`group`).
//!
//! ```text
//! Resources<Observed> ─validate, plan─▶ Resources<Planned> ─apply─▶ Resources<Applied> ─▶ report
//! ```

mod apply;
mod approvals;
mod decide;
mod observe;
mod preempt;
mod report;
mod stages;
mod status;

use std::sync::Arc;

use jiff::Timestamp;
use kube::ResourceExt as _;
use kube::runtime::controller::Action;
use russet_crds::ModelDeployment;
use thiserror::Error;

use crate::context::Context;
use crate::planner::{PlanError, PlanKey};
use crate::reconcile::requeue_after;

/// Why a deployment could not be reconciled.
#[derive(Debug, Error)]
pub enum Error {
    /// It was not planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The running groups could not be listed.
    #[error("ModelDeployment {name}: the running ShardGroups could not be listed")]
    Observe {
        /// The deployment.
        name: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// A copy was not written.
    #[error("ModelDeployment {name}: ModelCopy {copy} could not be written")]
    Copy {
        /// The deployment.
        name: String,
        /// The copy.
        copy: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// A group was not created or deleted.
    #[error("ModelDeployment {name}: ShardGroup {group} could not be changed")]
    Group {
        /// The deployment.
        name: String,
        /// The group.
        group: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// An Approval was not created or withdrawn.
    #[error("ModelDeployment {name}: Approval {approval} could not be changed")]
    Approval {
        /// The deployment.
        name: String,
        /// The Approval.
        approval: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// The status was not written.
    #[error("ModelDeployment {name}: its status could not be written")]
    Report {
        /// The deployment.
        name: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
}

/// Reconciles one deployment.
pub async fn reconcile(deployment: Arc<ModelDeployment>, context: Arc<Context>) -> Result<Action, Error> {
    if deployment.metadata.deletion_timestamp.is_some() {
        // Its groups are deleted with it, by their owner references.
        return Ok(requeue_after([]));
    }
    let now = Timestamp::now();
    let (namespace, name) = (deployment.namespace().unwrap_or_default(), deployment.name_any());
    let key = PlanKey { kind: "ModelDeployment", namespace, name };
    let plan = {
        let (context, deployment) = (context.clone(), deployment.clone());
        move || {
            let cached = observe::cached(&context, &deployment, now);
            context.metrics.time_plan("cached", || decide::decide(cached))
        }
    };
    let planned = context.planner.plan(key.clone(), plan).await?;
    let applied = if planned.stage.placement.is_empty() {
        apply::apply(&context, planned, now).await?
    } else {
        // The caches may lag behind what another deployment was just given. Before a change, the state is
        // read again from the server, and nothing else is placed between that and the writes.
        let metrics = context.metrics.clone();
        let (planned, mut turn) = context
            .planner
            .plan_in_turn(
                key,
                || observe::live(&context, &deployment, now),
                move |live| metrics.time_plan("live", || decide::decide(live)),
                decide::changed_nodes,
            )
            .await?;
        turn.note_write(Some(decide::changed_nodes(&planned)));
        apply::apply(&context, planned, now).await?
    };
    report::report(&context, &applied, now).await?;
    let next_node_loss = observe::until_next_loss(&context, &applied, now);
    let next_decision = decide::until_next_decision(&applied, now);
    Ok(requeue_after([next_node_loss, next_decision]))
}
