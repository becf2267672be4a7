//! Layers over stages: which team of nodes holds which run of layers, within each node's memory and as
//! balanced as possible. A stage is a team of ranks that share its layers; in a plain pipeline every team is
//! one node. Stages are counted from rank 0, which holds the last layers and the head. In this file
//! activations flow the other way, so the first run of layers is the highest stage.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;

use super::balance::Balancer;
use super::{NodeSlot, RankAssignment};
use crate::memory_model::MemoryModel;
use crate::note::Note;

/// Maximum number of stages for which every order of the teams is tried; 24 orders cost microseconds.
const MAX_STAGES_ALL_ORDERS: usize = 4;
/// Maximum number of stages for which every choice of first and last team is tried; only those two hold more
/// than layers.
const MAX_STAGES_ALL_ENDS: usize = 12;
/// Bandwidth of an unknown machine, bytes per second. Beside known ones it counts as slow.
const UNKNOWN_BANDWIDTH: f64 = 100e9;

/// The nodes of one stage, in the order of its members' ring. The leader is not fixed: the order may be
/// rotated.
#[derive(Clone, Debug, PartialEq)]
pub struct TpTeam<'a> {
    /// The nodes.
    pub slots: Vec<NodeSlot<'a>>,
}

impl<'a> TpTeam<'a> {
    fn max_free(&self) -> u64 {
        self.slots.iter().map(|slot| slot.free).max().unwrap_or(0)
    }

    fn min_free(&self) -> u64 {
        self.slots.iter().map(|slot| slot.free).min().unwrap_or(0)
    }

    /// The name of its first node.
    pub fn name(&self) -> &'a str {
        self.slots.first().map_or("", |slot| slot.node)
    }

    fn size(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Picoseconds per token of these layers on its slowest member; for unknown machines their bytes.
    pub(super) fn time(&self, fit: &MemoryModel<'_>, layers: Range<u32>, head: bool) -> u64 {
        let count = layers.end - layers.start;
        let bytes = fit.bytes_read_per_token(layers, head, self.size()) as f64;
        let seconds = |slot: &NodeSlot<'_>| match slot.gpu {
            Some(machine) => machine.step(bytes, count),
            None => bytes / UNKNOWN_BANDWIDTH,
        };
        let slowest = self.slots.iter().map(seconds).fold(0.0, f64::max);
        (slowest * 1e12) as u64
    }

    /// Whether every member has memory for its share; one of them is the leader.
    pub fn fits(&self, fit: &MemoryModel<'_>, layers: Range<u32>, embedding: bool, head: bool) -> bool {
        let lead = fit.sharded_estimate(layers.clone(), embedding, head, self.size()).total();
        let others = fit.sharded_estimate(layers, embedding, false, self.size()).total();
        lead <= self.max_free() && others <= self.min_free()
    }

    /// Its members as ranks; `None` if one has too little memory. The leader is the first node in team order
    /// that can lead.
    pub fn ranks(
        &self,
        fit: &MemoryModel<'_>,
        layers: Range<u32>,
        embedding: bool,
        head: bool,
    ) -> Option<Vec<RankAssignment>> {
        let size = self.size();
        let lead = fit.sharded_estimate(layers.clone(), embedding, head, size);
        let turn = self.slots.iter().position(|slot| slot.free >= lead.total())?;
        let turned = self.slots.iter().cycle().skip(turn).take(self.slots.len());
        let members = turned.enumerate().map(|(member, slot)| {
            let need = fit.sharded_estimate(layers.clone(), embedding, head && member == 0, size);
            let left = slot.free.checked_sub(need.total())?;
            let node = slot.node.to_owned();
            Some(RankAssignment {
                node,
                layers: layers.end - layers.start,
                memory: need,
                free_after: left,
                rdma_devices: Vec::new(),
            })
        });
        members.collect()
    }
}

