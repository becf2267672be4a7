//! Joint placement: branch and bound over all pending replicas, which picks a candidate for each so that the
//! sum of their scores is largest. Running replicas stay. Not here: the steps of one deployment (`place`).
//!
//! ```text
//! pending replicas, the heaviest first ─▶ candidates of the first ─▶ of the second in the rest ─▶ …
//!      the first descent is the greedy plan; a branch that cannot beat the best sum is pruned
//! ```

use std::cmp::Reverse;
use std::collections::BTreeMap;

pub use crate::joint_plan::JointPlan;
use crate::memory_model::MemoryModel;
use crate::placement::{ScoreScale, ScoredCandidate, enumerate, pending_among, pending_replicas};
use crate::shard::SplitCandidate;
use crate::snapshot::{Availability, GroupInfo, ObjectKey, Snapshot};
use crate::valid_deployment::{Split, ValidDeployment};

/// Maximum number of enumerations of candidates, beyond one for each replica; then the best plan so far is
/// used. Fewer in clusters of many nodes, where each is slow. A handful of replicas needs a few dozen.
const MAX_SEARCH_NODES: usize = 4000;
/// Weight factor of a replica that ran before.
const RAN_BEFORE_WEIGHT: f64 = 4.0;
/// Number of nodes up to which an enumeration is fast.
const SMALL_CLUSTER_NODES: usize = 64;
/// Maximum number of replicas for which every order is tried.
const MAX_REPLICAS_ALL_ORDERS: usize = 4;
/// Of more, this many replicas come first in turn.
const MAX_FRONT_REPLICAS: usize = 16;
/// Optimality gap: the share of the best sum that is not worth more search.
const OPTIMALITY_GAP: f64 = 0.002;

/// One pending replica.
struct PendingReplica<'a> {
    desired: &'a ValidDeployment,
    memory: MemoryModel<'a>,
    replica: i32,
    scale: ScoreScale,
    weight: f64,
    /// Its maximum score.
    max_score: f64,
}

/// Decides for every pending replica of `deployments`. A deployment that may preempt chooses before those of
/// lower priority, and gets the memory being freed for it; otherwise all are decided jointly.
pub fn solve(view: &Snapshot, deployments: &[&ValidDeployment]) -> JointPlan {
    let mut rights: Vec<i32> =
        deployments.iter().filter(|desired| desired.preempts).map(|desired| desired.priority).collect();
    rights.sort_by_key(|priority| Reverse(*priority));
    rights.dedup();
    if rights.is_empty() {
        return solve_jointly(view, deployments);
    }
    let mut view = view.clone();
    let mut all = JointPlan::default();
    for class in 0..=rights.len() {
        let before =
            |desired: &ValidDeployment| rights.iter().filter(|right| **right > desired.priority).count();
        let members: Vec<&ValidDeployment> =
            deployments.iter().filter(|desired| before(desired) == class).copied().collect();
        let found = solve_jointly(&view, &members);
        all.score += found.score;
        for desired in members {
            let fit = desired.memory_model();
            for replica in pending_replicas(&view, desired, &fit) {
                let split = found.splits.get(&(desired.key(), replica)).cloned();
                // Those before it leave nothing for it, whatever seems to be free.
                all.splits.insert((desired.key(), replica), split.clone().flatten());
                let split = split.unwrap_or_else(|| {
                    let promised = best_when_vacated(&view, desired, &fit, replica);
                    all.reserved_for.extend(
                        promised.is_some().then(|| format!("{}/{}", desired.namespace, desired.name)),
                    );
                    promised
                });
                if let Some(split) = split {
                    let key = (desired.namespace.clone(), format!("~{}/{replica}", desired.name));
                    view.groups.insert(key, desired.new_group(replica, split.plan(&fit)));
                }
            }
        }
    }
    all
}

