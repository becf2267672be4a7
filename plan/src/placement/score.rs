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

use crate::shard::SplitCandidate;

/// Share of the best speed from which on a difference counts no more: a tighter fit is worth it.
pub(super) const ENOUGH_SPEED: f64 = 0.8;
/// What a node beyond the fewest costs. By this, two nodes must answer 1.5 times as fast as one, four 2.5.
const NODE_COST: f64 = 1.0 / 12.0;
/// What all the gaps of a cluster are worth.
const FRAGMENTATION_WEIGHT: f64 = 1e-3;
/// What a replica of the same deployment on the same node costs: one machine's end should not end both.
const SAME_NODE_COST: f64 = 0.25;
/// What replicas of the same deployment cost that fail together with it, at most: as much as a second node. So
/// nobody takes a second node to be apart from others, and no place is taken for it that answers less than two
/// thirds as fast as the fastest there is (`ENOUGH` less `2 × APART` of that); for the first of them, which costs
/// half of it, less than 73 %.
const SHARED_DOMAIN_COST: f64 = NODE_COST;
/// What it costs at most that the model's files are not there: they come in minutes and stay, and a slower machine
/// is slower for ever. It decides between machines that answer about as soon.
const FETCH_COST: f64 = 0.02;
/// What it costs that the sums of a tensor group go over TCP, where other traffic delays every one of them.
const TCP_COST: f64 = 0.25;
/// What it costs that ranks meet over Wi-Fi. Its round trips are predicted at their best, and owners saw a third of
/// the speed they had over the cable beside it.
const WIFI_COST: f64 = 1.0 / 12.0;
/// What a pipeline is worth at most, of 1, of a model that one node would hold: better than none, and no price for
/// others being a little faster.
const MAX_PIPELINE_SCORE: f64 = 0.3;
/// What any placement is worth at least: a replica that runs somehow is better than none.
const MIN_SCORE: f64 = 0.05;

/// A way to run one replica.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredCandidate {
    /// The split.
    pub candidate: SplitCandidate,
    /// Tokens a second of one stream.
    pub rate: f64,
    /// Whether ranks meet over Wi-Fi.
    pub wifi: bool,
    /// Share of the cluster's gaps it takes: large free pieces count more than the same bytes in small ones.
    pub fragmentation: f64,
    /// Other replicas of the same deployment that fail together with it.
    pub domain_siblings: usize,
    /// How much of the model's files is to come to its nodes, on average: from 0, where they are, over ½, where they
    /// have room, to 1, where others go for them.
    pub fetch_cost: f64,
}

impl ScoredCandidate {
    /// The nodes of its ranks.
    pub fn nodes(&self) -> Vec<String> {
        self.candidate.ranks.iter().map(|rank| rank.node.clone()).collect()
    }

    /// Whether a rank of it is on this node.
    pub fn uses(&self, node: &str) -> bool {
        self.candidate.ranks.iter().any(|rank| rank.node == node)
    }

    /// What orders ways that are worth the same: their nodes and what each holds.
    pub fn node_layers(&self) -> impl Iterator<Item = (&str, u32)> {
        self.candidate.ranks.iter().map(|rank| (rank.node.as_str(), rank.layers))
    }
}

/// What the ways of one deployment are measured by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreScale {
    /// The best speed of all ways, tokens a second.
    pub best: f64,
    /// The fewest nodes of all ways.
    pub fewest: usize,
}