/// The ranks of the most balanced split over these teams, in the best order of the teams; ties go to the
/// given order. An error says why no split fits, or that the search for one was given up.
pub fn balanced(fit: &MemoryModel<'_>, teams: &[TpTeam<'_>]) -> Result<Vec<RankAssignment>, Note> {
    let budget = fit.search_budget();
    // Without limits the order of equal machines does not matter; no order beats this bound.
    let mut machines = teams.iter().flat_map(|team| &team.slots).map(|slot| slot.gpu);
    let first = machines.next();
    let equal = machines.all(|machine| Some(machine) == first);
    let floor = equal.then(|| boundless_cost(fit, teams)).flatten();
    let mut best: Option<(u128, Vec<usize>, Vec<u32>)> = None;
    let kinds = equivalent_teams(teams);
    let mut seen = BTreeSet::new();
    let mut balancer = Balancer::new(fit, teams);
    for (turn, order) in orders(teams).into_iter().enumerate() {
        if budget.is_spent() || (turn > 0 && !budget.is_full()) {
            break;
        }
        // Swapping equal teams changes no time.
        if !seen.insert(order.iter().map(|place| kinds[*place]).collect::<Vec<_>>()) {
            continue;
        }
        let Some((cost, layers)) = balancer.split(&order) else { continue };
        if best.as_ref().is_none_or(|(least, _, _)| cost < *least) {
            best = Some((cost, order, layers));
        }
        if Some(cost) == floor {
            break;
        }
    }
    let refusal = || match budget.is_full() {
        true => too_small_note(fit, teams),
        false => Note::SearchGivenUp { layers: fit.layers(), stages: teams.len(), steps: budget.steps() },
    };
    let (_, order, layers) = best.ok_or_else(refusal)?;
    let parts = parts(fit, &layers);
    let ranks = order
        .iter()
        .zip(parts)
        .map(|(place, (range, embedding, head))| teams[*place].ranks(fit, range, embedding, head));
    Ok(ranks.collect::<Option<Vec<_>>>().ok_or_else(refusal)?.concat())
}

/// The least sum of squared times if no node were short of memory.
fn boundless_cost(fit: &MemoryModel<'_>, teams: &[TpTeam<'_>]) -> Option<u128> {
    let mut teams = teams.to_vec();
    for slot in teams.iter_mut().flat_map(|team| &mut team.slots) {
        slot.free = u64::MAX;
    }
    let order: Vec<usize> = (0..teams.len()).collect();
    Balancer::new(fit, &teams).split(&order).map(|(cost, _)| cost)
}

/// The ranks of a split with exactly these layers per stage. The stage with the largest need gets the team
/// with the most memory, so if one does not fit, its numbers have to change.
pub fn explicit(
    fit: &MemoryModel<'_>,
    teams: &[TpTeam<'_>],
    layers: &[u32],
) -> Result<Vec<RankAssignment>, Note> {
    let parts = parts(fit, layers);
    let size = teams.first().map_or(1, TpTeam::size);
    let need = |stage: usize| {
        let (range, embedding, head) = parts[stage].clone();
        fit.sharded_estimate(range, embedding, head, size).total()
    };
    let mut by_need: Vec<usize> = (0..parts.len()).collect();
    by_need.sort_by_key(|&stage| (Reverse(need(stage)), stage));
    let mut by_room: Vec<&TpTeam<'_>> = teams.iter().collect();
    by_room.sort_by_key(|team| (Reverse(team.min_free()), team.name()));
    let mut ranks = vec![Vec::new(); parts.len()];
    for (&stage, team) in by_need.iter().zip(by_room) {
        let (range, embedding, head) = parts[stage].clone();
        match team.ranks(fit, range, embedding, head) {
            Some(members) => ranks[stage] = members,
            None => {
                let tightest = team.slots.iter().min_by_key(|slot| slot.free);
                let draft = fit.draft().filter(|_| stage == 0);
                let what = match (size, draft) {
                    (1, Some(draft)) => {
                        format!("rank 0 with {} layers and the draft model {}", layers[stage], draft.model)
                    }
                    (1, None) => format!("rank {stage} with {} layers", layers[stage]),
                    _ => format!("a member of stage {stage} with 1/{size} of {} layers", layers[stage]),
                };
                let what = format!("{what}{}", fit.adapter_overhead().beside());
                return Err(Note::TooSmall {
                    node: tightest.map_or("", |slot| slot.node).to_owned(),
                    what,
                    needed: need(stage),
                    free: tightest.map_or(0, |slot| slot.free),
                    limit: tightest.map_or(0, |slot| slot.limit),
                });
            }
        }
    }
    Ok(ranks.concat())
}

/// Why no split over these teams fits: every split of the same size needs at least this much, as each rank
/// has its own engine.
fn too_small_note(fit: &MemoryModel<'_>, teams: &[TpTeam<'_>]) -> Note {
    let size = teams.first().map_or(1, TpTeam::size);
    let all = 0..fit.layers();
    let others =
        fit.sharded_estimate(all.clone(), true, false, size).total().saturating_mul(u64::from(size) - 1);
    let first = fit.sharded_estimate(all, true, true, size).total();
    let engines = fit
        .sharded_estimate(0..0, false, false, size)
        .overhead
        .saturating_mul(u64::from(size) * (teams.len() as u64 - 1));
    let slots = || teams.iter().flat_map(|team| &team.slots);
    Note::TooSmallTogether {
        nodes: slots().map(|slot| slot.node.to_owned()).collect(),
        needed: first.saturating_add(others).saturating_add(engines),
        free: slots().fold(0, |sum, slot| sum.saturating_add(slot.free)),
    }
}

