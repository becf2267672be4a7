//! The tokens of a prompt as their client is told of them: with their texts, and with log-probabilities as far as these are
//! computed. Pure; not here: the logits.

use std::sync::Arc;

use russet_chat::grammar::TokenText;
use russet_wire::event::{
    FailureKind, GenerationEvent, GenerationFailure, PromptLogprobs, PromptToken, TokenLogprob,
};
use russet_wire::request::GenerationRequest;

use super::output::token_bytes;
use crate::executor::{SampleError, ScoreSpec, TokenScore};

/// Most numbers of the prompt of one response: one for each token and for each of the most probable ones beside it. A
/// response of so many takes some megabytes in the gateway, which has to hold it until the prompt is read.
const MAX_PROMPT_LOGPROBS: usize = 1 << 18;
/// Most of them in one event: gRPC's messages have at most four megabytes.
const MAX_EVENT_LOGPROBS: usize = 1 << 13;
/// Most bytes of one event, because the texts of tokens have any length. A token is not divided: with all that is told beside
/// it, it may take three more megabytes.
const MAX_EVENT_BYTES: usize = 1 << 20;
/// More than the bytes of a token or of one beside it, as encoded, without its text: six fields and lengths of up to six bytes.
const TOKEN_BYTES: usize = 40;

/// What is told of a prompt, and how far.
pub struct PromptReport {
    texts: Arc<[TokenText]>,
    /// How many of the most probable tokens are told beside each token; `None` where no log-probabilities are.
    top: Option<u32>,
    /// Tokens that were told.
    reported: usize,
    /// The token that the next scores are of, since the last admission.
    next: usize,
}

impl PromptReport {
    /// What a request asks to be told of its prompt of so many tokens; `None` where it is nothing, or was told before: a
    /// response that resumes has gone beyond its prompt.
    ///
    /// # Errors
    /// It is too much.
    pub fn new(
        request: &GenerationRequest,
        prompt_tokens: usize,
        texts: impl FnOnce() -> Arc<[TokenText]>,
    ) -> Result<Option<Self>, GenerationFailure> {
        if !request.tells_prompt() || !request.emitted.is_empty() {
            return Ok(None);
        }
        let top = request.prompt_logprobs;
        let each = 1 + top.unwrap_or(0) as usize;
        if prompt_tokens.saturating_mul(each) > MAX_PROMPT_LOGPROBS {
            let most = MAX_PROMPT_LOGPROBS / each;
            let message = format!(
                "the prompt has {prompt_tokens} tokens, and with {each} log-probabilities of each a response tells of at most {most}; ask for fewer, or send the prompt in parts"
            );
            return Err(GenerationFailure { kind: FailureKind::InvalidRequest, message });
        }
        Ok(Some(Self { texts: texts(), top, reported: 0, next: 1 }))
    }

    /// Whether log-probabilities of the prompt are still to be computed: all of it is prefilled then.
    pub fn needs_scores(&self, prompt: &[u32]) -> bool {
        self.top.is_some() && self.reported.max(1) < prompt.len()
    }

    /// Its sequence is prefilled from its first token on.
    pub fn admit(&mut self) {
        self.next = 1;
    }

    /// What to compute beside a step whose tokens these follow.
    pub fn score_spec(&self, following: &[u32]) -> Option<ScoreSpec> {
        self.top.map(|top| ScoreSpec { tokens: following.to_vec(), top })
    }

    /// What is told before anything is computed: the first token, or all where no log-probabilities are.
    pub fn opening(&mut self, prompt: &[u32]) -> Vec<GenerationEvent> {
        let end = if self.top.is_some() { 1.min(prompt.len()) } else { prompt.len() };
        let new = prompt.get(self.reported..end).unwrap_or_default();
        self.reported = self.reported.max(end);
        let tokens = new.iter().map(|id| PromptToken { id: *id, bytes: self.bytes(*id), logprobs: None });
        self.events(tokens.collect())
    }

