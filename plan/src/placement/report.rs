//! The placement report of a deployment's status: decision, reason and alternatives.

use russet_crds::{GroupPlan, PlacementReport};

use super::selection::{MAX_SHOWN_CANDIDATES, Selection};
use super::{Placement, deployment_hash};
use crate::note::Note;
use crate::prediction::Predictor;
use crate::shard::describe;

/// The reason of a plan without a remembered one.
const UNCHANGED_REASON: &str = "what runs stays where it is";

/// The report of this placement; that of the one `before`, while its plan is still valid; or the refusal.
/// `current` are the plans of the groups that stay.
pub fn status_report(
    placement: &Placement,
    current: &[&GroupPlan],
    notes: &[Note],
    before: Option<PlacementReport>,
) -> Option<PlacementReport> {
    let plan_hash = deployment_hash(current.iter().map(|plan| plan.hash.as_str()));
    if let Some(report) = &placement.report {
        return Some(PlacementReport { plan_hash, ..report.clone() });
    }
    let ran = before.as_ref().filter(|_| !placement.waiting.is_empty()).map_or(0, |before| before.replicas);
    if !current.is_empty() {
        let unchanged = before.filter(|before| before.plan_hash == plan_hash);
        let plans = current.iter().map(|plan| describe(&plan.members, plan.tensor_size));
        let replicas = ran.max(i32::try_from(current.len()).unwrap_or(i32::MAX));
        return Some(unchanged.unwrap_or_else(|| PlacementReport {
            replicas,
            decision: plans.collect::<Vec<_>>().join("; "),
            reason: UNCHANGED_REASON.to_owned(),
            plan_hash,
            ..PlacementReport::default()
        }));
    }
    if placement.waiting.is_empty() {
        return None;
    }
    // Keep the hash of an earlier placement: it counts when memory is short.
    let plan_hash = before.map(|before| before.plan_hash).unwrap_or_default();
    Some(PlacementReport {
        plan_hash,
        replicas: ran,
        ..refusal_report(notes.iter().map(ToString::to_string).collect())
    })
}

/// The refusal; the last text names the remedy.
pub fn refusal_report(mut texts: Vec<String>) -> PlacementReport {
    let reason = texts.pop().unwrap_or_default();
    texts.truncate(MAX_SHOWN_CANDIDATES);
    PlacementReport {
        decision: "not placed".to_owned(),
        reason,
        candidates: texts,
        ..PlacementReport::default()
    }
}

/// The report of a new placement.
pub(super) fn report(
    placement: &Placement,
    found: &[(i32, Selection)],
    notes: &[Note],
    predictor: &Predictor<'_>,
) -> Option<PlacementReport> {
    let (_, first) = found.first()?;
    let decision = match found {
        [(_, choice)] => choice.candidate.show(),
        many => {
            let all: Vec<String> = many
                .iter()
                .map(|(replica, choice)| format!("replica {replica}: {}", choice.candidate.show()))
                .collect();
            all.join("; ")
        }
    };
    let together = notes.iter().filter(|note| matches!(note, Note::SharedFailureDomain { .. }));
    let together = together.map(ToString::to_string);
    let plans = placement.create.iter().map(|new| &new.plan);
    let slowest = plans.min_by(|a, b| predictor.rate(a).total_cmp(&predictor.rate(b)));
    Some(PlacementReport {
        decision,
        reason: std::iter::once(first.why.clone()).chain(together).collect::<Vec<_>>().join("; "),
        plan_hash: deployment_hash(placement.create.iter().map(|new| new.plan.hash.as_str())),
        replicas: 0,
        predicted: slowest.and_then(|plan| predictor.predicted(plan)),
        measured: None,
        candidates: first.alternatives.clone(),
    })
}
