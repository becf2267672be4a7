//! Batch time model: predicts how long a batch should take on this rank, from earlier batches. Pure.
//!
//! The cost of a batch grows with its tokens and with their attention context, never more than in proportion
//! to either, because a part of it (reading the weights) is constant. So batches are put into cells by the
//! powers of two of both. A cell holds the time of its slowest recent batch; an unseen cell is predicted from
//! the lowest bound that another cell implies. The model estimates high: a prediction tells a step that hangs
//! from a long one, and is no promise.
//!
//! Batches that score tokens of prompts have cells of their own, by the powers of two of these tokens too: how much longer
//! a token takes whose logits are computed differs by model. A batch takes no longer without its scores, so their cells
//! bound those without, and never the other way round. Before the first of them ended, their tokens are weighted.

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
const SCORED_TOKENS: u32 = 7;

/// From so many of the most probable tokens on, the vocabulary is put in order for each scored token.
pub const ORDERED_TOP: u32 = 2;

/// Batches of a cell over which its slowest one is forgotten: the first ones compile kernels, and one may
/// have run on a busy machine.
const DECAY_BATCHES: f64 = 32.0;

/// Tokens of a step, where one that is scored counts as many as take as long.
pub fn weighted_tokens(step: &SequenceStep) -> u32 {
    step.length().saturating_add(SCORED_TOKENS.saturating_mul(step.scored_tokens()))
}

/// Tokens of which logits are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScoredWork {
    tokens: u64,
    /// Whether the vocabulary is put in order for some of them.
    ordered: bool,
}

impl ScoredWork {
    /// Of these steps.
    pub fn from_steps(batch: &[SequenceStep]) -> Self {
        let is_ordered =
            |step: &SequenceStep| step.score.as_ref().is_some_and(|score| score.top >= ORDERED_TOP);
        Self {
            tokens: batch.iter().map(|step| u64::from(step.scored_tokens())).sum(),
            ordered: batch.iter().any(is_ordered),
        }
    }

    /// The larger of both, in each respect.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self { tokens: self.tokens.max(other.tokens), ordered: self.ordered || other.ordered }
    }
}

/// Size of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSize {
    /// Tokens of all steps.
    tokens: u64,
    /// Average number of tokens that each of them attends to.
    context: u64,
    /// Tokens that this rank scores in it, or waits for.
    scored: ScoredWork,
}

impl BatchSize {
    /// The size of these steps.
    pub fn from_steps(batch: &[SequenceStep]) -> Self {
        let tokens: u64 = batch.iter().map(|step| u64::from(step.length())).sum();
        let attended = |step: &SequenceStep| {
            u64::from(step.length()) * (u64::from(step.offset) + u64::from(step.length()))
        };
        let attended: u64 = batch.iter().map(attended).sum();
        Self { tokens, context: attended / tokens.max(1), scored: ScoredWork::from_steps(batch) }
    }

    /// The same steps, where this rank scores or waits for so much.
    #[must_use]
    pub fn with_scored(self, scored: ScoredWork) -> Self {
        Self { scored, ..self }
    }

    /// Plain work that takes about as long.
    fn weighted(self) -> Self {
        let tokens = self.tokens + u64::from(SCORED_TOKENS) * self.scored.tokens;
        Self { tokens, scored: ScoredWork::default(), ..self }
    }

    fn cell(self) -> Cell {
        let ScoredWork { tokens: scored, ordered } = self.scored;
        Cell {
            tokens: self.tokens.max(1).ilog2(),
            context: (1 + self.context / CHEAP_CONTEXT_TOKENS).ilog2(),
            scored: scored.checked_ilog2(),
            ordered,
        }
    }
}

/// Powers of two of a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cell {
    tokens: u32,
    context: u32,
    /// `None` where nothing is scored.
    scored: Option<u32>,
    ordered: bool,
}

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
        if let Some(seconds) = self.cells.get(&cell) {
            return Duration::from_secs_f64(*seconds);
        }
        let bound = |(seen, seconds): (&Cell, &f64)| Some(seconds * max_growth(*seen, cell)?);
        let implied = self.cells.iter().filter_map(bound).reduce(f64::min);
        match implied {
            Some(seconds) => Duration::from_secs_f64(seconds.min(DEFAULT_ESTIMATE.as_secs_f64())),
            // Only what is measured bounds it: the weight is a guess, and counts while there is nothing else.
            None if cell.scored.is_some() => self.estimate(work.weighted()),
            None => DEFAULT_ESTIMATE,
        }
    }

    /// Records the time of a batch.
    pub fn record(&mut self, work: BatchSize, took: Duration) {
        // A longer time than any estimate means that the machine slept.
        let took = took.min(DEFAULT_ESTIMATE).as_secs_f64();
        let slowest = self.cells.entry(work.cell()).or_insert(took);
        *slowest = took.max(*slowest + (took - *slowest) / DECAY_BATCHES);
    }
}

