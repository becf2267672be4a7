//! Every layer cut over the ranks of a team: which nodes form the teams, and how their members meet.
//! One team alone is a tensor group; several are the stages of `hybrid`.

use std::cmp::Reverse;

use russet_crds::{Backend, BackendChoice};

use super::stages::{Team, largest, preferred};
use super::{Candidate, Seat, hybrid};
use crate::fabric::{self, Fabric, MESH_RANKS};
use crate::fit::Fit;
use crate::note::Note;

/// Pairs without a cable that a refusal names.
const SHOWN: usize = 3;

/// What carries the sums of teams.
#[derive(Clone, Debug)]
pub struct Meeting<'v> {
    /// What was asked for.
    pub choice: BackendChoice,
    /// Where it was asked for, for people.
    pub asked_at: String,
    /// Whether TCP will not do, because another way would be better than that.
    pub rdma_only: bool,
    /// Whether somebody will read what cables lack; finding out who comes nearest takes long among many nodes.
    pub explain: bool,
    /// The cables nobody uses.
    pub free: Fabric<'v>,
    /// The same and those that come free without anybody's doing, or by this replica's own move; nothing where
    /// none do.
    pub soon: Option<Fabric<'v>>,
}

impl Meeting<'_> {
    /// The backends to try, the best first.
    pub fn backends(&self) -> &'static [Backend] {
        match (self.choice, self.rdma_only) {
            (BackendChoice::Auto, false) => &[Backend::Jaccl, Backend::JacclRing, Backend::Ring],
            (BackendChoice::Auto, true) => &[Backend::Jaccl, Backend::JacclRing],
            (BackendChoice::Jaccl, _) => &[Backend::Jaccl],
            (BackendChoice::JacclRing, _) => &[Backend::JacclRing],
            (BackendChoice::Ring, false) => &[Backend::Ring],
            (BackendChoice::Ring, true) | (BackendChoice::Unknown, _) => &[],
        }
    }
}

/// One tensor group of `size` ranks, or what forbids it. All seats have equal engines.
pub fn candidate(
    fit: &Fit<'_>,
    seats: &[Seat<'_>],
    size: u32,
    meeting: &Meeting<'_>,
) -> Result<Candidate, Note> {
    hybrid::candidate(fit, seats, &hybrid::Cut { stages: 1, size, layers: None }, meeting)
}

/// `count` teams that meet over TCP: the largest nodes, those of about the same size together.
pub fn over_tcp<'a>(seats: &[Seat<'a>], count: usize, size: usize, spread: bool) -> Vec<Team<'a>> {
    let mut chosen = largest(seats, count * size, spread);
    chosen.sort_by_key(|seat| (Reverse(seat.free), seat.node));
    let team = |seats: &[Seat<'a>]| {
        let mut seats = seats.to_vec();
        seats.sort_by_key(|seat| seat.node);
        Team { seats }
    };
    let mut teams: Vec<Team<'a>> = chosen.chunks(size).map(team).collect();
    teams.sort_by_key(Team::name);
    teams
}

/// `count` teams that cables join as `backend` needs it.
pub fn over_cables<'a>(
    fabric: &Fabric<'_>,
    backend: Backend,
    seats: &[Seat<'a>],
    counts: (usize, usize),
    spread: bool,
    good: impl Fn(&Team<'a>) -> bool,
) -> Option<Vec<Team<'a>>> {
    let seats = preferred(seats, spread);
    let places: Vec<usize> = seats.iter().map(|seat| seat.place).collect();
    let good = |members: &[usize]| good(&team(backend, &seats, members));
    let teams = fabric::teams(fabric, backend, &places, counts, good)?;
    let mut teams: Vec<Team<'a>> = teams.iter().map(|members| team(backend, &seats, members)).collect();
    teams.sort_by_key(Team::name);
    Some(teams)
}

/// What cables lack so that `backend` could carry teams, of those that come nearest to it; `None` when
/// no teams are `good`.
pub fn lack<'a>(
    fabric: &Fabric<'_>,
    backend: Backend,
    seats: &[Seat<'a>],
    counts: (usize, usize),
    spread: bool,
    good: impl Fn(&Team<'a>) -> bool,
) -> Option<String> {
    let (count, size) = counts;
    if backend == Backend::Jaccl && size > MESH_RANKS as usize {
        return Some(format!("Jaccl joins at most {MESH_RANKS} ranks, not {size}"));
    }
    let seats = preferred(seats, spread);
    let places: Vec<usize> = seats.iter().map(|seat| seat.place).collect();
    let good = |members: &[usize]| good(&team(backend, &seats, members));
    let nearest = fabric::nearest(fabric, backend, &places, counts, good)?;
    let mut teams: Vec<Team<'a>> = nearest.iter().map(|members| team(backend, &seats, members)).collect();
    teams.sort_by_key(Team::name);
    let pairs = fabric::pairs(backend, size);
    let pairs = teams.iter().flat_map(|team| {
        pairs.iter().map(|&(a, b)| (team.seats[a].node, team.seats[b].node)).collect::<Vec<_>>()
    });
    let mut lacking: Vec<String> =
        pairs.filter(|(a, b)| !fabric.joined(a, b)).map(|(a, b)| fabric.refusal(a, b)).collect();
    let more = lacking.len().saturating_sub(SHOWN);
    lacking.truncate(SHOWN);
    let mut why = lacking.join("; ");
    if more > 0 {
        why.push_str(&format!("; and {more} more"));
    }
    if (count, size) == (1, 2) {
        return Some(why);
    }
    let members = |team: &Team<'_>| team.seats.iter().map(|seat| seat.node).collect::<Vec<_>>().join(", ");
    let joined = if backend == Backend::Jaccl { "a mesh" } else { "a ring" };
    let teams = teams.iter().map(members).collect::<Vec<_>>().join(" | ");
    Some(format!("{teams} come nearest to {joined}, where {why}"))
}

/// Nodes as a team in the order of its ranks.
fn team<'a>(backend: Backend, seats: &[Seat<'a>], members: &[usize]) -> Team<'a> {
    let mut members: Vec<Seat<'a>> = members.iter().map(|&index| seats[index].clone()).collect();
    // A mesh has no order of its own; a ring may only be turned.
    match backend {
        Backend::JacclRing => {
            let first = members.iter().enumerate().min_by_key(|(_, seat)| seat.node);
            let first = first.map_or(0, |(index, _)| index);
            members.rotate_left(first);
        }
        _ => members.sort_by_key(|seat| seat.node),
    }
    Team { seats: members }
}