    /// What is told of the next tokens of the prompt, which have these scores. Those that were told before the sequence was
    /// preempted are not told again.
    ///
    /// # Errors
    /// A score is no number.
    pub fn scored(
        &mut self,
        prompt: &[u32],
        scores: Vec<TokenScore>,
    ) -> Result<Vec<GenerationEvent>, SampleError> {
        let mut tokens = Vec::new();
        for TokenScore { logprob, rank, top } in scores {
            let at = self.next;
            self.next += 1;
            if logprob.is_nan() || top.iter().any(|(_, logprob)| logprob.is_nan()) {
                return Err(SampleError::NotFinite);
            }
            let Some(id) = prompt.get(at).copied().filter(|_| at == self.reported) else { continue };
            self.reported += 1;
            let of = |(id, logprob)| TokenLogprob { id, bytes: self.bytes(id), logprob };
            let logprobs = PromptLogprobs { logprob, rank, top: top.into_iter().map(of).collect() };
            tokens.push(PromptToken { id, bytes: self.bytes(id), logprobs: Some(logprobs) });
        }
        Ok(self.events(tokens))
    }

    fn bytes(&self, id: u32) -> Vec<u8> {
        token_bytes(&self.texts, id)
    }

    fn events(&self, tokens: Vec<PromptToken>) -> Vec<GenerationEvent> {
        let most = (MAX_EVENT_LOGPROBS / (1 + self.top.unwrap_or(0) as usize)).max(1);
        let (mut events, mut event, mut event_bytes) = (Vec::new(), Vec::new(), 0);
        for token in tokens {
            let bytes = max_encoded_bytes(&token);
            if event.len() == most || (!event.is_empty() && event_bytes + bytes > MAX_EVENT_BYTES) {
                events.push(GenerationEvent::Prompt { tokens: std::mem::take(&mut event) });
                event_bytes = 0;
            }
            event_bytes += bytes;
            event.push(token);
        }
        if !event.is_empty() {
            events.push(GenerationEvent::Prompt { tokens: event });
        }
        events
    }
}