/// Upper bound of the ratio between the batch times of two cells; `None` where the second one has work of a kind that the
/// first one has not.
fn max_growth(from: Cell, to: Cell) -> Option<f64> {
    // From the bottom of one cell to the top of another is one power more than between the cells.
    let powers = |from: u32, to: u32| if to > from { to - from + 1 } else { 0 };
    let scored = match (from.scored, to.scored) {
        (_, None) => 0,
        (Some(from), Some(to)) => powers(from, to),
        (None, Some(_)) => return None,
    };
    if to.ordered && !from.ordered {
        return None;
    }
    // The steps and the scores are parts of the time, each of which grows by itself.
    let steps = powers(from.tokens, to.tokens) + powers(from.context, to.context);
    Some(f64::from(steps.max(scored)).exp2())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::ScoreSpec;

    fn work(tokens: u64, context: u64) -> BatchSize {
        BatchSize { tokens, context, scored: ScoredWork::default() }
    }

    /// A prompt of so many tokens, all of which are scored.
    fn scored(tokens: u64, ordered: bool) -> BatchSize {
        BatchSize { scored: ScoredWork { tokens, ordered }, ..work(tokens, tokens) }
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
        for (top, ordered) in [(0, false), (1, false), (2, true)] {
            let score = Some(ScoreSpec { tokens: vec![1; 300], top });
            let step = SequenceStep { score, ..step(0, 300) };
            // The logits of a prompt take longer than the prompt.
            assert_eq!(weighted_tokens(&step), 2400);
            assert_eq!(BatchSize::from_steps(&[step]), scored(300, ordered));
        }
    }

    #[test]
    fn scored_batches_are_estimated_apart_from_plain_ones() {
        let prompt = |tokens| work(tokens, 100);
        for (story, seen, asked, expected) in [
            ("nothing is known", vec![], scored(128, false), 60.0),
            // 128 + 7 × 128 tokens are in the cell of 1024.
            ("at first tokens are weighted", vec![(prompt(1024), 3.0)], scored(128, true), 3.0),
            ("as if there were more of them", vec![(prompt(128), 1.0)], scored(128, true), 16.0),
            ("a quick one says nothing of many tokens", vec![(scored(128, true), 0.2)], prompt(1024), 3.2),
            ("a plain one takes no longer", vec![(scored(128, true), 0.2)], prompt(100), 0.2),
            ("nor one without order", vec![(scored(128, true), 0.2)], scored(128, false), 0.2),
            ("one with order may", vec![(scored(128, false), 0.2)], scored(128, true), 3.2),
            ("measured", vec![(prompt(1024), 0.1), (scored(128, true), 9.0)], scored(128, true), 9.0),
            ("and larger", vec![(prompt(2048), 0.1), (scored(128, true), 9.0)], scored(256, true), 36.0),
            (
                "no plain one is slower for it",
                vec![(prompt(99), 1.0), (scored(99, true), 9.0)],
                prompt(99),
                1.0,
            ),
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
        for (base, token, attention, score) in [
            (0.02, 0.005, 1e-7, 7.0),
            (0.001, 1e-5, 5e-9, 0.1),
            (0.5, 0.0, 0.0, 7.0),
            (0.0, 0.02, 1e-6, 7.0),
            (0.0, 0.02, 1e-6, 0.01),
        ] {
            let mut forecast = BatchTimeModel::default();
            let mut run = |work: BatchSize| {
                let (tokens, context) = (work.tokens as f64, work.context as f64);
                let order = if work.scored.ordered { 1.0 } else { 0.3 };
                let scores = work.scored.tokens as f64 * token * score * order;
                let took = base + tokens * (token + attention * context) + scores;
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
            // Scored prompts, before any plain one of the size that they are weighted by.
            for tokens in [128, 256, 128, 64] {
                run(scored(tokens, false));
                run(scored(tokens, true));
                run(work(8 * tokens, 8 * tokens));
            }
            run(work(2048, 60_000));
        }
    }
}
