//! Teams: disjoint sets of nodes that are cabled as a backend needs it, and the nearest to that.

use russet_crds::Backend;

use super::{Fabric, MAX_MESH_RANKS};

/// Maximum steps of the search. Nodes have few ports, so a search is short; this bounds one over a faulty
/// report of thousands of links.
const MAX_STEPS: u32 = 20_000;
/// Maximum steps of the search for the nearest teams, which cables do not prune. Its first result is usable
/// already.
const MAX_NEAREST_STEPS: u32 = 2_000;

/// `count` teams of `size` nodes each, out of `nodes` (indices in the cluster), cabled as `backend` needs it.
/// Earlier nodes are preferred, and every team must be `good`. The result has indices in `nodes`; the order
/// within a team is the order of its ring.
pub fn teams(
    fabric: &Fabric<'_>,
    backend: Backend,
    nodes: &[usize],
    (count, size): (usize, usize),
    good: impl Fn(&[usize]) -> bool,
) -> Option<Vec<Vec<usize>>> {
    let possible = match backend {
        Backend::Jaccl => size >= 2 && size <= MAX_MESH_RANKS as usize,
        Backend::JacclRing => size >= 2,
        Backend::None | Backend::Ring | Backend::Unknown => false,
    };
    if !possible {
        return None;
    }
    TeamSearch::new(fabric, backend, nodes, size, &good).run(count, 0, MAX_STEPS)
}

/// The same with as few missing cables as possible.
pub fn nearest(
    fabric: &Fabric<'_>,
    backend: Backend,
    nodes: &[usize],
    (count, size): (usize, usize),
    good: impl Fn(&[usize]) -> bool,
) -> Option<Vec<Vec<usize>>> {
    TeamSearch::new(fabric, backend, nodes, size, &good).run(count, usize::MAX, MAX_NEAREST_STEPS)
}

/// Pairs of members that `backend` needs cabled, in a team of `size`.
pub fn pairs(backend: Backend, size: usize) -> Vec<(usize, usize)> {
    if backend == Backend::Jaccl || size < 3 {
        return (0..size).flat_map(|a| (a + 1..size).map(move |b| (a, b))).collect();
    }
    (0..size).map(|a| (a, (a + 1) % size)).collect()
}

struct TeamSearch<'s> {
    fabric: &'s Fabric<'s>,
    mesh: bool,
    nodes: &'s [usize],
    /// Position in `nodes` of each node of the cluster, if any.
    at: Vec<Option<usize>>,
    size: usize,
    good: &'s dyn Fn(&[usize]) -> bool,
    steps: u32,
    /// Maximum number of missing cables; `None` once no better result is possible.
    limit: Option<usize>,
    /// The teams of the partial result.
    teams: Vec<Vec<usize>>,
    best: Option<Vec<Vec<usize>>>,
}

impl<'s> TeamSearch<'s> {
    fn new(
        fabric: &'s Fabric<'s>,
        backend: Backend,
        nodes: &'s [usize],
        size: usize,
        good: &'s dyn Fn(&[usize]) -> bool,
    ) -> Self {
        // A ring of two is a mesh.
        let mesh = backend == Backend::Jaccl || size < 3;
        let mut at = vec![None; nodes.iter().max().map_or(0, |last| last + 1)];
        nodes.iter().enumerate().for_each(|(index, place)| at[*place] = Some(index));
        Self { fabric, mesh, nodes, at, size, good, steps: 0, limit: None, teams: Vec::new(), best: None }
    }

    fn run(mut self, count: usize, limit: usize, steps: u32) -> Option<Vec<Vec<usize>>> {
        (self.limit, self.steps) = (Some(limit), steps);
        let all: Vec<usize> = (0..self.nodes.len()).collect();
        self.split(&all, count, 0);
        self.best
    }

    /// Each remaining node leads a team in turn, with those before it left out.
    fn split(&mut self, left: &[usize], count: usize, lacking: usize) {
        if count == 0 {
            self.best = Some(self.teams.clone());
            self.limit = lacking.checked_sub(1);
            return;
        }
        for (index, &first) in left.iter().enumerate() {
            if left.len() - index < count * self.size {
                return;
            }
            let rest = &left[index + 1..];
            self.grow(&mut vec![first], rest, rest, count, lacking);
        }
    }

    fn grow(&mut self, team: &mut Vec<usize>, next: &[usize], rest: &[usize], count: usize, lacking: usize) {
        if team.len() == self.size {
            let lacking =
                lacking + if self.mesh { 0 } else { self.missing_cables(team[self.size - 1], team[0]) };
            if self.allows(lacking) && (self.good)(team) {
                let others: Vec<usize> = rest.iter().copied().filter(|node| !team.contains(node)).collect();
                self.teams.push(team.clone());
                self.split(&others, count - 1, lacking);
                self.teams.pop();
            }
            return;
        }
        // If no cable may be missing, only nodes joined with the last one can follow.
        let last = team[team.len() - 1];
        let free = |node: &usize| !team.contains(node);
        let next: Vec<usize> = match self.limit {
            Some(limit) if limit == lacking => {
                let near = self.fabric.neighbours(self.nodes[last]);
                let near = near.filter_map(|place| self.at.get(place).copied().flatten());
                let mut near: Vec<usize> =
                    near.filter(|node| next.binary_search(node).is_ok()).filter(free).collect();
                near.sort_unstable();
                near
            }
            _ => next.iter().copied().filter(free).collect(),
        };
        for (index, &node) in next.iter().enumerate() {
            if self.steps == 0 {
                return;
            }
            self.steps -= 1;
            // A mesh joins all members, a ring only neighbours.
            let joins = if self.mesh { &team[..] } else { &team[team.len() - 1..] };
            let lacking =
                lacking + joins.iter().map(|&member| self.missing_cables(member, node)).sum::<usize>();
            if !self.allows(lacking) {
                continue;
            }
            team.push(node);
            // A mesh is a set, so only later nodes are added; a ring has an order.
            match self.mesh {
                true => self.grow(team, &next[index + 1..], rest, count, lacking),
                false => self.grow(team, rest, rest, count, lacking),
            }
            team.pop();
        }
    }

    fn allows(&self, lacking: usize) -> bool {
        self.limit.is_some_and(|limit| lacking <= limit)
    }

    fn missing_cables(&self, a: usize, b: usize) -> usize {
        usize::from(!self.fabric.joins(self.nodes[a], self.nodes[b]))
    }
}
