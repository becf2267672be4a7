//! The result of joint placement, which the placement of each deployment follows. Not the search.

use std::collections::BTreeMap;

use crate::group_info::ObjectKey;
use crate::shard::SplitCandidate;

/// The joint plan of pending replicas.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JointPlan {
    /// The split of every replica that was considered; `None` if others score higher than it. A replica that
    /// fits nowhere even by itself is not included.
    pub splits: BTreeMap<(ObjectKey, i32), Option<SplitCandidate>>,
    /// Deployments for which groups are being preempted.
    pub reserved_for: Vec<String>,
    /// The sum of the scores.
    pub score: f64,
}

impl JointPlan {
    /// Deployments that get the free memory, as a reason for those that get none.
    pub fn preferred(&self) -> Vec<String> {
        let placed = self.splits.iter().filter(|(_, split)| split.is_some());
        let mut names: Vec<String> =
            placed.map(|(((space, name), _), _)| format!("{space}/{name}")).collect();
        names.extend(self.reserved_for.iter().cloned());
        names.dedup();
        names
    }
}
