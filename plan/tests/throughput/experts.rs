//! What ranks read of a token's experts, if each expert is cut or each rank has whole ones.

use super::models::Facts;

impl Facts {
    /// The part of a token's active experts that the busiest of `ranks` ranks reads, if each has whole experts and a
    /// router favours none: the mean of the largest of as many hypergeometric counts.
    pub fn share_of_whole_experts(&self, ranks: u32) -> f64 {
        let choose =
            |of: u32, count: u32| (0..count).map(|i| f64::from(of - i) / f64::from(i + 1)).product::<f64>();
        let (count, used) = self.experts;
        let each = count / ranks;
        // Selections of experts of which no rank has more than `most`.
        let selections = |most: u32| {
            let mut counts = vec![0.0; used as usize + 1];
            counts[0] = 1.0;
            for _ in 0..ranks {
                let of_rank = |chosen: usize| {
                    (0..=most.min(chosen as u32))
                        .map(|own| counts[chosen - own as usize] * choose(each, own))
                        .sum::<f64>()
                };
                counts = (0..=used as usize).map(of_rank).collect();
            }
            counts[used as usize]
        };
        let mean: f64 = (0..used).map(|most| 1.0 - selections(most) / choose(count, used)).sum();
        mean / f64::from(used)
    }

    /// The same if every expert is cut between groups of quantised weights.
    pub fn share_of_cut_experts(&self, ranks: u32) -> f64 {
        let groups = if self.expert_width.is_multiple_of(64) {
            self.expert_width / 64
        } else {
            self.expert_width / 32
        };
        f64::from(groups.div_ceil(ranks)) / f64::from(groups)
    }
}
