//! Room for one replica: which nodes are looked at, which split is chosen among those that fit, and
//! what the others lacked.

use std::collections::{BTreeMap, BTreeSet};

use russet_crds::BackendChoice;

use crate::fabric::{self, Fabric, Web};
use crate::fit::Fit;
use crate::note::Note;
use crate::quantity::show;
use crate::shard::tensor::Meeting;
use crate::shard::{Candidate, Seat, hybrid, pipeline, single, tensor};
use crate::snapshot::{Availability, Key, Snapshot};
use crate::validate::{MAX_RANKS, Split, ValidDeployment, shapes};

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

/// Nodes that may share a group: of one area, with the same engine, joined as the area asks.
#[derive(Clone)]
struct Company<'a> {
    build: Option<&'a str>,
    seats: Vec<Seat<'a>>,
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
    let mut seats = Vec::new();
    // Those that can meet others.
    let mut ringed = Vec::new();
    for (name, node) in view.nodes.iter().filter(|(name, _)| want.allows(std::iter::once(name.as_str()))) {
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
            ringed.push((node.engine_build.as_deref(), seat.clone()));
        } else if !matches!(want.split, Split::Single) {
            notes.push(Note::NoRing { node: name.clone() });
        }
        seats.push(seat);
    }
    if seats.is_empty() {
        notes.push(no_nodes(view, want));
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
    if want.split == Split::Single {
        return Err(notes);
    }
    let companies = companies(view, want, &ringed, &mut notes);
    // Engines of an older release know nothing of tensor groups and would hold whole layers.
    let mut cutting = companies.clone();
    for company in &mut cutting {
        company.seats.retain(|seat| view.nodes.get(seat.node).is_some_and(|node| node.cuts_layers));
    }
    cutting.retain(|company| !company.seats.is_empty());
    let mut meeting = meeting(view, want, replica, count_unreleased, without);
    match &want.split {
        Split::Auto => {
            meeting.rdma_only = true;
            if let Some(decided) = auto_tensor(want, fit, &cutting, &meeting, &notes) {
                return decided;
            }
            several(want, fit, &companies, &meeting, notes)
        }
        Split::Tensor(_) | Split::Hybrid(_) => {
            for (_, seat) in &ringed {
                if let Some(node) = view.nodes.get(seat.node).filter(|node| !node.cuts_layers) {
                    notes.push(Note::NoTensor {
                        node: seat.node.to_owned(),
                        build: node.engine_build.clone(),
                    });
                }
            }
            several(want, fit, &cutting, &meeting, notes)
        }
        _ => several(want, fit, &companies, &meeting, notes),
    }
}

fn no_nodes(view: &Snapshot, want: &ValidDeployment) -> Note {
    let pools = want.pools();
    if pools.is_empty() {
        return Note::NoNodes;
    }
    let nodes = view.nodes.keys().filter(|name| want.allows(std::iter::once(name.as_str()))).count();
    Note::NoNodesInPools { pools, nodes }
}

/// Who may share a group with whom; the notes say which nodes an area keeps apart.
fn companies<'a>(
    view: &Snapshot,
    want: &ValidDeployment,
    ringed: &[(Option<&'a str>, Seat<'a>)],
    notes: &mut Vec<Note>,
) -> Vec<Company<'a>> {
    // Ranks of one group need equal engines.
    let mut builds: BTreeMap<Option<&str>, Vec<&Seat<'a>>> = BTreeMap::new();
    for (build, seat) in ringed {
        builds.entry(*build).or_default().push(seat);
    }
    let mut companies = Vec::new();
    for area in &want.areas {
        let web = area.demand.map(|demand| (demand, Web::new(&view.nodes)));
        for (build, seats) in &builds {
            let seats: Vec<Seat<'a>> =
                seats.iter().filter(|seat| area.holds(seat.node)).map(|seat| (*seat).clone()).collect();
            let Some((demand, web)) = &web else {
                companies.push(Company { build: *build, seats });
                continue;
            };
            let names: Vec<&str> = seats.iter().map(|seat| seat.node).collect();
            for domain in web.domains(&names, *demand) {
                let seats = seats.iter().filter(|seat| domain.contains(&seat.node)).cloned().collect();
                companies.push(Company { build: *build, seats });
            }
            let why = web.lacking(&names, *demand);
            if !why.is_empty() {
                notes.push(Note::Apart { asks: area.asks.join(" and "), demand: *demand, why });
            }
        }
    }
    companies.retain(|company| !company.seats.is_empty());
    companies
}

