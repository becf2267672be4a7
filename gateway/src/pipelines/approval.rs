//! Approvals of steps: the object that asks a person, and what that person's decision means. One is for the very actions whose
//! SHA-256 it has.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use kube::api::PostParams;
use kube::{Api, Client, Resource as _, ResourceExt as _};
use russet_crds::{Approval, ApprovalAction, ApprovalDecision, ApprovalSpec, LocalReference, PipelineRun};
use sha2::Digest as _;

use super::record::{ApprovalRecord, ArtifactRef, RunRecord};
use super::{PipelineObjects, suffixed};
use crate::api_timeout::with_timeout;

/// Longest beginning of a run's name in that of an Approval.
const MAX_NAME_CHARS: usize = 200;

/// Where an Approval is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ApprovalState {
    /// Nobody has asked yet.
    Missing,
    Undecided,
    /// By whom.
    Approved(String),
    /// Why the step is not done.
    Refused(String),
}

/// The name of the Approval of these actions of a step: another one for each attempt.
pub(super) fn name(run: &RunRecord, step: usize, actions: &ArtifactRef) -> String {
    let id = format!("{}/{step}/{}/{}", run.uid, run.attempt, actions.digest);
    let digest = hex::encode(sha2::Sha256::digest(id));
    suffixed(&run.name, MAX_NAME_CHARS, &digest[..8])
}

/// The Approval that asks.
pub(super) fn object(run: &RunRecord, asked: &ApprovalRecord, step: &str, message: &str) -> Approval {
    let spec = ApprovalSpec {
        deployment_ref: None,
        pipeline_run_ref: Some(LocalReference::new(run.name.clone())),
        action: ApprovalAction::Step,
        plan_hash: asked.actions.digest.clone(),
        message: format!("step {step}: {message}"),
        affects: Vec::new(),
        expires_at: Some(Time(asked.expires)),
        decision: None,
        decided_by: None,
    };
    let mut approval = Approval::new(&asked.name, spec);
    approval.metadata.namespace = Some(run.namespace.clone());
    approval.metadata.owner_references = Some(vec![OwnerReference {
        api_version: PipelineRun::api_version(&()).into_owned(),
        kind: PipelineRun::kind(&()).into_owned(),
        name: run.name.clone(),
        uid: run.uid.clone(),
        ..OwnerReference::default()
    }]);
    approval
}

/// Asks. Where that fails it is asked again when something changes, or soon.
pub(super) async fn create(client: &Client, approval: &Approval) {
    let api: Api<Approval> = Api::namespaced(client.clone(), &approval.namespace().unwrap_or_default());
    let created = async {
        match api.create(&PostParams::default(), approval).await {
            // The watch has not shown it yet.
            Err(kube::Error::Api(error)) if error.code == 409 => Ok(()),
            other => other.map(drop),
        }
    };
    if let Err(error) = with_timeout(created).await {
        let name = approval.name_any();
        tracing::warn!(approval = name, cause = error.cause, "an Approval of a step cannot be created");
    }
}

/// Where the Approval of a step is.
pub(super) fn state_of(
    objects: &PipelineObjects,
    run: &RunRecord,
    asked: &ApprovalRecord,
    now: Timestamp,
) -> ApprovalState {
    let late = || {
        let message = format!(
            "nobody decided on Approval {} before it expired; resume the run to ask again",
            asked.name
        );
        ApprovalState::Refused(message)
    };
    let key = (run.namespace.clone(), asked.name.clone());
    let Some(approval) = objects.approvals.get(&key) else {
        // The list may have it.
        return match () {
            () if asked.expires <= now => late(),
            () if objects.listed => ApprovalState::Missing,
            () => ApprovalState::Undecided,
        };
    };
    let owners = approval.metadata.owner_references.iter().flatten();
    let is_for_it = approval.spec.plan_hash == asked.actions.digest
        && approval.spec.action == ApprovalAction::Step
        && approval.spec.pipeline_run() == Some(run.name.as_str())
        && owners.into_iter().any(|owner| owner.uid == run.uid);
    if !is_for_it {
        let message = format!("Approval {} is for something else; delete it and resume the run", asked.name);
        return ApprovalState::Refused(message);
    }
    let by = approval.spec.decided_by.clone().unwrap_or_default();
    match approval.spec.decision {
        _ if asked.expires <= now || approval.spec.is_expired(now) => late(),
        Some(ApprovalDecision::Approved) => ApprovalState::Approved(by),
        Some(ApprovalDecision::Denied) => ApprovalState::Refused(format!("{by} denied it")),
        Some(ApprovalDecision::Unknown) | None => ApprovalState::Undecided,
    }
}
