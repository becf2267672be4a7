//! Candidates: which sets of nodes are considered for one replica, and every split of them worth comparing.
//! Not here: the choice among them (`selection`).

use std::collections::{BTreeMap, BTreeSet};

use russet_crds::{Backend, BackendChoice};

use super::failure_domains::SiblingDomains;
use super::score::{ScoreScale, ScoredCandidate};
use crate::copies::DiskOutlook;
use crate::fabric::{self, Fabric, LinkGraph, PortUse, PortUser};
use crate::memory_model::{MemoryEstimate, MemoryModel};
use crate::note::Note;
use crate::performance_model::GpuProfile;
use crate::prediction::Predictor;
use crate::shard::tensor::TransportOptions;
use crate::shard::{NodeSlot, RankAssignment, SplitCandidate, hybrid, pipeline, single, tensor};
use crate::snapshot::{Availability, ObjectKey, Snapshot};
use crate::validate::{MAX_RANKS, Split, ValidDeployment, shapes};

/// Maximum number of node sets for one size beyond the largest nodes.
const MAX_NODE_SETS: usize = 32;
/// Number of nodes from which a cluster is large and searched less thoroughly.
const LARGE_CLUSTER_NODES: usize = 64;
/// Equal nodes of a large cluster that are considered.
const MAX_EQUAL_NODES: usize = 4;
/// Number of sizes tried, from the smallest that fits. Larger teams may pay off, and longer pipelines leave
/// memory to others.
const MAX_SIZES: usize = 3;

/// The candidates of a replica.
#[derive(Debug)]
pub struct Candidates {
    /// Every candidate, unordered; at least one.
    pub found: Vec<ScoredCandidate>,
    /// What could not be used, and why.
    pub notes: Vec<Note>,
}

/// Nodes that may share a group: in one pool, with the same engine, linked as the pool requires.
#[derive(Clone)]
struct CompatibleNodes<'a> {
    build: Option<&'a str>,
    slots: Vec<NodeSlot<'a>>,
}

/// Common state of all candidates of one replica.
struct CandidateSearch<'a> {
    desired: &'a ValidDeployment,
    memory: &'a MemoryModel<'a>,
    predictor: Predictor<'a>,
    /// Sum of the squares of the nodes' free bytes.
    total_fragmentation: f64,
    /// Sizes of tensor groups that are considered without being requested.
    sizes: Vec<u32>,
    /// Failure domains of the other replicas.
    sibling_domains: SiblingDomains<'a>,
    /// Cost of fetching the model's files to a node, if known and not zero.
    fetch_costs: BTreeMap<&'a str, f64>,
}

/// What it costs to have on a node the files of each Model that a rank may read: of the model and of every adapter, all
/// of them beside one another, and of the draft model, as any of the nodes may become rank 0's. Models whose sizes are
/// unknown are left out.
fn disk_outlooks<'v, W: Fn(&ObjectKey) -> bool + Copy>(
    view: &'v Snapshot,
    desired: &ValidDeployment,
    without: W,
) -> Vec<DiskOutlook<'v, W>> {
    let models: Vec<&str> = std::iter::once(desired.model.as_str()).chain(desired.adapter_models()).collect();
    let draft = desired.draft.as_ref().map(|draft| draft.name.as_str());
    let outlooks = models.iter().copied().chain(draft).filter_map(|model| {
        let outlook = DiskOutlook::for_model(view, &desired.namespace, model, without)?;
        let others = models.iter().copied().filter(|other| *other != model);
        Some(outlook.with_companions(&desired.namespace, others))
    });
    outlooks.collect()
}