/// At least the bytes of what is told of a token in a message.
fn max_encoded_bytes(PromptToken { id: _, bytes, logprobs }: &PromptToken) -> usize {
    let beside = logprobs.iter().flat_map(|logprobs| &logprobs.top);
    let beside: usize = beside.map(|token| TOKEN_BYTES + token.bytes.len()).sum();
    TOKEN_BYTES + bytes.len() + beside
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(
        prompt_logprobs: Option<u32>,
        tokens: usize,
    ) -> Result<Option<PromptReport>, GenerationFailure> {
        let request = GenerationRequest { echo: true, prompt_logprobs, ..GenerationRequest::default() };
        PromptReport::new(&request, tokens, || Arc::new([]))
    }

    fn score(logprob: f32) -> TokenScore {
        TokenScore { logprob, rank: 1, top: vec![(9, -0.5)] }
    }

    fn reported(events: Vec<GenerationEvent>) -> Vec<(u32, Option<f32>)> {
        let tokens = events.into_iter().flat_map(|event| match event {
            GenerationEvent::Prompt { tokens } => tokens,
            other => panic!("{other:?}"),
        });
        tokens.map(|token| (token.id, token.logprobs.map(|logprobs| logprobs.logprob))).collect()
    }

    #[test]
    fn each_token_is_reported_once_whatever_runs_again() {
        let prompt = [5, 6, 7, 8];
        let mut report = report(Some(1), prompt.len()).unwrap().unwrap();
        assert_eq!(reported(report.opening(&prompt)), [(5, None)]);
        assert!(report.needs_scores(&prompt));
        assert_eq!(
            reported(report.scored(&prompt, vec![score(-1.0), score(-2.0)]).unwrap()),
            [(6, Some(-1.0)), (7, Some(-2.0))]
        );
        // Preempted and admitted again: it is computed from its beginning.
        report.admit();
        assert_eq!(reported(report.opening(&prompt)), []);
        assert_eq!(reported(report.scored(&prompt, vec![score(-1.0)]).unwrap()), []);
        assert!(report.needs_scores(&prompt));
        assert_eq!(
            reported(report.scored(&prompt, vec![score(-2.0), score(-3.0)]).unwrap()),
            [(8, Some(-3.0))]
        );
        assert!(!report.needs_scores(&prompt));
    }

    #[test]
    fn tokens_alone_come_at_once_and_scores_have_to_be_numbers() {
        let prompt: Vec<u32> = (0..20_000).collect();
        let mut alone = report(None, prompt.len()).unwrap().unwrap();
        assert!(!alone.needs_scores(&prompt));
        let events = alone.opening(&prompt);
        assert_eq!(events.len(), prompt.len().div_ceil(MAX_EVENT_LOGPROBS));
        assert_eq!(reported(events), prompt.iter().map(|id| (*id, None)).collect::<Vec<_>>());
        let mut scored = report(Some(0), 2).unwrap().unwrap();
        assert_eq!(scored.scored(&[1, 2], vec![score(f32::NAN)]), Err(SampleError::NotFinite));
        // Of a prompt of one token there is nothing to compute.
        assert!(!report(Some(20), 1).unwrap().unwrap().needs_scores(&[1]));
    }

    #[test]
    fn events_of_long_tokens_stay_within_a_message() {
        let prompt: Vec<u32> = (0..4000).map(|at| at % 3).collect();
        let request =
            GenerationRequest { echo: true, prompt_logprobs: Some(2), ..GenerationRequest::default() };
        for length in [1, 1000, MAX_EVENT_BYTES] {
            let prompt = &prompt[..if length > 1000 { 5 } else { 4000 }];
            let texts: Arc<[TokenText]> = vec![TokenText::Bytes(vec![b'x'; length]); 3].into();
            let mut report = PromptReport::new(&request, prompt.len(), || texts).unwrap().unwrap();
            let score = |_: &u32| TokenScore { logprob: -1.0, rank: 1, top: vec![(1, -0.1), (2, -0.2)] };
            let mut events = report.opening(prompt);
            events.extend(report.scored(prompt, prompt[1..].iter().map(score).collect()).unwrap());
            for event in &events {
                let GenerationEvent::Prompt { tokens } = event else { panic!("{event:?}") };
                let beside = |token: &PromptToken| token.logprobs.as_ref().map_or(0, |of| of.top.len());
                let texts: usize = tokens.iter().map(|token| (1 + beside(token)) * length).sum();
                // A token is not divided.
                assert!(tokens.len() == 1 || texts < MAX_EVENT_BYTES, "{texts} bytes of {length} each");
            }
            let whole = reported(events).iter().map(|(id, _)| *id).collect::<Vec<_>>();
            assert_eq!(whole, prompt, "tokens of {length}");
        }
    }

    #[test]
    fn too_much_is_refused_and_a_resumed_response_tells_nothing() {
        for (top, tokens, most) in
            [(None, 1 << 18, 1 << 18), (Some(1), 1 << 17, 1 << 17), (Some(20), 12_483, 12_483)]
        {
            assert!(report(top, tokens).unwrap().is_some());
            let failure = report(top, tokens + 1).err().unwrap();
            assert_eq!(failure.kind, FailureKind::InvalidRequest);
            assert!(failure.message.contains(&format!("tells of at most {most}")), "{}", failure.message);
        }
        let resumed = GenerationRequest { emitted: vec![7], echo: true, ..GenerationRequest::default() };
        assert!(PromptReport::new(&resumed, 9, || Arc::new([])).unwrap().is_none());
        assert!(PromptReport::new(&GenerationRequest::default(), 9, || Arc::new([])).unwrap().is_none());
    }
}
