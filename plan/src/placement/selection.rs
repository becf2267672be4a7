//! The choice among the candidates for one replica, and its reasons as text.

use super::candidates::{Candidates, enumerate};
use super::score::{ENOUGH_SPEED, ScoreScale, ScoredCandidate};
use crate::memory_model::MemoryModel;
use crate::note::Note;
use crate::prediction::{Predictor, show_rate};
use crate::quantity::show;
use crate::shard::SplitCandidate;
use crate::snapshot::{ObjectKey, Snapshot};
use crate::valid_deployment::{Split, ValidDeployment};

/// Maximum candidates of a report; the schema says the same.
pub(super) const MAX_SHOWN_CANDIDATES: usize = 5;

/// Ranked candidates, the best first.
pub struct RankedCandidates<'a> {
    deployment: &'a ValidDeployment,
    memory_model: &'a MemoryModel<'a>,
    candidates: Vec<ScoredCandidate>,
    notes: Vec<Note>,
}

/// The chosen candidate and its alternatives.
pub struct Selection {
    /// The split.
    pub candidate: SplitCandidate,
    /// The reason.
    pub why: String,
    /// The alternatives, best first, with their numbers.
    pub alternatives: Vec<String>,
    /// The best candidate that shares failure domains with fewer replicas of the same deployment, if there is
    /// one.
    pub best_apart: Option<String>,
}

/// The candidates for one replica, as if the groups for which `without` is true were gone, and with or
/// without memory that agents have not released yet.
pub fn find_candidates<'a>(
    view: &Snapshot,
    desired: &'a ValidDeployment,
    memory_model: &'a MemoryModel<'a>,
    replica: i32,
    count_unreleased: bool,
    without: impl Fn(&ObjectKey) -> bool + Copy,
) -> Result<RankedCandidates<'a>, Vec<Note>> {
    let Candidates { found: mut scored, notes } =
        enumerate(view, desired, memory_model, replica, count_unreleased, without)?;
    if let Some(scale) = ScoreScale::from_candidates(scored.iter()) {
        scored.sort_by(|a, b| scale.compare(a, b));
    }
    Ok(RankedCandidates { deployment: desired, memory_model, candidates: scored, notes })
}

impl RankedCandidates<'_> {
    /// The candidates, the best first.
    pub fn candidates(&self) -> impl Iterator<Item = &ScoredCandidate> {
        self.candidates.iter()
    }

    /// Number of nodes of the best.
    pub fn best_node_count(&self) -> usize {
        self.candidates.first().map_or(0, |scored| scored.candidate.ranks.len())
    }

    /// The best candidate, or the one that the joint plan chose.
    pub fn select(self, view: &Snapshot, advised: Option<&SplitCandidate>) -> Option<Selection> {
        let Self { deployment, memory_model, candidates: mut scored, notes } = self;
        let mut together = false;
        if let Some(split) = advised {
            let at = scored.iter().position(|scored| scored.candidate.is_same_split(split));
            let chosen = at.map(|at| scored.remove(at)).unwrap_or_else(|| {
                // Smaller splits, which free memory for others, kept this one from being considered.
                let rate = Predictor::new(view, &deployment.shape, deployment.capacity)
                    .rate(&split.plan(memory_model));
                ScoredCandidate {
                    candidate: split.clone(),
                    rate,
                    wifi: false,
                    fragmentation: 0.0,
                    domain_siblings: 0,
                    fetch_cost: 0.0,
                }
            });
            together = at != Some(0);
            scored.insert(0, chosen);
        }
        let mut why = selection_reason(deployment, memory_model, &scored, scored.first()?);
        let fetch = scored.first()?.fetch_cost;
        if fetch == 0.0 && scored.iter().any(|scored| scored.fetch_cost > 0.0) {
            why.push_str("; the model's files are there already");
        } else if fetch > 0.5 {
            why.push_str("; other files have to go for the model's");
        }
        if together {
            why.push_str("; best together with the other pending replicas");
        }
        let best = scored.remove(0);
        let known = |scored: &ScoredCandidate| {
            scored.candidate.ranks.iter().all(|rank| has_known_gpu(view, &rank.node))
        };
        let shown = |scored: &ScoredCandidate| {
            let rate =
                if known(scored) { format!(", {} tokens/s", show_rate(scored.rate)) } else { String::new() };
            format!("{}, {} left{rate}", scored.candidate.show(), show(scored.candidate.min_free_after()))
        };
        let others = scored
            .iter()
            .map(shown)
            .chain(notes.iter().map(ToString::to_string))
            .take(MAX_SHOWN_CANDIDATES)
            .collect();
        let apart = scored.iter().find(|scored| scored.domain_siblings < best.domain_siblings).map(shown);
        Some(Selection { candidate: best.candidate, why, alternatives: others, best_apart: apart })
    }
}