/// Enumerates the candidates of one replica, as if the groups for which `without` is true were gone, and with
/// or without memory that agents have not released yet.
pub fn enumerate(
    view: &Snapshot,
    desired: &ValidDeployment,
    fit: &MemoryModel<'_>,
    replica: i32,
    count_unreleased: bool,
    without: impl Fn(&ObjectKey) -> bool + Copy,
) -> Result<Candidates, Vec<Note>> {
    let mut look = CandidateSearch {
        desired,
        memory: fit,
        predictor: Predictor::new(view, &desired.shape, desired.capacity),
        total_fragmentation: view.nodes.values().map(|node| square(node.serving_limit)).sum::<f64>().max(1.0),
        sizes: Vec::new(),
        sibling_domains: SiblingDomains::for_replica(view, desired, replica, without),
        fetch_costs: BTreeMap::new(),
    };
    let outlooks = disk_outlooks(view, desired, without);
    let committed = view.committed_bytes(without);
    let others = view
        .groups_of(&desired.namespace, &desired.name)
        .filter(|(key, group)| group.replica != replica && !without(key));
    let mut siblings: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, group) in others {
        // A node has one rank of a group.
        group.nodes().for_each(|node| *siblings.entry(node).or_default() += 1);
    }
    let mut notes = Vec::new();
    let mut slots = Vec::new();
    // Nodes that can communicate with others.
    let mut ringed = Vec::new();
    for (place, (name, node)) in view.nodes.iter().enumerate() {
        if !desired.allows(std::iter::once(name.as_str())) {
            continue;
        }
        if node.availability != Availability::Open {
            notes.push(Note::NodeUnavailable { node: name.clone(), availability: node.availability });
            continue;
        }
        // The engine of an older release would ignore the option, and its memory need would differ from the
        // reservation.
        let is_missing = |option: &&str| !node.engine_options.iter().any(|known| known == option);
        if let Some(option) = desired.engine_options().find(is_missing) {
            let build = node.engine_build.clone();
            notes.push(Note::NoEngineOption { node: name.clone(), build, option });
            continue;
        }
        let fetches = outlooks.iter().map(|disk_outlook| disk_outlook.fetch_cost(name));
        match fetches.collect::<Result<Vec<f64>, _>>() {
            Ok(fetches) => {
                let most = fetches.into_iter().fold(0.0, f64::max);
                if most > 0.0 {
                    look.fetch_costs.insert(name, most);
                }
            }
            Err(lack) => {
                notes.push(Note::Disk { shortage: lack });
                continue;
            }
        }
        let unreleased = if count_unreleased { 0 } else { node.unreleased };
        let committed = committed.get(name.as_str()).copied().unwrap_or(0).saturating_sub(unreleased);
        let slot = NodeSlot {
            node: name,
            index: place,
            free: node.serving_limit.saturating_sub(committed),
            limit: node.serving_limit,
            siblings: siblings.get(name.as_str()).copied().unwrap_or(0),
            domain_siblings: look.sibling_domains.siblings_sharing(std::iter::once(name.as_str())),
            supports_tensor: node.supports_tensor,
            gpu: node.gpu,
        };
        if node.backends.is_empty()
            || node.backends.iter().any(|backend| backend.eq_ignore_ascii_case("ring"))
        {
            ringed.push((node.engine_build.as_deref(), slot.clone()));
        } else if !matches!(desired.split, Split::Single) {
            notes.push(Note::NoRing { node: name.clone() });
        }
        slots.push(slot);
    }
    if slots.is_empty() {
        if !notes.iter().any(|note| matches!(note, Note::Disk { .. } | Note::NoEngineOption { .. })) {
            notes.push(no_nodes_note(view, desired));
        }
        return Err(notes);
    }
    let mut found = Vec::new();
    if let Split::Auto | Split::Single = desired.split {
        let (candidates, too_small) = single::candidates(fit, &look.representatives(&slots));
        found = look.single_node(view, candidates);
        notes.extend(too_small);
    }
    look.sizes = look.worthwhile_sizes(&slots, &found);
    let enough = desired.split == Split::Auto && !found.is_empty() && look.sizes.is_empty();
    if desired.split != Split::Single && !enough {
        look.multi_node(view, &ringed, replica, count_unreleased, without, &mut found, &mut notes);
    }
    if found.is_empty() { Err(notes) } else { Ok(Candidates { found, notes }) }
}

