//! What requests take of the engine: every batch's time, shared by the requests in it. Pure; the scheduler feeds it.
//!
//! Batches overlap: while one computes, the next is queued behind it. Of each counts the time since the one before it
//! had ended, so that all of them together never count more than has passed. With several stages this is the time of
//! the whole group, in which all of its machines draw power.
//!
//! Sequences that decode share a batch alike: reading the weights is nearly all of it, and draft tokens ride along.
//! Prompts share theirs by tokens, of which scored ones count more. Where both are in one batch, a token that is prefilled
//! costs far less than one that is decoded. The sequences that decode then pay what a batch takes without prompts, as measured: at least their part
//! by tokens, and at most as if every prompt were one more of them. The prompts pay the rest.

use std::time::Duration;

use tokio::time::Instant;

use crate::batch_time::weighted_tokens;
use crate::executor::SequenceStep;

/// What a request has in a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BatchPart {
    /// It decodes.
    Decode,
    /// It prefills so many tokens, each of those that are scored as many as take as long, or the draft model reads and
    /// proposes so many.
    Tokens(u32),
}

impl BatchPart {
    /// What the request of this step has in its batch.
    pub(super) fn of(step: &SequenceStep) -> Self {
        if step.sample.is_some() { Self::Decode } else { Self::Tokens(weighted_tokens(step)) }
    }
}

/// Time that batches have taken, without overlap.
#[derive(Debug)]
pub(super) struct EngineClock {
    started: Instant,
    /// Microseconds since then that were counted already.
    counted_until: u64,
}

impl EngineClock {
    pub(super) fn new(started: Instant) -> Self {
        Self { started, counted_until: 0 }
    }

    /// Microseconds of a batch from `began` to `ended`, less those that earlier ones took.
    pub(super) fn count(&mut self, began: Instant, ended: Instant) -> u64 {
        let since_start = |at: Instant| {
            u64::try_from(at.saturating_duration_since(self.started).as_micros()).unwrap_or(u64::MAX)
        };
        let (from, until) = (since_start(began).max(self.counted_until), since_start(ended));
        self.counted_until = self.counted_until.max(until);
        until.saturating_sub(from)
    }
}

/// The share of each part in a batch of `microseconds`; together they are all of it. `decode` is what a batch of as
/// many decoding sequences takes without prompts, where that is known.
pub(super) fn shares(microseconds: u64, parts: &[BatchPart], decode: Option<Duration>) -> Vec<u64> {
    let of = |part: &BatchPart| match part {
        BatchPart::Decode => (1, 0),
        // A part is never empty.
        BatchPart::Tokens(tokens) => (0, u64::from(*tokens).max(1)),
    };
    let (rows, tokens) = parts.iter().map(of).fold((0, 0), |(rows, tokens), part| {
        let (row, more) = part;
        (rows + row, tokens + more)
    });
    let prompts = parts.len() as u64 - rows;
    let by_tokens = part_of(microseconds, rows, rows + tokens);
    let by_sequences = part_of(microseconds, rows, rows + prompts);
    let measured = decode.map_or(0, |decode| u64::try_from(decode.as_micros()).unwrap_or(u64::MAX));
    let decoding = measured.clamp(by_tokens, by_sequences);
    let (mut row, mut token) = (0, 0);
    let share = |part: &BatchPart| {
        let (all, whole, before) = match part {
            BatchPart::Decode => (decoding, rows, &mut row),
            BatchPart::Tokens(_) => (microseconds - decoding, tokens, &mut token),
        };
        let (one, more) = of(part);
        let until = *before + one + more;
        // Differences of rounded sums add up to the sum.
        let share = part_of(all, until, whole) - part_of(all, *before, whole);
        *before = until;
        share
    };
    parts.iter().map(share).collect()
}

