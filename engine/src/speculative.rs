//! Speculative decoding: draft tokens are proposed for a sequence and all of them verified in one batch,
//! which costs little more than decoding one token. Pure.
//!
//! A token is sampled at every draft position just as it would be without draft tokens, from the same logits
//! and the same noise ([`crate::executor::SampleSpec::index`]). It counts if all draft tokens before it are
//! accepted. So the output does not depend on the draft tokens, greedy or sampled. For proposers that are
//! certain of their draft tokens, this equals rejection sampling.
//!
//! Speculation stops by itself where it does not pay: each request tracks its acceptance rate, and the
//! [`CostModel`] gives the rate it needs.

pub mod cost_model;
pub mod prompt_lookup;

pub use cost_model::CostModel;
use prompt_lookup::PromptLookup;

/// Maximum draft tokens of one sequence in a batch.
pub const MAX_DRAFT_TOKENS: usize = 8;
/// Acceptance rate assumed before any draft token was verified.
const INITIAL_ACCEPTANCE: f64 = 0.7;
/// Weight of the newest sample in the moving average.
const EMA_WEIGHT: f64 = 1.0 / 8.0;
/// Tokens without draft tokens after speculation did not pay; doubles each time.
const BACKOFF_TOKENS: u32 = 16;
/// Upper bound of that pause, because the text of an output changes.
const MAX_BACKOFF_TOKENS: u32 = 1024;

/// Acceptance rate of one proposer, and whether it is paused.
#[derive(Clone, Debug)]
struct ProposerStats {
    acceptance_rate: f64,
    /// Acceptance rate it needs.
    threshold: f64,
    /// Sequence length from which it proposes again.
    resume_at: usize,
    backoff: u32,
}

impl Default for ProposerStats {
    fn default() -> Self {
        Self { acceptance_rate: INITIAL_ACCEPTANCE, threshold: 0.0, resume_at: 0, backoff: BACKOFF_TOKENS }
    }
}

impl ProposerStats {
    /// Number of draft tokens worth proposing at a sequence length of `length` tokens, if each needs at least
    /// this acceptance probability.
    fn draft_length(&mut self, length: usize, least: f64) -> usize {
        self.threshold = least;
        if length < self.resume_at { 0 } else { worthwhile_tokens(self.acceptance_rate, least) }
    }

    /// Records how many of the verified draft tokens were accepted; the sequence now has `length` tokens.
    fn record(&mut self, length: usize, accepted: usize, drafted: usize) {
        // Draft tokens after the first rejected one were not verified.
        for position in 0..drafted.min(accepted + 1) {
            let outcome = if position < accepted { 1.0 } else { 0.0 };
            self.acceptance_rate += (outcome - self.acceptance_rate) * EMA_WEIGHT;
        }
        if accepted > 0 {
            self.backoff = BACKOFF_TOKENS;
        }
        if worthwhile_tokens(self.acceptance_rate, self.threshold) == 0 {
            self.resume_at = length + self.backoff as usize;
            self.backoff = (self.backoff * 2).min(MAX_BACKOFF_TOKENS);
            self.acceptance_rate = INITIAL_ACCEPTANCE;
        }
    }
}

/// Enabled proposers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Proposers {
    /// Prompt lookup.
    pub prompt_lookup: bool,
    /// A draft model, where prompt lookup finds nothing.
    pub draft_model: bool,
}

/// Acceptance probability that a draft token needs, by proposer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AcceptanceThreshold {
    /// Prompt lookup, which costs nothing to run.
    pub prompt_lookup: f64,
    /// The draft model.
    pub draft_model: f64,
}

/// Draft tokens of one sequence, and their proposers.
#[derive(Clone, Debug, Default)]
pub struct Speculator {
    proposers: Proposers,
    lookup: PromptLookup,
    lookup_stats: ProposerStats,
    draft_stats: ProposerStats,
    draft_state: DraftState,
    draft_tokens: Vec<u32>,
}

