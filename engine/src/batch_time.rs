//! How long a batch should take on this rank, known before it runs, from how long others took. Pure.
//!
//! What a batch costs grows with its tokens, and with how much each of them attends to; never by more than in
//! proportion to either, because some of it (reading the weights) is the same for any. So batches are put into
//! cells by the powers of two of both, a cell holds the time of its slowest recent batch, and a cell that has seen
//! none is expected to take no longer than the least that another one implies. It guesses high: a forecast tells a
//! step that hangs from one that is long, and is no promise to anybody.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::executor::SequenceStep;

/// What a batch is expected to take before any has ended, and the most that is expected of a size that was never
/// seen: reading 2,048 tokens with the largest model on the slowest machine we know of takes less.
pub const DEFAULT_ESTIMATE: Duration = Duration::from_secs(60);

/// Attending to so many tokens costs less than reading one more through the weights, in every model of use: the
/// ratio of the two is about six times a model's width.
const CHEAP_CONTEXT_TOKENS: u64 = 1024;

/// Over so many batches of a cell its slowest is forgotten: the first ones compile kernels, and one may have met a
/// busy machine.
const DECAY_BATCHES: f64 = 32.0;

/// How much there is to do in a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSize {
    /// Of all its steps.
    tokens: u64,
    /// Tokens that each of them attends to, on average.
    context: u64,
}

impl BatchSize {
    /// What these steps ask for.
    pub fn from_steps(batch: &[SequenceStep]) -> Self {
        let tokens: u64 = batch.iter().map(|step| u64::from(step.length())).sum();
        let attended =
            |step: &SequenceStep| u64::from(step.length()) * (u64::from(step.offset) + u64::from(step.length()));
        let attended: u64 = batch.iter().map(attended).sum();
        Self { tokens, context: attended / tokens.max(1) }
    }

    fn cell(self) -> Cell {
        (self.tokens.max(1).ilog2(), (1 + self.context / CHEAP_CONTEXT_TOKENS).ilog2())
    }
}

/// Powers of two of the tokens and of what they attend to.
type Cell = (u32, u32);

/// What was learned of this rank's batches.
#[derive(Clone, Debug, Default)]
pub struct BatchTimeModel {
    /// Seconds of the slowest recent batch.
    cells: BTreeMap<Cell, f64>,
}

impl BatchTimeModel {
    /// What a batch should take.
    pub fn estimate(&self, work: BatchSize) -> Duration {
        let cell = work.cell();
        let seconds = self.cells.get(&cell).copied().unwrap_or_else(|| {
            let implied = self.cells.iter().map(|(seen, seconds)| seconds * max_growth(*seen, cell));
            implied.fold(DEFAULT_ESTIMATE.as_secs_f64(), f64::min)
        });
        Duration::from_secs_f64(seconds)
    }

    /// A batch took so long.
    pub fn record(&mut self, work: BatchSize, took: Duration) {
        // More than anything is ever expected to take was somebody's sleep.
        let took = took.min(DEFAULT_ESTIMATE).as_secs_f64();
        let slowest = self.cells.entry(work.cell()).or_insert(took);
        *slowest = took.max(*slowest + (took - *slowest) / DECAY_BATCHES);
    }
}

/// The most by which a batch of one cell takes longer than one of another.
fn max_growth(from: Cell, to: Cell) -> f64 {
    // From the least of one cell to the most of another is a power more than between the cells.
    let powers = |from: u32, to: u32| if to > from { to - from + 1 } else { 0 };
    f64::from(powers(from.0, to.0) + powers(from.1, to.1)).exp2()
}

#[cfg(test)]
mod tests {
    use super::*;

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
            sample: None,
        };
        assert_eq!(BatchSize::from_steps(&[step(100, 1)]), work(1, 101));
        // A token that nobody has read yet is a token.
        assert_eq!(BatchSize::from_steps(&[step(100, 0)]), work(1, 101));
        // A long answer beside a prompt does not make the prompt's tokens costly.
        assert_eq!(BatchSize::from_steps(&[step(99_999, 1), step(0, 255)]), work(256, (100_000 + 255 * 255) / 256));
        assert_eq!(BatchSize::from_steps(&[]), work(0, 0));
    }

    #[test]
    fn batch_time_model_estimates_from_measured_batches() {
        let prompt = work(2048, 2048);
        for (story, seen, asked, expected) in [
            ("the first batch ever gets a generous guess", vec![], prompt, 60.0),
            ("the same again takes as long", vec![(work(1, 20), 0.02)], work(1, 30), 0.02),
            ("fewer tokens take no longer", vec![(prompt, 10.0)], work(1, 20), 10.0),
            ("unless they were seen", vec![(prompt, 10.0), (work(1, 20), 0.02)], work(1, 500), 0.02),
            (
                "the first prompt is guessed from the smoke prompt",
                vec![(work(20, 10), 0.1)],
                work(900, 900),
                6.4,
            ),
            // 20 tokens of the smoke prompt on a machine that needs ten seconds for 2,048.
            ("a long one has all the time there is", vec![(work(20, 10), 0.1)], prompt, 60.0),
            ("and is known afterwards", vec![(work(20, 10), 0.1), (prompt, 10.0)], prompt, 10.0),
            ("more answers at a time cost no more than each", vec![(work(1, 20), 0.02)], work(8, 20), 0.32),
            ("a long context may cost as much again", vec![(prompt, 1.0)], work(2048, 9_000), 8.0),
            ("no guess is beyond the first", vec![(work(1, 20), 1.0)], prompt, 60.0),
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
        // Seconds of batches on made-up ranks: a base, the weights' share of a token, and attention.
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
            // The smoke prompt, answers of one and of many, a prompt, and one behind a long prefix that was kept.
            run(work(20, 10));
            (0..300).for_each(|at| run(work(1, 20 + at)));
            (0..300).for_each(|at| run(work(16, 500 + at)));
            (0..4).for_each(|piece| run(work(2048, 2048 * piece + 1024)));
            (0..300).for_each(|at| run(work(1, 8000 + at)));
            run(work(2048, 60_000));
        }
    }
}
