//! The choice among the ways to run one replica, and its reasons in words.

use super::report::SHOWN;
use super::ways::{Ways, ways};
use super::worth::{ENOUGH, Scale, Way};
use crate::fit::Fit;
use crate::forecast::{Forecast, show_rate};
use crate::note::Note;
use crate::quantity::show;
use crate::shard::Candidate;
use crate::snapshot::{Key, Snapshot};
use crate::validate::{Split, ValidDeployment};

/// Ways to choose from, the best first.
pub struct Choices<'a> {
    want: &'a ValidDeployment,
    fit: &'a Fit<'a>,
    ways: Vec<Way>,
    notes: Vec<Note>,
}

/// A choice and what it was chosen from.
pub struct Choice {
    /// The split.
    pub candidate: Candidate,
    /// Why this one.
    pub why: String,
    /// The others, best first, with their numbers.
    pub others: Vec<String>,
    /// The best one that fails together with fewer replicas of the same deployment, where there is one.
    pub apart: Option<String>,
}

/// The room there is for one replica, as if the groups for which `without` is true were gone, and with
/// or without what agents have not released.
pub fn find<'a>(
    view: &Snapshot,
    want: &'a ValidDeployment,
    fit: &'a Fit<'a>,
    replica: i32,
    count_unreleased: bool,
    without: impl Fn(&Key) -> bool + Copy,
) -> Result<Choices<'a>, Vec<Note>> {
    let Ways { found: mut ways, notes } = ways(view, want, fit, replica, count_unreleased, without)?;
    if let Some(scale) = Scale::of(ways.iter()) {
        ways.sort_by(|a, b| scale.compare(a, b));
    }
    Ok(Choices { want, fit, ways, notes })
}

impl Choices<'_> {
    /// The ways, the best first.
    pub fn ways(&self) -> impl Iterator<Item = &Way> {
        self.ways.iter()
    }

    /// Nodes of the best.
    pub fn size(&self) -> usize {
        self.ways.first().map_or(0, |way| way.candidate.ranks.len())
    }

    /// The best, or the one that is best for all that wait together.
    pub fn choose(self, view: &Snapshot, advised: Option<&Candidate>) -> Option<Choice> {
        let Self { want, fit, mut ways, notes } = self;
        let mut together = false;
        if let Some(split) = advised {
            let at = ways.iter().position(|way| way.candidate.is(split));
            let way = at.map(|at| ways.remove(at)).unwrap_or_else(|| {
                // Smaller splits, which others get the room of, kept this one from being looked at.
                let rate = Forecast::new(view, &want.shape, want.room).rate(&split.plan(fit));
                Way { candidate: split.clone(), rate, wifi: false, gaps: 0.0, crowd: 0, fetch: 0.0 }
            });
            together = at != Some(0);
            ways.insert(0, way);
        }
        let mut why = why(want, fit, &ways, ways.first()?);
        let fetch = ways.first()?.fetch;
        if fetch == 0.0 && ways.iter().any(|way| way.fetch > 0.0) {
            why.push_str("; the model's files are there already");
        } else if fetch > 0.5 {
            why.push_str("; other files have to go for the model's");
        }
        if together {
            why.push_str("; best together with what else waits for a place");
        }
        let best = ways.remove(0);
        let known = |way: &Way| way.candidate.ranks.iter().all(|rank| knows(view, &rank.node));
        let shown = |way: &Way| {
            let rate = if known(way) { format!(", {} tokens/s", show_rate(way.rate)) } else { String::new() };
            format!("{}, {} left{rate}", way.candidate.show(), show(way.candidate.left()))
        };
        let others =
            ways.iter().map(shown).chain(notes.iter().map(ToString::to_string)).take(SHOWN).collect();
        let apart = ways.iter().find(|way| way.crowd < best.crowd).map(shown);
        Some(Choice { candidate: best.candidate, why, others, apart })
    }
}

fn knows(view: &Snapshot, node: &str) -> bool {
    view.nodes.get(node).is_some_and(|node| node.machine.is_some())
}

/// Why the best way is the best.
fn why(want: &ValidDeployment, fit: &Fit<'_>, ways: &[Way], best: &Way) -> String {
    let at = &want.asked_at;
    match &want.split {
        Split::Auto | Split::Single => automatic(want, fit, ways, best),
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

/// The reasons where nothing is prescribed.
fn automatic(want: &ValidDeployment, fit: &Fit<'_>, ways: &[Way], best: &Way) -> String {
    let nodes = |way: &Way| way.candidate.ranks.len();
    let of = |single: bool| ways.iter().filter(move |way| (nodes(way) == 1) == single);
    let fastest = |single: bool| of(single).max_by(|a, b| a.rate.total_cmp(&b.rate));
    let size = show(fit.whole().total());
    match (fastest(true), fastest(false)) {
        (Some(single), several) if nodes(best) == 1 => {
            let slower = of(true).any(|way| way.rate < ENOUGH * single.rate);
            let which = match &want.own {
                Some((_, group)) => format!("a node of workload group {group}'s own"),
                None if slower => "of those that answer about as soon as any, the tightest fit".to_owned(),
                None => "the tightest fit keeps larger nodes free".to_owned(),
            };
            let spare = show(best.candidate.left());
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
            "no single node holds the model's {size}; these are the fewest that do and meet over RDMA, where a tensor group answers sooner than a pipeline"
        ),
        (None, _) => format!("no single node holds the model's {size}; these are the fewest that do"),
    }
}
