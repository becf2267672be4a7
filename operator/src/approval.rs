//! Approvals: the status of each. Not here: their creation, which is by deployments.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::runtime::controller::Action;
use kube::{Api, ResourceExt as _};
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{Approval, ApprovalDecision, ApprovalSpec, ApprovalStatus};
use thiserror::Error;

use crate::context::Context;
use crate::reconcile::requeue_after;
use crate::ssa;

/// Why an approval could not be reconciled.
#[derive(Debug, Error)]
pub enum Error {
    /// Its status was not written.
    #[error("Approval {name}: its status could not be written")]
    Report {
        /// The approval.
        name: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
}

/// Reconciles one approval.
pub async fn reconcile(approval: Arc<Approval>, context: Arc<Context>) -> Result<Action, Error> {
    let now = Timestamp::now();
    let status = status(&approval, now);
    let before = approval.status.clone().unwrap_or_default();
    if status != before {
        let name = approval.name_any();
        let api: Api<Approval> = ssa::namespaced_api(&context.client, approval.as_ref());
        ssa::apply_status(&api, &name, &status).await.map_err(|source| Error::Report { name, source })?;
        if status.decided_at != before.decided_at
            && let Some(ready) = conditions::get(&status.conditions, Type::Ready)
        {
            let approved = approval.spec.decision == Some(ApprovalDecision::Approved);
            let reason = if approved { Reason::Approved } else { Reason::Denied };
            context.record(approval.as_ref(), approved, reason, "Decide", &ready.message).await;
        }
    }
    Ok(requeue_after([until_expiry(&approval, now)]))
}

/// Time until it expires; no watch event announces that.
fn until_expiry(approval: &Approval, now: Timestamp) -> Option<Duration> {
    let expires = approval.spec.expires_at.as_ref()?.0;
    Duration::try_from(expires.duration_since(now)).ok().filter(|left| !left.is_zero())
}

/// The status of an approval.
fn status(approval: &Approval, now: Timestamp) -> ApprovalStatus {
    let ApprovalSpec { decision, decided_by, .. } = &approval.spec;
    let generation = approval.metadata.generation;
    let ApprovalStatus { decided_at, mut conditions, .. } = approval.status.clone().unwrap_or_default();
    let who = decided_by.as_deref().unwrap_or("nobody");
    let (ready, reason, message) = match decision {
        _ if approval.spec.is_expired(now) => (
            true,
            Reason::Expired,
            "it has expired; what still needs approval asks with another one".to_owned(),
        ),
        Some(ApprovalDecision::Approved) => (true, Reason::Approved, format!("approved by {who}")),
        Some(ApprovalDecision::Denied) => (true, Reason::Denied, format!("denied by {who}")),
        Some(ApprovalDecision::Unknown) => {
            (false, Reason::NewerRelease, "spec.decision has a value of a newer release".to_owned())
        }
        None => (
            false,
            Reason::AwaitingApproval,
            format!(
                "{} waits for a decision: russet approve {name}, or russet deny {name}",
                approval.spec.subject(),
                name = approval.name_any()
            ),
        ),
    };
    for (kind, value) in [(Type::Ready, ready), (Type::Reconciling, !ready)] {
        conditions::set(&mut conditions, kind, value, reason, message.as_str(), generation, now);
    }
    let answered = matches!(decision, Some(ApprovalDecision::Approved | ApprovalDecision::Denied));
    let time = || k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now);
    let decided_at = if answered { decided_at.or_else(|| Some(time())) } else { None };
    ApprovalStatus { observed_generation: generation, decided_at, conditions }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use russet_crds::LocalReference;

    use super::*;

    #[test]
    fn approval_status_shows_whether_it_was_answered() {
        let now = Timestamp::UNIX_EPOCH;
        for (decision, by, expires, expected) in [
            (
                None,
                None,
                9,
                "False AwaitingApproval ModelDeployment deep waits for a decision: russet approve q, or russet deny q",
            ),
            (Some(ApprovalDecision::Approved), Some("ada"), 9, "True Approved approved by ada"),
            (Some(ApprovalDecision::Denied), Some("ada"), 9, "True Denied denied by ada"),
            (
                Some(ApprovalDecision::Approved),
                Some("ada"),
                0,
                "True Expired it has expired; what still needs approval asks with another one",
            ),
            (
                Some(ApprovalDecision::Unknown),
                Some("ada"),
                9,
                "False NewerRelease spec.decision has a value of a newer release",
            ),
        ] {
            let expires_at = Timestamp::from_second(expires).map(Time).ok();
            let spec = ApprovalSpec {
                deployment_ref: Some(LocalReference::new("deep")),
                decision,
                decided_by: by.map(str::to_owned),
                expires_at,
                ..ApprovalSpec::default()
            };
            let status = status(&Approval::new("q", spec), now);
            let ready = conditions::get(&status.conditions, Type::Ready).unwrap();
            assert_eq!(format!("{} {} {}", ready.status, ready.reason, ready.message), expected);
            let answered = matches!(decision, Some(ApprovalDecision::Approved | ApprovalDecision::Denied));
            assert_eq!(status.decided_at.is_some(), answered, "{expected}");
        }
    }
}