/// The best candidate of a replica in free memory and in memory being freed, by others and by its
/// predecessor, which is deleted once there is enough altogether.
fn best_when_vacated(
    view: &Snapshot,
    desired: &ValidDeployment,
    fit: &MemoryModel<'_>,
    replica: i32,
) -> Option<SplitCandidate> {
    let leaving = |key: &ObjectKey| {
        view.groups.get(key).is_some_and(|group| {
            let own =
                key.0 == desired.namespace && group.deployment == desired.name && group.replica == replica;
            group.deleting || own
        })
    };
    let found = enumerate(view, desired, fit, replica, false, leaving).ok()?.found;
    let scale = ScoreScale::from_candidates(found.iter())?;
    Some(found.into_iter().min_by(|a, b| scale.compare(a, b))?.candidate)
}

/// Decides for all of them jointly.
fn solve_jointly(view: &Snapshot, deployments: &[&ValidDeployment]) -> JointPlan {
    let mut pending = Vec::new();
    let mut groups: BTreeMap<(&str, &str), Vec<(&ObjectKey, &GroupInfo)>> = BTreeMap::new();
    for (key, group) in view.groups.iter().filter(|(_, group)| !group.deleting) {
        groups.entry((&key.0, &group.deployment)).or_default().push((key, group));
    }
    for desired in deployments {
        let fit = desired.memory_model();
        let own =
            groups.get(&(desired.namespace.as_str(), desired.name.as_str())).map_or(&[][..], Vec::as_slice);
        let waiting = pending_among(view, desired, &fit, own);
        let Some(first) = waiting.first() else { continue };
        let Ok(found) = enumerate(view, desired, &fit, *first, true, |_| false) else { continue };
        let Some(mut scale) = ScoreScale::from_candidates(found.found.iter()) else { continue };
        if desired.split == Split::Auto && fits_single_node(view, desired, &fit) {
            // Also once others run there: a plan applied step by step gets the same score at every step.
            scale.fewest = 1;
        }
        let best = found.found.iter().map(|scored| scale.net_score(scored)).fold(0.0, f64::max);
        pending.extend(waiting.iter().map(|&replica| {
            let weight = weight(desired, replica);
            PendingReplica { desired, memory: fit.clone(), replica, scale, weight, max_score: weight * best }
        }));
    }
    // The heaviest first; among equal ones those with the largest need, which have the fewest candidates.
    pending.sort_by(|a, b| {
        let heavier = b.weight.total_cmp(&a.weight);
        let larger = b.memory.whole_model().total().cmp(&a.memory.whole_model().total());
        heavier
            .then(larger)
            .then_with(|| a.desired.key().cmp(&b.desired.key()))
            .then(a.replica.cmp(&b.replica))
    });
    let most = pending.iter().map(|next| next.max_score).sum();
    let budget =
        pending.len() + MAX_SEARCH_NODES * SMALL_CLUSTER_NODES / view.nodes.len().max(SMALL_CLUSTER_NODES);
    let mut search = BranchAndBound {
        visited: 0,
        budget,
        best: f64::NEG_INFINITY,
        upper_bound: most,
        splits: BTreeMap::new(),
    };
    if pending.is_empty() {
        return JointPlan::default();
    }
    // Every descent restores it.
    let mut view = view.clone();
    for order in orders(&pending.iter().collect::<Vec<_>>()) {
        if search.is_pruned(0.0) {
            break;
        }
        search.search(&order, &mut view, 0.0, &mut Vec::new());
    }
    JointPlan { splits: search.splits, reserved_for: Vec::new(), score: search.best.max(0.0) }
}

/// Whether some node would hold it alone.
fn fits_single_node(view: &Snapshot, desired: &ValidDeployment, fit: &MemoryModel<'_>) -> bool {
    let needed = fit.whole_model().total();
    view.nodes.iter().any(|(name, node)| {
        let open = node.availability == Availability::Open && node.serving_limit >= needed;
        open && desired.allows(std::iter::once(name.as_str()))
    })
}

