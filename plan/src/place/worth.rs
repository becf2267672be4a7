//! What a way to run a replica is worth, as one number by which ways are compared, alone and all deployments
//! together. Its constants are what owners of clusters say about theirs (docs/plan.md).
//!
//! ```text
//! worth = ½ + ½ × min(1, speed / (0.8 × the best speed there is))      placed at all, and how fast
//!       − 1/12 for every node beyond the fewest that can hold it        a second node must give 1.5 times the speed
//!       − 1/4 for every replica of the same deployment on its nodes
//!       − 1/12 × n/(n+1) for n replicas in its failure domains           at most what a second node costs
//!       − 1/4 for sums that go over TCP                                  RDMA, unless that is 2.5 times as slow
//!       − 1/12 for stages that meet over Wi-Fi                          what is predicted of it is its best hour
//!       − 1/50 × the share of its files that is to come                   half of that where they have room
//!       − 1/1000 × the share of the cluster's large gaps it takes       ties go to the tightest fit, then the fastest
//! ```

use std::cmp::Ordering;

use russet_crds::Backend;

use crate::shard::Candidate;

/// Share of the best speed from which on a difference counts no more: a tighter fit is worth it.
pub(super) const ENOUGH: f64 = 0.8;
/// What a node beyond the fewest costs. By this, two nodes must answer 1.5 times as fast as one, four 2.5.
const NODE: f64 = 1.0 / 12.0;
/// What all the gaps of a cluster are worth.
const GAPS: f64 = 1e-3;
/// What a replica of the same deployment on the same node costs: one machine's end should not end both.
const SIBLING: f64 = 0.25;
/// What replicas of the same deployment cost that fail together with it, at most: as much as a second node. So
/// nobody takes a second node to be apart from others, and no place is taken for it that answers less than two
/// thirds as fast as the fastest there is (`ENOUGH` less `2 × APART` of that); for the first of them, which costs
/// half of it, less than 73 %.
const APART: f64 = NODE;
/// What it costs at most that the model's files are not there: they come in minutes and stay, and a slower machine
/// is slower for ever. It decides between machines that answer about as soon.
const FETCH: f64 = 0.02;
/// What it costs that the sums of a tensor group go over TCP, where other traffic delays every one of them.
const OVER_TCP: f64 = 0.25;
/// What it costs that ranks meet over Wi-Fi. Its round trips are predicted at their best, and owners saw a third of
/// the speed they had over the cable beside it.
const OVER_WIFI: f64 = 1.0 / 12.0;
/// What a pipeline is worth at most, of 1, of a model that one node would hold: better than none, and no price for
/// others being a little faster.
const STRUNG: f64 = 0.3;
/// What any placement is worth at least: a replica that runs somehow is better than none.
const LEAST: f64 = 0.05;

/// A way to run one replica.
#[derive(Clone, Debug, PartialEq)]
pub struct Way {
    /// The split.
    pub candidate: Candidate,
    /// Tokens a second of one stream.
    pub rate: f64,
    /// Whether ranks meet over Wi-Fi.
    pub wifi: bool,
    /// Share of the cluster's gaps it takes: large free pieces count more than the same bytes in small ones.
    pub gaps: f64,
    /// Other replicas of the same deployment that fail together with it.
    pub crowd: usize,
    /// How much of the model's files is to come to its nodes, on average: from 0, where they are, over ½, where they
    /// have room, to 1, where others go for them.
    pub fetch: f64,
}

impl Way {
    /// The nodes of its ranks.
    pub fn nodes(&self) -> Vec<String> {
        self.candidate.ranks.iter().map(|rank| rank.node.clone()).collect()
    }

    /// Whether a rank of it is on this node.
    pub fn uses(&self, node: &str) -> bool {
        self.candidate.ranks.iter().any(|rank| rank.node == node)
    }

    /// What orders ways that are worth the same: their nodes and what each holds.
    pub fn names(&self) -> impl Iterator<Item = (&str, u32)> {
        self.candidate.ranks.iter().map(|rank| (rank.node.as_str(), rank.layers))
    }
}

/// What the ways of one deployment are measured by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// The best speed of all ways, tokens a second.
    pub best: f64,
    /// The fewest nodes of all ways.
    pub fewest: usize,
}

