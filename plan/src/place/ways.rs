//! Ways to run one replica: which nodes are looked at together, and every split of them worth comparing.
//! Which one wins is decided in `choose`.

use std::collections::{BTreeMap, BTreeSet};

use russet_crds::{Backend, BackendChoice};

use super::spread::Spread;
use super::worth::{Scale, Way};
use crate::copies::Outlook;
use crate::fabric::{self, Fabric, Holder, Taken, Web};
use crate::fit::{Fit, Need};
use crate::forecast::Forecast;
use crate::note::Note;
use crate::shard::tensor::Meeting;
use crate::shard::{Candidate, Rank, Seat, hybrid, pipeline, single, tensor};
use crate::snapshot::{Availability, Key, Snapshot};
use crate::speed::Machine;
use crate::validate::{MAX_RANKS, Split, ValidDeployment, shapes};

/// Sets of nodes tried for one size beyond the largest nodes.
const SETS: usize = 32;
/// Nodes from which on a cluster is large, and looked at less closely.
const MANY: usize = 64;
/// Equal nodes of a large cluster that are looked at.
const EQUAL: usize = 4;
/// Sizes tried, from the smallest that fits. Larger teams may pay, and longer pipelines leave room to others.
const LARGER: usize = 3;

/// What was found for a replica.
#[derive(Debug)]
pub struct Ways {
    /// Every way, in no order; at least one.
    pub found: Vec<Way>,
    /// What could not be used, and why.
    pub notes: Vec<Note>,
}

/// Nodes that may share a group: of one area, with the same engine, joined as the area asks.
#[derive(Clone)]
struct Company<'a> {
    build: Option<&'a str>,
    seats: Vec<Seat<'a>>,
}

/// What all ways of one replica have in common.
struct Look<'a> {
    want: &'a ValidDeployment,
    fit: &'a Fit<'a>,
    forecast: Forecast<'a>,
    /// Squares of what nodes may give, summed.
    gaps: f64,
    /// Sizes of tensor groups that are looked at without being asked for.
    sizes: Vec<u32>,
    /// Where the other replicas are.
    spread: Spread<'a>,
    /// What it costs to have the model's files on a node, where that is known and not nothing.
    fetches: BTreeMap<&'a str, f64>,
}

