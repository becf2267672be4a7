//! Cost model of speculative decoding: the cost of a draft token, measured on the batches of this rank. Pure.
//!
//! A batch reads the weights once, whatever it holds, so one more token costs a fraction of a batch. The
//! fraction depends on machine, model and batch size, so it is measured. The result is the acceptance
//! probability at which a draft token pays: a token that is produced one batch earlier saves one sequence its
//! share of that batch.
//!
//! Where layers go back to the beginning of a step alone, the accepted tokens of a step with a rejected one run again. In
//! a batch they count as draft tokens do, being as many rows. The threshold leaves them out: a draft token at place `i`
//! whose acceptance is `p` brings `i` of them about with `pⁱ⁻¹ · (1 - p)`, half a token at most where more than half are
//! accepted, and where fewer are, the proposer soon pauses.

use std::collections::BTreeMap;
use std::time::Duration;

use super::AcceptanceThreshold;

/// Cost of a draft token as a share of a batch, before any was measured.
const DEFAULT_TOKEN_COST: f64 = 0.1;
/// Weight of the newest batch in the moving average.
const EMA_WEIGHT: f64 = 1.0 / 8.0;

/// Seconds per decode batch, by number of sequences.
#[derive(Clone, Debug, Default)]
pub struct CostModel {
    by_sequences: BTreeMap<u32, BatchCost>,
    /// Per token of the draft model.
    draft_model_token: Option<f64>,
}

#[derive(Clone, Copy, Debug, Default)]
struct BatchCost {
    /// Per batch without draft tokens.
    base: Option<f64>,
    /// Per additional draft token.
    per_draft_token: Option<f64>,
}

impl CostModel {
    /// Records how long the draft model took for a number of draft tokens.
    pub fn record_draft(&mut self, draft_tokens: u32, took: Duration) {
        if draft_tokens > 0 {
            update_average(&mut self.draft_model_token, took.as_secs_f64() / f64::from(draft_tokens));
        }
    }

    /// Records how long a decode batch took, with its number of sequences and of all their draft tokens and tokens that
    /// run again.
    pub fn record_batch(&mut self, sequences: u32, draft_tokens: u32, took: Duration) {
        let seen = self.by_sequences.entry(sequences).or_default();
        match (draft_tokens, seen.base) {
            (0, _) => update_average(&mut seen.base, took.as_secs_f64()),
            (draft_tokens, Some(plain)) => {
                update_average(
                    &mut seen.per_draft_token,
                    (took.as_secs_f64() - plain).max(0.0) / f64::from(draft_tokens),
                );
            }
            // No baseline to compare with yet.
            (_, None) => {}
        }
    }

    /// How long a decode batch of `sequences` sequences takes without draft tokens: measured with as many, or with the next
    /// lower or else higher number that was seen.
    pub fn decode_time(&self, sequences: u32) -> Option<Duration> {
        let base = |(_, cost): (&u32, &BatchCost)| cost.base;
        let lower = self.by_sequences.range(..=sequences).rev().find_map(base);
        let seconds = lower.or_else(|| self.by_sequences.range(sequences..).find_map(base))?;
        Duration::try_from_secs_f64(seconds).ok()
    }

    /// Acceptance probability at which a draft token pays in a batch of `sequences` sequences; above 1, none
    /// pays.
    pub fn acceptance_threshold(&self, sequences: u32) -> AcceptanceThreshold {
        let BatchCost { base: plain, per_draft_token } =
            self.by_sequences.get(&sequences).copied().unwrap_or_default();
        let of_a_batch = |seconds: Option<f64>| match (plain, seconds) {
            (Some(plain), Some(seconds)) if plain > 0.0 => seconds / plain,
            _ => DEFAULT_TOKEN_COST,
        };
        let lookup = of_a_batch(per_draft_token) * f64::from(sequences);
        AcceptanceThreshold {
            prompt_lookup: lookup,
            draft_model: lookup + of_a_batch(self.draft_model_token) * f64::from(sequences),
        }
    }
}

fn update_average(known: &mut Option<f64>, value: f64) {
    *known = Some(known.map_or(value, |known| known + (value - known) * EMA_WEIGHT));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acceptance_threshold_follows_the_cost_of_draft_tokens() {
        let batch = |draft_tokens, milliseconds| (1_u32, draft_tokens, milliseconds);
        for (story, seen, sequences, least) in [
            ("nothing was seen", vec![], 1, 0.1),
            ("beside others a batch saves less for one", vec![], 4, 0.4),
            ("without a batch to compare with nothing is learned", vec![batch(4, 100)], 1, 0.1),
            ("nor from plain ones alone", vec![batch(0, 30)], 1, 0.1),
            ("weights that are read once", vec![batch(0, 30), batch(4, 42)], 1, 0.1),
            ("products that cost as much for each", vec![batch(0, 10), batch(4, 42)], 1, 0.8),
            ("a draft token for nothing", vec![batch(0, 10), batch(4, 9)], 1, 0.0),
            ("other numbers of sequences say nothing", vec![batch(0, 10), batch(4, 42)], 2, 0.2),
        ] {
            let mut costs = CostModel::default();
            for (sequences, draft_tokens, milliseconds) in seen {
                costs.record_batch(sequences, draft_tokens, Duration::from_millis(milliseconds));
            }
            let AcceptanceThreshold { prompt_lookup: lookup, draft_model: draft } =
                costs.acceptance_threshold(sequences);
            assert!((lookup - least).abs() < 1e-9, "{story}: {lookup}");
            assert!((draft - least - 0.1 * f64::from(sequences)).abs() < 1e-9, "{story}: {draft}");
        }
    }

    #[test]
    fn draft_model_time_raises_its_acceptance_threshold() {
        let mut costs = CostModel::default();
        costs.record_batch(1, 0, Duration::from_millis(10));
        costs.record_batch(1, 4, Duration::from_millis(14));
        costs.record_draft(4, Duration::from_millis(8));
        let AcceptanceThreshold { prompt_lookup: lookup, draft_model: draft } = costs.acceptance_threshold(1);
        assert!((lookup - 0.1).abs() < 1e-9 && (draft - 0.3).abs() < 1e-9, "{lookup} {draft}");
    }

    #[test]
    fn cost_model_follows_a_machine_that_changes() {
        let mut costs = CostModel::default();
        costs.record_batch(1, 0, Duration::from_millis(10));
        costs.record_batch(1, 2, Duration::from_millis(30));
        (0..100).for_each(|_| costs.record_batch(1, 2, Duration::from_millis(14)));
        let AcceptanceThreshold { prompt_lookup: lookup, .. } = costs.acceptance_threshold(1);
        assert!((lookup - 0.2).abs() < 0.01, "{lookup}");
    }
}