impl Scale {
    /// The scale of these ways; `None` when there are none.
    pub fn of<'w>(ways: impl Iterator<Item = &'w Way> + Clone) -> Option<Self> {
        let fewest = ways.clone().map(|way| way.candidate.ranks.len()).min()?;
        Some(Self { best: ways.map(|way| way.rate).fold(0.0, f64::max), fewest })
    }

    /// What a way is worth, from nearly 0 to 1; without its gaps.
    pub fn worth(&self, way: &Way) -> f64 {
        let nodes = way.candidate.ranks.len().saturating_sub(self.fewest) as f64;
        let siblings = way.candidate.siblings as f64;
        let tcp = if way.candidate.tensor_size > 1 && way.candidate.backend == Backend::Ring {
            OVER_TCP
        } else {
            0.0
        };
        let wifi = if way.wifi { OVER_WIFI } else { 0.0 };
        let crowd = way.crowd as f64;
        let beside = APART * crowd / (crowd + 1.0) + FETCH * way.fetch;
        let worth = self.of_rate(way.rate) - NODE * nodes - SIBLING * siblings - tcp - wifi - beside;
        let worth = worth.max(LEAST);
        let strung = self.fewest == 1 && way.candidate.ranks.len() > 1 && way.candidate.tensor_size == 1;
        if strung { worth * STRUNG } else { worth }
    }

    /// What a way over the fewest nodes is worth by its speed.
    pub fn of_rate(&self, rate: f64) -> f64 {
        let share = if self.best > 0.0 { (rate / (ENOUGH * self.best)).min(1.0) } else { 1.0 };
        0.5 + 0.5 * share
    }

    /// The same less what its gaps are worth.
    pub fn net(&self, way: &Way) -> f64 {
        self.worth(way) - GAPS * way.gaps
    }

    /// The better of two ways comes first: replicas of a deployment spread first of all.
    pub fn compare(&self, a: &Way, b: &Way) -> Ordering {
        let spread = a.candidate.siblings.cmp(&b.candidate.siblings);
        spread.then_with(|| self.better(a, b))
    }

    /// The one that is worth more comes first, and of equal ones the faster.
    pub fn better(&self, a: &Way, b: &Way) -> Ordering {
        let worth = self.net(b).total_cmp(&self.net(a));
        worth.then(b.rate.total_cmp(&a.rate)).then_with(|| a.names().cmp(b.names()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fit::Need;
    use crate::shard::Rank;

    fn way(nodes: usize, rate: f64, gaps: f64) -> Way {
        let rank = Rank {
            node: "a".to_owned(),
            layers: 1,
            need: Need::default(),
            left: 0,
            rdma_devices: Vec::new(),
        };
        let candidate = Candidate {
            ranks: vec![rank; nodes],
            siblings: 0,
            tensor_size: nodes as u32,
            backend: Backend::None,
            why_backend: None,
        };
        Way { candidate, rate, wifi: false, gaps, crowd: 0, fetch: 0.0 }
    }

    #[test]
    fn a_cable_is_better_than_the_air() {
        let (air, cable) = (Way { wifi: true, ..way(2, 24.0, 0.0) }, way(2, 25.0, 0.5));
        let slow = way(2, 15.0, 0.0);
        let scale = Scale::of([&air, &cable, &slow].into_iter()).unwrap();
        assert_eq!(scale.compare(&cable, &air), Ordering::Less, "although it leaves no room to others");
        assert_eq!(scale.compare(&air, &slow), Ordering::Less, "and not at any price");
        let (slower, faster) = (way(2, 24.0, 0.1), way(2, 25.0, 0.1));
        assert_eq!(scale.compare(&faster, &slower), Ordering::Less, "of two that are worth the same");
    }

    #[test]
    fn more_nodes_must_really_win() {
        for (story, a, b, first) in [
            ("a quarter more is not worth a second node", way(1, 10.0, 0.0), way(2, 12.5, 0.0), true),
            ("1.4 times is not", way(1, 10.0, 0.0), way(2, 14.0, 0.0), true),
            ("1.6 times is", way(1, 10.0, 0.0), way(2, 16.0, 0.0), false),
            ("four nodes must give much more", way(1, 10.0, 0.0), way(4, 20.0, 0.0), true),
            ("and may", way(1, 10.0, 0.0), way(4, 28.0, 0.0), false),
            ("a machine a tenth slower is a tighter fit", way(1, 10.0, 0.2), way(1, 9.0, 0.1), false),
            ("one half as fast is none", way(1, 10.0, 0.9), way(1, 5.0, 0.1), true),
        ] {
            let scale = Scale::of([&a, &b].into_iter()).unwrap();
            assert_eq!(scale.compare(&a, &b) == Ordering::Less, first, "{story}");
        }
    }

    #[test]
    fn a_replica_that_runs_is_worth_more_than_none() {
        let (slow, fast) = (way(16, 0.1, 1.0), way(1, 100.0, 0.0));
        let scale = Scale::of([&slow, &fast].into_iter()).unwrap();
        assert!(scale.net(&slow) > 0.0 && scale.net(&fast) <= 1.0);
    }
}
