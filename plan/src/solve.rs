//! All that waits for a place, decided together: which way every replica takes so that the sum of what they
//! are worth is largest. What runs stays where it is; how one deployment gets there, step by step, is `place`.
//!
//! ```text
//! replicas that wait, the heaviest first ─▶ ways of the first ─▶ ways of the second among what is left ─▶ …
//!      the first dive is the greedy plan; a branch that cannot beat the best sum found is not followed
//! ```

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::fit::Fit;
use crate::place::{Scale, Way, pending, waiting, ways};
use crate::shard::Candidate;
use crate::snapshot::{Availability, Group, Key, Snapshot};
use crate::validate::{Split, ValidDeployment};

/// Looks at ways, beyond one for each replica, after which the best plan found is good enough; fewer where a
/// look is long, as many nodes make it. A handful of replicas needs a few dozen.
const LOOKS: usize = 4000;
/// How many times more a replica counts that ran before.
const BEFORE: f64 = 4.0;
/// Nodes up to which a look is short.
const SHORT: usize = 64;
/// Up to so many replicas every order is tried.
const ALL_ORDERS: usize = 4;
/// Of more, so many come first by turns.
const FRONTS: usize = 16;
/// Share of the best sum that is not worth looking for.
const CLOSE: f64 = 0.002;

/// Where replicas that wait are to go.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Advice {
    /// The split of every replica that was looked at; nothing where others are worth more than it. A
    /// replica that fits nowhere even by itself is not in here.
    pub splits: BTreeMap<(Key, i32), Option<Candidate>>,
    /// Deployments for which room is being made.
    pub promised: Vec<String>,
    /// The sum of what all are worth.
    pub worth: f64,
}

impl Advice {
    /// Deployments that get what is there, for those that get nothing.
    pub fn preferred(&self) -> Vec<String> {
        let placed = self.splits.iter().filter(|(_, split)| split.is_some());
        let mut names: Vec<String> =
            placed.map(|(((space, name), _), _)| format!("{space}/{name}")).collect();
        names.extend(self.promised.iter().cloned());
        names.dedup();
        names
    }
}

/// One replica that waits.
struct Wish<'a> {
    want: &'a ValidDeployment,
    fit: Fit<'a>,
    replica: i32,
    scale: Scale,
    weight: f64,
    /// The most it can be worth.
    most: f64,
}

/// Decides for every replica of `wants` that has no group yet. Who may have others make room chooses before those
/// of lower priority, and what is being vacated for him is not theirs; else all choose together.
pub fn solve(view: &Snapshot, wants: &[&ValidDeployment]) -> Advice {
    let mut rights: Vec<i32> = wants.iter().filter(|want| want.preempts).map(|want| want.priority).collect();
    rights.sort_by_key(|priority| Reverse(*priority));
    rights.dedup();
    if rights.is_empty() {
        return together(view, wants);
    }
    let mut view = view.clone();
    let mut all = Advice::default();
    for class in 0..=rights.len() {
        let before = |want: &ValidDeployment| rights.iter().filter(|right| **right > want.priority).count();
        let members: Vec<&ValidDeployment> =
            wants.iter().filter(|want| before(want) == class).copied().collect();
        let found = together(&view, &members);
        all.worth += found.worth;
        for want in members {
            let fit = want.fit();
            for replica in waiting(&view, want, &fit) {
                let split = found.splits.get(&(want.key(), replica)).cloned();
                // What is left for it by those before it is nothing, whatever seems to be free.
                all.splits.insert((want.key(), replica), split.clone().flatten());
                let split = split.unwrap_or_else(|| {
                    let promised = vacated(&view, want, &fit, replica);
                    all.promised
                        .extend(promised.is_some().then(|| format!("{}/{}", want.namespace, want.name)));
                    promised
                });
                if let Some(split) = split {
                    let key = (want.namespace.clone(), format!("~{}/{replica}", want.name));
                    view.groups.insert(key, want.group(replica, split.plan(&fit)));
                }
            }
        }
    }
    all
}

/// The best that a replica can have of what is there and what is being vacated, by others and by what runs in its
/// place, which goes once there is room enough together.
fn vacated(view: &Snapshot, want: &ValidDeployment, fit: &Fit<'_>, replica: i32) -> Option<Candidate> {
    let leaving = |key: &Key| {
        view.groups.get(key).is_some_and(|group| {
            let own = key.0 == want.namespace && group.deployment == want.name && group.replica == replica;
            group.deleting || own
        })
    };
    let found = ways(view, want, fit, replica, false, leaving).ok()?.found;
    let scale = Scale::of(found.iter())?;
    Some(found.into_iter().min_by(|a, b| scale.compare(a, b))?.candidate)
}

