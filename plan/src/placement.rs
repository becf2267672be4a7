//! Placement: from a valid deployment to the groups that must exist, that is which replicas stay, are created
//! and are removed. Sticky: a replica whose plan still matches the spec stays, so that replanning an applied
//! plan changes nothing. It never deletes a group that it could not replace.
//!
//! ```text
//! for each replica:  a current group? ─yes─▶ keep; once it is ready, delete its predecessors
//!                         │ no
//!                         ├─ fits beside what runs ──────────────▶ create; delete the predecessor when ready
//!                         ├─ fits once deleted groups release ───▶ wait
//!                         ├─ fits once its predecessor is gone ──▶ delete the predecessor, wait
//!                         ├─ fits once others are preempted ─────▶ preempt them, or request approval first
//!                         └─ fits nowhere ───────────────────────▶ keep what runs, report the numbers
//! ```

mod candidates;
mod failure_domains;
mod preempt;
mod replica_steps;
mod report;
mod running;
mod score;
mod selection;

use std::collections::BTreeSet;

use russet_crds::{GroupPlan, PlacementReport, names};
use sha2::{Digest as _, Sha256};

use crate::digest::digest;
use crate::joint_plan::JointPlan;
use crate::note::Note;
use crate::prediction::Predictor;
use crate::snapshot::{GroupInfo, ObjectKey, Snapshot};
use crate::valid_deployment::ValidDeployment;
use failure_domains::desired_and_surplus;
use replica_steps::ReplicaSteps;
use report::report;

pub use candidates::{Candidates, enumerate};
pub use preempt::ApprovalRequest;
pub use report::{refusal_report, status_report};
pub use running::{is_current, pending_among, pending_replicas};
pub use score::{ScoreScale, ScoredCandidate};

/// Maximum number of nodes that a remedy names.
const MAX_SHOWN_NODES: usize = 5;

/// Changes for one deployment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Groups that stay.
    pub keep: Vec<ObjectKey>,
    /// Groups to create, at epoch 1.
    pub create: Vec<NewGroup>,
    /// Groups to delete.
    pub delete: Vec<RemovedGroup>,
    /// Replicas of other deployments to delete, so that a replica of this one fits.
    pub preempt: Vec<ObjectKey>,
    /// Models whose files have to be on nodes before anything stops for them: model and node.
    pub prefetch: Vec<(String, String)>,
    /// Approvals to request.
    pub approval_requests: Vec<ApprovalRequest>,
    /// Replicas without a current group that get none yet.
    pub waiting: Vec<i32>,
    /// The placement report; only if something was placed.
    pub report: Option<PlacementReport>,
}

/// A group to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewGroup {
    /// Its name; the namespace is the deployment's.
    pub name: String,
    /// Index of the replica.
    pub replica: i32,
    /// The split.
    pub plan: GroupPlan,
}

/// A group to delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemovedGroup {
    /// Its name.
    pub name: String,
    /// Why it is deleted.
    pub reason: RemovalReason,
}

/// Why a group is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemovalReason {
    /// The deployment wants fewer replicas.
    ScaledDown,
    /// The deployment is idle: its tier has scaled it to zero for now.
    Idle,
    /// Another group of the same replica matches the spec.
    Replaced,
    /// Its replacement needs its memory.
    Drained,
}

impl Placement {
    /// Whether nothing has to be done.
    pub fn is_empty(&self) -> bool {
        self.create.is_empty() && self.delete.is_empty() && self.preempt.is_empty()
    }

    /// How many replicas have a group, or get one.
    fn placed_replicas(&self, view: &Snapshot) -> i32 {
        let retained = self.keep.iter().filter_map(|key| Some(view.groups.get(key)?.replica));
        let replicas: BTreeSet<i32> = retained.chain(self.create.iter().map(|new| new.replica)).collect();
        i32::try_from(replicas.len()).unwrap_or(i32::MAX)
    }

    /// The view after everything was applied and every agent has released its memory.
    pub fn apply(&self, view: &Snapshot, desired: &ValidDeployment) -> Snapshot {
        let mut after = view.clone();
        for old in &self.delete {
            after.groups.remove(&(desired.namespace.clone(), old.name.clone()));
        }
        for key in &self.preempt {
            after.groups.remove(key);
        }
        for new in &self.create {
            after.groups.insert(
                (desired.namespace.clone(), new.name.clone()),
                desired.new_group(new.replica, new.plan.clone()),
            );
        }
        after
    }
}

/// Decides which groups must exist for `desired`, as if no other deployment waited.
pub fn place(view: &Snapshot, desired: &ValidDeployment) -> (Placement, Vec<Note>) {
    place_with(view, desired, &JointPlan::default())
}

/// Decides which groups must exist for `desired`, with new replicas where `joint_plan` has them.
pub fn place_with(
    view: &Snapshot,
    desired: &ValidDeployment,
    joint_plan: &JointPlan,
) -> (Placement, Vec<Note>) {
    let mut turn = ReplicaSteps::new(view, desired, joint_plan);
    turn.remove_surplus();
    for replica in turn.desired_replicas.clone() {
        turn.step(replica);
    }
    let ReplicaSteps { mut placement, notes, selections: found, .. } = turn;
    let predictor = Predictor::new(view, &desired.shape, desired.capacity);
    let placed = placement.placed_replicas(view).max(if placement.waiting.is_empty() {
        0
    } else {
        desired.ran_before
    });
    placement.report = report(&placement, &found, &notes, &predictor)
        .map(|report| PlacementReport { replicas: placed.min(desired.replicas), ..report });
    (placement, notes)
}

/// Placement of a deployment that cannot be planned: surplus replicas are removed.
pub fn scale_down(view: &Snapshot, namespace: &str, deployment: &str, replicas: i32) -> Placement {
    let mut placement = Placement::default();
    let groups: Vec<(&ObjectKey, &GroupInfo)> =
        view.groups_of(namespace, deployment).filter(|(_, group)| !group.deleting).collect();
    let (desired, _) = desired_and_surplus(view, &groups, replicas, names::LABEL_ZONE);
    for (key, group) in groups {
        if desired.contains(&group.replica) {
            placement.keep.push(key.clone());
        } else {
            placement.delete.push(RemovedGroup { name: key.1.clone(), reason: RemovalReason::ScaledDown });
        }
    }
    placement
}

/// Digest of the content of a plan; another digest means another group.
pub fn plan_hash(model: &str, plan: &GroupPlan) -> String {
    let bare = GroupPlan { hash: String::new(), ..plan.clone() };
    digest(&(model, bare))
}

/// The hash that a deployment shows for all its replicas.
pub fn deployment_hash<'a>(hashes: impl Iterator<Item = &'a str>) -> String {
    let hashes: Vec<&str> = hashes.collect();
    match hashes.as_slice() {
        [] => String::new(),
        [one] => (*one).to_owned(),
        many => hex::encode(Sha256::digest(many.join(","))),
    }
}

#[cfg(test)]
mod tests;
