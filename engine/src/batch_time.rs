//! Batch time model: predicts how long a batch should take on this rank, from earlier batches. Pure.
//!
//! The cost of a batch grows with its tokens and with their attention context, never more than in proportion
//! to either, because a part of it (reading the weights) is constant. So batches are put into cells by the
//! powers of two of both. A cell holds the time of its slowest recent batch; an unseen cell is predicted from
//! the lowest bound that another cell implies. The model estimates high: a prediction tells a step that hangs
//! from a long one, and is no promise.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::executor::SequenceStep;

/// Default and maximum estimate, for the first batch and for sizes never seen: prefilling 2,048 tokens with
/// the largest model on the slowest machine we know of takes less.
pub const DEFAULT_ESTIMATE: Duration = Duration::from_secs(60);

/// Attending to this many tokens costs less than running one more token through the weights, in every model
/// in use: the ratio of the two is about six times a model's width.
const CHEAP_CONTEXT_TOKENS: u64 = 1024;

/// Tokens that take as long as the logits of one and the order of its vocabulary. In small models these are most of the
/// work.
const SCORED_TOKENS: u64 = 7;

/// Batches of a cell over which its slowest one is forgotten: the first ones compile kernels, and one may
/// have run on a busy machine.
const DECAY_BATCHES: f64 = 32.0;

/// Size of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSize {
    /// Tokens of all steps; those of which logits are computed too count more.
    tokens: u64,
    /// Average number of tokens that each of them attends to.
    context: u64,
}

impl BatchSize {
    /// The size of these steps.
    pub fn from_steps(batch: &[SequenceStep]) -> Self {
        let scored = |step: &SequenceStep| step.score.as_ref().map_or(0, |score| score.tokens.len() as u64);
        let length = |step: &SequenceStep| u64::from(step.length()) + SCORED_TOKENS * scored(step);
        let tokens: u64 = batch.iter().map(length).sum();
        let attended = |step: &SequenceStep| {
            u64::from(step.length()) * (u64::from(step.offset) + u64::from(step.length()))
        };
        let attended: u64 = batch.iter().map(attended).sum();
        Self { tokens, context: attended / tokens.max(1) }
    }

    fn cell(self) -> Cell {
        (self.tokens.max(1).ilog2(), (1 + self.context / CHEAP_CONTEXT_TOKENS).ilog2())
    }
}

/// Powers of two of tokens and context.
type Cell = (u32, u32);

/// The batch times of this rank.
#[derive(Clone, Debug, Default)]
pub struct BatchTimeModel {
    /// Seconds of the slowest recent batch.
    cells: BTreeMap<Cell, f64>,
}

impl BatchTimeModel {
    /// Predicted time of a batch.
    pub fn estimate(&self, work: BatchSize) -> Duration {
        let cell = work.cell();
        let seconds = self.cells.get(&cell).copied().unwrap_or_else(|| {
            let implied = self.cells.iter().map(|(seen, seconds)| seconds * max_growth(*seen, cell));
            implied.fold(DEFAULT_ESTIMATE.as_secs_f64(), f64::min)
        });
        Duration::from_secs_f64(seconds)
    }

    /// Records the time of a batch.
    pub fn record(&mut self, work: BatchSize, took: Duration) {
        // A longer time than any estimate means that the machine slept.
        let took = took.min(DEFAULT_ESTIMATE).as_secs_f64();
        let slowest = self.cells.entry(work.cell()).or_insert(took);
        *slowest = took.max(*slowest + (took - *slowest) / DECAY_BATCHES);
    }
}