fn has_known_gpu(view: &Snapshot, node: &str) -> bool {
    view.nodes.get(node).is_some_and(|node| node.gpu.is_some())
}

/// The reason for the best candidate.
fn selection_reason(
    desired: &ValidDeployment,
    memory_model: &MemoryModel<'_>,
    candidates: &[ScoredCandidate],
    best: &ScoredCandidate,
) -> String {
    let at = &desired.split_source;
    match &desired.split {
        Split::Auto | Split::Single => automatic_reason(desired, memory_model, candidates, best),
        Split::Pipeline => {
            format!("{at}.mode asks for a pipeline; these are the fewest nodes that hold it")
        }
        Split::Ranks(ranks) => format!(
            "{at}.ranks asks for {ranks}; layers are balanced by the time each rank takes for a token"
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

/// The reasons if no split is prescribed.
fn automatic_reason(
    desired: &ValidDeployment,
    memory_model: &MemoryModel<'_>,
    candidates: &[ScoredCandidate],
    best: &ScoredCandidate,
) -> String {
    let nodes = |scored: &ScoredCandidate| scored.candidate.ranks.len();
    let of = |single: bool| candidates.iter().filter(move |scored| (nodes(scored) == 1) == single);
    let fastest = |single: bool| of(single).max_by(|a, b| a.rate.total_cmp(&b.rate));
    let size = show(memory_model.whole_model().total());
    match (fastest(true), fastest(false)) {
        (Some(single), several) if nodes(best) == 1 => {
            let slower = of(true).any(|scored| scored.rate < ENOUGH_SPEED * single.rate);
            let tighter = |other: &&ScoredCandidate| {
                other.candidate.min_free_after() < best.candidate.min_free_after()
                    && other.fetch_cost > best.fetch_cost
            };
            let tightest = of(true).filter(tighter).min_by_key(|other| other.candidate.min_free_after());
            let which = match &desired.dedicated_group {
                Some((_, group)) => format!("a node of workload group {group}'s own"),
                None => match tightest {
                    Some(tightest) => format!(
                        "the files decide: {} would fit more tightly and has more of them to fetch",
                        tightest.candidate.show()
                    ),
                    None if slower => {
                        "of those that answer about as soon as any, the tightest fit".to_owned()
                    }
                    None => "the tightest fit keeps larger nodes free".to_owned(),
                },
            };
            let spare = show(best.candidate.min_free_after());
            let mut why = format!("one node holds the model's {size} with {spare} to spare; {which}");
            if let Some(several) = several.filter(|several| several.rate > best.rate) {
                let (count, gain) = (nodes(several), several.rate / best.rate);
                why.push_str(&format!(
                    "; {count} nodes together would answer {gain:.2} times as fast, less than they are worth by themselves"
                ));
            }
            why
        }
        (Some(single), _) => format!(
            "{} nodes together answer {:.2} times as fast as one that holds the model's {size}",
            nodes(best),
            best.rate / single.rate
        ),
        (None, _) if best.candidate.tensor_size > 1 => format!(
            "no single node holds the model's {size}; these are the fewest that do and are connected by RDMA, where a tensor group answers sooner than a pipeline"
        ),
        (None, _) => format!("no single node holds the model's {size}; these are the fewest that do"),
    }
}
