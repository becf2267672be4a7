//! A pipeline of tensor groups: every stage is a team of as many nodes, which share its layers. With
//! one stage it is a tensor group.

use russet_crds::Backend;

use super::stages::{self, Team, preferred};
use super::tensor::{Meeting, over_cables, over_tcp};
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
    let mut refusal = Note::TooFewNodes { ranks, nodes: seats.len() };
    if seats.len() < ranks as usize || ranks == 0 || cut.stages > fit.layers() {
        return Err(refusal);
    }
    let mut passed_over = None;
    for &backend in meeting.backends() {
        refusal = match backend {
            Backend::Ring => match tcp(fit, seats, cut) {
                Ok((ranks, siblings)) => {
                    let why = passed_over.unwrap_or_else(|| "spec.sharding.backend asks for it".to_owned());
                    return Ok(made(ranks, siblings, cut.size, backend, why));
                }
                Err(note) => note,
            },
            _ => {
                if let Some(candidate) = cabled(fit, seats, cut, backend, &meeting.free) {
                    return Ok(candidate);
                }
                if let Some(candidate) = cabled(fit, seats, cut, backend, &meeting.soon) {
                    // Over TCP it would run at once, and stay slow for as long as it lives.
                    return Err(busy(&candidate, &meeting.free));
                }
                let why = lack(seats, cut, backend, &meeting.free);
                passed_over = passed_over.or(why.clone());
                match why {
                    Some(why) => Note::Links { backend, why },
                    None => tcp(fit, seats, cut).err().unwrap_or(refusal),
                }
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

fn cabled(
    fit: &Fit<'_>,
    seats: &[Seat<'_>],
    cut: &Cut<'_>,
    backend: Backend,
    fabric: &Fabric<'_>,
) -> Option<Candidate> {
    let good = |team: &Team<'_>| {
        // What a team of several holds is not known before the layers are cut.
        cut.stages > 1 || team.holds(fit, 0..fit.layers(), true, true)
    };
    for spread in [true, false] {
        let counts = (cut.stages as usize, cut.size as usize);
        let Some(teams) = over_cables(fabric, backend, seats, counts, spread, good) else { continue };
        let Ok(mut ranks) = cut.ranks(fit, &teams) else { continue };
        let mut wires = 0;
        for members in ranks.chunks_mut(cut.size as usize) {
            let names: Vec<&str> = members.iter().map(|rank| rank.node.as_str()).collect();
            let matrix = match backend {
                Backend::Jaccl => fabric.mesh(&names),
                _ => fabric.ring(&names),
            };
            let matrix = matrix.ok()?;
            wires = matrix.iter().flatten().map(Vec::len).max().unwrap_or(0);
            for (rank, row) in members.iter_mut().zip(matrix) {
                rank.rdma_devices = row;
            }
        }
        let why = match backend {
            Backend::Jaccl => "an RDMA cable joins every two members".to_owned(),
            _ => format!("RDMA joins neighbours, {wires} to each"),
        };
        return Some(made(ranks, siblings(&teams), cut.size, backend, why));
    }
    None
}

/// The first pair that lacks a cable among the nodes one would take; `None` when cables are not what
/// is lacking.
fn lack(seats: &[Seat<'_>], cut: &Cut<'_>, backend: Backend, fabric: &Fabric<'_>) -> Option<String> {
    let mut names: Vec<&str> = preferred(seats, true).iter().map(|seat| seat.node).collect();
    names.truncate(cut.size as usize);
    names.sort_unstable();
    match backend {
        Backend::Jaccl => fabric.mesh(&names).err(),
        _ => fabric.ring(&names).err(),
    }
}

fn busy(candidate: &Candidate, free: &Fabric<'_>) -> Note {
    let nodes: Vec<&str> = candidate.ranks.iter().map(|rank| rank.node.as_str()).collect();
    let pairs =
        nodes.iter().enumerate().flat_map(|(index, a)| nodes[index + 1..].iter().map(move |b| (*a, *b)));
    let mut lacking = pairs.filter(|(a, b)| !free.joined(a, b)).map(|(a, b)| free.lack(a, b));
    // The first pair may never have been joined; the one whose port is taken says who has it.
    let first = lacking.next().unwrap_or_default();
    let why = std::iter::once(first.clone()).chain(lacking).find(|why| why.contains(" is in use by "));
    Note::PortsBusy { backend: backend_words(candidate.backend), why: why.unwrap_or(first) }
}

fn siblings(teams: &[Team<'_>]) -> usize {
    teams.iter().flat_map(|team| &team.seats).map(|seat| seat.siblings).sum()
}

fn made(ranks: Vec<Rank>, siblings: usize, tensor_size: u32, backend: Backend, why: String) -> Candidate {
    Candidate { ranks, siblings, tensor_size, backend, why_backend: Some(why) }
}
