//! Layers over stages: which team of nodes holds which run of layers, within everybody's memory and
//! as balanced as it can be. A stage is a team of ranks that share its layers; in a plain pipeline
//! every team is one node. Stages are counted from rank 0, which holds the last layers and the head;
//! inside this file activations flow the other way, so the first cut is the highest stage.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;

use super::{Rank, Seat};
use crate::fit::Fit;
use crate::note::Note;

/// Up to so many stages every order of the teams is tried; 24 orders cost microseconds.
const ALL_ORDERS: usize = 4;
/// Up to so many stages every choice of first and last team is tried; only those two differ in what
/// they hold besides layers.
const ALL_ENDS: usize = 12;
/// Bytes a second of a machine nobody knows. Beside known ones it counts as a slow one.
const UNKNOWN: f64 = 100e9;

/// The nodes of one stage, in the order of its members' ring. Which of them leads is open: the
/// order may be turned.
#[derive(Clone, Debug, PartialEq)]
pub struct Team<'a> {
    /// The nodes.
    pub seats: Vec<Seat<'a>>,
}

impl<'a> Team<'a> {
    fn most(&self) -> u64 {
        self.seats.iter().map(|seat| seat.free).max().unwrap_or(0)
    }

    fn least(&self) -> u64 {
        self.seats.iter().map(|seat| seat.free).min().unwrap_or(0)
    }

    /// The name of its first node.
    pub fn name(&self) -> &'a str {
        self.seats.first().map_or("", |seat| seat.node)
    }

    fn size(&self) -> u32 {
        self.seats.len() as u32
    }

    /// Picoseconds these layers take for a token on its slowest member. By machines nobody knows it is the
    /// bytes that count.
    fn time(&self, fit: &Fit<'_>, layers: Range<u32>, head: bool) -> u64 {
        let count = layers.end - layers.start;
        let bytes = fit.work(layers, head, self.size()) as f64;
        let seconds = |seat: &Seat<'_>| match seat.machine {
            Some(machine) => machine.step(bytes, count),
            None => bytes / UNKNOWN,
        };
        let slowest = self.seats.iter().map(seconds).fold(0.0, f64::max);
        (slowest * 1e12) as u64
    }

    /// Whether every member has room for its share; one of them leads.
    pub fn holds(&self, fit: &Fit<'_>, layers: Range<u32>, embedding: bool, head: bool) -> bool {
        let lead = fit.share(layers.clone(), embedding, head, self.size()).total();
        let others = fit.share(layers, embedding, false, self.size()).total();
        lead <= self.most() && others <= self.least()
    }

    /// Its members as ranks; `None` when one has too little room. The first node by the order of the
    /// team that can lead does.
    pub fn ranks(&self, fit: &Fit<'_>, layers: Range<u32>, embedding: bool, head: bool) -> Option<Vec<Rank>> {
        let size = self.size();
        let lead = fit.share(layers.clone(), embedding, head, size);
        let turn = self.seats.iter().position(|seat| seat.free >= lead.total())?;
        let turned = self.seats.iter().cycle().skip(turn).take(self.seats.len());
        let members = turned.enumerate().map(|(member, seat)| {
            let need = fit.share(layers.clone(), embedding, head && member == 0, size);
            let left = seat.free.checked_sub(need.total())?;
            let node = seat.node.to_owned();
            Some(Rank { node, layers: layers.end - layers.start, need, left, rdma_devices: Vec::new() })
        });
        members.collect()
    }
}