/// The cables, without those in use.
fn meeting<'v>(
    view: &'v Snapshot,
    want: &ValidDeployment,
    replica: i32,
    count_unreleased: bool,
    without: impl Fn(&Key) -> bool,
) -> Meeting<'v> {
    let (mut lasting, mut passing) = (BTreeMap::new(), BTreeMap::new());
    for (key, group) in view.groups.iter().filter(|(key, _)| !without(key)) {
        let own = key.0 == want.namespace && group.deployment == want.name && group.replica == replica;
        let taken = if group.deleting || own { &mut passing } else { &mut lasting };
        for (node, device) in fabric::ports(&group.plan) {
            taken.insert((node.to_owned(), device.to_owned()), format!("ShardGroup {}", key.1));
        }
    }
    for (name, node) in view.nodes.iter().filter(|(_, node)| count_unreleased && node.unreleased > 0) {
        for device in node.links.iter().filter_map(|link| link.rdma_device.clone()) {
            // Which ports an engine without a group still holds, nobody knows.
            passing.insert((name.clone(), device), "an engine its agent has not released".to_owned());
        }
    }
    passing.extend(lasting.clone());
    Meeting {
        choice: want.backend,
        asked_at: want.asked_at.clone(),
        rdma_only: false,
        free: Fabric::new(&view.nodes, passing),
        soon: Fabric::new(&view.nodes, lasting),
    }
}

