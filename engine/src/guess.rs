//! Speculative decoding: the next tokens of an answer are guessed, and all guesses are checked in one batch, which
//! costs little more than the one token that would be chosen otherwise. Pure.
//!
//! A token is chosen at every guessed place just as it would be without guesses, from the same numbers and the same
//! noise ([`crate::compute::Choice::index`]); guesses before it that turn out right make it count. So an answer is
//! the one that would have come anyway, greedy or drawn, whatever is guessed. For guesses that are certain of
//! themselves this is what rejection sampling comes to.
//!
//! Guessing stops by itself where it does not pay: each request learns how often its guesses are right, and asks
//! [`Costs`] how often they have to be.

pub mod cost;
pub mod lookup;

pub use cost::Costs;
use lookup::Lookup;

/// Most guesses of one sequence in a batch.
pub const MOST: usize = 8;
/// How often a guess is expected to be right before any was checked.
const FIRST: f64 = 0.7;
/// Share of the newest guess in what is known.
const NEWEST: f64 = 1.0 / 8.0;
/// Tokens without guesses after those that did not pay; twice as many each time.
const PAUSE: u32 = 16;
/// Never more than so many, because answers change.
const LONGEST_PAUSE: u32 = 1024;

/// Who guesses the next tokens of one answer.
#[derive(Clone, Debug)]
pub struct Guesser {
    lookup: Lookup,
    /// How often guesses are right.
    right: f64,
    /// How often they have to be.
    least: f64,
    /// Length of the text from which guesses are made again.
    from: usize,
    pause: u32,
}

impl Default for Guesser {
    fn default() -> Self {
        Self { lookup: Lookup::default(), right: FIRST, least: 0.0, from: 0, pause: PAUSE }
    }
}

impl Guesser {
    /// The next tokens after `text`: at most so many, and as many as are likely to be worth it, where a guess has to be
    /// right with the probability `least`. `text` goes on from the one of the call before.
    pub fn guess(&mut self, text: &[u32], most: usize, least: f64) -> Vec<u32> {
        self.least = least;
        let most = most.min(MOST).min(worth(self.right, least));
        if text.len() < self.from || most == 0 { Vec::new() } else { self.lookup.next(text, most) }
    }

    /// Of the guesses that were checked so many were right; the text has `length` tokens now.
    pub fn learn(&mut self, length: usize, right: usize, guessed: usize) {
        // Behind the first wrong one nobody knows.
        for guess in 0..guessed.min(right + 1) {
            let outcome = if guess < right { 1.0 } else { 0.0 };
            self.right += (outcome - self.right) * NEWEST;
        }
        if right > 0 {
            self.pause = PAUSE;
        }
        if worth(self.right, self.least) == 0 {
            self.from = length + self.pause as usize;
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
            self.right = FIRST;
        }
    }
}

/// How many guesses in a row are worth it, if each is right with one probability when those before it are, and the
/// last one has to be with another.
fn worth(right: f64, least: f64) -> usize {
    let mut likely = right;
    (0..MOST)
        .take_while(|_| {
            let worth = likely > least;
            likely *= right;
            worth
        })
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_are_guessed_as_are_likely_to_be_worth_it() {
        for (right, least, expected) in [
            (0.7, 0.1, 6),
            (1.0, 0.1, MOST),
            (0.7, 0.5, 1),
            (0.7, 0.7, 0),
            (0.05, 0.1, 0),
            (0.0, 0.0, 0),
            (1.0, 1.0, 0),
            (0.9, 0.0, MOST),
        ] {
            assert_eq!(worth(right, least), expected, "{right} of {least}");
        }
    }

    /// How many tokens come in how many batches, of a text whose guesses are right as `right` says by their place.
    fn batches(text: &[u32], least: f64) -> usize {
        let (mut guesser, mut length, mut batches) = (Guesser::default(), 8, 0);
        while length < text.len() {
            let guesses = guesser.guess(&text[..length], text.len() - length - 1, least);
            let right = guesses.iter().zip(&text[length..]).take_while(|(one, other)| one == other).count();
            batches += 1;
            length += right + 1;
            if !guesses.is_empty() {
                guesser.learn(length, right, guesses.len());
            }
        }
        batches
    }

    #[test]
    fn a_text_that_repeats_itself_takes_a_fraction_of_the_batches() {
        let repeated: Vec<u32> = (0..2000).map(|place| place % 100).collect();
        let count = batches(&repeated, 0.1);
        assert!(count < 400, "{count}");
    }

    #[test]
    fn guesses_that_are_wrong_are_made_less_and_less() {
        // Three tokens repeat all the time, what follows never does.
        let misleading: Vec<u32> =
            (0..4000).map(|place| if place % 4 < 3 { place % 4 } else { 10 + place }).collect();
        let mut guesser = Guesser::default();
        let mut guesses = [0; 4];
        for length in 8..misleading.len() {
            let made = guesser.guess(&misleading[..length], 8, 0.1);
            if !made.is_empty() {
                assert_ne!(made[0], misleading[length]);
                guesses[length / 1000] += made.len();
                guesser.learn(length, 0, made.len());
            }
        }
        assert!(guesses[0] < 200 && guesses[3] < 40, "{guesses:?}");
    }

    #[test]
    fn where_guesses_cost_what_they_bring_none_are_made() {
        let repeated: Vec<u32> = (0..200).map(|place| place % 20).collect();
        assert!(Guesser::default().guess(&repeated, 8, 1.0).is_empty());
        assert!(Guesser::default().guess(&repeated, 8, 0.8).is_empty(), "none is known to be as good");
        assert_eq!(Guesser::default().guess(&repeated, 2, 0.0), [0, 1]);
    }

    #[test]
    fn after_a_pause_they_are_tried_again() {
        let repeated: Vec<u32> = (0..500).map(|place| place % 20).collect();
        let mut guesser = Guesser::default();
        assert!(!guesser.guess(&repeated[..100], 8, 0.1).is_empty());
        (0..40).for_each(|_| guesser.learn(100, 0, 8));
        assert!(guesser.guess(&repeated[..100], 8, 0.1).is_empty());
        let mut length = 100;
        while guesser.guess(&repeated[..length], 8, 0.1).is_empty() {
            length += 1;
        }
        assert!(length > 110 && length < 500, "{length}");
    }
}