/// Looks for room for one replica, as if the groups for which `without` is true were gone, and with
/// or without what agents have not released.
pub fn ways(
    view: &Snapshot,
    want: &ValidDeployment,
    fit: &Fit<'_>,
    replica: i32,
    count_unreleased: bool,
    without: impl Fn(&Key) -> bool + Copy,
) -> Result<Ways, Vec<Note>> {
    let mut look = Look {
        want,
        fit,
        forecast: Forecast::new(view, &want.shape, want.room),
        gaps: view.nodes.values().map(|node| square(node.serving_limit)).sum::<f64>().max(1.0),
        sizes: Vec::new(),
        spread: Spread::around(view, want, replica, without),
        fetches: BTreeMap::new(),
    };
    let outlook = Outlook::of(view, &want.namespace, &want.model, without);
    // Any of the nodes may become that of rank 0.
    let draft = want.draft.as_ref().and_then(|draft| {
        let outlook = Outlook::of(view, &want.namespace, &draft.name, without)?;
        Some(outlook.together_with(&want.namespace, &want.model))
    });
    let committed = view.committed(without);
    let others = view
        .groups_of(&want.namespace, &want.name)
        .filter(|(key, group)| group.replica != replica && !without(key));
    let mut siblings: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, group) in others {
        // A node has one rank of a group.
        group.nodes().for_each(|node| *siblings.entry(node).or_default() += 1);
    }
    let mut notes = Vec::new();
    let mut seats = Vec::new();
    // Those that can meet others.
    let mut ringed = Vec::new();
    for (place, (name, node)) in view.nodes.iter().enumerate() {
        if !want.allows(std::iter::once(name.as_str())) {
            continue;
        }
        if node.availability != Availability::Open {
            notes.push(Note::Closed { node: name.clone(), availability: node.availability });
            continue;
        }
        // The engine of an older release would compute as it always did, in memory that was not reserved for that.
        let lacks = |option: &&str| !node.engine_options.iter().any(|known| known == option);
        if let Some(option) = want.options().find(lacks) {
            let build = node.engine_build.clone();
            notes.push(Note::NoOption { node: name.clone(), build, option });
            continue;
        }
        let fetches = [&outlook, &draft].into_iter().flatten().map(|outlook| outlook.fetch(name));
        match fetches.collect::<Result<Vec<f64>, _>>() {
            Ok(fetches) => {
                let most = fetches.into_iter().fold(0.0, f64::max);
                if most > 0.0 {
                    look.fetches.insert(name, most);
                }
            }
            Err(lack) => {
                notes.push(Note::Disk { lack });
                continue;
            }
        }
        let unreleased = if count_unreleased { 0 } else { node.unreleased };
        let committed = committed.get(name.as_str()).copied().unwrap_or(0).saturating_sub(unreleased);
        let seat = Seat {
            node: name,
            place,
            free: node.serving_limit.saturating_sub(committed),
            limit: node.serving_limit,
            siblings: siblings.get(name.as_str()).copied().unwrap_or(0),
            crowd: look.spread.crowd(std::iter::once(name.as_str())),
            cuts_layers: node.cuts_layers,
            machine: node.machine,
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
        if !notes.iter().any(|note| matches!(note, Note::Disk { .. } | Note::NoOption { .. })) {
            notes.push(no_nodes(view, want));
        }
        return Err(notes);
    }
    let mut found = Vec::new();
    if let Split::Auto | Split::Single = want.split {
        let (candidates, too_small) = single::candidates(fit, &look.different_ones(&seats));
        found = look.singles(view, candidates);
        notes.extend(too_small);
    }
    look.sizes = look.worthwhile(&seats, &found);
    let enough = want.split == Split::Auto && !found.is_empty() && look.sizes.is_empty();
    if want.split != Split::Single && !enough {
        look.several(view, &ringed, replica, count_unreleased, without, &mut found, &mut notes);
    }
    if found.is_empty() { Err(notes) } else { Ok(Ways { found, notes }) }
}

fn no_nodes(view: &Snapshot, want: &ValidDeployment) -> Note {
    if let Some((tier, group)) = want.own.clone() {
        return Note::NoOwnNodes { tier, group };
    }
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
    let (mut lasting, mut taken) = (Taken::new(), Taken::new());
    for (key, group) in view.groups.iter().filter(|(key, _)| !without(key)) {
        let own = key.0 == want.namespace && group.deployment == want.name && group.replica == replica;
        let ports = if group.deleting || own { &mut taken } else { &mut lasting };
        ports.extend(fabric::ports(&group.plan).map(|port| (port, Holder::Group(&key.1))));
    }
    for (name, node) in view.nodes.iter().filter(|(_, node)| count_unreleased && node.unreleased > 0) {
        let devices = node.links.iter().filter_map(|link| link.rdma_device.as_deref());
        taken.extend(devices.map(|device| ((name.as_str(), device), Holder::Unreleased)));
    }
    let passing = !taken.is_empty();
    taken.extend(lasting.clone());
    Meeting {
        choice: want.backend,
        asked_at: want.asked_at.clone(),
        rdma_only: false,
        explain: true,
        free: Fabric::new(&view.nodes, taken),
        soon: passing.then(|| Fabric::new(&view.nodes, lasting)),
    }
}

fn square(bytes: u64) -> f64 {
    bytes as f64 * bytes as f64
}

