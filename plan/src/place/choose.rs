//! Room for one replica: which nodes are looked at, which split is chosen among those that fit, and
//! what the others lacked.

use std::collections::BTreeMap;

use crate::fit::Fit;
use crate::note::Note;
use crate::quantity::show;
use crate::shard::{Candidate, Seat, pipeline, single};
use crate::snapshot::{Availability, Key, Snapshot};
use crate::validate::{MAX_RANKS, Split, ValidDeployment};

/// Candidates shown in a report; the schema says the same.
const SHOWN: usize = 5;

/// A choice and what it was chosen from.
pub struct Choice {
    /// The split.
    pub candidate: Candidate,
    /// Why this one.
    pub why: String,
    /// The others, best first, with their numbers.
    pub others: Vec<String>,
}

/// Looks for room for one replica, as if the groups for which `without` is true were gone, and with
/// or without what agents have not released.
pub fn find(
    view: &Snapshot,
    want: &ValidDeployment,
    fit: &Fit<'_>,
    replica: i32,
    count_unreleased: bool,
    without: impl Fn(&Key) -> bool + Copy,
) -> Result<Choice, Vec<Note>> {
    let mut notes = Vec::new();
    // Ranks of one group need equal engines, so pipelines look at one build at a time.
    let mut seats = Vec::new();
    let mut builds: BTreeMap<Option<&str>, Vec<Seat<'_>>> = BTreeMap::new();
    for (name, node) in &view.nodes {
        if node.availability != Availability::Open {
            notes.push(Note::Closed { node: name.clone(), availability: node.availability });
            continue;
        }
        let unreleased = if count_unreleased { 0 } else { node.unreleased };
        let committed = view.committed(name, without).saturating_sub(unreleased);
        let siblings = view
            .groups_of(&want.namespace, &want.name)
            .filter(|(key, group)| group.replica != replica && !without(key))
            .filter(|(_, group)| group.plan.members.iter().any(|member| member.node_name == *name))
            .count();
        let seat = Seat {
            node: name,
            free: node.serving_limit.saturating_sub(committed),
            limit: node.serving_limit,
            siblings,
        };
        if node.backends.is_empty()
            || node.backends.iter().any(|backend| backend.eq_ignore_ascii_case("ring"))
        {
            builds.entry(node.engine_build.as_deref()).or_default().push(seat.clone());
        } else if !matches!(want.split, Split::Single) {
            notes.push(Note::NoRing { node: name.clone() });
        }
        seats.push(seat);
    }
    if seats.is_empty() {
        notes.push(Note::NoNodes);
        return Err(notes);
    }
    if let Split::Auto | Split::Single = want.split {
        let (candidates, too_small) = single::candidates(fit, &seats);
        let shown =
            candidates.iter().skip(1).map(|other| format!("{}, {} left", other.show(), show(other.left())));
        let refused = too_small.iter().map(ToString::to_string);
        let others = shown.chain(refused).take(SHOWN).collect();
        if let Some(candidate) = candidates.first() {
            let why = format!(
                "one node holds the model's {} with {} to spare; the tightest fit keeps larger nodes free",
                show(fit.whole().total()),
                show(candidate.left())
            );
            return Ok(Choice { candidate: candidate.clone(), why, others });
        }
        notes.extend(too_small);
    }
    pipeline_choice(want, fit, &builds, notes)
}

fn pipeline_choice(
    want: &ValidDeployment,
    fit: &Fit<'_>,
    builds: &BTreeMap<Option<&str>, Vec<Seat<'_>>>,
    mut notes: Vec<Note>,
) -> Result<Choice, Vec<Note>> {
    let most = builds.values().map(Vec::len).max().unwrap_or(0);
    let sizes = match &want.split {
        Split::Single => return Err(notes),
        // Trying all sizes up to the number of nodes is cheap: a size that cannot hold it fails fast.
        Split::Auto | Split::Pipeline => 2..=(most as u32).min(fit.layers()).clamp(2, MAX_RANKS),
        Split::Ranks(ranks) => *ranks..=*ranks,
        Split::Layers(layers) => layers.len() as u32..=layers.len() as u32,
    };
    let why = match &want.split {
        Split::Auto | Split::Single => {
            format!(
                "no single node holds the model's {}; these are the fewest that do",
                show(fit.whole().total())
            )
        }
        Split::Pipeline => {
            "spec.sharding.mode asks for a pipeline; these are the fewest nodes that hold it".to_owned()
        }
        Split::Ranks(ranks) => {
            format!(
                "spec.sharding.ranks asks for {ranks}; layers are balanced by the bytes each rank reads for a token"
            )
        }
        Split::Layers(_) => "spec.sharding.layersPerRank asks for exactly this split".to_owned(),
    };
    let mut refusals = Vec::new();
    for ranks in sizes {
        let mut found = Vec::new();
        refusals.clear();
        for seats in builds.values() {
            let result = match &want.split {
                Split::Layers(layers) => pipeline::explicit(fit, seats, layers),
                _ => pipeline::balanced(fit, seats, ranks),
            };
            match result {
                Ok(candidate) => found.push(candidate),
                Err(note) => refusals.push(note),
            }
        }
        found.sort_by_key(|candidate| {
            (candidate.siblings, std::cmp::Reverse(candidate.left()), candidate.show())
        });
        if let Some(candidate) = found.first() {
            let others = found.iter().skip(1).map(Candidate::show);
            let refused = notes.iter().map(ToString::to_string);
            let others = others.chain(refused).take(SHOWN).collect();
            return Ok(Choice { candidate: candidate.clone(), why, others });
        }
        if builds.is_empty() {
            refusals.push(Note::TooFewNodes { ranks, nodes: 0 });
        }
    }
    // Only Auto tries sizes it was not asked for; that one node is not two is then no news.
    if !(matches!(want.split, Split::Auto)
        && refusals.iter().all(|note| matches!(note, Note::TooFewNodes { .. })))
    {
        notes.extend(refusals);
    }
    Err(notes)
}
