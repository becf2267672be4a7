//! Which texts are computed together. Pure.

/// Indices of the texts of each batch, given the tokens of each text: the shortest first, and no batch with more than
/// `most` tokens but one of a single text.
pub(super) fn batches(tokens: &[u32], most: u32) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..tokens.len()).collect();
    order.sort_by_key(|&index| tokens[index]);
    let mut batches: Vec<Vec<usize>> = Vec::new();
    let mut left = 0;
    for index in order {
        match batches.last_mut().filter(|_| tokens[index] <= left) {
            Some(batch) => batch.push(index),
            None => {
                left = most;
                batches.push(vec![index]);
            }
        }
        left = left.saturating_sub(tokens[index]);
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_batched_by_length_within_the_limit() {
        for (tokens, most, expected) in [
            (&[][..], 10, vec![]),
            (&[3, 1, 2], 10, vec![vec![1, 2, 0]]),
            (&[3, 1, 2], 3, vec![vec![1, 2], vec![0]]),
            (&[4, 4, 4], 8, vec![vec![0, 1], vec![2]]),
            (&[20, 1], 10, vec![vec![1], vec![0]]),
        ] {
            assert_eq!(batches(tokens, most), expected, "{tokens:?} within {most}");
        }
    }
}