/// State of the draft model for one sequence.
#[derive(Clone, Copy, Debug, Default)]
struct DraftState {
    /// Tokens of the sequence in the draft model's KV cache.
    cached: usize,
    /// Sequence length of the last request and the number of draft tokens requested; the reply is pending if
    /// `awaited`.
    requested: Option<(usize, usize)>,
    pending: bool,
    /// Whether the current draft tokens come from the draft model.
    is_source: bool,
}

impl Speculator {
    /// A speculator with these proposers.
    pub fn new(proposers: Proposers) -> Self {
        Self { proposers, ..Self::default() }
    }

    /// The draft tokens to verify next, or being verified.
    pub fn draft_tokens(&self) -> &[u32] {
        &self.draft_tokens
    }

    /// Whether a reply of the draft model is pending.
    pub fn awaits_draft(&self) -> bool {
        self.draft_state.pending
    }

    /// Whether the newest draft tokens come from the draft model.
    pub fn is_from_draft_model(&self) -> bool {
        self.draft_state.is_source
    }

    /// Proposes tokens after `text` by prompt lookup if there are no draft tokens: up to a maximum, and no
    /// more than are likely to pay. `text` must extend the text of the previous call.
    pub fn propose(&mut self, text: &[u32], most: usize, least: AcceptanceThreshold) {
        if !self.draft_tokens.is_empty() || self.draft_state.pending || !self.proposers.prompt_lookup {
            return;
        }
        let most =
            most.min(MAX_DRAFT_TOKENS).min(self.lookup_stats.draft_length(text.len(), least.prompt_lookup));
        if most > 0 {
            self.draft_tokens = self.lookup.propose(text, most);
            self.draft_state.is_source = false;
        }
    }

    /// Whether there will be draft tokens once the token after `text` is known.
    pub fn will_propose(&mut self, text: &[u32], least: AcceptanceThreshold) -> bool {
        let drafts =
            self.proposers.draft_model && self.draft_stats.draft_length(text.len(), least.draft_model) > 0;
        let finds = self.proposers.prompt_lookup
            && self.lookup_stats.draft_length(text.len(), least.prompt_lookup) > 0;
        drafts || finds && !self.lookup.propose(text, 1).is_empty()
    }

    /// Whether to ask the draft model about `text`: how many tokens of it its KV cache holds, and how many
    /// draft tokens to request. Once per text, and only if prompt lookup found nothing.
    pub fn request_draft(
        &mut self,
        text: &[u32],
        most: usize,
        least: AcceptanceThreshold,
    ) -> Option<(usize, usize)> {
        let asked = self.draft_state.requested.is_some_and(|(length, _)| length == text.len());
        if !self.proposers.draft_model || asked || !self.draft_tokens.is_empty() {
            return None;
        }
        let most =
            most.min(MAX_DRAFT_TOKENS).min(self.draft_stats.draft_length(text.len(), least.draft_model));
        if most == 0 {
            return None;
        }
        self.draft_state.requested = Some((text.len(), most));
        self.draft_state.pending = true;
        Some((self.draft_state.cached, most))
    }

    /// Takes the draft model's reply.
    pub fn receive_draft(&mut self, draft_tokens: Vec<u32>) {
        let Some((length, most)) = self.draft_state.requested.filter(|_| self.draft_state.pending) else {
            return;
        };
        self.draft_state.pending = false;
        // The draft model has not run its last proposed token.
        self.draft_state.cached = if draft_tokens.len() == most { length + most - 1 } else { 0 };
        self.draft_state.is_source = true;
        self.draft_tokens = draft_tokens;
    }

    /// Drops the draft tokens beyond a maximum, where a batch has no capacity for more.
    pub fn truncate(&mut self, most: usize) {
        self.draft_tokens.truncate(most);
        if let Some((length, _)) = self.draft_state.requested.filter(|_| self.draft_state.is_source) {
            self.draft_state.cached = self.draft_state.cached.min(length + most);
        }
    }