/// Without being asked a tensor group is only taken over RDMA: sums over TCP cost more than they win.
fn auto_tensor(
    want: &ValidDeployment,
    fit: &Fit<'_>,
    companies: &[Company<'_>],
    meeting: &Meeting<'_>,
    notes: &[Note],
) -> Option<Result<Choice, Vec<Note>>> {
    if want.backend != BackendChoice::Auto {
        return None;
    }
    for size in want.shape.tensor_sizes().into_iter().filter(|&size| size > 1) {
        let results = companies.iter().map(|company| tensor::candidate(fit, &company.seats, size, meeting));
        let (found, refusals) = sorted(results);
        if let Some(choice) = choice(found, notes, || {
            format!(
                "no single node holds the model's {}; these are the fewest that do and meet over RDMA, where a tensor group answers sooner than a pipeline",
                show(fit.whole().total())
            )
        }) {
            return Some(Ok(choice));
        }
        if refusals.iter().any(|note| matches!(note, Note::PortsBusy { .. })) {
            return Some(Err(refusals));
        }
    }
    None
}

/// Candidates, the best first, and what refused the others.
fn sorted(results: impl Iterator<Item = Result<Candidate, Note>>) -> (Vec<Candidate>, Vec<Note>) {
    let (mut found, mut refusals) = (Vec::new(), Vec::new());
    for result in results {
        match result {
            Ok(candidate) => found.push(candidate),
            Err(note) => refusals.push(note),
        }
    }
    found
        .sort_by_key(|candidate| (candidate.siblings, std::cmp::Reverse(candidate.left()), candidate.show()));
    (found, refusals)
}

fn choice(found: Vec<Candidate>, notes: &[Note], why: impl FnOnce() -> String) -> Option<Choice> {
    let (candidate, rest) = found.split_first()?;
    let shown = rest.iter().map(Candidate::show);
    let others = shown.chain(notes.iter().map(ToString::to_string)).take(SHOWN).collect();
    Some(Choice { candidate: candidate.clone(), why: why(), others })
}

/// Stages and their members worth trying, the fewest ranks first. More ranks than there are nodes are
/// tried only where nothing less was asked for, to have the refusal.
fn sizes(want: &ValidDeployment, most: u32) -> Vec<(u32, u32)> {
    let all: Vec<(u32, u32)> = match &want.split {
        Split::Single => Vec::new(),
        // Trying all sizes up to the number of nodes is cheap: a size that cannot hold it fails fast.
        Split::Auto | Split::Pipeline => {
            (2..=most.min(want.shape.layers).clamp(2, MAX_RANKS)).map(|stages| (stages, 1)).collect()
        }
        Split::Ranks(ranks) => vec![(*ranks, 1)],
        Split::Layers(layers) => vec![(layers.len() as u32, 1)],
        Split::Tensor(Some(size)) => vec![(1, *size)],
        Split::Tensor(None) => {
            want.shape.tensor_sizes().into_iter().filter(|&size| size > 1).map(|size| (1, size)).collect()
        }
        Split::Hybrid(hybrid) => shapes(hybrid, &want.shape),
    };
    let fitting: Vec<(u32, u32)> =
        all.iter().copied().filter(|(stages, size)| stages * size <= most).collect();
    if fitting.is_empty() { all.into_iter().take(1).collect() } else { fitting }
}

fn several(
    want: &ValidDeployment,
    fit: &Fit<'_>,
    companies: &[Company<'_>],
    meeting: &Meeting<'_>,
    mut notes: Vec<Note>,
) -> Result<Choice, Vec<Note>> {
    let most = companies.iter().map(|company| company.seats.len()).max().unwrap_or(0);
    let mut refusals = Vec::new();
    for (stages, size) in sizes(want, most as u32) {
        let results = companies.iter().map(|Company { seats, .. }| match &want.split {
            Split::Layers(layers) => pipeline::explicit(fit, seats, layers),
            Split::Tensor(_) => tensor::candidate(fit, seats, size, meeting),
            Split::Hybrid(wanted) => {
                let cut = hybrid::Cut { stages, size, layers: wanted.layers.as_deref() };
                hybrid::candidate(fit, seats, &cut, meeting)
            }
            _ => pipeline::balanced(fit, seats, stages),
        });
        let (found, refused) = sorted(results);
        refusals = refused;
        if let Some(choice) = choice(found, &notes, || why(want, fit)) {
            return Ok(choice);
        }
        if refusals.iter().any(|note| matches!(note, Note::PortsBusy { .. })) {
            break;
        }
        if companies.is_empty() && !notes.iter().any(|note| matches!(note, Note::Apart { .. })) {
            refusals.push(Note::TooFewNodes { ranks: stages * size, nodes: 0 });
        }
    }
    // Only Auto tries sizes it was not asked for; that one node is not two is then no news.
    let asked = !matches!(want.split, Split::Auto);
    if asked || !refusals.iter().all(|note| matches!(note, Note::TooFewNodes { .. })) {
        notes.extend(refusals);
    }
    let mut builds: BTreeMap<Option<&str>, BTreeSet<&str>> = BTreeMap::new();
    for company in companies {
        builds.entry(company.build).or_default().extend(company.seats.iter().map(|seat| seat.node));
    }
    if builds.len() > 1 {
        let name = |build: &Option<&str>| build.unwrap_or("an unknown build").to_owned();
        let names = |nodes: &BTreeSet<&str>| nodes.iter().map(|node| (*node).to_owned()).collect();
        let builds = builds.iter().map(|(build, nodes)| (name(build), names(nodes))).collect();
        notes.push(Note::Builds { builds });
    }
    Err(notes)
}

fn why(want: &ValidDeployment, fit: &Fit<'_>) -> String {
    let at = &want.asked_at;
    match &want.split {
        Split::Auto | Split::Single => format!(
            "no single node holds the model's {}; these are the fewest that do",
            show(fit.whole().total())
        ),
        Split::Pipeline => {
            format!("{at}.mode asks for a pipeline; these are the fewest nodes that hold it")
        }
        Split::Ranks(ranks) => format!(
            "{at}.ranks asks for {ranks}; layers are balanced by the bytes each rank reads for a token"
        ),
        Split::Layers(_) => format!("{at}.layersPerRank asks for exactly this split"),
        Split::Tensor(Some(size)) => {
            format!("{at} asks for a tensor group of {size}; every rank holds 1/{size} of every layer")
        }
        Split::Tensor(None) => {
            format!("{at}.mode asks for a tensor group; these are the fewest nodes that hold it")
        }
        Split::Hybrid(_) => {
            format!("{at} asks for stages of tensor groups; these are the fewest nodes that hold them")
        }
    }
}