/// The ranks of the most balanced split over these teams, in whatever order of the teams serves it
/// best; ties go to the order given. `None` when no split fits.
pub fn balanced(fit: &Fit<'_>, teams: &[Team<'_>]) -> Option<Vec<Rank>> {
    // Without limits the order of equal machines would not matter; none can do better than this.
    let boundless: Vec<Team<'_>> = teams
        .iter()
        .map(|team| Team {
            seats: team.seats.iter().map(|seat| Seat { free: u64::MAX, ..seat.clone() }).collect(),
        })
        .collect();
    let mut machines = teams.iter().flat_map(|team| &team.seats).map(|seat| seat.machine);
    let first = machines.next();
    let equal = machines.all(|machine| Some(machine) == first);
    let floor = cut(fit, &boundless.iter().collect::<Vec<_>>()).filter(|_| equal).map(|(cost, _)| cost);
    let mut best: Option<(u128, Vec<&Team<'_>>, Vec<u32>)> = None;
    let kinds = kinds(teams);
    let mut seen = BTreeSet::new();
    for order in orders(teams) {
        // Equal teams in each other's place take as long.
        if !seen.insert(order.iter().map(|place| kinds[*place]).collect::<Vec<_>>()) {
            continue;
        }
        let order: Vec<&Team<'_>> = order.iter().map(|place| &teams[*place]).collect();
        let Some((cost, layers)) = cut(fit, &order) else { continue };
        if best.as_ref().is_none_or(|(least, _, _)| cost < *least) {
            best = Some((cost, order, layers));
        }
        if Some(cost) == floor {
            break;
        }
    }
    let (_, order, layers) = best?;
    let parts = parts(fit, &layers);
    let ranks = order
        .iter()
        .zip(parts)
        .map(|(team, (range, embedding, head))| team.ranks(fit, range, embedding, head));
    Some(ranks.collect::<Option<Vec<_>>>()?.concat())
}

/// The ranks of a split with exactly these layers on each stage: the stage that needs most gets the
/// team with most, and where one does not fit its numbers are the ones to change.
pub fn explicit(fit: &Fit<'_>, teams: &[Team<'_>], layers: &[u32]) -> Result<Vec<Rank>, Note> {
    let parts = parts(fit, layers);
    let size = teams.first().map_or(1, Team::size);
    let need = |stage: usize| {
        let (range, embedding, head) = parts[stage].clone();
        fit.share(range, embedding, head, size).total()
    };
    let mut by_need: Vec<usize> = (0..parts.len()).collect();
    by_need.sort_by_key(|&stage| (Reverse(need(stage)), stage));
    let mut by_room: Vec<&Team<'_>> = teams.iter().collect();
    by_room.sort_by_key(|team| (Reverse(team.least()), team.name()));
    let mut ranks = vec![Vec::new(); parts.len()];
    for (&stage, team) in by_need.iter().zip(by_room) {
        let (range, embedding, head) = parts[stage].clone();
        match team.ranks(fit, range, embedding, head) {
            Some(members) => ranks[stage] = members,
            None => {
                let tightest = team.seats.iter().min_by_key(|seat| seat.free);
                let draft = fit.draft().filter(|_| stage == 0);
                let what = match (size, draft) {
                    (1, Some(draft)) => {
                        format!("rank 0 with {} layers and the draft model {}", layers[stage], draft.model)
                    }
                    (1, None) => format!("rank {stage} with {} layers", layers[stage]),
                    _ => format!("a member of stage {stage} with 1/{size} of {} layers", layers[stage]),
                };
                return Err(Note::TooSmall {
                    node: tightest.map_or("", |seat| seat.node).to_owned(),
                    what,
                    needed: need(stage),
                    free: tightest.map_or(0, |seat| seat.free),
                    limit: tightest.map_or(0, |seat| seat.limit),
                });
            }
        }
    }
    Ok(ranks.concat())
}

/// Why no split over these teams fits: every split of the same size needs at least this much, as each
/// rank brings its own engine.
pub fn together(fit: &Fit<'_>, teams: &[Team<'_>]) -> Note {
    let size = teams.first().map_or(1, Team::size);
    let all = 0..fit.layers();
    let others = fit.share(all.clone(), true, false, size).total().saturating_mul(u64::from(size) - 1);
    let first = fit.share(all, true, true, size).total();
    let engines = fit
        .share(0..0, false, false, size)
        .overhead
        .saturating_mul(u64::from(size) * (teams.len() as u64 - 1));
    let seats = || teams.iter().flat_map(|team| &team.seats);
    Note::Together {
        nodes: seats().map(|seat| seat.node.to_owned()).collect(),
        needed: first.saturating_add(others).saturating_add(engines),
        free: seats().fold(0, |sum, seat| sum.saturating_add(seat.free)),
    }
}

/// The best seats: first the nodes without a replica of the same deployment when they are to
/// `spread`, then simply the largest.
pub fn largest<'a>(seats: &[Seat<'a>], count: usize, spread: bool) -> Vec<Seat<'a>> {
    let mut chosen = preferred(seats, spread);
    chosen.truncate(count);
    chosen.sort_by_key(|seat| seat.node);
    chosen
}