fn no_nodes_note(view: &Snapshot, desired: &ValidDeployment) -> Note {
    if let Some((tier, group)) = desired.dedicated_group.clone() {
        return Note::NoDedicatedNodes { tier, group };
    }
    let pools = desired.pools();
    if pools.is_empty() {
        return Note::NoNodes;
    }
    let nodes = view.nodes.keys().filter(|name| desired.allows(std::iter::once(name.as_str()))).count();
    Note::NoNodesInPools { pools, nodes }
}

/// Sets of nodes that may share a group; the notes name the nodes that a pool keeps apart.
fn compatible_nodes<'a>(
    view: &Snapshot,
    desired: &ValidDeployment,
    ringed: &[(Option<&'a str>, NodeSlot<'a>)],
    notes: &mut Vec<Note>,
) -> Vec<CompatibleNodes<'a>> {
    // Ranks of one group need equal engines.
    let mut builds: BTreeMap<Option<&str>, Vec<&NodeSlot<'a>>> = BTreeMap::new();
    for (build, slot) in ringed {
        builds.entry(*build).or_default().push(slot);
    }
    let mut companies = Vec::new();
    for area in &desired.eligible_nodes {
        let web = area.demand.map(|demand| (demand, LinkGraph::new(&view.nodes)));
        for (build, slots) in &builds {
            let slots: Vec<NodeSlot<'a>> =
                slots.iter().filter(|slot| area.contains(slot.node)).map(|slot| (*slot).clone()).collect();
            let Some((demand, web)) = &web else {
                companies.push(CompatibleNodes { build: *build, slots });
                continue;
            };
            let names: Vec<&str> = slots.iter().map(|slot| slot.node).collect();
            for domain in web.domains(&names, *demand) {
                let slots = slots.iter().filter(|slot| domain.contains(&slot.node)).cloned().collect();
                companies.push(CompatibleNodes { build: *build, slots });
            }
            let why = web.missing_links(&names, *demand);
            if !why.is_empty() {
                notes.push(Note::NotLinked {
                    demanded_by: area.demanded_by.join(" and "),
                    demand: *demand,
                    why,
                });
            }
        }
    }
    companies.retain(|company| !company.slots.is_empty());
    companies
}

/// The cables, without those in use.
fn transport_options<'v>(
    view: &'v Snapshot,
    desired: &ValidDeployment,
    replica: i32,
    count_unreleased: bool,
    without: impl Fn(&ObjectKey) -> bool,
) -> TransportOptions<'v> {
    let (mut lasting, mut taken) = (PortUse::new(), PortUse::new());
    for (key, group) in view.groups.iter().filter(|(key, _)| !without(key)) {
        let own = key.0 == desired.namespace && group.deployment == desired.name && group.replica == replica;
        let ports = if group.deleting || own { &mut taken } else { &mut lasting };
        ports.extend(fabric::ports(&group.plan).map(|port| (port, PortUser::Group(&key.1))));
    }
    for (name, node) in view.nodes.iter().filter(|(_, node)| count_unreleased && node.unreleased > 0) {
        let devices = node.links.iter().filter_map(|link| link.rdma_device.as_deref());
        taken.extend(devices.map(|device| ((name.as_str(), device), PortUser::Unreleased)));
    }
    let passing = !taken.is_empty();
    taken.extend(lasting.clone());
    TransportOptions {
        choice: desired.backend,
        split_source: desired.split_source.clone(),
        rdma_only: false,
        explain: true,
        free: Fabric::new(&view.nodes, taken),
        soon: passing.then(|| Fabric::new(&view.nodes, lasting)),
    }
}

fn square(bytes: u64) -> f64 {
    bytes as f64 * bytes as f64
}

