//! Whose turn it is: which sequences run next, together, and how much of its prompt each reads. Pure.

/// Prompt tokens read at a time while nobody waits for the next token: what mlx-lm reads at once, so that both
/// compute the same sums in the same order.
const PREFILL_CHUNK: u32 = 2048;
/// The same in a pipeline: the next piece begins in the first stage while this one is in another. Of pieces as long as
/// the whole prompt only one stage would work.
const PIPELINE_PREFILL_CHUNK: u32 = 512;
/// The same while somebody waits. Tokens of a prompt cost more than those of answers, and an answer should not
/// stand still: this many take a few times as long as a step without. With fewer, weights would be read again before
/// they are worth it.
const MIXED_PREFILL_CHUNK: u32 = 128;
/// Guesses that are checked at a time, of all sequences: each has logits of its own, which take memory.
const MAX_BATCH_DRAFT_TOKENS: u32 = 16;

/// What a sequence can do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Nothing before its token is known.
    Busy,
    /// Read so many tokens of its prompt, all but the last one.
    Prefill(u32),
    /// Choose a token, and so many more if they are guessed right.
    Decode(u32),
}

/// A sequence's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduledTokens {
    /// Which one, by its place among those asked about.
    pub index: usize,
    /// Tokens of its prompt to read; where it chooses a token one, and its guesses.
    pub tokens: u32,
}

/// Deals turns in the next batch to sequences in the order in which they came. Those that choose do so every time,
/// and prompts share what else there is room for, the first come first; little of it where an answer has begun.
/// While `stages` of a pipeline work at the same time, each gets its share of those that choose. All prompts together
/// get no more than one of `context_tokens` might: for so much the planner reserves room.
pub fn compose_batch(ready: &[Readiness], stages: usize, answering: bool, context_tokens: u32) -> Vec<ScheduledTokens> {
    let share = ready.len().div_ceil(stages.max(1));
    let choosing = ready.iter().enumerate().filter_map(|(index, ready)| match ready {
        Readiness::Decode(guesses) => Some((index, *guesses)),
        Readiness::Busy | Readiness::Prefill(_) => None,
    });
    let mut left = MAX_BATCH_DRAFT_TOKENS;
    let choose = |(index, guesses): (usize, u32)| {
        let guesses = guesses.min(left);
        left -= guesses;
        ScheduledTokens { index, tokens: 1 + guesses }
    };
    let mut turns: Vec<ScheduledTokens> = choosing.take(share).map(choose).collect();
    let budget = match (turns.is_empty() && !answering, stages) {
        (false, _) => MIXED_PREFILL_CHUNK,
        (true, 0 | 1) => PREFILL_CHUNK,
        (true, _) => PIPELINE_PREFILL_CHUNK,
    };
    let mut budget = budget.min(context_tokens);
    for (index, ready) in ready.iter().enumerate() {
        let Readiness::Prefill(left) = ready else { continue };
        let tokens = (*left).min(budget);
        if tokens == 0 {
            break;
        }
        budget -= tokens;
        turns.push(ScheduledTokens { index, tokens });
    }
    turns
}

#[cfg(test)]
mod tests {
    use super::Readiness::{Busy, Prefill};
    use super::*;

    const DECODE: Readiness = Readiness::Decode(0);

    #[test]
    fn batches_take_every_decode_and_fill_up_with_prefill() {
        for (ready, stages, answering, expected) in [
            // Alone, a prompt is read as mlx-lm reads it.
            (&[Prefill(5000)][..], 1, false, &[(0, 2048)][..]),
            (&[Prefill(904)], 1, false, &[(0, 904)]),
            (&[DECODE], 1, false, &[(0, 1)]),
            // Short prompts are read together, long ones after those that came before.
            (&[Prefill(10), Prefill(20), Prefill(3000), Prefill(5)], 1, false, &[(0, 10), (1, 20), (2, 2018)]),
            // Beside answers little of a prompt is read, and every answer goes on.
            (&[DECODE, Prefill(5000), DECODE], 1, true, &[(0, 1), (2, 1), (1, 128)]),
            (&[DECODE, Prefill(100), Prefill(50), Prefill(7)], 1, true, &[(0, 1), (1, 100), (2, 28)]),
            // Also while no answer can go on.
            (&[Busy, Prefill(5000)], 1, true, &[(1, 128)]),
            (&[Busy], 1, true, &[]),
            // Stages of a pipeline work on different sequences.
            (&[DECODE; 5], 2, true, &[(0, 1), (1, 1), (2, 1)]),
            (&[Busy, Busy, Busy, DECODE, DECODE], 2, true, &[(3, 1), (4, 1)]),
            (&[Busy, Prefill(300)], 2, true, &[(1, 128)]),
            // And on pieces of one prompt.
            (&[Prefill(5000)], 2, false, &[(0, 512)]),
            (&[DECODE], 4, true, &[(0, 1)]),
            // Guesses are checked as far as there is room for them.
            (&[Readiness::Decode(8), DECODE, Readiness::Decode(3)], 1, true, &[(0, 9), (1, 1), (2, 4)]),
            (&[Readiness::Decode(8); 3], 1, true, &[(0, 9), (1, 9), (2, 1)]),
            (&[], 2, false, &[]),
        ] {
            let dealt: Vec<(usize, u32)> = compose_batch(ready, stages, answering, 100_000)
                .into_iter()
                .map(|ScheduledTokens { index, tokens }| (index, tokens))
                .collect();
            assert_eq!(dealt, expected, "{ready:?} over {stages}");
        }
    }

    #[test]
    fn batched_prefill_is_bounded_by_the_context_length() {
        let turns = compose_batch(&[Prefill(60), Prefill(60)], 1, false, 64);
        assert_eq!(turns, [ScheduledTokens { index: 0, tokens: 60 }, ScheduledTokens { index: 1, tokens: 4 }]);
    }

    #[test]
    fn every_prompt_is_prefilled_beside_decodes() {
        let mut ready = vec![DECODE, Prefill(4000), Prefill(4000), Prefill(10)];
        let mut rounds = 0;
        while ready.iter().any(|ready| *ready != DECODE) {
            for ScheduledTokens { index, tokens } in compose_batch(&ready, 1, true, 100_000) {
                ready[index] = match ready[index] {
                    Prefill(left) if left > tokens => Prefill(left - tokens),
                    _ => DECODE,
                };
            }
            rounds += 1;
            assert!(rounds < 100, "{ready:?}");
        }
        assert_eq!(rounds, 8010_usize.div_ceil(128));
    }
}