/// `all × part / whole`, rounded down; nothing of nothing.
fn part_of(all: u64, part: u64, whole: u64) -> u64 {
    let exact = u128::from(all) * u128::from(part) / u128::from(whole.max(1));
    u64::try_from(exact).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng as _, SeedableRng as _};

    use super::BatchPart::{Decode, Tokens};
    use super::*;
    use crate::executor::{SampleSpec, ScoreSpec};

    #[test]
    fn a_batch_is_shared_by_what_requests_have_in_it() {
        let known = |microseconds| Some(Duration::from_micros(microseconds));
        for (story, microseconds, parts, decode, expected) in [
            ("nothing", 100, &[][..], None, &[][..]),
            ("one alone", 100, &[Decode], known(5), &[100]),
            ("decoding sequences pay alike", 100, &[Decode; 3], known(10), &[33, 33, 34]),
            ("prompts pay by tokens", 1000, &[Tokens(300), Tokens(100)], known(10), &[750, 250]),
            (
                "a decode beside a prompt is what it is alone",
                3000,
                &[Decode, Tokens(128)],
                known(1000),
                &[1000, 2000],
            ),
            ("two of them", 3000, &[Decode, Tokens(128), Decode], known(1200), &[600, 1800, 600]),
            (
                "no more than if the prompt were another",
                1000,
                &[Decode, Tokens(128)],
                known(9000),
                &[500, 500],
            ),
            ("not known yet: by tokens", 1290, &[Decode, Tokens(128)], None, &[10, 1280]),
            ("no less than by tokens", 1290, &[Decode, Tokens(128)], known(1), &[10, 1280]),
            ("a draft model that proposes nothing", 10, &[Tokens(0), Tokens(0)], None, &[5, 5]),
        ] {
            assert_eq!(shares(microseconds, parts, decode), expected, "{story}");
        }
    }

    #[test]
    fn a_scored_prompt_pays_more_than_a_plain_one() {
        let score = Some(ScoreSpec { tokens: vec![1; 64], top: 0 });
        let plain = SequenceStep {
            slot: 0,
            offset: 0,
            tokens: vec![1; 64],
            draft_tokens: 0,
            adapter: 0,
            sample: None,
            score: None,
        };
        let decode = SequenceStep { tokens: vec![1], sample: Some(SampleSpec::greedy(0)), ..plain.clone() };
        let scored = SequenceStep { score, ..plain.clone() };
        let parts = [plain, scored, decode].map(|step| BatchPart::of(&step));
        assert_eq!(parts[2], Decode);
        assert_eq!(shares(900, &parts[..2], None), [100, 800]);
    }

    #[test]
    fn shares_add_up_to_the_time_of_the_batch() {
        let mut random = StdRng::seed_from_u64(7);
        for _ in 0..2000 {
            let part = |random: &mut StdRng| match random.random_bool(0.5) {
                true => Decode,
                false => Tokens(random.random_range(0..3000)),
            };
            let parts: Vec<BatchPart> = (0..random.random_range(1..40)).map(|_| part(&mut random)).collect();
            let microseconds = random.random_range(0..100_000_000);
            let decode =
                random.random_bool(0.7).then(|| Duration::from_micros(random.random_range(0..1 << 40)));
            let sum: u64 = shares(microseconds, &parts, decode).iter().sum();
            assert_eq!(sum, microseconds, "{parts:?} {decode:?}");
        }
        assert_eq!(shares(u64::MAX, &[Decode, Tokens(u32::MAX)], None).iter().sum::<u64>(), u64::MAX);
    }

    #[test]
    fn batches_that_overlap_count_once() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut clock = EngineClock::new(start);
        for (story, began, ended, expected) in [
            ("the first", 10, 30, 20_000),
            ("one that waited for it", 12, 45, 15_000),
            ("one after a pause", 100, 101, 1000),
            ("one that ended before it", 90, 99, 0),
            ("one that ended when it began", 101, 101, 0),
        ] {
            assert_eq!(clock.count(at(began), at(ended)), expected, "{story}");
        }
    }
}
