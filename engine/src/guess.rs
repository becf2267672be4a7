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

/// How often the guesses of one source are right, and whether it makes any just now.
#[derive(Clone, Debug)]
struct Record {
    right: f64,
    /// How often they have to be.
    least: f64,
    /// Length of the text from which guesses are made again.
    from: usize,
    pause: u32,
}

impl Default for Record {
    fn default() -> Self {
        Self { right: FIRST, least: 0.0, from: 0, pause: PAUSE }
    }
}

impl Record {
    /// How many guesses after a text of `length` tokens are worth it, where each has to be right with the probability
    /// `least`.
    fn worth(&mut self, length: usize, least: f64) -> usize {
        self.least = least;
        if length < self.from { 0 } else { worth(self.right, least) }
    }

    /// So many guesses were right of those that were checked; the text has `length` tokens now.
    fn learn(&mut self, length: usize, right: usize, guessed: usize) {
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

/// Who may guess.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// What followed the same tokens before.
    pub lookup: bool,
    /// A smaller model, where that finds nothing.
    pub draft: bool,
}

/// How likely a guess has to be right, by who makes it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Least {
    /// What followed the same tokens before, which costs nothing to find.
    pub lookup: f64,
    /// A draft model.
    pub draft: f64,
}

/// The guesses of the next tokens of one answer, and who makes them.
#[derive(Clone, Debug, Default)]
pub struct Guesser {
    sources: Sources,
    lookup: Lookup,
    found: Record,
    drafted: Record,
    draft: Draft,
    guesses: Vec<u32>,
}

/// What the draft model does for one answer.
#[derive(Clone, Copy, Debug, Default)]
struct Draft {
    /// Tokens of the text that its cache holds.
    cached: usize,
    /// Length of the text it was asked about last, and how much it was asked for; what it says to that is awaited or was
    /// said.
    asked: Option<(usize, usize)>,
    awaited: bool,
    /// Whether the guesses are its own.
    guesses: bool,
}

impl Guesser {
    /// One with these sources.
    pub fn new(sources: Sources) -> Self {
        Self { sources, ..Self::default() }
    }

    /// The guesses that are to be checked next, or are being checked.
    pub fn guesses(&self) -> &[u32] {
        &self.guesses
    }

    /// Whether the draft model has yet to say what it guesses.
    pub fn awaits_draft(&self) -> bool {
        self.draft.awaited
    }

    /// Whether the newest guesses are the draft model's.
    pub fn was_drafted(&self) -> bool {
        self.draft.guesses
    }

    /// Makes guesses of the next tokens after `text` if there are none: at most so many, and as many as are likely to be
    /// worth it. `text` goes on from the one of the call before.
    pub fn guess(&mut self, text: &[u32], most: usize, least: Least) {
        if !self.guesses.is_empty() || self.draft.awaited || !self.sources.lookup {
            return;
        }
        let most = most.min(MOST).min(self.found.worth(text.len(), least.lookup));
        if most > 0 {
            self.guesses = self.lookup.next(text, most);
            self.draft.guesses = false;
        }
    }

    /// Whether there will be guesses once the token after `text` is known.
    pub fn will_guess(&mut self, text: &[u32], least: Least) -> bool {
        let drafts = self.sources.draft && self.drafted.worth(text.len(), least.draft) > 0;
        let finds = self.sources.lookup && self.found.worth(text.len(), least.lookup) > 0;
        drafts || finds && !self.lookup.next(text, 1).is_empty()
    }

    /// Whether the draft model is to be asked about `text`: how much of that its cache holds, and for how many tokens to
    /// ask. Once for each text, if nothing was found.
    pub fn ask_draft(&mut self, text: &[u32], most: usize, least: Least) -> Option<(usize, usize)> {
        let asked = self.draft.asked.is_some_and(|(length, _)| length == text.len());
        if !self.sources.draft || asked || !self.guesses.is_empty() {
            return None;
        }
        let most = most.min(MOST).min(self.drafted.worth(text.len(), least.draft));
        if most == 0 {
            return None;
        }
        self.draft.asked = Some((text.len(), most));
        self.draft.awaited = true;
        Some((self.draft.cached, most))
    }