impl ScoreScale {
    /// The scale of these ways; `None` when there are none.
    pub fn from_candidates<'w>(candidates: impl Iterator<Item = &'w ScoredCandidate> + Clone) -> Option<Self> {
        let fewest = candidates.clone().map(|scored| scored.candidate.ranks.len()).min()?;
        Some(Self { best: candidates.map(|scored| scored.rate).fold(0.0, f64::max), fewest })
    }

    /// What a way is worth, from nearly 0 to 1; without its gaps.
    pub fn score(&self, scored: &ScoredCandidate) -> f64 {
        let nodes = scored.candidate.ranks.len().saturating_sub(self.fewest) as f64;
        let siblings = scored.candidate.siblings as f64;
        let tcp = if scored.candidate.tensor_size > 1 && scored.candidate.backend == Backend::Ring {
            TCP_COST
        } else {
            0.0
        };
        let wifi = if scored.wifi { WIFI_COST } else { 0.0 };
        let crowd = scored.domain_siblings as f64;
        let beside = SHARED_DOMAIN_COST * crowd / (crowd + 1.0) + FETCH_COST * scored.fetch_cost;
        let worth = self.rate_score(scored.rate) - NODE_COST * nodes - SAME_NODE_COST * siblings - tcp - wifi - beside;
        let worth = worth.max(MIN_SCORE);
        let strung = self.fewest == 1 && scored.candidate.ranks.len() > 1 && scored.candidate.tensor_size == 1;
        if strung { worth * MAX_PIPELINE_SCORE } else { worth }
    }

    /// What a way over the fewest nodes is worth by its speed.
    pub fn rate_score(&self, rate: f64) -> f64 {
        let share = if self.best > 0.0 { (rate / (ENOUGH_SPEED * self.best)).min(1.0) } else { 1.0 };
        0.5 + 0.5 * share
    }

    /// The same less what its gaps are worth.
    pub fn net_score(&self, scored: &ScoredCandidate) -> f64 {
        self.score(scored) - FRAGMENTATION_WEIGHT * scored.fragmentation
    }

    /// The better of two ways comes first: replicas of a deployment spread first of all.
    pub fn compare(&self, a: &ScoredCandidate, b: &ScoredCandidate) -> Ordering {
        let spread = a.candidate.siblings.cmp(&b.candidate.siblings);
        spread.then_with(|| self.compare_score(a, b))
    }

    /// The one that is worth more comes first, and of equal ones the faster.
    pub fn compare_score(&self, a: &ScoredCandidate, b: &ScoredCandidate) -> Ordering {
        let worth = self.net_score(b).total_cmp(&self.net_score(a));
        worth.then(b.rate.total_cmp(&a.rate)).then_with(|| a.node_layers().cmp(b.node_layers()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_model::MemoryEstimate;
    use crate::shard::RankAssignment;

    fn way(nodes: usize, rate: f64, gaps: f64) -> ScoredCandidate {
        let rank = RankAssignment {
            node: "a".to_owned(),
            layers: 1,
            memory: MemoryEstimate::default(),
            free_after: 0,
            rdma_devices: Vec::new(),
        };
        let candidate = SplitCandidate {
            ranks: vec![rank; nodes],
            siblings: 0,
            tensor_size: nodes as u32,
            backend: Backend::None,
            backend_reason: None,
        };
        ScoredCandidate { candidate, rate, wifi: false, fragmentation: gaps, domain_siblings: 0, fetch_cost: 0.0 }
    }

    #[test]
    fn cable_scores_better_than_wifi() {
        let (air, cable) = (ScoredCandidate { wifi: true, ..way(2, 24.0, 0.0) }, way(2, 25.0, 0.5));
        let slow = way(2, 15.0, 0.0);
        let scale = ScoreScale::from_candidates([&air, &cable, &slow].into_iter()).unwrap();
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
            let scale = ScoreScale::from_candidates([&a, &b].into_iter()).unwrap();
            assert_eq!(scale.compare(&a, &b) == Ordering::Less, first, "{story}");
        }
    }

    #[test]
    fn any_running_replica_scores_above_none() {
        let (slow, fast) = (way(16, 0.1, 1.0), way(1, 100.0, 0.0));
        let scale = ScoreScale::from_candidates([&slow, &fast].into_iter()).unwrap();
        assert!(scale.net_score(&slow) > 0.0 && scale.net_score(&fast) <= 1.0);
    }
}
