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

pub mod cost_model;
pub mod prompt_lookup;

pub use cost_model::CostModel;
use prompt_lookup::PromptLookup;

/// Most guesses of one sequence in a batch.
pub const MAX_DRAFT_TOKENS: usize = 8;
/// How often a guess is expected to be right before any was checked.
const INITIAL_ACCEPTANCE: f64 = 0.7;
/// Share of the newest guess in what is known.
const EMA_WEIGHT: f64 = 1.0 / 8.0;
/// Tokens without guesses after those that did not pay; twice as many each time.
const BACKOFF_TOKENS: u32 = 16;
/// Never more than so many, because answers change.
const MAX_BACKOFF_TOKENS: u32 = 1024;

/// How often the guesses of one source are right, and whether it makes any just now.
#[derive(Clone, Debug)]
struct ProposerStats {
    acceptance_rate: f64,
    /// How often they have to be.
    threshold: f64,
    /// Length of the text from which guesses are made again.
    resume_at: usize,
    backoff: u32,
}

impl Default for ProposerStats {
    fn default() -> Self {
        Self { acceptance_rate: INITIAL_ACCEPTANCE, threshold: 0.0, resume_at: 0, backoff: BACKOFF_TOKENS }
    }
}

impl ProposerStats {
    /// How many guesses after a text of `length` tokens are worth it, where each has to be right with the probability
    /// `least`.
    fn draft_length(&mut self, length: usize, least: f64) -> usize {
        self.threshold = least;
        if length < self.resume_at { 0 } else { worthwhile_tokens(self.acceptance_rate, least) }
    }

    /// So many guesses were right of those that were checked; the text has `length` tokens now.
    fn record(&mut self, length: usize, right: usize, guessed: usize) {
        // Behind the first wrong one nobody knows.
        for guess in 0..guessed.min(right + 1) {
            let outcome = if guess < right { 1.0 } else { 0.0 };
            self.acceptance_rate += (outcome - self.acceptance_rate) * EMA_WEIGHT;
        }
        if right > 0 {
            self.backoff = BACKOFF_TOKENS;
        }
        if worthwhile_tokens(self.acceptance_rate, self.threshold) == 0 {
            self.resume_at = length + self.backoff as usize;
            self.backoff = (self.backoff * 2).min(MAX_BACKOFF_TOKENS);
            self.acceptance_rate = INITIAL_ACCEPTANCE;
        }
    }
}

/// Who may guess.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Proposers {
    /// What followed the same tokens before.
    pub prompt_lookup: bool,
    /// A smaller model, where that finds nothing.
    pub draft_model: bool,
}

/// How likely a guess has to be right, by who makes it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AcceptanceThreshold {
    /// What followed the same tokens before, which costs nothing to find.
    pub prompt_lookup: f64,
    /// A draft model.
    pub draft_model: f64,
}

/// The guesses of the next tokens of one answer, and who makes them.
#[derive(Clone, Debug, Default)]
pub struct Speculator {
    proposers: Proposers,
    lookup: PromptLookup,
    lookup_stats: ProposerStats,
    draft_stats: ProposerStats,
    draft_state: DraftState,
    draft_tokens: Vec<u32>,
}

/// What the draft model does for one answer.
#[derive(Clone, Copy, Debug, Default)]
struct DraftState {
    /// Tokens of the text that its cache holds.
    cached: usize,
    /// Length of the text it was asked about last, and how much it was asked for; what it says to that is awaited or was
    /// said.
    requested: Option<(usize, usize)>,
    pending: bool,
    /// Whether the guesses are its own.
    is_source: bool,
}

impl Speculator {
    /// One with these sources.
    pub fn new(proposers: Proposers) -> Self {
        Self { proposers, ..Self::default() }
    }

    /// The guesses that are to be checked next, or are being checked.
    pub fn draft_tokens(&self) -> &[u32] {
        &self.draft_tokens
    }

    /// Whether the draft model has yet to say what it guesses.
    pub fn awaits_draft(&self) -> bool {
        self.draft_state.pending
    }

