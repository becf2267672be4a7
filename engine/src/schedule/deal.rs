//! Whose turn it is: which sequences run next, together, and how much of its prompt each reads. Pure.

/// Prompt tokens read at a time while nobody waits for the next token: what mlx-lm reads at once, so that both
/// compute the same sums in the same order.
const PROMPT_STEP: u32 = 2048;
/// The same while somebody does. Tokens of a prompt cost more than those of answers, and an answer should not
/// stand still: this many take a few times as long as a step without.
const PROMPT_STEP_BESIDE: u32 = 256;

/// A sequence's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Which one, by its place among those asked about.
    pub index: usize,
    /// Tokens of its prompt to read; at its prompt's last token, and from then on, one.
    pub tokens: u32,
}

/// Deals turns to sequences, given how many tokens of its prompt each has still to read before the last one, in
/// the order in which they came. Whoever has none left chooses a token in every round, and prompts share what
/// else there is room for, the first come first. The batches are for stages of a pipeline that work at the same
/// time, as many as there are stages if there are as many turns.
pub fn deal(left: &[u32], stages: usize) -> Vec<Vec<Turn>> {
    let turns = left.iter().enumerate();
    let mut turns: Vec<Turn> =
        turns.filter(|(_, left)| **left == 0).map(|(index, _)| Turn { index, tokens: 1 }).collect();
    let mut budget = if turns.is_empty() { PROMPT_STEP } else { PROMPT_STEP_BESIDE };
    for (index, left) in left.iter().enumerate().filter(|(_, left)| **left > 0) {
        let tokens = (*left).min(budget);
        if tokens == 0 {
            break;
        }
        budget -= tokens;
        turns.push(Turn { index, tokens });
    }
    let count = stages.clamp(1, turns.len().max(1));
    let mut batches = vec![Vec::new(); count];
    for (place, turn) in turns.into_iter().enumerate() {
        batches[place % count].push(turn);
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_gets_a_turn_and_prompts_what_room_there_is() {
        for (left, stages, expected) in [
            // Alone, a prompt is read as mlx-lm reads it.
            (&[5000][..], 1, vec![vec![(0, 2048)]]),
            (&[904], 1, vec![vec![(0, 904)]]),
            (&[0], 1, vec![vec![(0, 1)]]),
            // Short prompts are read together, long ones after those that came before.
            (&[10, 20, 3000, 5], 1, vec![vec![(0, 10), (1, 20), (2, 2018)]]),
            // Beside answers little of a prompt is read, and every answer goes on.
            (&[0, 5000, 0], 1, vec![vec![(0, 1), (2, 1), (1, 256)]]),
            (&[0, 200, 100, 7], 1, vec![vec![(0, 1), (1, 200), (2, 56)]]),
            // Stages of a pipeline work on different sequences.
            (&[0, 0, 0, 0, 0], 2, vec![vec![(0, 1), (2, 1), (4, 1)], vec![(1, 1), (3, 1)]]),
            (&[0, 300], 2, vec![vec![(0, 1)], vec![(1, 256)]]),
            (&[0], 4, vec![vec![(0, 1)]]),
            (&[], 2, vec![vec![]]),
        ] {
            let dealt: Vec<Vec<(usize, u32)>> = deal(left, stages)
                .into_iter()
                .map(|batch| batch.into_iter().map(|Turn { index, tokens }| (index, tokens)).collect())
                .collect();
            assert_eq!(dealt, expected, "{left:?} over {stages}");
        }
    }

    #[test]
    fn no_prompt_waits_for_ever() {
        let mut left = vec![0, 4000, 4000, 10];
        let mut rounds = 0;
        while left.iter().any(|left| *left > 0) {
            for Turn { index, tokens } in deal(&left, 1).concat() {
                left[index] -= tokens.min(left[index]);
            }
            rounds += 1;
            assert!(rounds < 100, "{left:?}");
        }
        assert_eq!(rounds, 8010_usize.div_ceil(256));
    }
}