/// Whether to spread, in the order of trying: where nodes have equally many replicas of the same deployment,
/// there is nothing to spread over.
pub fn turns(seats: &[Seat<'_>]) -> &'static [bool] {
    let mut siblings = seats.iter().map(|seat| seat.siblings);
    let first = siblings.next();
    if siblings.all(|others| Some(others) == first) { &[true] } else { &[true, false] }
}

/// Seats, the best first.
pub fn preferred<'a>(seats: &[Seat<'a>], spread: bool) -> Vec<Seat<'a>> {
    let mut chosen = seats.to_vec();
    chosen.sort_by_key(|seat| (if spread { seat.siblings } else { 0 }, Reverse(seat.free), seat.node));
    chosen
}

/// Layers of every stage, with whether it embeds and whether it holds the head.
fn parts(fit: &Fit<'_>, layers: &[u32]) -> Vec<(Range<u32>, bool, bool)> {
    let mut end = fit.layers();
    let mut parts = Vec::new();
    for (stage, &count) in layers.iter().enumerate() {
        let start = end.saturating_sub(count);
        parts.push((start..end, stage + 1 == layers.len(), stage == 0));
        end = start;
    }
    parts
}

/// Of every team the first one that is like it: with as much free on the same machines.
fn kinds(teams: &[Team<'_>]) -> Vec<usize> {
    let like = |a: &Team<'_>, b: &Team<'_>| {
        let mut pairs = a.seats.iter().zip(&b.seats);
        a.size() == b.size() && pairs.all(|(a, b)| (a.free, a.machine) == (b.free, b.machine))
    };
    let first = |(at, team): (usize, &Team<'_>)| teams.iter().position(|one| like(one, team)).unwrap_or(at);
    teams.iter().enumerate().map(first).collect()
}

/// Orders worth trying, rank 0's team first, the order given before all others.
fn orders(teams: &[Team<'_>]) -> Vec<Vec<usize>> {
    let given: Vec<usize> = (0..teams.len()).collect();
    let count = given.len();
    let mut orders = vec![given.clone()];
    if count <= ALL_ORDERS {
        permute(&given, &mut Vec::new(), &mut orders);
    } else {
        let mut sorted = given;
        sorted.sort_by_key(|at| (Reverse(teams[*at].least()), teams[*at].name()));
        let ends: Vec<(usize, usize)> = if count <= ALL_ENDS {
            (0..count)
                .flat_map(|first| (0..count).map(move |last| (first, last)))
                .filter(|(a, b)| a != b)
                .collect()
        } else {
            // The two largest, either way round, carry head and embedding.
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

/// Layers per stage for teams in this order, within each node's memory, with the least sum of
/// squared times; `None` when no cut fits. Squares make the slowest stage as fast as it can be
/// without leaving the others uneven.
///
/// Stage by stage: `least[end]` is the least cost of putting the first `end` layers on the stages so
/// far; every stage takes at least one layer.
fn cut(fit: &Fit<'_>, order: &[&Team<'_>]) -> Option<(u128, Vec<u32>)> {
    let layers = fit.layers() as usize;
    let size = order.len();
    if size == 0 || size > layers {
        return None;
    }
    let mut least: Vec<Option<u128>> = vec![None; layers + 1];
    least[0] = Some(0);
    let mut starts: Vec<Vec<usize>> = Vec::new();
    for (stage, team) in order.iter().rev().enumerate() {
        let (embedding, head) = (stage == 0, stage + 1 == size);
        let mut next: Vec<Option<u128>> = vec![None; layers + 1];
        let mut from = vec![0; layers + 1];
        // Every later stage still needs a layer.
        let last_end = layers - (size - 1 - stage);
        for end in stage + 1..=last_end {
            if head && end != layers {
                continue;
            }
            // Taking more layers only needs more memory: stop at the first start that does not fit.
            for start in (stage..end).rev() {
                let range = start as u32..end as u32;
                if !team.holds(fit, range.clone(), embedding, head) {
                    break;
                }
                let Some(before) = least[start] else { continue };
                let time = u128::from(team.time(fit, range, head));
                let cost = before.saturating_add(time.saturating_mul(time));
                if next[end].is_none_or(|known| cost < known) {
                    next[end] = Some(cost);
                    from[end] = start;
                }
            }
        }
        least = next;
        starts.push(from);
    }
    let cost = least[layers]?;
    let mut end = layers;
    let mut counts = Vec::new();
    for from in starts.iter().rev() {
        counts.push((end - from[end]) as u32);
        end = from[end];
    }
    Some((cost, counts))
}