    /// Whether the newest guesses are the draft model's.
    pub fn is_from_draft_model(&self) -> bool {
        self.draft_state.is_source
    }

    /// Makes guesses of the next tokens after `text` if there are none: at most so many, and as many as are likely to be
    /// worth it. `text` goes on from the one of the call before.
    pub fn propose(&mut self, text: &[u32], most: usize, least: AcceptanceThreshold) {
        if !self.draft_tokens.is_empty() || self.draft_state.pending || !self.proposers.prompt_lookup {
            return;
        }
        let most = most.min(MAX_DRAFT_TOKENS).min(self.lookup_stats.draft_length(text.len(), least.prompt_lookup));
        if most > 0 {
            self.draft_tokens = self.lookup.propose(text, most);
            self.draft_state.is_source = false;
        }
    }

    /// Whether there will be guesses once the token after `text` is known.
    pub fn will_propose(&mut self, text: &[u32], least: AcceptanceThreshold) -> bool {
        let drafts = self.proposers.draft_model && self.draft_stats.draft_length(text.len(), least.draft_model) > 0;
        let finds = self.proposers.prompt_lookup && self.lookup_stats.draft_length(text.len(), least.prompt_lookup) > 0;
        drafts || finds && !self.lookup.propose(text, 1).is_empty()
    }

    /// Whether the draft model is to be asked about `text`: how much of that its cache holds, and for how many tokens to
    /// ask. Once for each text, if nothing was found.
    pub fn request_draft(&mut self, text: &[u32], most: usize, least: AcceptanceThreshold) -> Option<(usize, usize)> {
        let asked = self.draft_state.requested.is_some_and(|(length, _)| length == text.len());
        if !self.proposers.draft_model || asked || !self.draft_tokens.is_empty() {
            return None;
        }
        let most = most.min(MAX_DRAFT_TOKENS).min(self.draft_stats.draft_length(text.len(), least.draft_model));
        if most == 0 {
            return None;
        }
        self.draft_state.requested = Some((text.len(), most));
        self.draft_state.pending = true;
        Some((self.draft_state.cached, most))
    }

    /// What the draft model says.
    pub fn receive_draft(&mut self, guesses: Vec<u32>) {
        let Some((length, most)) = self.draft_state.requested.filter(|_| self.draft_state.pending) else { return };
        self.draft_state.pending = false;
        // The last one it said it has not read.
        self.draft_state.cached = if guesses.len() == most { length + most - 1 } else { 0 };
        self.draft_state.is_source = true;
        self.draft_tokens = guesses;
    }

    /// There is room for so many of the guesses only.
    pub fn truncate(&mut self, most: usize) {
        self.draft_tokens.truncate(most);
        if let Some((length, _)) = self.draft_state.requested.filter(|_| self.draft_state.is_source) {
            self.draft_state.cached = self.draft_state.cached.min(length + most);
        }
    }

    /// How many of the guesses after a text of `length` tokens are what was chosen. There are none any more.
    pub fn verify<E>(&mut self, length: usize, chosen: &[Result<u32, E>]) -> usize {
        let guesses = std::mem::take(&mut self.draft_tokens);
        let right = guesses
            .iter()
            .zip(chosen)
            .take_while(|(guess, chosen)| chosen.as_ref().is_ok_and(|token| token == *guess));
        let right = right.count();
        if !guesses.is_empty() {
            let record = if self.draft_state.is_source { &mut self.draft_stats } else { &mut self.lookup_stats };
            record.record(length + right + 1, right, guesses.len());
            self.draft_state.cached = self.draft_state.cached.min(length + if self.draft_state.is_source { right } else { 0 });
        }
        right
    }

    /// The answer goes on in another slot: the draft model knows nothing of it there.
    pub fn reset_slot(&mut self) {
        self.draft_tokens.clear();
        self.draft_state = DraftState::default();
    }
}

