//! Tensor parallelism: which nodes form teams that share every layer, and the backend between their members.
//! One team alone is a tensor group; several are the stages of `hybrid`.

use std::cmp::Reverse;

use russet_crds::{Backend, BackendChoice};

use super::stages::{TpTeam, largest, preferred};
use super::{NodeSlot, SplitCandidate, hybrid};
use crate::fabric::{self, Fabric, MAX_MESH_RANKS};
use crate::memory_model::MemoryModel;
use crate::note::Note;

/// Maximum number of unlinked pairs that a refusal names.
const MAX_SHOWN_PAIRS: usize = 3;

/// Transports available for the sums of teams.
#[derive(Clone, Debug)]
pub struct TransportOptions<'v> {
    /// The requested backend.
    pub choice: BackendChoice,
    /// The path of the request, for display.
    pub split_source: String,
    /// Whether TCP is excluded, because another candidate would be better than that.
    pub rdma_only: bool,
    /// Whether to explain missing cables; finding the nearest teams is slow among many nodes.
    pub explain: bool,
    /// The free cables.
    pub free: Fabric<'v>,
    /// The free cables and those being released, or released by this replica's own move; `None` if there are
    /// none.
    pub soon: Option<Fabric<'v>>,
}

impl TransportOptions<'_> {
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

/// One tensor group of `size` ranks, or why there is none. All nodes have equal engines.
pub fn candidate(
    fit: &MemoryModel<'_>,
    slots: &[NodeSlot<'_>],
    size: u32,
    meeting: &TransportOptions<'_>,
) -> Result<SplitCandidate, Note> {
    hybrid::candidate(fit, slots, &hybrid::HybridSplit { stages: 1, size, layers: None }, meeting)
}

/// `count` teams over TCP: the largest nodes, with nodes of about the same size together.
pub fn over_tcp<'a>(slots: &[NodeSlot<'a>], count: usize, size: usize, spread: bool) -> Vec<TpTeam<'a>> {
    let mut chosen = largest(slots, count * size, spread);
    chosen.sort_by_key(|slot| (Reverse(slot.free), slot.node));
    let team = |members: &[NodeSlot<'a>]| {
        let mut slots = members.to_vec();
        slots.sort_by_key(|slot| slot.node);
        TpTeam { slots }
    };
    let mut teams: Vec<TpTeam<'a>> = chosen.chunks(size).map(team).collect();
    teams.sort_by_key(TpTeam::name);
    teams
}

/// `count` teams that are cabled as `backend` needs it.
pub fn over_cables<'a>(
    fabric: &Fabric<'_>,
    backend: Backend,
    slots: &[NodeSlot<'a>],
    counts: (usize, usize),
    spread: bool,
    good: impl Fn(&TpTeam<'a>) -> bool,
) -> Option<Vec<TpTeam<'a>>> {
    let slots = preferred(slots, spread);
    let places: Vec<usize> = slots.iter().map(|slot| slot.index).collect();
    let good = |members: &[usize]| good(&team(backend, &slots, members));
    let teams = fabric::teams(fabric, backend, &places, counts, good)?;
    let mut teams: Vec<TpTeam<'a>> = teams.iter().map(|members| team(backend, &slots, members)).collect();
    teams.sort_by_key(TpTeam::name);
    Some(teams)
}

/// The missing cables of the teams that come nearest to what `backend` needs; `None` if no teams are `good`.
pub fn missing_cables<'a>(
    fabric: &Fabric<'_>,
    backend: Backend,
    slots: &[NodeSlot<'a>],
    counts: (usize, usize),
    spread: bool,
    good: impl Fn(&TpTeam<'a>) -> bool,
) -> Option<String> {
    let (count, size) = counts;
    if backend == Backend::Jaccl && size > MAX_MESH_RANKS as usize {
        return Some(format!("Jaccl joins at most {MAX_MESH_RANKS} ranks, not {size}"));
    }
    let slots = preferred(slots, spread);
    let places: Vec<usize> = slots.iter().map(|slot| slot.index).collect();
    let good = |members: &[usize]| good(&team(backend, &slots, members));
    let nearest = fabric::nearest(fabric, backend, &places, counts, good)?;
    let mut teams: Vec<TpTeam<'a>> = nearest.iter().map(|members| team(backend, &slots, members)).collect();
    teams.sort_by_key(TpTeam::name);
    let pairs = fabric::pairs(backend, size);
    let pairs = teams.iter().flat_map(|team| {
        pairs.iter().map(|&(a, b)| (team.slots[a].node, team.slots[b].node)).collect::<Vec<_>>()
    });
    let mut lacking: Vec<String> =
        pairs.filter(|(a, b)| !fabric.joined(a, b)).map(|(a, b)| fabric.refusal(a, b)).collect();
    let more = lacking.len().saturating_sub(MAX_SHOWN_PAIRS);
    lacking.truncate(MAX_SHOWN_PAIRS);
    let mut why = lacking.join("; ");
    if more > 0 {
        why.push_str(&format!("; and {more} more"));
    }
    if (count, size) == (1, 2) {
        return Some(why);
    }
    let members = |team: &TpTeam<'_>| team.slots.iter().map(|slot| slot.node).collect::<Vec<_>>().join(", ");
    let joined = if backend == Backend::Jaccl { "a mesh" } else { "a ring" };
    let teams = teams.iter().map(members).collect::<Vec<_>>().join(" | ");
    Some(format!("{teams} come nearest to {joined}, where {why}"))
}

/// Nodes as a team in rank order.
fn team<'a>(backend: Backend, slots: &[NodeSlot<'a>], members: &[usize]) -> TpTeam<'a> {
    let mut members: Vec<NodeSlot<'a>> = members.iter().map(|&index| slots[index].clone()).collect();
    // A mesh has no order of its own; a ring may only be rotated.
    match backend {
        Backend::JacclRing => {
            let first = members.iter().enumerate().min_by_key(|(_, slot)| slot.node);
            let first = first.map_or(0, |(index, _)| index);
            members.rotate_left(first);
        }
        _ => members.sort_by_key(|slot| slot.node),
    }
    TpTeam { slots: members }
}
