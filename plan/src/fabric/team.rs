//! Teams: disjoint sets of nodes that cables join as one backend needs it.

use russet_crds::Backend;

use super::{Fabric, MESH_RANKS};

/// Steps of the search. Nodes have few ports, so a search is short; this bounds one that a strange
/// report of thousands of links would make long.
const STEPS: u32 = 20_000;

/// `count` teams of `size` nodes each out of `nodes`, joined as `backend` needs it; nodes that stand
/// first are preferred, and every team must be `good`. The order within a team is the order of its ring.
pub fn teams(
    fabric: &Fabric<'_>,
    backend: Backend,
    nodes: &[&str],
    count: usize,
    size: usize,
    good: impl Fn(&[usize]) -> bool,
) -> Option<Vec<Vec<usize>>> {
    let possible = match backend {
        Backend::Jaccl => size >= 2 && size <= MESH_RANKS as usize,
        Backend::JacclRing => size >= 2,
        Backend::None | Backend::Ring | Backend::Unknown => false,
    };
    if !possible {
        return None;
    }
    let mut search =
        Search { fabric, mesh: backend == Backend::Jaccl, nodes, size, good: &good, steps: STEPS };
    search.split((0..nodes.len()).collect(), count)
}

struct Search<'s, 'a> {
    fabric: &'s Fabric<'a>,
    mesh: bool,
    nodes: &'s [&'s str],
    size: usize,
    good: &'s dyn Fn(&[usize]) -> bool,
    steps: u32,
}

impl Search<'_, '_> {
    /// The first of what is left leads a team or is left out.
    fn split(&mut self, left: Vec<usize>, count: usize) -> Option<Vec<Vec<usize>>> {
        if count == 0 {
            return Some(Vec::new());
        }
        if left.len() < count * self.size {
            return None;
        }
        let (first, rest) = left.split_first()?;
        let mut found = Vec::new();
        self.grow(&mut vec![*first], rest, &mut found);
        for team in found {
            let others = rest.iter().copied().filter(|node| !team.contains(node)).collect();
            if let Some(mut teams) = self.split(others, count - 1) {
                teams.insert(0, team);
                return Some(teams);
            }
        }
        self.split(rest.to_vec(), count)
    }

    fn grow(&mut self, team: &mut Vec<usize>, rest: &[usize], found: &mut Vec<Vec<usize>>) {
        if team.len() == self.size {
            let closed = self.mesh || self.joined(team[self.size - 1], team[0]);
            if closed && (self.good)(team) {
                found.push(team.clone());
            }
            return;
        }
        for (index, &next) in rest.iter().enumerate() {
            if self.steps == 0 {
                return;
            }
            self.steps -= 1;
            let fits = match self.mesh {
                true => team.iter().all(|&member| self.joined(member, next)),
                false => team.last().is_some_and(|&last| self.joined(last, next)),
            };
            if !fits {
                continue;
            }
            team.push(next);
            // A mesh is a set, so only later nodes join it; a ring has an order.
            let others: Vec<usize> = match self.mesh {
                true => rest[index + 1..].to_vec(),
                false => rest.iter().copied().filter(|&node| node != next).collect(),
            };
            self.grow(team, &others, found);
            team.pop();
        }
    }

    fn joined(&self, a: usize, b: usize) -> bool {
        self.fabric.joined(self.nodes[a], self.nodes[b])
    }
}
