//! All that waits for a place, decided together: which way every replica takes so that the sum of what they
//! are worth is largest. What runs stays where it is; how one deployment gets there, step by step, is `place`.
//!
//! ```text
//! replicas that wait, the heaviest first ─▶ ways of the first ─▶ ways of the second among what is left ─▶ …
//!      the first dive is the greedy plan; a branch that cannot beat the best sum found is not followed
//! ```

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::memory_model::MemoryModel;
use crate::placement::{ScoreScale, ScoredCandidate, pending_among, pending_replicas, enumerate};
use crate::shard::SplitCandidate;
use crate::snapshot::{Availability, GroupInfo, ObjectKey, Snapshot};
use crate::validate::{Split, ValidDeployment};

/// Looks at ways, beyond one for each replica, after which the best plan found is good enough; fewer where a
/// look is long, as many nodes make it. A handful of replicas needs a few dozen.
const MAX_SEARCH_NODES: usize = 4000;
/// How many times more a replica counts that ran before.
const RAN_BEFORE_WEIGHT: f64 = 4.0;
/// Nodes up to which a look is short.
const SMALL_CLUSTER_NODES: usize = 64;
/// Up to so many replicas every order is tried.
const MAX_REPLICAS_ALL_ORDERS: usize = 4;
/// Of more, so many come first by turns.
const MAX_FRONT_REPLICAS: usize = 16;
/// Share of the best sum that is not worth looking for.
const OPTIMALITY_GAP: f64 = 0.002;

/// Where replicas that wait are to go.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JointPlan {
    /// The split of every replica that was looked at; nothing where others are worth more than it. A
    /// replica that fits nowhere even by itself is not in here.
    pub splits: BTreeMap<(ObjectKey, i32), Option<SplitCandidate>>,
    /// Deployments for which room is being made.
    pub reserved_for: Vec<String>,
    /// The sum of what all are worth.
    pub score: f64,
}

impl JointPlan {
    /// Deployments that get what is there, for those that get nothing.
    pub fn preferred(&self) -> Vec<String> {
        let placed = self.splits.iter().filter(|(_, split)| split.is_some());
        let mut names: Vec<String> =
            placed.map(|(((space, name), _), _)| format!("{space}/{name}")).collect();
        names.extend(self.reserved_for.iter().cloned());
        names.dedup();
        names
    }
}

/// One replica that waits.
struct PendingReplica<'a> {
    desired: &'a ValidDeployment,
    memory: MemoryModel<'a>,
    replica: i32,
    scale: ScoreScale,
    weight: f64,
    /// The most it can be worth.
    max_score: f64,
}

