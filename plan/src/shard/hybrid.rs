//! Hybrid splits: a pipeline of tensor groups of equal size. With one stage it is a plain tensor group.

use russet_crds::Backend;

use super::stages::{self, TpTeam};
use super::tensor::{TransportOptions, missing_cables, over_cables, over_tcp};
use super::{NodeSlot, RankAssignment, SplitCandidate, backend_label};
use crate::fabric::Fabric;
use crate::memory_model::MemoryModel;
use crate::note::Note;

/// The requested split.
#[derive(Clone, Debug)]
pub struct HybridSplit<'s> {
    /// Number of stages.
    pub stages: u32,
    /// Ranks per stage.
    pub size: u32,
    /// Layers per stage, if prescribed.
    pub layers: Option<&'s [u32]>,
}

impl HybridSplit<'_> {
    fn counts(&self) -> (usize, usize) {
        (self.stages as usize, self.size as usize)
    }

    fn too_few_nodes(&self, slots: &[NodeSlot<'_>]) -> Note {
        Note::TooFewNodes { ranks: self.stages * self.size, nodes: slots.len() }
    }

    fn ranks(&self, fit: &MemoryModel<'_>, teams: &[TpTeam<'_>]) -> Result<Vec<RankAssignment>, Note> {
        match (self.layers, self.stages) {
            (Some(layers), _) => stages::explicit(fit, teams, layers),
            (None, 1) => stages::explicit(fit, teams, &[fit.layers()]),
            (None, _) => stages::balanced(fit, teams),
        }
    }
}