impl<'a> Look<'a> {
    /// Of many seats a few of those that are equal: which of them a replica takes makes no difference.
    fn different_ones<'s>(&self, seats: &[Seat<'s>]) -> Vec<Seat<'s>> {
        if seats.len() <= MANY {
            return seats.to_vec();
        }
        let mut kinds: Vec<(&Seat<'s>, usize)> = Vec::new();
        let mut kept = Vec::new();
        for seat in seats {
            let equal = |other: &Seat<'_>| {
                (other.free, other.limit) == (seat.free, seat.limit)
                    && (other.siblings, other.crowd) == (seat.siblings, seat.crowd)
                    && self.fetches.get(other.node) == self.fetches.get(seat.node)
                    && other.machine == seat.machine
            };
            match kinds.iter_mut().find(|(kind, _)| equal(kind)) {
                Some((_, count)) if *count >= EQUAL => continue,
                Some((_, count)) => *count += 1,
                None => kinds.push((seat, 1)),
            }
            kept.push(seat.clone());
        }
        kept
    }

    /// The ways on one node; equal machines are equally fast.
    fn singles(&self, view: &Snapshot, candidates: Vec<Candidate>) -> Vec<Way> {
        let mut rates: Vec<(Option<Machine>, f64)> = Vec::new();
        let machine = |candidate: &Candidate| {
            let node = candidate.ranks.first().and_then(|rank| view.nodes.get(&rank.node));
            node.and_then(|node| node.machine)
        };
        let ways = candidates.into_iter().map(|candidate| {
            let machine = machine(&candidate);
            let rate = match rates.iter().find(|(known, _)| *known == machine) {
                Some((_, rate)) => *rate,
                None => {
                    let rate = self.forecast.rate(&candidate.plan(self.fit));
                    rates.push((machine, rate));
                    rate
                }
            };
            self.way_at(rate, candidate)
        });
        ways.collect()
    }

    /// Sizes of tensor groups that nobody asked for and that may be worth their nodes: in a large cluster, where
    /// looking takes long, those that would be on the best machines over the best RDMA.
    fn worthwhile(&self, seats: &[Seat<'_>], singles: &[Way]) -> Vec<u32> {
        let mut sizes = self.want.shape.tensor_sizes();
        sizes.retain(|&size| size > 1);
        let speed = |seat: &&Seat<'_>| seat.machine.map_or(0.0, |machine| machine.bandwidth);
        let best = seats.iter().max_by(|a, b| speed(a).total_cmp(&speed(b)));
        let single = singles.iter().map(|way| way.rate).reduce(f64::max);
        let (Some(best), Some(single)) = (best, single.filter(|_| seats.len() > MANY)) else { return sizes };
        sizes.retain(|&size| {
            let rank = |_| Rank {
                node: best.node.to_owned(),
                layers: self.fit.layers(),
                need: Need::default(),
                left: 0,
                rdma_devices: Vec::new(),
            };
            let candidate = Candidate {
                ranks: (0..size).map(rank).collect(),
                siblings: 0,
                tensor_size: size,
                backend: Backend::Jaccl,
                why_backend: None,
            };
            let rate = self.forecast.rate(&candidate.plan(self.fit));
            let scale = Scale { best: rate.max(single), fewest: 1 };
            let way = Way { candidate, rate, wifi: false, gaps: 0.0, crowd: 0, fetch: 0.0 };
            scale.worth(&way) > scale.of_rate(single)
        });
        sizes
    }

    fn gaps(&self, candidate: &Candidate) -> f64 {
        let taken = candidate.ranks.iter().map(|rank| {
            let before = rank.left.saturating_add(rank.need.total());
            square(before) - square(rank.left)
        });
        taken.sum::<f64>() / self.gaps
    }

    fn way(&self, candidate: Candidate) -> Way {
        let plan = candidate.plan(self.fit);
        let (rate, wifi) = (self.forecast.rate(&plan), self.forecast.over_wifi(&plan));
        Way { wifi, ..self.way_at(rate, candidate) }
    }

    /// A way whose rate is known, over no Wi-Fi.
    fn way_at(&self, rate: f64, candidate: Candidate) -> Way {
        let crowd = self.spread.crowd(candidate.ranks.iter().map(|rank| rank.node.as_str()));
        let (gaps, fetch) = (self.gaps(&candidate), self.fetch(&candidate));
        Way { rate, wifi: false, gaps, crowd, fetch, candidate }
    }

    fn fetch(&self, candidate: &Candidate) -> f64 {
        if self.fetches.is_empty() {
            return 0.0;
        }
        let of = |rank: &Rank| self.fetches.get(rank.node.as_str()).copied().unwrap_or(0.0);
        candidate.ranks.iter().map(of).sum::<f64>() / candidate.ranks.len().max(1) as f64
    }

    /// The ways over several nodes; where there are none, the notes tell why.
    #[allow(clippy::too_many_arguments, reason = "the same question as that of `ways`, and where answers go")]
    fn several(
        &self,
        view: &'a Snapshot,
        ringed: &[(Option<&'a str>, Seat<'a>)],
        replica: i32,
        count_unreleased: bool,
        without: impl Fn(&Key) -> bool,
        found: &mut Vec<Way>,
        notes: &mut Vec<Note>,
    ) {
        let companies = companies(view, self.want, ringed, notes);
        // Engines of an older release know nothing of tensor groups and would hold whole layers.
        let mut cutting = companies.clone();
        for company in &mut cutting {
            company.seats.retain(|seat| seat.cuts_layers);
        }
        cutting.retain(|company| !company.seats.is_empty());
        let mut meeting = meeting(view, self.want, replica, count_unreleased, without);
        match &self.want.split {
            Split::Auto => {
                meeting.rdma_only = true;
                let one_holds_it = !found.is_empty();
                meeting.explain = !one_holds_it;
                if one_holds_it {
                    // Nobody takes a second node on a guess; and a pipeline answers no sooner than one node.
                    cutting
                        .iter_mut()
                        .for_each(|company| company.seats.retain(|seat| seat.machine.is_some()));
                }
                if self.rdma(&cutting, &meeting, found, notes) && !one_holds_it {
                    self.sized(&companies, &meeting, found, notes);
                }
            }
            Split::Tensor(_) | Split::Hybrid(_) => {
                for (build, seat) in ringed.iter().filter(|(_, seat)| !seat.cuts_layers) {
                    let build = build.map(str::to_owned);
                    notes.push(Note::NoTensor { node: seat.node.to_owned(), build });
                }
                self.sized(&cutting, &meeting, found, notes);
            }
            _ => self.sized(&companies, &meeting, found, notes),
        }
    }

    /// Tensor groups nobody asked for: only over RDMA, as sums over TCP cost more than they win. Says whether
    /// other ways are worth looking at: not while the cables of one that fits come free by themselves.
    fn rdma(
        &self,
        companies: &[Company<'_>],
        meeting: &Meeting<'_>,
        found: &mut Vec<Way>,
        notes: &mut Vec<Note>,
    ) -> bool {
        if self.want.backend != BackendChoice::Auto {
            return true;
        }
        for &size in &self.sizes {
            let refusals =
                self.tried(companies, size, found, |seats| tensor::candidate(self.fit, seats, size, meeting));
            if found.is_empty() && refusals.iter().any(|note| matches!(note, Note::PortsBusy { .. })) {
                *notes = refusals;
                return false;
            }
        }
        true
    }

    /// The ways of every size worth trying of the split that is asked for.
    fn sized(
        &self,
        companies: &[Company<'_>],
        meeting: &Meeting<'_>,
        found: &mut Vec<Way>,
        notes: &mut Vec<Note>,
    ) {
        let want = self.want;
        let most = companies.iter().map(|company| company.seats.len()).max().unwrap_or(0);
        let (before, mut fitting) = (found.len(), 0);
        let mut refusals = Vec::new();
        for (stages, size) in sizes(want, most as u32) {
            let had = found.len();
            refusals = self.tried(companies, stages * size, found, |seats| match &want.split {
                Split::Layers(layers) => pipeline::explicit(self.fit, seats, layers),
                Split::Tensor(_) => tensor::candidate(self.fit, seats, size, meeting),
                Split::Hybrid(wanted) => {
                    let cut = hybrid::Cut { stages, size, layers: wanted.layers.as_deref() };
                    hybrid::candidate(self.fit, seats, &cut, meeting)
                }
                _ => pipeline::balanced(self.fit, seats, stages),
            });
            fitting += usize::from(found.len() > had);
            if fitting >= LARGER {
                break;
            }
            if fitting == 0 && refusals.iter().any(|note| matches!(note, Note::PortsBusy { .. })) {
                break;
            }
            if companies.is_empty() && !notes.iter().any(|note| matches!(note, Note::Apart { .. })) {
                refusals.push(Note::TooFewNodes { ranks: stages * size, nodes: 0 });
            }
        }
        if found.len() > before {
            return;
        }
        // Only Auto tries sizes it was not asked for; that one node is not two is then no news.
        let asked = !matches!(want.split, Split::Auto);
        if asked || !refusals.iter().all(|note| matches!(note, Note::TooFewNodes { .. })) {
            notes.extend(refusals);
        }
        notes.extend(different(companies));
    }

    /// Tries every company as a whole, and where that fits, sets of its nodes too. Answers with what refused
    /// whole companies.
    fn tried(
        &self,
        companies: &[Company<'_>],
        ranks: u32,
        found: &mut Vec<Way>,
        split: impl Fn(&[Seat<'_>]) -> Result<Candidate, Note>,
    ) -> Vec<Note> {
        let (mut refusals, mut candidates) = (Vec::new(), BTreeMap::new());
        for company in companies {
            match split(&company.seats) {
                Ok(candidate) => {
                    let sets = sets(&company.seats, ranks as usize);
                    let others = sets.iter().filter_map(|set| split(set).ok());
                    candidates.extend(others.chain([candidate]).map(|one| (one.show(), one)));
                }
                Err(note) => refusals.push(note),
            }
        }
        found.extend(candidates.into_values().map(|candidate| self.way(candidate)));
        refusals
    }
}

/// Sets of `count` seats worth trying beside the largest: all of them while they are few, else those of
/// equal machines and the fastest ones. Equal sets make slow searches, so nothing goes through all of many.
fn sets<'a>(seats: &[Seat<'a>], count: usize) -> Vec<Vec<Seat<'a>>> {
    if seats.len() <= count {
        return Vec::new();
    }
    let mut all = Vec::new();
    if combinations(seats.len(), count) <= SETS {
        choose(seats, count, &mut Vec::new(), &mut all);
        return all;
    }
    let speed = |seat: &Seat<'_>| seat.machine.map_or(0.0, |machine| machine.bandwidth);
    let mut sorted = seats.to_vec();
    sorted.sort_by(|a, b| {
        let fastest = speed(b).total_cmp(&speed(a));
        fastest.then(b.limit.cmp(&a.limit)).then(b.free.cmp(&a.free)).then(a.node.cmp(b.node))
    });
    all.push(sorted[..count].to_vec());
    let (least, most) =
        (seats.iter().map(|seat| seat.crowd).min(), seats.iter().map(|seat| seat.crowd).max());
    if least < most {
        // Those that fail with the fewest other replicas, and of them the largest.
        let apart = sorted.iter().filter(|seat| Some(seat.crowd) == least).cloned().collect::<Vec<_>>();
        all.extend((apart.len() >= count).then_some(apart));
    }
    let kinds = sorted.chunk_by(|a, b| a.machine == b.machine && a.limit == b.limit);
    all.extend(kinds.filter(|kind| kind.len() >= count).map(<[Seat<'_>]>::to_vec));
    all
}

fn combinations(of: usize, count: usize) -> usize {
    (0..count).fold(1_usize, |all, at| all.saturating_mul(of - at) / (at + 1))
}

fn choose<'a>(rest: &[Seat<'a>], count: usize, head: &mut Vec<Seat<'a>>, out: &mut Vec<Vec<Seat<'a>>>) {
    if count == 0 {
        out.push(head.clone());
        return;
    }
    for (at, seat) in rest.iter().enumerate() {
        head.push(seat.clone());
        choose(&rest[at + 1..], count - 1, head, out);
        head.pop();
    }
}

/// That nodes have different engines, where they do.
fn different(companies: &[Company<'_>]) -> Option<Note> {
    let mut builds: BTreeMap<Option<&str>, BTreeSet<&str>> = BTreeMap::new();
    for company in companies {
        builds.entry(company.build).or_default().extend(company.seats.iter().map(|seat| seat.node));
    }
    let name = |build: &Option<&str>| build.unwrap_or("an unknown build").to_owned();
    let names = |nodes: &BTreeSet<&str>| nodes.iter().map(|node| (*node).to_owned()).collect();
    let named = builds.iter().map(|(build, nodes)| (name(build), names(nodes))).collect();
    (builds.len() > 1).then_some(Note::Builds { builds: named })
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
