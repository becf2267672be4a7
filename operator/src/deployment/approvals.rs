//! Approvals of a deployment: created when needed, and withdrawn undecided when no longer needed. Not here:
//! what needs approval (`plan`).

use jiff::{Timestamp, ToSpan as _};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{Api, Resource as _, ResourceExt as _};
use russet_crds::{Approval, ApprovalSpec, LocalReference, ModelDeployment, names};
use russet_plan::placement::ApprovalRequest;

use super::Error;
use crate::context::Context;
use crate::ssa;

/// Time that an approval request, and its decision, is valid.
const APPROVAL_TTL_HOURS: i64 = 7 * 24;

/// Creates and deletes Approvals of a deployment to match these.
pub async fn apply(
    context: &Context,
    deployment: &ModelDeployment,
    requests: &[ApprovalRequest],
    now: Timestamp,
) -> Result<(), Error> {
    let api: Api<Approval> = ssa::namespaced_api(&context.client, deployment);
    let name = deployment.name_any();
    let failed = |approval: &str| {
        let (name, approval) = (name.clone(), approval.to_owned());
        move |source| Error::Approval { name, approval, source }
    };
    let mut known = context.stores.approvals.state();
    known.retain(|approval| {
        approval.namespace() == deployment.namespace() && approval.spec.deployment() == Some(name.as_str())
    });
    for approval in &known {
        let requested = requests.iter().any(|ask| ask.hash == approval.spec.plan_hash);
        // A decision is kept while it is valid, even after it was acted upon: people look it up.
        if approval.spec.is_expired(now) || (!requested && approval.spec.decision.is_none()) {
            ssa::delete(&api, approval.as_ref()).await.map_err(failed(&approval.name_any()))?;
        }
    }
    for ask in requests {
        if known.iter().any(|approval| approval.spec.plan_hash == ask.hash) {
            continue;
        }
        let object = object(deployment, ask, now);
        ssa::apply(&api, &object).await.map_err(failed(&object.name_any()))?;
    }
    Ok(())
}

fn object(deployment: &ModelDeployment, ask: &ApprovalRequest, now: Timestamp) -> Approval {
    let ApprovalRequest { action, hash, affects, message } = ask;
    let spec = ApprovalSpec {
        deployment_ref: Some(LocalReference::new(deployment.name_any())),
        pipeline_run_ref: None,
        action: *action,
        plan_hash: hash.clone(),
        message: message.clone(),
        affects: affects.clone(),
        expires_at: now.checked_add(APPROVAL_TTL_HOURS.hours()).ok().map(Time),
        decision: None,
        decided_by: None,
    };
    let mut approval = Approval::new(&names::approval(&deployment.name_any(), hash), spec);
    approval.metadata.namespace = deployment.namespace();
    approval.metadata.owner_references = deployment.controller_owner_ref(&()).map(|owner| vec![owner]);
    approval
}