/// Upper bound of the ratio between the batch times of two cells.
fn max_growth(from: Cell, to: Cell) -> f64 {
    // From the bottom of one cell to the top of another is one power more than between the cells.
    let powers = |from: u32, to: u32| if to > from { to - from + 1 } else { 0 };
    f64::from(powers(from.0, to.0) + powers(from.1, to.1)).exp2()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::ScoreSpec;

    fn work(tokens: u64, context: u64) -> BatchSize {
        BatchSize { tokens, context }
    }

    #[test]
    fn batch_size_counts_tokens_and_context() {
        let step = |offset, tokens: usize| SequenceStep {
            slot: 0,
            offset,
            tokens: vec![1; tokens],
            draft_tokens: 0,
            adapter: 0,
            sample: None,
            score: None,
        };
        assert_eq!(BatchSize::from_steps(&[step(100, 1)]), work(1, 101));
        // A token that is not known yet counts as a token.
        assert_eq!(BatchSize::from_steps(&[step(100, 0)]), work(1, 101));
        // A long output beside a prompt does not make the prompt's tokens costly.
        assert_eq!(
            BatchSize::from_steps(&[step(99_999, 1), step(0, 255)]),
            work(256, (100_000 + 255 * 255) / 256)
        );
        assert_eq!(BatchSize::from_steps(&[]), work(0, 0));
        // The logits of a prompt take longer than the prompt.
        let score = Some(ScoreSpec { tokens: vec![1; 300], top: 0 });
        let scored = BatchSize::from_steps(&[SequenceStep { score, ..step(0, 300) }]);
        assert!(scored.tokens > work(1200, 300).tokens && scored.context <= 300, "{scored:?}");
    }

    #[test]
    fn batch_time_model_estimates_from_measured_batches() {
        let prompt = work(2048, 2048);
        for (story, seen, asked, expected) in [
            ("the first batch ever gets a generous estimate", vec![], prompt, 60.0),
            ("the same again takes as long", vec![(work(1, 20), 0.02)], work(1, 30), 0.02),
            ("fewer tokens take no longer", vec![(prompt, 10.0)], work(1, 20), 10.0),
            ("unless they were seen", vec![(prompt, 10.0), (work(1, 20), 0.02)], work(1, 500), 0.02),
            (
                "the first prompt is estimated from the smoke prompt",
                vec![(work(20, 10), 0.1)],
                work(900, 900),
                6.4,
            ),
            // 20 tokens of the smoke prompt on a machine that needs ten seconds for 2,048.
            ("a long one has all the time there is", vec![(work(20, 10), 0.1)], prompt, 60.0),
            ("and is known afterwards", vec![(work(20, 10), 0.1), (prompt, 10.0)], prompt, 10.0),
            ("more answers at a time cost no more than each", vec![(work(1, 20), 0.02)], work(8, 20), 0.32),
            ("a long context may cost as much again", vec![(prompt, 1.0)], work(2048, 9_000), 8.0),
            ("no estimate is beyond the first", vec![(work(1, 20), 1.0)], prompt, 60.0),
            ("a machine's sleep is no batch", vec![(work(1, 20), 7200.0)], work(1, 20), 60.0),
        ] {
            let mut forecast = BatchTimeModel::default();
            for (work, seconds) in seen {
                forecast.record(work, Duration::from_secs_f64(seconds));
            }
            let seconds = forecast.estimate(asked).as_secs_f64();
            assert!((seconds - expected).abs() < 1e-6, "{story}: {seconds}");
        }
    }

    #[test]
    fn batch_time_model_forgets_outliers_and_follows_slowdowns() {
        let mut forecast = BatchTimeModel::default();
        let (step, quick) = (work(1, 20), Duration::from_millis(20));
        forecast.record(step, Duration::from_secs(3));
        assert_eq!(forecast.estimate(step), Duration::from_secs(3), "the kernels were compiled");
        for _ in 0..200 {
            forecast.record(step, quick);
        }
        assert!(forecast.estimate(step) < Duration::from_millis(30), "{:?}", forecast.estimate(step));
        forecast.record(step, Duration::from_millis(80));
        assert_eq!(forecast.estimate(step), Duration::from_millis(80));
    }

    #[test]
    fn healthy_batches_stay_within_five_times_their_estimate() {
        // Batch seconds of made-up ranks: a base, the cost per token, and attention.
        for (base, token, attention) in
            [(0.02, 0.005, 1e-7), (0.001, 1e-5, 5e-9), (0.5, 0.0, 0.0), (0.0, 0.02, 1e-6)]
        {
            let mut forecast = BatchTimeModel::default();
            let mut run = |work: BatchSize| {
                let (tokens, context) = (work.tokens as f64, work.context as f64);
                let took = base + tokens * (token + attention * context);
                let bound = (5.0 * forecast.estimate(work).as_secs_f64()).max(2.0);
                assert!(took < bound, "{work:?} took {took:.3} of {bound:.3} on {base} {token} {attention}");
                forecast.record(work, Duration::from_secs_f64(took));
            };
            // The smoke prompt, one decode and several, a prompt, and one behind a long cached prefix.
            run(work(20, 10));
            (0..300).for_each(|at| run(work(1, 20 + at)));
            (0..300).for_each(|at| run(work(16, 500 + at)));
            (0..4).for_each(|piece| run(work(2048, 2048 * piece + 1024)));
            (0..300).for_each(|at| run(work(1, 8000 + at)));
            run(work(2048, 60_000));
        }
    }
}
