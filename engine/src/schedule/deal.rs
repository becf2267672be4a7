//! Whose turn it is: which sequences run next, together, and how much of its prompt each reads. Pure.

/// Prompt tokens read at a time while nobody waits for the next token: what mlx-lm reads at once, so that both
/// compute the same sums in the same order.
const PROMPT_STEP: u32 = 2048;
/// The same in a pipeline: the next piece begins in the first stage while this one is in another. Of pieces as long as
/// the whole prompt only one stage would work.
const PROMPT_STEP_OF_STAGES: u32 = 512;
/// The same while somebody waits. Tokens of a prompt cost more than those of answers, and an answer should not
/// stand still: this many take a few times as long as a step without. With fewer, weights would be read again before
/// they are worth it.
const PROMPT_STEP_BESIDE: u32 = 128;
/// Guesses that are checked at a time, of all sequences: each has logits of its own, which take memory.
const GUESSES: u32 = 16;

/// What a sequence can do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// Nothing before its token is known.
    Busy,
    /// Read so many tokens of its prompt, all but the last one.
    Read(u32),
    /// Choose a token, and so many more if they are guessed right.
    Choose(u32),
}

/// A sequence's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Which one, by its place among those asked about.
    pub index: usize,
    /// Tokens of its prompt to read; where it chooses a token one, and its guesses.
    pub tokens: u32,
}

/// Deals turns in the next batch to sequences in the order in which they came. Those that choose do so every time,
/// and prompts share what else there is room for, the first come first; little of it where an answer has begun.
/// While `stages` of a pipeline work at the same time, each gets its share of those that choose. All prompts together
/// get no more than one of `context_tokens` might: for so much the planner reserves room.
pub fn deal(ready: &[Ready], stages: usize, answering: bool, context_tokens: u32) -> Vec<Turn> {
    let share = ready.len().div_ceil(stages.max(1));
    let choosing = ready.iter().enumerate().filter_map(|(index, ready)| match ready {
        Ready::Choose(guesses) => Some((index, *guesses)),
        Ready::Busy | Ready::Read(_) => None,
    });
    let mut left = GUESSES;
    let choose = |(index, guesses): (usize, u32)| {
        let guesses = guesses.min(left);
        left -= guesses;
        Turn { index, tokens: 1 + guesses }
    };
    let mut turns: Vec<Turn> = choosing.take(share).map(choose).collect();
    let budget = match (turns.is_empty() && !answering, stages) {
        (false, _) => PROMPT_STEP_BESIDE,
        (true, 0 | 1) => PROMPT_STEP,
        (true, _) => PROMPT_STEP_OF_STAGES,
    };
    let mut budget = budget.min(context_tokens);
    for (index, ready) in ready.iter().enumerate() {
        let Ready::Read(left) = ready else { continue };
        let tokens = (*left).min(budget);
        if tokens == 0 {
            break;
        }
        budget -= tokens;
        turns.push(Turn { index, tokens });
    }
    turns
}

#[cfg(test)]
mod tests {
    use super::Ready::{Busy, Read};
    use super::*;

    const CHOOSE: Ready = Ready::Choose(0);

    #[test]
    fn everybody_gets_a_turn_and_prompts_what_room_there_is() {
        for (ready, stages, answering, expected) in [
            // Alone, a prompt is read as mlx-lm reads it.
            (&[Read(5000)][..], 1, false, &[(0, 2048)][..]),
            (&[Read(904)], 1, false, &[(0, 904)]),
            (&[CHOOSE], 1, false, &[(0, 1)]),
            // Short prompts are read together, long ones after those that came before.
            (&[Read(10), Read(20), Read(3000), Read(5)], 1, false, &[(0, 10), (1, 20), (2, 2018)]),
            // Beside answers little of a prompt is read, and every answer goes on.
            (&[CHOOSE, Read(5000), CHOOSE], 1, true, &[(0, 1), (2, 1), (1, 128)]),
            (&[CHOOSE, Read(100), Read(50), Read(7)], 1, true, &[(0, 1), (1, 100), (2, 28)]),
            // Also while no answer can go on.
            (&[Busy, Read(5000)], 1, true, &[(1, 128)]),
            (&[Busy], 1, true, &[]),
            // Stages of a pipeline work on different sequences.
            (&[CHOOSE; 5], 2, true, &[(0, 1), (1, 1), (2, 1)]),
            (&[Busy, Busy, Busy, CHOOSE, CHOOSE], 2, true, &[(3, 1), (4, 1)]),
            (&[Busy, Read(300)], 2, true, &[(1, 128)]),
            // And on pieces of one prompt.
            (&[Read(5000)], 2, false, &[(0, 512)]),
            (&[CHOOSE], 4, true, &[(0, 1)]),
            // Guesses are checked as far as there is room for them.
            (&[Ready::Choose(8), CHOOSE, Ready::Choose(3)], 1, true, &[(0, 9), (1, 1), (2, 4)]),
            (&[Ready::Choose(8); 3], 1, true, &[(0, 9), (1, 9), (2, 1)]),
            (&[], 2, false, &[]),
        ] {
            let dealt: Vec<(usize, u32)> = deal(ready, stages, answering, 100_000)
                .into_iter()
                .map(|Turn { index, tokens }| (index, tokens))
                .collect();
            assert_eq!(dealt, expected, "{ready:?} over {stages}");
        }
    }

    #[test]
    fn short_contexts_are_read_no_faster_than_one_of_them_could_be() {
        let turns = deal(&[Read(60), Read(60)], 1, false, 64);
        assert_eq!(turns, [Turn { index: 0, tokens: 60 }, Turn { index: 1, tokens: 4 }]);
    }

    #[test]
    fn no_prompt_waits_for_ever() {
        let mut ready = vec![CHOOSE, Read(4000), Read(4000), Read(10)];
        let mut rounds = 0;
        while ready.iter().any(|ready| *ready != CHOOSE) {
            for Turn { index, tokens } in deal(&ready, 1, true, 100_000) {
                ready[index] = match ready[index] {
                    Read(left) if left > tokens => Read(left - tokens),
                    _ => CHOOSE,
                };
            }
            rounds += 1;
            assert!(rounds < 100, "{ready:?}");
        }
        assert_eq!(rounds, 8010_usize.div_ceil(128));
    }
}