    /// Verifies the draft tokens after a text of `length` tokens; returns how many are accepted and clears
    /// them.
    pub fn verify<Token: PartialEq<u32>, E>(&mut self, length: usize, chosen: &[Result<Token, E>]) -> usize {
        let draft_tokens = std::mem::take(&mut self.draft_tokens);
        let matching = draft_tokens
            .iter()
            .zip(chosen)
            .take_while(|(draft, chosen)| chosen.as_ref().is_ok_and(|token| *token == **draft));
        let accepted = matching.count();
        if !draft_tokens.is_empty() {
            let record =
                if self.draft_state.is_source { &mut self.draft_stats } else { &mut self.lookup_stats };
            record.record(length + accepted + 1, accepted, draft_tokens.len());
            self.draft_state.cached =
                self.draft_state.cached.min(length + if self.draft_state.is_source { accepted } else { 0 });
        }
        accepted
    }

    /// The sequence moves to another slot, where the draft model's KV cache is empty.
    pub fn reset_slot(&mut self) {
        self.draft_tokens.clear();
        self.draft_state = DraftState::default();
    }
}

/// Number of draft tokens in a row that pay. Each is accepted with the first probability if those before it
/// are; the probability that the last one is accepted has to exceed the second.
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

    /// Draft tokens after a text, before verification.
    fn drafted(speculator: &mut Speculator, text: &[u32], most: usize, least: f64) -> Vec<u32> {
        speculator.truncate(0);
        speculator.propose(text, most, found(least));
        speculator.draft_tokens().to_vec()
    }

    /// Number of batches that produce `text`, if a draft token needs at least this acceptance probability.
    fn batches(text: &[u32], least: f64) -> usize {
        let (mut speculator, mut length, mut batches) = (lookup(), 8, 0);
        while length < text.len() {
            speculator.propose(&text[..length], text.len() - length - 1, found(least));
            batches += 1;
            length += speculator.verify(length, &chosen(&text[length..])) + 1;
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
        // Three tokens repeat all the time; the tokens after them never do.
        let misleading: Vec<u32> =
            (0..4000).map(|place| if place % 4 < 3 { place % 4 } else { 10 + place }).collect();
        let mut speculator = lookup();
        let mut made = [0; 4];
        for length in 8..misleading.len() {
            made[length / 1000] += drafted(&mut speculator, &misleading[..length], 8, 0.1).len();
            assert_eq!(speculator.verify(length, &chosen(&misleading[length..])), 0);
        }
        assert!(made[0] < 200 && made[3] < 40, "{made:?}");
    }

    #[test]
    fn speculator_drafts_nothing_when_the_cost_is_too_high() {
        let repeated: Vec<u32> = (0..200).map(|place| place % 20).collect();
        assert!(drafted(&mut lookup(), &repeated, 8, 1.0).is_empty());
        assert!(drafted(&mut lookup(), &repeated, 8, 0.8).is_empty(), "none is known to be as good");
        assert_eq!(drafted(&mut lookup(), &repeated, 2, 0.0), [0, 1]);
        assert!(drafted(&mut Speculator::default(), &repeated, 2, 0.0).is_empty(), "no proposer is enabled");
    }

    #[test]
    fn speculator_retries_after_its_backoff() {
        let repeated: Vec<u32> = (0..500).map(|place| place % 20).collect();
        let mut speculator = lookup();
        let mut length = 100;
        while !drafted(&mut speculator, &repeated[..length], 8, 0.1).is_empty() {
            assert_eq!(speculator.verify(length, &[Ok::<u32, ()>(99)]), 0);
        }
        while drafted(&mut speculator, &repeated[..length], 8, 0.1).is_empty() {
            length += 1;
        }
        assert!(length > 110 && length < 500, "{length}");
    }

    #[test]
    fn draft_model_gets_each_text_once_and_only_uncached_tokens() {
        let least = AcceptanceThreshold { prompt_lookup: 0.1, draft_model: 0.3 };
        let mut speculator = Speculator::new(Proposers { prompt_lookup: true, draft_model: true });
        let text: Vec<u32> = (0..20).collect();
        assert!(speculator.will_propose(&text, least));
        speculator.propose(&text, 9, least);
        // 0.7 cubed is still more than 0.3.
        assert_eq!(speculator.request_draft(&text, 9, least), Some((0, 3)));
        assert!(speculator.awaits_draft());
        assert_eq!(speculator.request_draft(&text, 9, least), None);
        speculator.receive_draft(vec![20, 21, 99]);
        assert_eq!((speculator.draft_tokens(), speculator.awaits_draft()), (&[20, 21, 99][..], false));
        assert_eq!(speculator.verify(20, &chosen(&[20, 21, 22, 23])), 2);
        // Its KV cache holds 20 and 21; 22 and the token sampled after it are new.
        let text: Vec<u32> = (0..23).collect();
        assert_eq!(speculator.request_draft(&text, 2, least), Some((22, 2)));
        // On failure it may return fewer draft tokens than requested, or none.
        speculator.receive_draft(Vec::new());
        assert_eq!(speculator.request_draft(&text, 2, least), None, "it is asked once for each text");
        assert_eq!(speculator.verify(23, &chosen(&[23])), 0);
        let text: Vec<u32> = (0..24).collect();
        assert_eq!(speculator.request_draft(&text, 2, least), Some((0, 2)));
        // In another slot its KV cache is empty, and a pending reply is dropped.
        speculator.reset_slot();
        speculator.receive_draft(vec![24, 25]);
        assert!(speculator.draft_tokens().is_empty());
        assert_eq!(speculator.request_draft(&text, 2, least), Some((0, 2)));
        speculator.receive_draft(vec![24, 25]);
        // The batch may have capacity for fewer draft tokens, or none.
        speculator.truncate(0);
        let longer: Vec<u32> = (0..25).collect();
        assert_eq!(speculator.request_draft(&longer, 2, least), Some((24, 2)));
        speculator.reset_slot();
        assert_eq!(speculator.request_draft(&text, 2, least), Some((0, 2)));
        speculator.receive_draft(vec![24, 25]);
        // Prompt lookup costs nothing, and the draft model has to prefill these tokens later.
        let text: Vec<u32> = (0..24).chain([24, 25, 26, 0, 1, 2]).collect();
        assert_eq!(speculator.verify(24, &chosen(&[24, 25, 26])), 2);
        speculator.propose(&text, 9, least);
        assert_eq!(speculator.draft_tokens()[..2], [3, 4]);
        assert_eq!(speculator.request_draft(&text, 9, least), None);
        assert_eq!(speculator.verify(30, &chosen(&[3, 4, 5, 9])), 3);
        let text: Vec<u32> = text.into_iter().chain([3, 4, 5, 9]).collect();
        assert_eq!(speculator.request_draft(&text, 1, least), Some((25, 1)));
    }

    #[test]
    fn draft_model_backs_off_while_its_tokens_are_rejected() {
        let least = AcceptanceThreshold { prompt_lookup: 0.1, draft_model: 0.5 };
        let mut speculator = Speculator::new(Proposers { prompt_lookup: false, draft_model: true });
        let mut asked = [0; 4];
        for length in 1..2000 {
            let text: Vec<u32> = (0..length).collect();
            if let Some((_, most)) = speculator.request_draft(&text, 8, least) {
                asked[text.len() / 500] += 1;
                speculator.receive_draft(vec![7777; most]);
            }
            speculator.verify(text.len(), &chosen(&[length]));
        }
        assert!(asked[0] > 5 && asked[3] < asked[0] / 2, "{asked:?}");
    }
}
