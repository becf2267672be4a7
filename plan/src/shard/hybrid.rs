//! A pipeline of tensor groups: every stage is a team of as many nodes, which share its layers. With
//! one stage it is a tensor group.

use russet_crds::Backend;

use super::stages::{self, Team};
use super::tensor::{Meeting, lack, over_cables, over_tcp};
use super::{Candidate, Rank, Seat, backend_words};
use crate::fabric::Fabric;
use crate::fit::Fit;
use crate::note::Note;

/// The split wanted.
#[derive(Clone, Debug)]
pub struct Cut<'s> {
    /// Teams.
    pub stages: u32,
    /// Members of each.
    pub size: u32,
    /// Layers of each, when they are prescribed.
    pub layers: Option<&'s [u32]>,
}

impl Cut<'_> {
    fn counts(&self) -> (usize, usize) {
        (self.stages as usize, self.size as usize)
    }

    fn too_few(&self, seats: &[Seat<'_>]) -> Note {
        Note::TooFewNodes { ranks: self.stages * self.size, nodes: seats.len() }
    }

    fn ranks(&self, fit: &Fit<'_>, teams: &[Team<'_>]) -> Result<Vec<Rank>, Note> {
        match (self.layers, self.stages) {
            (Some(layers), _) => stages::explicit(fit, teams, layers),
            (None, 1) => stages::explicit(fit, teams, &[fit.layers()]),
            (None, _) => stages::balanced(fit, teams).ok_or_else(|| stages::together(fit, teams)),
        }
    }
}

/// The best such split over the best backend, or what forbids it. All seats have equal engines.
pub fn candidate(
    fit: &Fit<'_>,
    seats: &[Seat<'_>],
    cut: &Cut<'_>,
    meeting: &Meeting<'_>,
) -> Result<Candidate, Note> {
    let ranks = cut.stages * cut.size;
    let mut refusal = cut.too_few(seats);
    if seats.len() < ranks as usize || ranks == 0 || cut.stages > fit.layers() {
        return Err(refusal);
    }
    let mut passed_over = None;
    for &backend in meeting.backends() {
        refusal = match backend {
            Backend::Ring => match tcp(fit, seats, cut) {
                Ok((ranks, siblings)) => {
                    let asked = || format!("{}.backend asks for it", meeting.asked_at);
                    let why = passed_over.unwrap_or_else(asked);
                    return Ok(made(ranks, siblings, cut.size, backend, why));
                }
                Err(note) => note,
            },
            _ => {
                let note = match cabled(fit, seats, cut, backend, &meeting.free) {
                    Ok(candidate) => return Ok(candidate),
                    Err(note) => note,
                };
                let soon = meeting.soon.as_ref().map(|soon| cabled(fit, seats, cut, backend, soon));
                if let Some(Ok(candidate)) = soon {
                    // Over TCP it would run at once, and stay slow for as long as it lives.
                    let why = in_use(&candidate, &meeting.free);
                    return Err(Note::PortsBusy { backend: backend_words(backend), why });
                }
                let note = note.unwrap_or_else(|| match meeting.explain {
                    true => lacking(fit, seats, cut, backend, &meeting.free),
                    false => cut.too_few(seats),
                });
                passed_over.get_or_insert_with(|| match &note {
                    Note::Links { why, .. } | Note::PortsTaken { why, .. } => why.clone(),
                    other => other.to_string(),
                });
                note
            }
        };
    }
    Err(refusal)
}

fn tcp(fit: &Fit<'_>, seats: &[Seat<'_>], cut: &Cut<'_>) -> Result<(Vec<Rank>, usize), Note> {
    let teams = |spread| over_tcp(seats, cut.stages as usize, cut.size as usize, spread);
    let spread = teams(true);
    match cut.ranks(fit, &spread) {
        Ok(ranks) => Ok((ranks, siblings(&spread))),
        Err(_) => {
            let largest = teams(false);
            Ok((cut.ranks(fit, &largest)?, siblings(&largest)))
        }
    }
}

/// What a team of several holds is not known before the layers are cut.
fn good(fit: &Fit<'_>, cut: &Cut<'_>, team: &Team<'_>) -> bool {
    cut.stages > 1 || team.holds(fit, 0..fit.layers(), true, true)
}

/// The split over cabled teams, or what forbids it to those that are cabled; nothing where none are.
fn cabled(
    fit: &Fit<'_>,
    seats: &[Seat<'_>],
    cut: &Cut<'_>,
    backend: Backend,
    fabric: &Fabric<'_>,
) -> Result<Candidate, Option<Note>> {
    let mut refusal = None;
    for &spread in stages::turns(seats) {
        let Some(teams) =
            over_cables(fabric, backend, seats, cut.counts(), spread, |team| good(fit, cut, team))
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
            let matrix = matrix.map_err(|why| Note::Links { backend, why })?;
            wires = matrix.iter().flatten().map(Vec::len).max().unwrap_or(0);
            for (rank, row) in members.iter_mut().zip(matrix) {
                rank.rdma_devices = row;
            }
        }
        let why = match backend {
            Backend::Jaccl => "an RDMA cable joins every two members".to_owned(),
            _ => format!("RDMA joins neighbours, {wires} to each"),
        };
        return Ok(made(ranks, siblings(&teams), cut.size, backend, why));
    }
    Err(refusal)
}

/// Why no teams are cabled: others use the cables, cables lack, or no team would hold it however cabled.
fn lacking(fit: &Fit<'_>, seats: &[Seat<'_>], cut: &Cut<'_>, backend: Backend, fabric: &Fabric<'_>) -> Note {
    if let Some(Ok(candidate)) = fabric.whole().map(|all| cabled(fit, seats, cut, backend, &all)) {
        return Note::PortsTaken { backend: backend_words(backend), why: in_use(&candidate, fabric) };
    }
    // The search is short: where many nodes without siblings hold nothing, it ends before it meets others.
    let why = stages::turns(seats)
        .iter()
        .find_map(|&spread| lack(fabric, backend, seats, cut.counts(), spread, |team| good(fit, cut, team)));
    match why {
        Some(why) => Note::Links { backend, why },
        None => tcp(fit, seats, cut).err().unwrap_or(cut.too_few(seats)),
    }
}

/// Which port this candidate lacks, and who uses it.
fn in_use(candidate: &Candidate, free: &Fabric<'_>) -> String {
    let nodes: Vec<&str> = candidate.ranks.iter().map(|rank| rank.node.as_str()).collect();
    let pairs =
        nodes.iter().enumerate().flat_map(|(index, a)| nodes[index + 1..].iter().map(move |b| (*a, *b)));
    let mut lacking = pairs.filter(|(a, b)| !free.joined(a, b)).map(|(a, b)| free.lack(a, b));
    // The first pair may never have been joined; the one whose port is taken says who has it.
    let first = lacking.next().unwrap_or_default();
    let why = std::iter::once(first.clone()).chain(lacking).find(|why| why.contains(" is in use by "));
    why.unwrap_or(first)
}

fn siblings(teams: &[Team<'_>]) -> usize {
    teams.iter().flat_map(|team| &team.seats).map(|seat| seat.siblings).sum()
}

fn made(ranks: Vec<Rank>, siblings: usize, tensor_size: u32, backend: Backend, why: String) -> Candidate {
    Candidate { ranks, siblings, tensor_size, backend, why_backend: Some(why) }
}