/// The best such split over the best backend, or why there is none. All nodes have equal engines.
pub fn candidate(
    fit: &MemoryModel<'_>,
    slots: &[NodeSlot<'_>],
    cut: &HybridSplit<'_>,
    meeting: &TransportOptions<'_>,
) -> Result<SplitCandidate, Note> {
    let ranks = cut.stages * cut.size;
    let mut refusal = cut.too_few_nodes(slots);
    if slots.len() < ranks as usize || ranks == 0 || cut.stages > fit.max_stages() {
        return Err(refusal);
    }
    let mut passed_over = None;
    for &backend in meeting.backends() {
        refusal = match backend {
            Backend::Ring => match tcp_ranks(fit, slots, cut) {
                Ok((ranks, siblings)) => {
                    let asked = || format!("{}.backend asks for it", meeting.split_source);
                    let why = passed_over.unwrap_or_else(asked);
                    return Ok(build_candidate(ranks, siblings, cut.size, backend, why));
                }
                Err(note) => note,
            },
            _ => {
                let note = match cabled_candidate(fit, slots, cut, backend, &meeting.free) {
                    Ok(candidate) => return Ok(candidate),
                    Err(note) => note,
                };
                let soon = meeting.soon.as_ref().map(|soon| cabled_candidate(fit, slots, cut, backend, soon));
                if let Some(Ok(candidate)) = soon {
                    // Over TCP it would start at once, and stay slow for its lifetime.
                    let why = port_in_use(&candidate, &meeting.free);
                    return Err(Note::PortsBusy { backend: backend_label(backend), why });
                }
                let note = note.unwrap_or_else(|| match meeting.explain {
                    true => missing_cables_note(fit, slots, cut, backend, &meeting.free),
                    false => cut.too_few_nodes(slots),
                });
                passed_over.get_or_insert_with(|| match &note {
                    Note::MissingCables { why, .. } | Note::PortsTaken { why, .. } => why.clone(),
                    other => other.to_string(),
                });
                note
            }
        };
    }
    Err(refusal)
}

fn tcp_ranks(
    fit: &MemoryModel<'_>,
    slots: &[NodeSlot<'_>],
    cut: &HybridSplit<'_>,
) -> Result<(Vec<RankAssignment>, usize), Note> {
    let teams = |spread| over_tcp(slots, cut.stages as usize, cut.size as usize, spread);
    let spread = teams(true);
    match cut.ranks(fit, &spread) {
        Ok(ranks) => Ok((ranks, siblings(&spread))),
        Err(_) => {
            let largest = teams(false);
            Ok((cut.ranks(fit, &largest)?, siblings(&largest)))
        }
    }
}

/// The layers of one of several teams are unknown before the layers are balanced.
fn may_fit(fit: &MemoryModel<'_>, cut: &HybridSplit<'_>, team: &TpTeam<'_>) -> bool {
    cut.stages > 1 || team.fits(fit, 0..fit.layers(), true, true)
}

/// The split over cabled teams, or why they do not hold it; `None` if no teams are cabled.
fn cabled_candidate(
    fit: &MemoryModel<'_>,
    slots: &[NodeSlot<'_>],
    cut: &HybridSplit<'_>,
    backend: Backend,
    fabric: &Fabric<'_>,
) -> Result<SplitCandidate, Option<Note>> {
    let mut refusal = None;
    for &spread in stages::spread_orders(slots) {
        let Some(teams) =
            over_cables(fabric, backend, slots, cut.counts(), spread, |team| may_fit(fit, cut, team))
        else {
            continue;
        };
        let mut ranks = match cut.ranks(fit, &teams) {
            Ok(ranks) => ranks,
            Err(note) => {
                refusal = Some(note);
                continue;
            }
        };
        let mut wires = 0;
        for members in ranks.chunks_mut(cut.size as usize) {
            let names: Vec<&str> = members.iter().map(|rank| rank.node.as_str()).collect();
            let matrix = match backend {
                Backend::Jaccl => fabric.mesh(&names),
                _ => fabric.ring(&names),
            };
            let matrix = matrix.map_err(|why| Note::MissingCables { backend, why })?;
            wires = matrix.iter().flatten().map(Vec::len).max().unwrap_or(0);
            for (rank, row) in members.iter_mut().zip(matrix) {
                rank.rdma_devices = row;
            }
        }
        let why = match backend {
            Backend::Jaccl => "an RDMA cable joins every two members".to_owned(),
            _ => format!("RDMA joins neighbours, {wires} to each"),
        };
        return Ok(build_candidate(ranks, siblings(&teams), cut.size, backend, why));
    }
    Err(refusal)
}

/// Why no teams are cabled: the cables are in use, cables are missing, or no team would hold it however
/// cabled.
fn missing_cables_note(
    fit: &MemoryModel<'_>,
    slots: &[NodeSlot<'_>],
    cut: &HybridSplit<'_>,
    backend: Backend,
    fabric: &Fabric<'_>,
) -> Note {
    if let Some(Ok(candidate)) =
        fabric.ignoring_use().map(|all| cabled_candidate(fit, slots, cut, backend, &all))
    {
        return Note::PortsTaken { backend: backend_label(backend), why: port_in_use(&candidate, fabric) };
    }
    // The search is bounded: many nodes without siblings and memory could exhaust it before it reaches
    // others.
    let why = stages::spread_orders(slots).iter().find_map(|&spread| {
        missing_cables(fabric, backend, slots, cut.counts(), spread, |team| may_fit(fit, cut, team))
    });
    match why {
        Some(why) => Note::MissingCables { backend, why },
        None => tcp_ranks(fit, slots, cut).err().unwrap_or(cut.too_few_nodes(slots)),
    }
}

/// Which port this candidate lacks, and its user.
fn port_in_use(candidate: &SplitCandidate, free: &Fabric<'_>) -> String {
    let nodes: Vec<&str> = candidate.ranks.iter().map(|rank| rank.node.as_str()).collect();
    let pairs =
        nodes.iter().enumerate().flat_map(|(index, a)| nodes[index + 1..].iter().map(move |b| (*a, *b)));
    let mut lacking = pairs.filter(|(a, b)| !free.joined(a, b)).map(|(a, b)| free.missing_link(a, b));
    // The first pair may never have been joined; the pair whose port is in use has the user.
    let first = lacking.next().unwrap_or_default();
    let why = std::iter::once(first.clone()).chain(lacking).find(|why| why.contains(" is in use by "));
    why.unwrap_or(first)
}

fn siblings(teams: &[TpTeam<'_>]) -> usize {
    teams.iter().flat_map(|team| &team.slots).map(|slot| slot.siblings).sum()
}

fn build_candidate(
    ranks: Vec<RankAssignment>,
    siblings: usize,
    tensor_size: u32,
    backend: Backend,
    why: String,
) -> SplitCandidate {
    SplitCandidate { ranks, siblings, tensor_size, backend, backend_reason: Some(why) }
}