/// Decides for every replica of `wants` that has no group yet. Who may have others make room chooses before those
/// of lower priority, and what is being vacated for him is not theirs; else all choose together.
pub fn solve(view: &Snapshot, deployments: &[&ValidDeployment]) -> JointPlan {
    let mut rights: Vec<i32> = deployments.iter().filter(|desired| desired.preempts).map(|want| want.priority).collect();
    rights.sort_by_key(|priority| Reverse(*priority));
    rights.dedup();
    if rights.is_empty() {
        return solve_jointly(view, deployments);
    }
    let mut view = view.clone();
    let mut all = JointPlan::default();
    for class in 0..=rights.len() {
        let before = |desired: &ValidDeployment| rights.iter().filter(|right| **right > desired.priority).count();
        let members: Vec<&ValidDeployment> =
            deployments.iter().filter(|desired| before(desired) == class).copied().collect();
        let found = solve_jointly(&view, &members);
        all.score += found.score;
        for desired in members {
            let fit = desired.memory_model();
            for replica in pending_replicas(&view, desired, &fit) {
                let split = found.splits.get(&(desired.key(), replica)).cloned();
                // What is left for it by those before it is nothing, whatever seems to be free.
                all.splits.insert((desired.key(), replica), split.clone().flatten());
                let split = split.unwrap_or_else(|| {
                    let promised = best_when_vacated(&view, desired, &fit, replica);
                    all.reserved_for
                        .extend(promised.is_some().then(|| format!("{}/{}", desired.namespace, desired.name)));
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

/// The best that a replica can have of what is there and what is being vacated, by others and by what runs in its
/// place, which goes once there is room enough together.
fn best_when_vacated(view: &Snapshot, desired: &ValidDeployment, fit: &MemoryModel<'_>, replica: i32) -> Option<SplitCandidate> {
    let leaving = |key: &ObjectKey| {
        view.groups.get(key).is_some_and(|group| {
            let own = key.0 == desired.namespace && group.deployment == desired.name && group.replica == replica;
            group.deleting || own
        })
    };
    let found = enumerate(view, desired, fit, replica, false, leaving).ok()?.found;
    let scale = ScoreScale::from_candidates(found.iter())?;
    Some(found.into_iter().min_by(|a, b| scale.compare(a, b))?.candidate)
}

/// Decides for all of them at once.
fn solve_jointly(view: &Snapshot, deployments: &[&ValidDeployment]) -> JointPlan {
    let mut wishes = Vec::new();
    let mut groups: BTreeMap<(&str, &str), Vec<(&ObjectKey, &GroupInfo)>> = BTreeMap::new();
    for (key, group) in view.groups.iter().filter(|(_, group)| !group.deleting) {
        groups.entry((&key.0, &group.deployment)).or_default().push((key, group));
    }
    for desired in deployments {
        let fit = desired.memory_model();
        let own = groups.get(&(desired.namespace.as_str(), desired.name.as_str())).map_or(&[][..], Vec::as_slice);
        let waiting = pending_among(view, desired, &fit, own);
        let Some(first) = waiting.first() else { continue };
        let Ok(found) = enumerate(view, desired, &fit, *first, true, |_| false) else { continue };
        let Some(mut scale) = ScoreScale::from_candidates(found.found.iter()) else { continue };
        if desired.split == Split::Auto && fits_single_node(view, desired, &fit) {
            // Also once others run there: what is carried out step by step is judged alike at every step.
            scale.fewest = 1;
        }
        let best = found.found.iter().map(|scored| scale.net_score(scored)).fold(0.0, f64::max);
        wishes.extend(waiting.iter().map(|&replica| {
            let weight = weight(desired, replica);
            PendingReplica { desired, memory: fit.clone(), replica, scale, weight, max_score: weight * best }
        }));
    }
    // The heaviest first; among equal ones those that need most, which have the fewest ways.
    wishes.sort_by(|a, b| {
        let heavier = b.weight.total_cmp(&a.weight);
        let larger = b.memory.whole_model().total().cmp(&a.memory.whole_model().total());
        heavier.then(larger).then_with(|| a.desired.key().cmp(&b.desired.key())).then(a.replica.cmp(&b.replica))
    });
    let most = wishes.iter().map(|wish| wish.max_score).sum();
    let budget = wishes.len() + MAX_SEARCH_NODES * SMALL_CLUSTER_NODES / view.nodes.len().max(SMALL_CLUSTER_NODES);
    let mut search = BranchAndBound { visited: 0, budget, best: f64::NEG_INFINITY, upper_bound: most, splits: BTreeMap::new() };
    if wishes.is_empty() {
        return JointPlan::default();
    }
    // Every dive leaves it as it was.
    let mut view = view.clone();
    for order in orders(&wishes.iter().collect::<Vec<_>>()) {
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

/// Orders worth trying. What comes first leaves its nodes as suits itself, so another order may leave room
/// where this one does not: all orders of a few, and of many those in which one comes before the others.
fn orders<'w, 'a>(wishes: &[&'w PendingReplica<'a>]) -> Vec<Vec<&'w PendingReplica<'a>>> {
    if wishes.is_empty() {
        return vec![Vec::new()];
    }
    let front = |at: usize| {
        let mut rest = wishes.to_vec();
        (rest.remove(at), rest)
    };
    let heads = (0..wishes.len().min(MAX_FRONT_REPLICAS)).map(front);
    if wishes.len() > MAX_REPLICAS_ALL_ORDERS {
        return heads.map(|(head, rest)| [vec![head], rest].concat()).collect();
    }
    let tails = |(head, rest): (&'w PendingReplica<'a>, Vec<&'w PendingReplica<'a>>)| {
        orders(&rest).into_iter().map(move |tail| [vec![head], tail].concat())
    };
    heads.flat_map(tails).collect()
}

/// What a replica counts beside others: by its tier's priority, whether it ran before, and the first of one
/// deployment more than the second of another.
fn weight(desired: &ValidDeployment, replica: i32) -> f64 {
    // Where one was taken away from among the others, indices are above how many there are.
    let place = replica.min(desired.replicas - 1).max(0);
    let before = if place < desired.ran_before { RAN_BEFORE_WEIGHT } else { 1.0 };
    before * (1.0 + f64::from(desired.priority.max(0)) / 100.0) / (1.0 + f64::from(place))
}

struct BranchAndBound {
    visited: usize,
    budget: usize,
    best: f64,
    /// What all wishes could be worth if none took anything from another.
    upper_bound: f64,
    splits: BTreeMap<(ObjectKey, i32), Option<SplitCandidate>>,
}

impl BranchAndBound {
    /// Follows the ways of `order[taken.len()]` and those after it, on a view that holds what was taken. `lost`
    /// is what those before it are short of their most.
    fn search(
        &mut self,
        order: &[&PendingReplica<'_>],
        view: &mut Snapshot,
        lost: f64,
        taken: &mut Vec<Option<SplitCandidate>>,
    ) {
        let Some(wish) = order.get(taken.len()) else {
            let worth = self.upper_bound - lost;
            if worth > self.best {
                let keys = order.iter().map(|wish| (wish.desired.key(), wish.replica));
                (self.best, self.splits) = (worth, keys.zip(taken.iter().cloned()).collect());
            }
            return;
        };
        if self.is_pruned(lost) {
            return;
        }
        self.visited += 1;
        let found = enumerate(view, wish.desired, &wish.memory, wish.replica, true, |_| false);
        let mut found = found.map(|found| found.found).unwrap_or_default();
        let net = |scored: &ScoredCandidate| wish.scale.net_score(scored);
        found.sort_by(|a, b| wish.scale.compare_score(a, b));
        let key = (wish.desired.namespace.clone(), format!("~{}", taken.len()));
        for scored in found {
            let short = wish.max_score - wish.weight * net(&scored);
            if self.is_pruned(lost + short) {
                break;
            }
            let group = wish.desired.new_group(wish.replica, scored.candidate.plan(&wish.memory));
            view.groups.insert(key.clone(), group);
            taken.push(Some(scored.candidate));
            self.search(order, view, lost + short, taken);
            taken.pop();
            view.groups.remove(&key);
        }
        if !self.is_pruned(lost + wish.max_score) {
            taken.push(None);
            self.search(order, view, lost + wish.max_score, taken);
            taken.pop();
        }
    }

    /// Whether a branch that is short of so much is not worth following.
    fn is_pruned(&self, lost: f64) -> bool {
        let found = self.best > f64::NEG_INFINITY;
        found && (self.visited >= self.budget || self.upper_bound - lost <= self.best * (1.0 + OPTIMALITY_GAP))
    }
}