    /// What the draft model says.
    pub fn drafted(&mut self, guesses: Vec<u32>) {
        let Some((length, most)) = self.draft.asked.filter(|_| self.draft.awaited) else { return };
        self.draft.awaited = false;
        // The last one it said it has not read.
        self.draft.cached = if guesses.len() == most { length + most - 1 } else { 0 };
        self.draft.guesses = true;
        self.guesses = guesses;
    }

    /// There is room for so many of the guesses only.
    pub fn truncate(&mut self, most: usize) {
        self.guesses.truncate(most);
        if let Some((length, _)) = self.draft.asked.filter(|_| self.draft.guesses) {
            self.draft.cached = self.draft.cached.min(length + most);
        }
    }

    /// How many of the guesses after a text of `length` tokens are what was chosen. There are none any more.
    pub fn check<E>(&mut self, length: usize, chosen: &[Result<u32, E>]) -> usize {
        let guesses = std::mem::take(&mut self.guesses);
        let right = guesses
            .iter()
            .zip(chosen)
            .take_while(|(guess, chosen)| chosen.as_ref().is_ok_and(|token| token == *guess));
        let right = right.count();
        if !guesses.is_empty() {
            let record = if self.draft.guesses { &mut self.drafted } else { &mut self.found };
            record.learn(length + right + 1, right, guesses.len());
            self.draft.cached = self.draft.cached.min(length + if self.draft.guesses { right } else { 0 });
        }
        right
    }

