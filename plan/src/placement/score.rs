//! Score of a candidate: one number that compares candidates of one deployment and of all deployments
//! together. Its constants reflect what owners of clusters report (docs/plan.md).
//!
//! ```text
//! score = ½ + ½ × min(1, speed / (0.8 × the best speed there is))      placed at all, and how fast
//!       − 1/12 for every node beyond the fewest that can hold it        two nodes must be 1.5 times as fast
//!       − 1/4 for every replica of the same deployment on its nodes
//!       − 1/12 × n/(n+1) for n replicas in its failure domains          at most the cost of a second node
//!       − 1/4 for sums over TCP                                         RDMA, unless 2.5 times as slow
//!       − 1/12 for stages connected over Wi-Fi                          its prediction is its best case
//!       − 1/50 × the share of its files to fetch                        half of that if they have free space
//!       − 1/1000 × its share of the cluster's fragmentation             ties: tightest fit, then fastest
//! ```

use std::cmp::Ordering;

use russet_crds::Backend;

use crate::shard::SplitCandidate;

/// Share of the best speed above which differences do not count: a tighter fit is preferred.
pub(super) const ENOUGH_SPEED: f64 = 0.8;
/// Cost of a node beyond the fewest. With it, two nodes must be 1.5 times as fast as one, four 2.5 times.
const NODE_COST: f64 = 1.0 / 12.0;
/// Weight of the fragmentation of a whole cluster.
const FRAGMENTATION_WEIGHT: f64 = 1e-3;
/// Cost of a replica of the same deployment on the same node: the failure of one machine should not stop
/// both.
const SAME_NODE_COST: f64 = 0.25;
/// Maximum cost of replicas of the same deployment in one failure domain: as much as a second node. So no
/// second node is taken for the sake of spread, and no candidate is chosen for it that is less than two
/// thirds as fast as the fastest (`ENOUGH` less `2 × APART` of that). For the first such replica, which costs
/// half of it: less than 73 %.
const SHARED_DOMAIN_COST: f64 = NODE_COST;
/// Maximum cost of missing files: they are fetched in minutes and stay, while a slower machine stays slower.
/// It decides between candidates of about the same speed.
const FETCH_COST: f64 = 0.02;
/// Cost of a tensor group's sums over TCP, where other traffic delays every one of them.
const TCP_COST: f64 = 0.25;
/// Cost of ranks connected over Wi-Fi. Its round trips are predicted at their best, and owners saw a third of
/// the speed of the cable beside it.
const WIFI_COST: f64 = 1.0 / 12.0;
/// Maximum score, of 1, of a pipeline of a model that fits one node: better than none, but not worth a small
/// speed-up of others.
const MAX_PIPELINE_SCORE: f64 = 0.3;
/// Minimum score of any placement: a slow replica is better than none.
const MIN_SCORE: f64 = 0.05;

/// A candidate and the inputs of its score.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredCandidate {
    /// The split.
    pub candidate: SplitCandidate,
    /// Tokens per second of one stream.
    pub rate: f64,
    /// Whether ranks are connected over Wi-Fi.
    pub wifi: bool,
    /// Its share of the cluster's fragmentation: large free pieces count more than the same bytes in small
    /// ones.
    pub fragmentation: f64,
    /// Other replicas of the same deployment in its failure domains.
    pub domain_siblings: usize,
    /// Average cost of fetching the model's files to its nodes: 0 if present, ½ with free space, 1 if other
    /// files are evicted for them.
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

    /// Tie-breaker for candidates with equal scores: their nodes and what each holds.
    pub fn node_layers(&self) -> impl Iterator<Item = (&str, u32)> {
        self.candidate.ranks.iter().map(|rank| (rank.node.as_str(), rank.layers))
    }
}

/// Reference values for the candidates of one deployment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreScale {
    /// The best speed of all candidates, tokens per second.
    pub best: f64,
    /// The fewest nodes of all candidates.
    pub fewest: usize,
}

