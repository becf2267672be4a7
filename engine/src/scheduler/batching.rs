//! Composes the next batch: which sequences decode, and how many prefill tokens each gets. Pure.

use russet_model::cost;

/// Prefill chunk while no sequence decodes: mlx-lm's chunk size, so that both compute the same sums in the
/// same order.
const PREFILL_CHUNK: u32 = cost::PREFILL_TOKENS;
/// Prefill chunk in a pipeline.
const PIPELINE_PREFILL_CHUNK: u32 = cost::PIPELINE_PREFILL_TOKENS;
/// Prefill chunk beside decoding sequences. Prefill tokens cost more than decode tokens, and decoding should
/// not stall: this chunk takes a few times as long as a step without. Smaller chunks would re-read the
/// weights before that pays.
const MIXED_PREFILL_CHUNK: u32 = 128;
/// Maximum draft tokens verified in a batch, over all sequences: each has logits of its own, which take
/// memory.
const MAX_BATCH_DRAFT_TOKENS: u32 = 16;

/// Work a sequence is ready for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Nothing until its pending token is known.
    Busy,
    /// Prefill up to this many tokens of its prompt, all but the last one.
    Prefill(u32),
    /// Decode one token, and verify draft tokens.
    Decode {
        /// Known tokens to run: one, and those that run again after draft tokens were rejected.
        known: u32,
        /// Draft tokens, at most.
        drafts: u32,
    },
}

/// Tokens of one sequence in the next batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduledTokens {
    /// Index of the sequence in `ready`.
    pub index: usize,
    /// Prompt tokens to prefill; when decoding, the known tokens and the draft tokens.
    pub tokens: u32,
}

/// Distributes the next batch over sequences in order of arrival. Every decoding sequence is part of every
/// batch, and prompts share the remaining tokens, first come first served; few of them beside decoding
/// sequences. With `stages` pipeline stages working at the same time, each batch gets its share of the
/// decoding sequences. All prompts together get no more tokens than one of `context_tokens` might: the
/// planner reserves memory for that many.
pub fn compose_batch(
    ready: &[Readiness],
    stages: usize,
    answering: bool,
    context_tokens: u32,
) -> Vec<ScheduledTokens> {
    let share = ready.len().div_ceil(stages.max(1));
    let choosing = ready.iter().enumerate().filter_map(|(index, ready)| match ready {
        Readiness::Decode { known, drafts } => Some((index, *known, *drafts)),
        Readiness::Busy | Readiness::Prefill(_) => None,
    });
    let mut left = MAX_BATCH_DRAFT_TOKENS;
    let choose = |(index, known, drafts): (usize, u32, u32)| {
        let drafts = drafts.min(left);
        left -= drafts;
        ScheduledTokens { index, tokens: known + drafts }
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

    const DECODE: Readiness = decode(1, 0);

    const fn decode(known: u32, drafts: u32) -> Readiness {
        Readiness::Decode { known, drafts }
    }

    #[test]
    fn batches_take_every_decode_and_fill_up_with_prefill() {
        for (ready, stages, answering, expected) in [
            // Alone, a prompt is prefilled in mlx-lm's chunks.
            (&[Prefill(5000)][..], 1, false, &[(0, 2048)][..]),
            (&[Prefill(904)], 1, false, &[(0, 904)]),
            (&[DECODE], 1, false, &[(0, 1)]),
            // Short prompts are prefilled together, long ones after earlier ones.
            (
                &[Prefill(10), Prefill(20), Prefill(3000), Prefill(5)],
                1,
                false,
                &[(0, 10), (1, 20), (2, 2018)],
            ),
            // Beside decoding sequences, a prompt gets a small chunk, and every sequence decodes.
            (&[DECODE, Prefill(5000), DECODE], 1, true, &[(0, 1), (2, 1), (1, 128)]),
            (&[DECODE, Prefill(100), Prefill(50), Prefill(7)], 1, true, &[(0, 1), (1, 100), (2, 28)]),
            // Also while no sequence can decode.
            (&[Busy, Prefill(5000)], 1, true, &[(1, 128)]),
            (&[Busy], 1, true, &[]),
            // Pipeline stages work on different sequences.
            (&[DECODE; 5], 2, true, &[(0, 1), (1, 1), (2, 1)]),
            (&[Busy, Busy, Busy, DECODE, DECODE], 2, true, &[(3, 1), (4, 1)]),
            (&[Busy, Prefill(300)], 2, true, &[(1, 128)]),
            // And on chunks of one prompt.
            (&[Prefill(5000)], 2, false, &[(0, 512)]),
            (&[DECODE], 4, true, &[(0, 1)]),
            // Draft tokens are verified up to the batch limit.
            (&[decode(1, 8), DECODE, decode(1, 3)], 1, true, &[(0, 9), (1, 1), (2, 4)]),
            (&[decode(1, 8); 3], 1, true, &[(0, 9), (1, 9), (2, 1)]),
            // Tokens that run again are not among those.
            (
                &[decode(5, 0), decode(3, 8), decode(2, 8), decode(2, 1)],
                1,
                true,
                &[(0, 5), (1, 11), (2, 10), (3, 2)],
            ),
            (&[], 2, false, &[]),
        ] {
            let composed: Vec<(usize, u32)> = compose_batch(ready, stages, answering, 100_000)
                .into_iter()
                .map(|ScheduledTokens { index, tokens }| (index, tokens))
                .collect();
            assert_eq!(composed, expected, "{ready:?} over {stages}");
        }
    }

    #[test]
    fn batched_prefill_is_bounded_by_the_context_length() {
        let turns = compose_batch(&[Prefill(60), Prefill(60)], 1, false, 64);
        assert_eq!(
            turns,
            [ScheduledTokens { index: 0, tokens: 60 }, ScheduledTokens { index: 1, tokens: 4 }]
        );
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