    /// The answer goes on in another slot: the draft model knows nothing of it there.
    pub fn enter(&mut self) {
        self.guesses.clear();
        self.draft = Draft::default();
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

    fn lookup() -> Guesser {
        Guesser::new(Sources { lookup: true, draft: false })
    }

    fn found(least: f64) -> Least {
        Least { lookup: least, draft: 1.0 }
    }

    fn chosen(tokens: &[u32]) -> Vec<Result<u32, ()>> {
        tokens.iter().take(MOST + 1).map(|token| Ok(*token)).collect()
    }

    /// What is guessed after a text, without a look at whether it is right.
    fn guesses(guesser: &mut Guesser, text: &[u32], most: usize, least: f64) -> Vec<u32> {
        guesser.truncate(0);
        guesser.guess(text, most, found(least));
        guesser.guesses().to_vec()
    }

    /// In how many batches the tokens come of a text, when a guess has to be at least so likely.
    fn batches(text: &[u32], least: f64) -> usize {
        let (mut guesser, mut length, mut batches) = (lookup(), 8, 0);
        while length < text.len() {
            guesser.guess(&text[..length], text.len() - length - 1, found(least));
            batches += 1;
            length += guesser.check(length, &chosen(&text[length..])) + 1;
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
        let mut guesser = lookup();
        let mut made = [0; 4];
        for length in 8..misleading.len() {
            made[length / 1000] += guesses(&mut guesser, &misleading[..length], 8, 0.1).len();
            assert_eq!(guesser.check(length, &chosen(&misleading[length..])), 0);
        }
        assert!(made[0] < 200 && made[3] < 40, "{made:?}");
    }

    #[test]
    fn where_guesses_cost_what_they_bring_none_are_made() {
        let repeated: Vec<u32> = (0..200).map(|place| place % 20).collect();
        assert!(guesses(&mut lookup(), &repeated, 8, 1.0).is_empty());
        assert!(guesses(&mut lookup(), &repeated, 8, 0.8).is_empty(), "none is known to be as good");
        assert_eq!(guesses(&mut lookup(), &repeated, 2, 0.0), [0, 1]);
        assert!(guesses(&mut Guesser::default(), &repeated, 2, 0.0).is_empty(), "nobody may guess");
    }

    #[test]
    fn after_a_pause_they_are_tried_again() {
        let repeated: Vec<u32> = (0..500).map(|place| place % 20).collect();
        let mut guesser = lookup();
        let mut length = 100;
        while !guesses(&mut guesser, &repeated[..length], 8, 0.1).is_empty() {
            assert_eq!(guesser.check(length, &[Ok::<u32, ()>(99)]), 0);
        }
        while guesses(&mut guesser, &repeated[..length], 8, 0.1).is_empty() {
            length += 1;
        }
        assert!(length > 110 && length < 500, "{length}");
    }

    #[test]
    fn a_draft_model_is_asked_once_where_nothing_was_found_and_told_what_it_has_not_read() {
        let least = Least { lookup: 0.1, draft: 0.3 };
        let mut guesser = Guesser::new(Sources { lookup: true, draft: true });
        let text: Vec<u32> = (0..20).collect();
        assert!(guesser.will_guess(&text, least));
        guesser.guess(&text, 9, least);
        // 0.7 to the third is still more than 0.3.
        assert_eq!(guesser.ask_draft(&text, 9, least), Some((0, 3)));
        assert!(guesser.awaits_draft());
        assert_eq!(guesser.ask_draft(&text, 9, least), None);
        guesser.drafted(vec![20, 21, 99]);
        assert_eq!((guesser.guesses(), guesser.awaits_draft()), (&[20, 21, 99][..], false));
        assert_eq!(guesser.check(20, &chosen(&[20, 21, 22, 23])), 2);
        // It read 20 and 21 itself; 22 and what is chosen behind it are news.
        let text: Vec<u32> = (0..23).collect();
        assert_eq!(guesser.ask_draft(&text, 2, least), Some((22, 2)));
        // It may say less than it was asked for, or nothing, if it fails.
        guesser.drafted(Vec::new());
        assert_eq!(guesser.ask_draft(&text, 2, least), None, "it is asked once for each text");
        assert_eq!(guesser.check(23, &chosen(&[23])), 0);
        let text: Vec<u32> = (0..24).collect();
        assert_eq!(guesser.ask_draft(&text, 2, least), Some((0, 2)));
        // In another slot it knows nothing, and what it said meanwhile is of no use.
        guesser.enter();
        guesser.drafted(vec![24, 25]);
        assert!(guesser.guesses().is_empty());
        assert_eq!(guesser.ask_draft(&text, 2, least), Some((0, 2)));
        guesser.drafted(vec![24, 25]);
        // There may be room for fewer than it said, or for none.
        guesser.truncate(0);
        let longer: Vec<u32> = (0..25).collect();
        assert_eq!(guesser.ask_draft(&longer, 2, least), Some((24, 2)));
        guesser.enter();
        assert_eq!(guesser.ask_draft(&text, 2, least), Some((0, 2)));
        guesser.drafted(vec![24, 25]);
        // What is found costs nothing, and the draft model has to read it later.
        let text: Vec<u32> = (0..24).chain([24, 25, 26, 0, 1, 2]).collect();
        assert_eq!(guesser.check(24, &chosen(&[24, 25, 26])), 2);
        guesser.guess(&text, 9, least);
        assert_eq!(guesser.guesses()[..2], [3, 4]);
        assert_eq!(guesser.ask_draft(&text, 9, least), None);
        assert_eq!(guesser.check(30, &chosen(&[3, 4, 5, 9])), 3);
        let text: Vec<u32> = text.into_iter().chain([3, 4, 5, 9]).collect();
        assert_eq!(guesser.ask_draft(&text, 1, least), Some((25, 1)));
    }

    #[test]
    fn a_draft_model_that_does_not_pay_is_left_alone_for_a_while() {
        let least = Least { lookup: 0.1, draft: 0.5 };
        let mut guesser = Guesser::new(Sources { lookup: false, draft: true });
        let mut asked = [0; 4];
        for length in 1..2000 {
            let text: Vec<u32> = (0..length).collect();
            if let Some((_, most)) = guesser.ask_draft(&text, 8, least) {
                asked[text.len() / 500] += 1;
                guesser.drafted(vec![7777; most]);
            }
            guesser.check(text.len(), &chosen(&[length]));
        }
        assert!(asked[0] > 5 && asked[3] < asked[0] / 2, "{asked:?}");
    }
}