/// Decides for all of them at once.
fn together(view: &Snapshot, wants: &[&ValidDeployment]) -> Advice {
    let mut wishes = Vec::new();
    let mut groups: BTreeMap<(&str, &str), Vec<(&Key, &Group)>> = BTreeMap::new();
    for (key, group) in view.groups.iter().filter(|(_, group)| !group.deleting) {
        groups.entry((&key.0, &group.deployment)).or_default().push((key, group));
    }
    for want in wants {
        let fit = want.fit();
        let own = groups.get(&(want.namespace.as_str(), want.name.as_str())).map_or(&[][..], Vec::as_slice);
        let waiting = pending(view, want, &fit, own);
        let Some(first) = waiting.first() else { continue };
        let Ok(found) = ways(view, want, &fit, *first, true, |_| false) else { continue };
        let Some(mut scale) = Scale::of(found.found.iter()) else { continue };
        if want.split == Split::Auto && holds_it(view, want, &fit) {
            // Also once others run there: what is carried out step by step is judged alike at every step.
            scale.fewest = 1;
        }
        let best = found.found.iter().map(|way| scale.net(way)).fold(0.0, f64::max);
        wishes.extend(waiting.iter().map(|&replica| {
            let weight = weight(want, replica);
            Wish { want, fit: fit.clone(), replica, scale, weight, most: weight * best }
        }));
    }
    // The heaviest first; among equal ones those that need most, which have the fewest ways.
    wishes.sort_by(|a, b| {
        let heavier = b.weight.total_cmp(&a.weight);
        let larger = b.fit.whole().total().cmp(&a.fit.whole().total());
        heavier.then(larger).then_with(|| a.want.key().cmp(&b.want.key())).then(a.replica.cmp(&b.replica))
    });
    let most = wishes.iter().map(|wish| wish.most).sum();
    let budget = wishes.len() + LOOKS * SHORT / view.nodes.len().max(SHORT);
    let mut search = Search { looks: 0, budget, best: f64::NEG_INFINITY, most, splits: BTreeMap::new() };
    if wishes.is_empty() {
        return Advice::default();
    }
    // Every dive leaves it as it was.
    let mut view = view.clone();
    for order in orders(&wishes.iter().collect::<Vec<_>>()) {
        if search.hopeless(0.0) {
            break;
        }
        search.dive(&order, &mut view, 0.0, &mut Vec::new());
    }
    Advice { splits: search.splits, promised: Vec::new(), worth: search.best.max(0.0) }
}

/// Whether some node would hold it alone.
fn holds_it(view: &Snapshot, want: &ValidDeployment, fit: &Fit<'_>) -> bool {
    let needed = fit.whole().total();
    view.nodes.iter().any(|(name, node)| {
        let open = node.availability == Availability::Open && node.serving_limit >= needed;
        open && want.allows(std::iter::once(name.as_str()))
    })
}

/// Orders worth trying. What comes first leaves its nodes as suits itself, so another order may leave room
/// where this one does not: all orders of a few, and of many those in which one comes before the others.
fn orders<'w, 'a>(wishes: &[&'w Wish<'a>]) -> Vec<Vec<&'w Wish<'a>>> {
    if wishes.is_empty() {
        return vec![Vec::new()];
    }
    let front = |at: usize| {
        let mut rest = wishes.to_vec();
        (rest.remove(at), rest)
    };
    let heads = (0..wishes.len().min(FRONTS)).map(front);
    if wishes.len() > ALL_ORDERS {
        return heads.map(|(head, rest)| [vec![head], rest].concat()).collect();
    }
    let tails = |(head, rest): (&'w Wish<'a>, Vec<&'w Wish<'a>>)| {
        orders(&rest).into_iter().map(move |tail| [vec![head], tail].concat())
    };
    heads.flat_map(tails).collect()
}

/// What a replica counts beside others: by its tier's priority, whether it ran before, and the first of one
/// deployment more than the second of another.
fn weight(want: &ValidDeployment, replica: i32) -> f64 {
    // Where one was taken away from among the others, indices are above how many there are.
    let place = replica.min(want.replicas - 1).max(0);
    let before = if place < want.ran { BEFORE } else { 1.0 };
    before * (1.0 + f64::from(want.priority.max(0)) / 100.0) / (1.0 + f64::from(place))
}

struct Search {
    looks: usize,
    budget: usize,
    best: f64,
    /// What all wishes could be worth if none took anything from another.
    most: f64,
    splits: BTreeMap<(Key, i32), Option<Candidate>>,
}

impl Search {
    /// Follows the ways of `order[taken.len()]` and those after it, on a view that holds what was taken. `lost`
    /// is what those before it are short of their most.
    fn dive(
        &mut self,
        order: &[&Wish<'_>],
        view: &mut Snapshot,
        lost: f64,
        taken: &mut Vec<Option<Candidate>>,
    ) {
        let Some(wish) = order.get(taken.len()) else {
            let worth = self.most - lost;
            if worth > self.best {
                let keys = order.iter().map(|wish| (wish.want.key(), wish.replica));
                (self.best, self.splits) = (worth, keys.zip(taken.iter().cloned()).collect());
            }
            return;
        };
        if self.hopeless(lost) {
            return;
        }
        self.looks += 1;
        let found = ways(view, wish.want, &wish.fit, wish.replica, true, |_| false);
        let mut found = found.map(|found| found.found).unwrap_or_default();
        let net = |way: &Way| wish.scale.net(way);
        found.sort_by(|a, b| wish.scale.better(a, b));
        let key = (wish.want.namespace.clone(), format!("~{}", taken.len()));
        for way in found {
            let short = wish.most - wish.weight * net(&way);
            if self.hopeless(lost + short) {
                break;
            }
            let group = wish.want.group(wish.replica, way.candidate.plan(&wish.fit));
            view.groups.insert(key.clone(), group);
            taken.push(Some(way.candidate));
            self.dive(order, view, lost + short, taken);
            taken.pop();
            view.groups.remove(&key);
        }
        if !self.hopeless(lost + wish.most) {
            taken.push(None);
            self.dive(order, view, lost + wish.most, taken);
            taken.pop();
        }
    }

    /// Whether a branch that is short of so much is not worth following.
    fn hopeless(&self, lost: f64) -> bool {
        let found = self.best > f64::NEG_INFINITY;
        found && (self.looks >= self.budget || self.most - lost <= self.best * (1.0 + CLOSE))
    }
}