/// The best nodes: with `spread` first those without a replica of the same deployment, then the largest.
pub fn largest<'a>(slots: &[NodeSlot<'a>], count: usize, spread: bool) -> Vec<NodeSlot<'a>> {
    let mut chosen = preferred(slots, spread);
    chosen.truncate(count);
    chosen.sort_by_key(|slot| slot.node);
    chosen
}

/// Whether to spread, in the order of trying: where all nodes have the same number of replicas of the
/// deployment, there is nothing to spread over.
pub fn spread_orders(slots: &[NodeSlot<'_>]) -> &'static [bool] {
    let mut siblings = slots.iter().map(|slot| slot.siblings);
    let first = siblings.next();
    if siblings.all(|others| Some(others) == first) { &[true] } else { &[true, false] }
}

/// The nodes, the best first.
pub fn preferred<'a>(slots: &[NodeSlot<'a>], spread: bool) -> Vec<NodeSlot<'a>> {
    let mut chosen = slots.to_vec();
    chosen.sort_by_key(|slot| (if spread { slot.siblings } else { 0 }, Reverse(slot.free), slot.node));
    chosen
}

/// Layers of every stage, with whether it has the embedding and the head.
fn parts(fit: &MemoryModel<'_>, layers: &[u32]) -> Vec<(Range<u32>, bool, bool)> {
    let mut end = fit.layers();
    let mut parts = Vec::new();
    for (stage, &count) in layers.iter().enumerate() {
        let start = end.saturating_sub(count);
        parts.push((start..end, stage + 1 == layers.len(), stage == 0));
        end = start;
    }
    parts
}

/// For every team the first equivalent one: with as much free on the same machines.
fn equivalent_teams(teams: &[TpTeam<'_>]) -> Vec<usize> {
    let like = |a: &TpTeam<'_>, b: &TpTeam<'_>| {
        let mut pairs = a.slots.iter().zip(&b.slots);
        a.size() == b.size() && pairs.all(|(a, b)| (a.free, a.gpu) == (b.free, b.gpu))
    };
    let first = |(at, team): (usize, &TpTeam<'_>)| teams.iter().position(|one| like(one, team)).unwrap_or(at);
    teams.iter().enumerate().map(first).collect()
}

/// Orders worth trying, rank 0's team first, the given order before all others.
fn orders(teams: &[TpTeam<'_>]) -> Vec<Vec<usize>> {
    let given: Vec<usize> = (0..teams.len()).collect();
    let count = given.len();
    let mut orders = vec![given.clone()];
    if count <= MAX_STAGES_ALL_ORDERS {
        permute(&given, &mut Vec::new(), &mut orders);
    } else {
        let mut sorted = given;
        sorted.sort_by_key(|at| (Reverse(teams[*at].min_free()), teams[*at].name()));
        let ends: Vec<(usize, usize)> = if count <= MAX_STAGES_ALL_ENDS {
            (0..count)
                .flat_map(|first| (0..count).map(move |last| (first, last)))
                .filter(|(a, b)| a != b)
                .collect()
        } else {
            // The two largest, in both orders, hold head and embedding.
            vec![(0, 1), (1, 0)]
        };
        for (first, last) in ends {
            let middle = sorted.iter().enumerate().filter(|(index, _)| *index != first && *index != last);
            let mut order = vec![sorted[first]];
            order.extend(middle.map(|(_, at)| *at));
            order.push(sorted[last]);
            orders.push(order);
        }
    }
    orders
}

fn permute(rest: &[usize], head: &mut Vec<usize>, out: &mut Vec<Vec<usize>>) {
    if rest.is_empty() {
        out.push(head.clone());
        return;
    }
    for index in 0..rest.len() {
        let mut others = rest.to_vec();
        head.push(others.remove(index));
        permute(&others, head, out);
        head.pop();
    }
}