/// Orders worth trying. The first replica takes its best nodes, so another order may fit where this one does
/// not: all orders of a few replicas, and of many those in which each of some comes first.
fn orders<'w, 'a>(pending: &[&'w PendingReplica<'a>]) -> Vec<Vec<&'w PendingReplica<'a>>> {
    if pending.is_empty() {
        return vec![Vec::new()];
    }
    let front = |at: usize| {
        let mut rest = pending.to_vec();
        (rest.remove(at), rest)
    };
    let heads = (0..pending.len().min(MAX_FRONT_REPLICAS)).map(front);
    if pending.len() > MAX_REPLICAS_ALL_ORDERS {
        return heads.map(|(head, rest)| [vec![head], rest].concat()).collect();
    }
    let tails = |(head, rest): (&'w PendingReplica<'a>, Vec<&'w PendingReplica<'a>>)| {
        orders(&rest).into_iter().map(move |tail| [vec![head], tail].concat())
    };
    heads.flat_map(tails).collect()
}

/// Weight of a replica: by its tier's priority, whether it ran before, and the first replica of a deployment
/// above the second of another.
fn weight(desired: &ValidDeployment, replica: i32) -> f64 {
    // After the removal of one of several, an index may exceed the number of replicas.
    let place = replica.min(desired.replicas - 1).max(0);
    let before = if place < desired.ran_before { RAN_BEFORE_WEIGHT } else { 1.0 };
    before * (1.0 + f64::from(desired.priority.max(0)) / 100.0) / (1.0 + f64::from(place))
}

struct BranchAndBound {
    visited: usize,
    budget: usize,
    best: f64,
    /// The sum of the maximum scores.
    upper_bound: f64,
    splits: BTreeMap<(ObjectKey, i32), Option<SplitCandidate>>,
}

impl BranchAndBound {
    /// Descends through the candidates of `order[taken.len()]` and the rest, on a view with the chosen ones
    /// applied. `lost` is the difference of the chosen ones to their maximum scores.
    fn search(
        &mut self,
        order: &[&PendingReplica<'_>],
        view: &mut Snapshot,
        lost: f64,
        taken: &mut Vec<Option<SplitCandidate>>,
    ) {
        let Some(next) = order.get(taken.len()) else {
            let worth = self.upper_bound - lost;
            if worth > self.best {
                let keys = order.iter().map(|next| (next.desired.key(), next.replica));
                (self.best, self.splits) = (worth, keys.zip(taken.iter().cloned()).collect());
            }
            return;
        };
        if self.is_pruned(lost) {
            return;
        }
        self.visited += 1;
        let found = enumerate(view, next.desired, &next.memory, next.replica, true, |_| false);
        let mut found = found.map(|found| found.found).unwrap_or_default();
        let net = |scored: &ScoredCandidate| next.scale.net_score(scored);
        found.sort_by(|a, b| next.scale.compare_score(a, b));
        let key = (next.desired.namespace.clone(), format!("~{}", taken.len()));
        for scored in found {
            let short = next.max_score - next.weight * net(&scored);
            if self.is_pruned(lost + short) {
                break;
            }
            let group = next.desired.new_group(next.replica, scored.candidate.plan(&next.memory));
            view.groups.insert(key.clone(), group);
            taken.push(Some(scored.candidate));
            self.search(order, view, lost + short, taken);
            taken.pop();
            view.groups.remove(&key);
        }
        if !self.is_pruned(lost + next.max_score) {
            taken.push(None);
            self.search(order, view, lost + next.max_score, taken);
            taken.pop();
        }
    }

    /// Whether a branch with this loss can be pruned.
    fn is_pruned(&self, lost: f64) -> bool {
        let found = self.best > f64::NEG_INFINITY;
        found
            && (self.visited >= self.budget || self.upper_bound - lost <= self.best * (1.0 + OPTIMALITY_GAP))
    }
}