impl<'a> CandidateSearch<'a> {
    /// Of many equal nodes only a few: the choice among them makes no difference.
    fn representatives<'s>(&self, slots: &[NodeSlot<'s>]) -> Vec<NodeSlot<'s>> {
        if slots.len() <= LARGE_CLUSTER_NODES {
            return slots.to_vec();
        }
        let mut kinds: Vec<(&NodeSlot<'s>, usize)> = Vec::new();
        let mut chosen = Vec::new();
        for slot in slots {
            let equal = |other: &NodeSlot<'_>| {
                (other.free, other.limit) == (slot.free, slot.limit)
                    && (other.siblings, other.domain_siblings) == (slot.siblings, slot.domain_siblings)
                    && self.fetch_costs.get(other.node) == self.fetch_costs.get(slot.node)
                    && other.gpu == slot.gpu
            };
            match kinds.iter_mut().find(|(kind, _)| equal(kind)) {
                Some((_, count)) if *count >= MAX_EQUAL_NODES => continue,
                Some((_, count)) => *count += 1,
                None => kinds.push((slot, 1)),
            }
            chosen.push(slot.clone());
        }
        chosen
    }

    /// The candidates on one node; equal machines are equally fast.
    fn single_node(&self, view: &Snapshot, candidates: Vec<SplitCandidate>) -> Vec<ScoredCandidate> {
        let mut rates: Vec<(Option<GpuProfile>, f64)> = Vec::new();
        let machine = |candidate: &SplitCandidate| {
            let node = candidate.ranks.first().and_then(|rank| view.nodes.get(&rank.node));
            node.and_then(|node| node.gpu)
        };
        let scored = candidates.into_iter().map(|candidate| {
            let machine = machine(&candidate);
            let rate = match rates.iter().find(|(known, _)| *known == machine) {
                Some((_, rate)) => *rate,
                None => {
                    let rate = self.predictor.rate(&candidate.plan(self.memory));
                    rates.push((machine, rate));
                    rate
                }
            };
            self.score_at(rate, candidate)
        });
        scored.collect()
    }

    /// Sizes of tensor groups that were not requested and may be worth their nodes. In a large cluster, where
    /// a search is slow: those that would be worth it on the best machines over the best RDMA.
    fn worthwhile_sizes(&self, slots: &[NodeSlot<'_>], singles: &[ScoredCandidate]) -> Vec<u32> {
        let mut sizes = self.desired.shape.tensor_sizes();
        sizes.retain(|&size| size > 1);
        let speed = |slot: &&NodeSlot<'_>| slot.gpu.map_or(0.0, |machine| machine.bandwidth);
        let best = slots.iter().max_by(|a, b| speed(a).total_cmp(&speed(b)));
        let single = singles.iter().map(|scored| scored.rate).reduce(f64::max);
        let (Some(best), Some(single)) = (best, single.filter(|_| slots.len() > LARGE_CLUSTER_NODES)) else {
            return sizes;
        };
        sizes.retain(|&size| {
            let rank = |_| RankAssignment {
                node: best.node.to_owned(),
                layers: self.memory.layers(),
                memory: MemoryEstimate::default(),
                free_after: 0,
                rdma_devices: Vec::new(),
            };
            let candidate = SplitCandidate {
                ranks: (0..size).map(rank).collect(),
                siblings: 0,
                tensor_size: size,
                backend: Backend::Jaccl,
                backend_reason: None,
            };
            let rate = self.predictor.rate(&candidate.plan(self.memory));
            let scale = ScoreScale { best: rate.max(single), fewest: 1 };
            let scored = ScoredCandidate {
                candidate,
                rate,
                wifi: false,
                fragmentation: 0.0,
                domain_siblings: 0,
                fetch_cost: 0.0,
            };
            scale.score(&scored) > scale.rate_score(single)
        });
        sizes
    }

    fn fragmentation(&self, candidate: &SplitCandidate) -> f64 {
        let taken = candidate.ranks.iter().map(|rank| {
            let before = rank.free_after.saturating_add(rank.memory.total());
            square(before) - square(rank.free_after)
        });
        taken.sum::<f64>() / self.total_fragmentation
    }

    fn score(&self, candidate: SplitCandidate) -> ScoredCandidate {
        let plan = candidate.plan(self.memory);
        let (rate, wifi) = (self.predictor.rate(&plan), self.predictor.over_wifi(&plan));
        ScoredCandidate { wifi, ..self.score_at(rate, candidate) }
    }

    /// A candidate with a known rate, not over Wi-Fi.
    fn score_at(&self, rate: f64, candidate: SplitCandidate) -> ScoredCandidate {
        let crowd =
            self.sibling_domains.siblings_sharing(candidate.ranks.iter().map(|rank| rank.node.as_str()));
        let (gaps, fetch) = (self.fragmentation(&candidate), self.fetch_cost(&candidate));
        ScoredCandidate {
            rate,
            wifi: false,
            fragmentation: gaps,
            domain_siblings: crowd,
            fetch_cost: fetch,
            candidate,
        }
    }

    fn fetch_cost(&self, candidate: &SplitCandidate) -> f64 {
        if self.fetch_costs.is_empty() {
            return 0.0;
        }
        let of = |rank: &RankAssignment| self.fetch_costs.get(rank.node.as_str()).copied().unwrap_or(0.0);
        candidate.ranks.iter().map(of).sum::<f64>() / candidate.ranks.len().max(1) as f64
    }

    /// The candidates over several nodes; if there are none, the notes say why.
    #[allow(clippy::too_many_arguments, reason = "the same question as that of `ways`, and where answers go")]
    fn multi_node(
        &self,
        view: &'a Snapshot,
        ringed: &[(Option<&'a str>, NodeSlot<'a>)],
        replica: i32,
        count_unreleased: bool,
        without: impl Fn(&ObjectKey) -> bool,
        found: &mut Vec<ScoredCandidate>,
        notes: &mut Vec<Note>,
    ) {
        let companies = compatible_nodes(view, self.desired, ringed, notes);
        // Engines of older releases do not support tensor groups and would load whole layers.
        let mut cutting = companies.clone();
        for company in &mut cutting {
            company.slots.retain(|slot| slot.supports_tensor);
        }
        cutting.retain(|company| !company.slots.is_empty());
        let mut meeting = transport_options(view, self.desired, replica, count_unreleased, without);
        match &self.desired.split {
            Split::Auto => {
                meeting.rdma_only = true;
                let one_holds_it = !found.is_empty();
                meeting.explain = !one_holds_it;
                if one_holds_it {
                    // No second node is taken on an assumed speed; and a pipeline is no faster than one node.
                    cutting.iter_mut().for_each(|company| company.slots.retain(|slot| slot.gpu.is_some()));
                }
                if self.rdma_tensor(&cutting, &meeting, found, notes) && !one_holds_it {
                    self.requested_split(&companies, &meeting, found, notes);
                }
            }
            Split::Tensor(_) | Split::Hybrid(_) => {
                for (build, slot) in ringed.iter().filter(|(_, slot)| !slot.supports_tensor) {
                    let build = build.map(str::to_owned);
                    notes.push(Note::NoTensorParallelism { node: slot.node.to_owned(), build });
                }
                self.requested_split(&cutting, &meeting, found, notes);
            }
            _ => self.requested_split(&companies, &meeting, found, notes),
        }
    }

    /// Tensor groups that were not requested: only over RDMA, as sums over TCP cost more than they save.
    /// Returns whether other candidates are worth a search: not while the cables of one that fits are being
    /// released.
    fn rdma_tensor(
        &self,
        companies: &[CompatibleNodes<'_>],
        meeting: &TransportOptions<'_>,
        found: &mut Vec<ScoredCandidate>,
        notes: &mut Vec<Note>,
    ) -> bool {
        if self.desired.backend != BackendChoice::Auto {
            return true;
        }
        for &size in &self.sizes {
            let refusals = self.try_splits(companies, size, found, |slots| {
                tensor::candidate(self.memory, slots, size, meeting)
            });
            if found.is_empty() && refusals.iter().any(|note| matches!(note, Note::PortsBusy { .. })) {
                *notes = refusals;
                return false;
            }
        }
        true
    }

    /// The candidates of every size worth trying of the requested split.
    fn requested_split(
        &self,
        companies: &[CompatibleNodes<'_>],
        meeting: &TransportOptions<'_>,
        found: &mut Vec<ScoredCandidate>,
        notes: &mut Vec<Note>,
    ) {
        let desired = self.desired;
        let most = companies.iter().map(|company| company.slots.len()).max().unwrap_or(0);
        let (before, mut fitting) = (found.len(), 0);
        let mut refusals = Vec::new();
        for (stages, size) in stage_sizes(desired, most as u32) {
            let had = found.len();
            refusals = self.try_splits(companies, stages * size, found, |slots| match &desired.split {
                Split::Layers(layers) => pipeline::explicit(self.memory, slots, layers),
                Split::Tensor(_) => tensor::candidate(self.memory, slots, size, meeting),
                Split::Hybrid(requested) => {
                    let cut = hybrid::HybridSplit { stages, size, layers: requested.layers.as_deref() };
                    hybrid::candidate(self.memory, slots, &cut, meeting)
                }
                _ => pipeline::balanced(self.memory, slots, stages),
            });
            fitting += usize::from(found.len() > had);
            if fitting >= MAX_SIZES {
                break;
            }
            if fitting == 0 && refusals.iter().any(|note| matches!(note, Note::PortsBusy { .. })) {
                break;
            }
            if companies.is_empty() && !notes.iter().any(|note| matches!(note, Note::NotLinked { .. })) {
                refusals.push(Note::TooFewNodes { ranks: stages * size, nodes: 0 });
            }
        }
        if found.len() > before {
            return;
        }
        // Only Auto tries sizes that were not requested; that one node is too few for them is no news.
        let asked = !matches!(desired.split, Split::Auto);
        if asked || !refusals.iter().all(|note| matches!(note, Note::TooFewNodes { .. })) {
            notes.extend(refusals);
        }
        notes.extend(mixed_builds_note(companies));
    }

    /// Tries every set of compatible nodes as a whole, and if it fits, subsets of it. Returns the notes of
    /// whole sets that do not fit.
    fn try_splits(
        &self,
        companies: &[CompatibleNodes<'_>],
        ranks: u32,
        found: &mut Vec<ScoredCandidate>,
        split: impl Fn(&[NodeSlot<'_>]) -> Result<SplitCandidate, Note>,
    ) -> Vec<Note> {
        let (mut refusals, mut candidates) = (Vec::new(), BTreeMap::new());
        for company in companies {
            match split(&company.slots) {
                Ok(candidate) => {
                    let sets = node_sets(&company.slots, ranks as usize);
                    let others = sets.iter().filter_map(|set| split(set).ok());
                    candidates.extend(others.chain([candidate]).map(|one| (one.show(), one)));
                }
                Err(note) => refusals.push(note),
            }
        }
        found.extend(candidates.into_values().map(|candidate| self.score(candidate)));
        refusals
    }
}

/// Sets of `count` nodes worth trying beside the largest: all of them while they are few, else those of equal
/// machines and the fastest ones. Many equal sets make searches slow, so they are never enumerated.
fn node_sets<'a>(slots: &[NodeSlot<'a>], count: usize) -> Vec<Vec<NodeSlot<'a>>> {
    if slots.len() <= count {
        return Vec::new();
    }
    let mut all = Vec::new();
    if combinations(slots.len(), count) <= MAX_NODE_SETS {
        collect_combinations(slots, count, &mut Vec::new(), &mut all);
        return all;
    }
    let speed = |slot: &NodeSlot<'_>| slot.gpu.map_or(0.0, |machine| machine.bandwidth);
    let mut sorted = slots.to_vec();
    sorted.sort_by(|a, b| {
        let fastest = speed(b).total_cmp(&speed(a));
        fastest.then(b.limit.cmp(&a.limit)).then(b.free.cmp(&a.free)).then(a.node.cmp(b.node))
    });
    all.push(sorted[..count].to_vec());
    let (least, most) = (
        slots.iter().map(|slot| slot.domain_siblings).min(),
        slots.iter().map(|slot| slot.domain_siblings).max(),
    );
    if least < most {
        // Nodes that share a failure domain with the fewest other replicas, and of them the largest.
        let apart =
            sorted.iter().filter(|slot| Some(slot.domain_siblings) == least).cloned().collect::<Vec<_>>();
        all.extend((apart.len() >= count).then_some(apart));
    }
    let kinds = sorted.chunk_by(|a, b| a.gpu == b.gpu && a.limit == b.limit);
    all.extend(kinds.filter(|kind| kind.len() >= count).map(<[NodeSlot<'_>]>::to_vec));
    all
}

fn combinations(of: usize, count: usize) -> usize {
    (0..count).fold(1_usize, |all, at| all.saturating_mul(of - at) / (at + 1))
}

fn collect_combinations<'a>(
    rest: &[NodeSlot<'a>],
    count: usize,
    head: &mut Vec<NodeSlot<'a>>,
    out: &mut Vec<Vec<NodeSlot<'a>>>,
) {
    if count == 0 {
        out.push(head.clone());
        return;
    }
    for (at, slot) in rest.iter().enumerate() {
        head.push(slot.clone());
        collect_combinations(&rest[at + 1..], count - 1, head, out);
        head.pop();
    }
}

/// A note if nodes have different engine builds.
fn mixed_builds_note(companies: &[CompatibleNodes<'_>]) -> Option<Note> {
    let mut builds: BTreeMap<Option<&str>, BTreeSet<&str>> = BTreeMap::new();
    for company in companies {
        builds.entry(company.build).or_default().extend(company.slots.iter().map(|slot| slot.node));
    }
    let name = |build: &Option<&str>| build.unwrap_or("an unknown build").to_owned();
    let names = |nodes: &BTreeSet<&str>| nodes.iter().map(|node| (*node).to_owned()).collect();
    let named = builds.iter().map(|(build, nodes)| (name(build), names(nodes))).collect();
    (builds.len() > 1).then_some(Note::MixedBuilds { builds: named })
}

/// Stages and their sizes worth trying, the fewest ranks first. More ranks than nodes are tried only if
/// nothing less was requested, to get the refusal.
fn stage_sizes(desired: &ValidDeployment, most: u32) -> Vec<(u32, u32)> {
    let all: Vec<(u32, u32)> = match &desired.split {
        Split::Single => Vec::new(),
        // Trying all sizes up to the number of nodes is cheap: a size that does not fit fails fast.
        Split::Auto | Split::Pipeline => {
            (2..=most.min(desired.shape.max_stages()).clamp(2, MAX_RANKS)).map(|stages| (stages, 1)).collect()
        }
        Split::Ranks(ranks) => vec![(*ranks, 1)],
        Split::Layers(layers) => vec![(layers.len() as u32, 1)],
        Split::Tensor(Some(size)) => vec![(1, *size)],
        Split::Tensor(None) => {
            desired.shape.tensor_sizes().into_iter().filter(|&size| size > 1).map(|size| (1, size)).collect()
        }
        Split::Hybrid(hybrid) => shapes(hybrid, &desired.shape),
    };
    let fitting: Vec<(u32, u32)> =
        all.iter().copied().filter(|(stages, size)| stages * size <= most).collect();
    if fitting.is_empty() { all.into_iter().take(1).collect() } else { fitting }
}
