//! From the observed state to the writes. All policy is in the planner; this calls it, and explains why it
//! could not be called.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::ResourceExt as _;
use russet_crds::conditions::Reason;
use russet_crds::{CopyMode, Model, ModelCopySpec};
use russet_plan::joint_placement::{JointPlan, solve};
use russet_plan::placement::{place_with, scale_down};
use russet_plan::precondition::{UnmetPrecondition, unmet_precondition};
use russet_plan::validate::{read_at, until_idle};
use russet_plan::{Note, Placement, ValidDeployment, note};

use super::stages::{AppliedDeployment, ObservedDeployment, PlannedDeployment, Resources};
use crate::model::copy_spec;

/// Plans.
pub fn decide(resources: Resources<ObservedDeployment>) -> Resources<PlannedDeployment> {
    let Resources { deployment, stage: observed } = resources;
    let (namespace, name) = (deployment.namespace().unwrap_or_default(), deployment.name_any());
    let checked =
        match unmet_precondition(&namespace, &deployment.spec, |name| find_model(&observed.models, name)) {
            Some(unmet) => Err((unmet, Vec::new())),
            None => read_at(&observed.view, &deployment, observed.now).map_err(|notes| {
                let reason = notes.first().map_or(Reason::InvalidSpec, Note::reason);
                (UnmetPrecondition { reason, message: note::join(&notes), stalled: true }, notes)
            }),
        };
    let stage = match checked {
        Ok(valid) => {
            let (placement, notes) = place_with(&observed.view, &valid, &joint_plan(&observed, &valid));
            let copies = copies(&observed, &valid.model, &placement);
            PlannedDeployment {
                observed,
                valid: Some(valid),
                unmet_precondition: None,
                placement,
                notes,
                copies,
            }
        }
        Err((unmet, notes)) => {
            // Even an invalid deployment may be scaled down.
            let placement = scale_down(&observed.view, &namespace, &name, deployment.spec.replicas);
            let unmet = (deployment.spec.replicas > 0).then_some(unmet);
            PlannedDeployment {
                observed,
                valid: None,
                unmet_precondition: unmet,
                placement,
                notes,
                copies: Vec::new(),
            }
        }
    };
    Resources { deployment, stage }
}

/// The nodes whose memory or files a plan takes or frees for itself. Groups that end only free theirs.
pub fn changed_nodes(resources: &Resources<PlannedDeployment>) -> BTreeSet<String> {
    let PlannedDeployment { observed, placement, .. } = &resources.stage;
    let created = placement.create.iter().flat_map(|new| &new.plan.members);
    let created = created.map(|member| member.node_name.clone());
    let prefetched = placement.prefetch.iter().map(|(_, node)| node.clone());
    let victims = placement.preempt.iter().filter_map(|victim| observed.view.groups.get(victim));
    let victims = victims.flat_map(|group| group.nodes().map(str::to_owned));
    created.chain(prefetched).chain(victims).collect()
}

/// Time until the decision may change without an event: when a protected replica has run for its minimum
/// residency.
pub fn until_next_decision(resources: &Resources<AppliedDeployment>, now: Timestamp) -> Option<Duration> {
    let Resources { deployment, stage: AppliedDeployment { planned, .. } } = resources;
    let idle = until_idle(&planned.observed.view, deployment, now);
    let times = planned.notes.iter().filter_map(|note| match note {
        Note::Resident { until, .. } => Some(*until),
        _ => None,
    });
    let end_of_residency = times.min().and_then(|time| Duration::try_from(time.duration_since(now)).ok());
    idle.into_iter().chain(end_of_residency).min()
}

/// Placement of its new replicas in the joint plan of all pending ones.
fn joint_plan(observed: &ObservedDeployment, valid: &ValidDeployment) -> JointPlan {
    let competitors = observed.competitors.iter().filter_map(|(deployment, models)| {
        let namespace = deployment.namespace().unwrap_or_default();
        match unmet_precondition(&namespace, &deployment.spec, |name| find_model(models, name)) {
            Some(_) => None,
            None => read_at(&observed.view, deployment, observed.now).ok(),
        }
    });
    let competitors: Vec<ValidDeployment> = competitors.collect();
    if competitors.is_empty() {
        return JointPlan::default();
    }
    let all: Vec<&ValidDeployment> = competitors.iter().chain([valid]).collect();
    solve(&observed.view, &all)
}

/// Every node of every current group holds the files of the model and of the adapters, and rank 0's also those of the
/// draft model.
fn copies(observed: &ObservedDeployment, model: &str, placement: &Placement) -> Vec<ModelCopySpec> {
    let existing = placement.keep.iter().filter_map(|key| observed.view.groups.get(key));
    let existing = existing.filter(|group| group.model == model).flat_map(|group| group.files());
    let created = placement.create.iter().flat_map(|new| new.plan.files(model));
    let prefetched = placement.prefetch.iter().map(|(model, node)| (model.as_str(), node.as_str()));
    let files: BTreeSet<(&str, &str)> = existing.chain(created).chain(prefetched).collect();
    let copy = |(model, node)| Some(copy_spec(find_model(&observed.models, model)?, node, CopyMode::Files));
    files.into_iter().filter_map(copy).collect()
}

/// The Model of that name.
fn find_model<'m>(models: &'m [Arc<Model>], name: &str) -> Option<&'m Model> {
    models.iter().map(AsRef::as_ref).find(|model| model.name_any() == name)
}