impl ScoreScale {
    /// The scale of these candidates; `None` if there are none.
    pub fn from_candidates<'w>(
        candidates: impl Iterator<Item = &'w ScoredCandidate> + Clone,
    ) -> Option<Self> {
        let fewest = candidates.clone().map(|scored| scored.candidate.ranks.len()).min()?;
        Some(Self { best: candidates.map(|scored| scored.rate).fold(0.0, f64::max), fewest })
    }

    /// Score of a candidate, from nearly 0 to 1; without its fragmentation.
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
        let worth = self.rate_score(scored.rate)
            - NODE_COST * nodes
            - SAME_NODE_COST * siblings
            - tcp
            - wifi
            - beside;
        let worth = worth.max(MIN_SCORE);
        let strung =
            self.fewest == 1 && scored.candidate.ranks.len() > 1 && scored.candidate.tensor_size == 1;
        if strung { worth * MAX_PIPELINE_SCORE } else { worth }
    }

    /// Score by speed of a candidate over the fewest nodes.
    pub fn rate_score(&self, rate: f64) -> f64 {
        let share = if self.best > 0.0 { (rate / (ENOUGH_SPEED * self.best)).min(1.0) } else { 1.0 };
        0.5 + 0.5 * share
    }

    /// The score less its fragmentation.
    pub fn net_score(&self, scored: &ScoredCandidate) -> f64 {
        self.score(scored) - FRAGMENTATION_WEIGHT * scored.fragmentation
    }

    /// Orders the better candidate first: replicas of a deployment spread first of all.
    pub fn compare(&self, a: &ScoredCandidate, b: &ScoredCandidate) -> Ordering {
        let spread = a.candidate.siblings.cmp(&b.candidate.siblings);
        spread.then_with(|| self.compare_score(a, b))
    }

    /// Orders the higher score first, and of equal ones the faster.
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

    fn scored(nodes: usize, rate: f64, gaps: f64) -> ScoredCandidate {
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
        ScoredCandidate {
            candidate,
            rate,
            wifi: false,
            fragmentation: gaps,
            domain_siblings: 0,
            fetch_cost: 0.0,
        }
    }

    #[test]
    fn cable_scores_better_than_wifi() {
        let (air, cable) = (ScoredCandidate { wifi: true, ..scored(2, 24.0, 0.0) }, scored(2, 25.0, 0.5));
        let slow = scored(2, 15.0, 0.0);
        let scale = ScoreScale::from_candidates([&air, &cable, &slow].into_iter()).unwrap();
        assert_eq!(scale.compare(&cable, &air), Ordering::Less, "although it leaves no room to others");
        assert_eq!(scale.compare(&air, &slow), Ordering::Less, "and not at any price");
        let (slower, faster) = (scored(2, 24.0, 0.1), scored(2, 25.0, 0.1));
        assert_eq!(scale.compare(&faster, &slower), Ordering::Less, "of two that are worth the same");
    }

    #[test]
    fn more_nodes_must_really_win() {
        for (story, a, b, first) in [
            ("a quarter more is not worth a second node", scored(1, 10.0, 0.0), scored(2, 12.5, 0.0), true),
            ("1.4 times is not", scored(1, 10.0, 0.0), scored(2, 14.0, 0.0), true),
            ("1.6 times is", scored(1, 10.0, 0.0), scored(2, 16.0, 0.0), false),
            ("four nodes must give much more", scored(1, 10.0, 0.0), scored(4, 20.0, 0.0), true),
            ("and may", scored(1, 10.0, 0.0), scored(4, 28.0, 0.0), false),
            ("a machine a tenth slower is a tighter fit", scored(1, 10.0, 0.2), scored(1, 9.0, 0.1), false),
            ("one half as fast is none", scored(1, 10.0, 0.9), scored(1, 5.0, 0.1), true),
        ] {
            let scale = ScoreScale::from_candidates([&a, &b].into_iter()).unwrap();
            assert_eq!(scale.compare(&a, &b) == Ordering::Less, first, "{story}");
        }
    }

    #[test]
    fn any_running_replica_scores_above_none() {
        let (slow, fast) = (scored(16, 0.1, 1.0), scored(1, 100.0, 0.0));
        let scale = ScoreScale::from_candidates([&slow, &fast].into_iter()).unwrap();
        assert!(scale.net_score(&slow) > 0.0 && scale.net_score(&fast) <= 1.0);
    }
}