/// How many guesses in a row are worth it, if each is right with one probability when those before it are, and the
/// last one has to be with another.
fn worthwhile_tokens(right: f64, least: f64) -> usize {
    let mut likely = right;
    (0..MAX_DRAFT_TOKENS)
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
    fn draft_length_follows_the_acceptance_rate() {
        for (right, least, expected) in [
            (0.7, 0.1, 6),
            (1.0, 0.1, MAX_DRAFT_TOKENS),
            (0.7, 0.5, 1),
            (0.7, 0.7, 0),
            (0.05, 0.1, 0),
            (0.0, 0.0, 0),
            (1.0, 1.0, 0),
            (0.9, 0.0, MAX_DRAFT_TOKENS),
        ] {
            assert_eq!(worthwhile_tokens(right, least), expected, "{right} of {least}");
        }
    }

    fn lookup() -> Speculator {
        Speculator::new(Proposers { prompt_lookup: true, draft_model: false })
    }

    fn found(least: f64) -> AcceptanceThreshold {
        AcceptanceThreshold { prompt_lookup: least, draft_model: 1.0 }
    }

    fn chosen(tokens: &[u32]) -> Vec<Result<u32, ()>> {
        tokens.iter().take(MAX_DRAFT_TOKENS + 1).map(|token| Ok(*token)).collect()
    }

    /// What is guessed after a text, without a look at whether it is right.
    fn guesses(guesser: &mut Speculator, text: &[u32], most: usize, least: f64) -> Vec<u32> {
        guesser.truncate(0);
        guesser.propose(text, most, found(least));
        guesser.draft_tokens().to_vec()
    }

    /// In how many batches the tokens come of a text, when a guess has to be at least so likely.
    fn batches(text: &[u32], least: f64) -> usize {
        let (mut guesser, mut length, mut batches) = (lookup(), 8, 0);
        while length < text.len() {
            guesser.propose(&text[..length], text.len() - length - 1, found(least));
            batches += 1;
            length += guesser.verify(length, &chosen(&text[length..])) + 1;
        }
        batches
    }

    #[test]
    fn repetitive_text_needs_a_fraction_of_the_batches() {
        let repeated: Vec<u32> = (0..2000).map(|place| place % 100).collect();
        let count = batches(&repeated, 0.1);
        assert!(count < 400, "{count}");
    }

    #[test]
    fn speculator_drafts_less_after_rejected_tokens() {
        // Three tokens repeat all the time, what follows never does.
        let misleading: Vec<u32> =
            (0..4000).map(|place| if place % 4 < 3 { place % 4 } else { 10 + place }).collect();
        let mut guesser = lookup();
        let mut made = [0; 4];
        for length in 8..misleading.len() {
            made[length / 1000] += guesses(&mut guesser, &misleading[..length], 8, 0.1).len();
            assert_eq!(guesser.verify(length, &chosen(&misleading[length..])), 0);
        }
        assert!(made[0] < 200 && made[3] < 40, "{made:?}");
    }

    #[test]
    fn speculator_drafts_nothing_when_the_cost_is_too_high() {
        let repeated: Vec<u32> = (0..200).map(|place| place % 20).collect();
        assert!(guesses(&mut lookup(), &repeated, 8, 1.0).is_empty());
        assert!(guesses(&mut lookup(), &repeated, 8, 0.8).is_empty(), "none is known to be as good");
        assert_eq!(guesses(&mut lookup(), &repeated, 2, 0.0), [0, 1]);
        assert!(guesses(&mut Speculator::default(), &repeated, 2, 0.0).is_empty(), "nobody may guess");
    }

    #[test]
    fn speculator_retries_after_its_backoff() {
        let repeated: Vec<u32> = (0..500).map(|place| place % 20).collect();
        let mut guesser = lookup();
        let mut length = 100;
        while !guesses(&mut guesser, &repeated[..length], 8, 0.1).is_empty() {
            assert_eq!(guesser.verify(length, &[Ok::<u32, ()>(99)]), 0);
        }
        while guesses(&mut guesser, &repeated[..length], 8, 0.1).is_empty() {
            length += 1;
        }
        assert!(length > 110 && length < 500, "{length}");
    }

    #[test]
    fn draft_model_gets_each_text_once_and_only_uncached_tokens() {
        let least = AcceptanceThreshold { prompt_lookup: 0.1, draft_model: 0.3 };
        let mut guesser = Speculator::new(Proposers { prompt_lookup: true, draft_model: true });
        let text: Vec<u32> = (0..20).collect();
        assert!(guesser.will_propose(&text, least));
        guesser.propose(&text, 9, least);
        // 0.7 to the third is still more than 0.3.
        assert_eq!(guesser.request_draft(&text, 9, least), Some((0, 3)));
        assert!(guesser.awaits_draft());
        assert_eq!(guesser.request_draft(&text, 9, least), None);
        guesser.receive_draft(vec![20, 21, 99]);
        assert_eq!((guesser.draft_tokens(), guesser.awaits_draft()), (&[20, 21, 99][..], false));
        assert_eq!(guesser.verify(20, &chosen(&[20, 21, 22, 23])), 2);
        // It read 20 and 21 itself; 22 and what is chosen behind it are news.
        let text: Vec<u32> = (0..23).collect();
        assert_eq!(guesser.request_draft(&text, 2, least), Some((22, 2)));
        // It may say less than it was asked for, or nothing, if it fails.
        guesser.receive_draft(Vec::new());
        assert_eq!(guesser.request_draft(&text, 2, least), None, "it is asked once for each text");
        assert_eq!(guesser.verify(23, &chosen(&[23])), 0);
        let text: Vec<u32> = (0..24).collect();
        assert_eq!(guesser.request_draft(&text, 2, least), Some((0, 2)));
        // In another slot it knows nothing, and what it said meanwhile is of no use.
        guesser.reset_slot();
        guesser.receive_draft(vec![24, 25]);
        assert!(guesser.draft_tokens().is_empty());
        assert_eq!(guesser.request_draft(&text, 2, least), Some((0, 2)));
        guesser.receive_draft(vec![24, 25]);
        // There may be room for fewer than it said, or for none.
        guesser.truncate(0);
        let longer: Vec<u32> = (0..25).collect();
        assert_eq!(guesser.request_draft(&longer, 2, least), Some((24, 2)));
        guesser.reset_slot();
        assert_eq!(guesser.request_draft(&text, 2, least), Some((0, 2)));
        guesser.receive_draft(vec![24, 25]);
        // What is found costs nothing, and the draft model has to read it later.
        let text: Vec<u32> = (0..24).chain([24, 25, 26, 0, 1, 2]).collect();
        assert_eq!(guesser.verify(24, &chosen(&[24, 25, 26])), 2);
        guesser.propose(&text, 9, least);
        assert_eq!(guesser.draft_tokens()[..2], [3, 4]);
        assert_eq!(guesser.request_draft(&text, 9, least), None);
        assert_eq!(guesser.verify(30, &chosen(&[3, 4, 5, 9])), 3);
        let text: Vec<u32> = text.into_iter().chain([3, 4, 5, 9]).collect();
        assert_eq!(guesser.request_draft(&text, 1, least), Some((25, 1)));
    }

    #[test]
    fn draft_model_backs_off_while_its_tokens_are_rejected() {
        let least = AcceptanceThreshold { prompt_lookup: 0.1, draft_model: 0.5 };
        let mut guesser = Speculator::new(Proposers { prompt_lookup: false, draft_model: true });
        let mut asked = [0; 4];
        for length in 1..2000 {
            let text: Vec<u32> = (0..length).collect();
            if let Some((_, most)) = guesser.request_draft(&text, 8, least) {
                asked[text.len() / 500] += 1;
                guesser.receive_draft(vec![7777; most]);
            }
            guesser.verify(text.len(), &chosen(&[length]));
        }
        assert!(asked[0] > 5 && asked[3] < asked[0] / 2, "{asked:?}");
    }
}
