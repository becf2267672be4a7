//! One request from its prompt to its finish, pure: which step comes next, what a chosen token
//! means, when it is over. It neither waits nor sends.

use std::sync::Arc;

use russet_wire::event::{Event, Failure, FailureKind, FinishReason, Usage};
use russet_wire::request::GenerationRequest;

use crate::compute::{Choice, Step};
use crate::schedule::deal::Ready;
use crate::tokens::TokensError;
use crate::tokens::stops::Stops;
use crate::tokens::stream::TextStream;

/// More stop texts than any client's API takes.
const MOST_STOPS: usize = 32;
/// Every stop text is looked for after every token.
const LONGEST_STOP: usize = 1024;

/// What is wrong with a request whatever the model is.
pub fn validate(request: &GenerationRequest) -> Result<(), Failure> {
    let sampling = &request.sampling;
    let wrong = |message: String| Err(Failure { kind: FailureKind::InvalidRequest, message });
    if request.messages.is_empty() {
        return wrong("the request has no messages; send at least one".into());
    }
    if request.max_tokens == Some(0) {
        return wrong("max_tokens is 0; ask for at least 1".into());
    }
    if !(sampling.temperature.is_finite() && sampling.temperature >= 0.0) {
        return wrong(format!("temperature is {}; use 0 or more", sampling.temperature));
    }
    if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
        return wrong(format!("top_p is {}; use more than 0 and at most 1", sampling.top_p));
    }
    if !(0.0..=1.0).contains(&sampling.min_p) {
        return wrong(format!("min_p is {}; use 0 to 1", sampling.min_p));
    }
    if request.stop.len() > MOST_STOPS {
        return wrong(format!("{} stop texts; send at most {MOST_STOPS}", request.stop.len()));
    }
    if let Some(length) = request.stop.iter().map(String::len).find(|&length| length > LONGEST_STOP) {
        return wrong(format!("a stop text of {length} bytes; send at most {LONGEST_STOP}"));
    }
    Ok(())
}

/// How many tokens the answer may have: what was asked, as far as the context holds them.
pub fn room(prompt_tokens: usize, max_tokens: Option<u32>, context_tokens: u32) -> Result<u32, Failure> {
    let left = (context_tokens as usize).saturating_sub(prompt_tokens) as u32;
    match (prompt_tokens, left) {
        (0, _) => Err(Failure {
            kind: FailureKind::InvalidRequest,
            message: "the prompt has no tokens; send a message with text".into(),
        }),
        (_, 0) => Err(Failure {
            kind: FailureKind::InvalidRequest,
            message: format!(
                "the prompt has {prompt_tokens} tokens, but the context holds {context_tokens} including the answer; shorten the conversation"
            ),
        }),
        _ => Ok(max_tokens.map_or(left, |asked| asked.min(left))),
    }
}

/// A request in a slot.
pub struct Sequence {
    slot: u32,
    /// Tokens not yet in the cache, oldest first: the rest of the prompt, then one chosen token.
    next: Vec<u32>,
    cached: u32,
    /// Tokens of the prompt that were in the cache from the beginning.
    kept: u32,
    /// The prompt and what was chosen after it.
    history: Vec<u32>,
    /// Choices that were handed out and not yet accepted.
    pending: u32,
    prompt_tokens: u32,
    generated: u32,
    limit: u32,
    choice: Choice,
    ends: Arc<[u32]>,
    ignore_eos: bool,
    text: TextStream,
    stops: Stops,
}

/// What a chosen token came to.
#[derive(Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Text to tell, if there is any or a token to count.
    pub event: Option<Event>,
    /// Set when the answer is complete.
    pub finished: Option<FinishReason>,
}

impl Sequence {
    /// A sequence whose prompt and room are known. `seed` was drawn if the request names none.
    pub fn new(
        slot: u32,
        request: &GenerationRequest,
        prompt: Vec<u32>,
        limit: u32,
        seed: u64,
        ends: Arc<[u32]>,
        text: TextStream,
    ) -> Self {
        let banned: Arc<[u32]> = if request.ignore_eos { ends.clone() } else { Arc::new([]) };
        Self {
            slot,
            prompt_tokens: prompt.len() as u32,
            history: prompt.clone(),
            next: prompt,
            cached: 0,
            kept: 0,
            pending: 0,
            generated: 0,
            limit,
            choice: Choice { sampling: request.sampling.clone(), seed, index: 0, banned },
            ends,
            ignore_eos: request.ignore_eos,
            text,
            stops: Stops::new(request.stop.iter().cloned()),
        }
    }

    /// So many tokens of the prompt, but not all, are in the cache already.
    pub fn skip(&mut self, cached: u32) {
        self.next = self.history[cached as usize..].to_vec();
        (self.cached, self.kept) = (cached, cached);
    }

    /// The prompt and what was chosen after it. The cache holds no more of it than [`Sequence::cached`].
    pub fn history(&self) -> &[u32] {
        &self.history
    }

    /// The prompt.
    pub fn prompt(&self) -> &[u32] {
        &self.history[..self.prompt_tokens as usize]
    }

    /// The slot it occupies.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// Tokens in the cache once the steps handed out are done.
    pub fn cached(&self) -> u32 {
        self.cached
    }

    /// What it cost so far.
    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.generated,
            cached_tokens: self.kept,
        }
    }

    /// What it can do next; `ahead` allows to choose a token after one that is not known yet. A prompt's last token
    /// always goes alone: so mlx-lm computes it.
    pub fn ready(&self, ahead: bool) -> Ready {
        match self.next.len() {
            0 if ahead && self.pending == 1 && self.generated + self.pending < self.limit => Ready::Choose,
            0 => Ready::Busy,
            1 => Ready::Choose,
            length => Ready::Read(length as u32 - 1),
        }
    }

    /// The step to run next: so many tokens at most, and without a choice, while the prompt is being read. Steps
    /// with a choice are followed by [`Sequence::accept`], in their order.
    pub fn step(&mut self, tokens: u32) -> Step {
        let rest = match self.ready(false) {
            Ready::Read(left) => self.next.split_off(left.min(tokens.max(1)) as usize),
            Ready::Choose | Ready::Busy => Vec::new(),
        };
        let tokens = std::mem::replace(&mut self.next, rest);
        let offset = self.cached;
        let choice = self.next.is_empty().then(|| {
            let index = self.generated + self.pending;
            self.pending += 1;
            Choice { index, ..self.choice.clone() }
        });
        let step = Step { slot: self.slot, offset, tokens, choice };
        self.cached += step.length();
        step
    }

    /// Takes the token that a step chose.
    pub fn accept(&mut self, token: u32) -> Result<Accepted, TokensError> {
        self.pending = self.pending.saturating_sub(1);
        if self.ends.contains(&token) && !self.ignore_eos {
            let text = self.rest()?;
            let event = (!text.is_empty()).then_some(Event::Token { id: token, text });
            return Ok(Accepted { event, finished: Some(FinishReason::Stop) });
        }
        self.generated += 1;
        self.history.push(token);
        // Else a step that was handed out already goes on from it.
        if self.pending == 0 {
            self.next = vec![token];
        }
        let piece = self.text.push(token)?;
        let mut pushed = self.stops.push(&piece);
        let finished = if pushed.stopped {
            Some(FinishReason::Stop)
        } else if self.generated >= self.limit {
            // The bytes left may still complete a stop text.
            let last = self.text.flush()?;
            let rest = self.stops.push(&last);
            pushed.text.push_str(&rest.text);
            if rest.stopped {
                Some(FinishReason::Stop)
            } else {
                pushed.text.push_str(&self.stops.flush());
                Some(FinishReason::Length)
            }
        } else {
            None
        };
        Ok(Accepted { event: Some(Event::Token { id: token, text: pushed.text }), finished })
    }

    /// What was held back when the model ended its turn.
    fn rest(&mut self) -> Result<String, TokensError> {
        let last = self.text.flush()?;
        let mut pushed = self.stops.push(&last);
        if !pushed.stopped {
            pushed.text.push_str(&self.stops.flush());
        }
        Ok(pushed.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{self, END, token_of_byte};
    use crate::tokens::Tokens;
    use russet_wire::request::{Message, Sampling};

    fn request() -> GenerationRequest {
        GenerationRequest {
            id: "r".into(),
            messages: vec![Message { role: "user".into(), content: "hi".into() }],
            max_tokens: None,
            sampling: Sampling::default(),
            stop: Vec::new(),
            ignore_eos: false,
        }
    }

    /// Feeds bytes (and perhaps an end) as the model's choices; returns text, finish and count.
    fn answer(
        request: &GenerationRequest,
        limit: u32,
        choices: &[u32],
    ) -> (String, Option<FinishReason>, u32) {
        let dir = fixture::model_dir();
        let tokens = Tokens::load(dir.path()).unwrap();
        let mut sequence =
            Sequence::new(0, request, vec![1, 2, 3], limit, 7, tokens.ends().clone(), tokens.stream());
        sequence.step(2048);
        sequence.step(2048);
        let mut text = String::new();
        for &choice in choices {
            let Accepted { event, finished } = sequence.accept(choice).unwrap();
            if let Some(Event::Token { text: piece, .. }) = event {
                text.push_str(&piece);
            }
            if finished.is_some() {
                return (text, finished, sequence.usage().completion_tokens);
            }
            assert_eq!(sequence.step(1).tokens, [choice]);
        }
        (text, None, sequence.usage().completion_tokens)
    }

    fn bytes(text: &str) -> Vec<u32> {
        text.bytes().map(token_of_byte).collect()
    }

    #[test]
    fn an_answer_ends_where_it_should() {
        let with = |stop: &[&str], ignore_eos| GenerationRequest {
            stop: stop.iter().map(|stop| (*stop).to_owned()).collect(),
            ignore_eos,
            ..request()
        };
        let ended = |text: &str| [bytes(text), vec![END]].concat();
        for (request, limit, choices, text, finished, count) in [
            (with(&[], false), 99, ended("héllo"), "héllo", Some(FinishReason::Stop), 6),
            (with(&[], false), 3, ended("hello"), "hel", Some(FinishReason::Length), 3),
            (with(&["lo"], false), 99, ended("hello!"), "hel", Some(FinishReason::Stop), 5),
            (with(&["lo!"], false), 99, ended("hello"), "hello", Some(FinishReason::Stop), 5),
            (with(&["lo!"], false), 5, ended("hello"), "hello", Some(FinishReason::Length), 5),
            (with(&[], true), 8, ended("hi"), "hi", None, 3),
            // The limit cuts é in half: the half is told as a replacement, not dropped.
            (with(&[], false), 2, ended("hé"), "h\u{FFFD}", Some(FinishReason::Length), 2),
        ] {
            assert_eq!(answer(&request, limit, &choices), (text.to_owned(), finished, count), "{choices:?}");
        }
    }

    #[test]
    fn a_prompt_is_read_as_it_is_dealt_and_its_last_token_alone() {
        let dir = fixture::model_dir();
        let tokens = Tokens::load(dir.path()).unwrap();
        let mut sequence =
            Sequence::new(3, &request(), vec![9; 5000], 10, 7, tokens.ends().clone(), tokens.stream());
        let steps: Vec<Step> = (0..4).map(|_| sequence.step(2048)).collect();
        let shapes: Vec<_> =
            steps.iter().map(|step| (step.offset, step.tokens.len(), step.choice.is_some())).collect();
        assert_eq!(shapes, [(0, 2048, false), (2048, 2048, false), (4096, 903, false), (4999, 1, true)]);
        let mut single = Sequence::new(0, &request(), vec![9], 10, 7, tokens.ends().clone(), tokens.stream());
        assert!(single.step(2048).choice.is_some());
    }

    #[test]
    fn wrong_requests_are_refused_with_the_number() {
        let sampled = |change: fn(&mut Sampling)| {
            let mut request = request();
            change(&mut request.sampling);
            request
        };
        for (request, expected) in [
            (GenerationRequest { messages: Vec::new(), ..request() }, "no messages"),
            (GenerationRequest { max_tokens: Some(0), ..request() }, "max_tokens is 0"),
            (sampled(|s| s.temperature = f32::NAN), "temperature is NaN"),
            (sampled(|s| s.temperature = -1.0), "temperature is -1"),
            (sampled(|s| s.top_p = 0.0), "top_p is 0"),
            (sampled(|s| s.min_p = 1.5), "min_p is 1.5"),
            (GenerationRequest { stop: vec!["x".into(); 33], ..request() }, "33 stop texts"),
            (GenerationRequest { stop: vec!["x".repeat(2000)], ..request() }, "2000 bytes"),
        ] {
            let failure = validate(&request).unwrap_err();
            assert_eq!(failure.kind, FailureKind::InvalidRequest);
            assert!(failure.message.contains(expected), "{}", failure.message);
        }
        assert_eq!(validate(&request()), Ok(()));
    }

    #[test]
    fn the_context_bounds_the_answer() {
        assert_eq!(room(10, None, 16), Ok(6));
        assert_eq!(room(10, Some(4), 16), Ok(4));
        assert_eq!(room(10, Some(40), 16), Ok(6));
        let failure = room(16, Some(4), 16).unwrap_err();
        assert!(failure.message.contains("16 tokens, but the context holds 16"), "{}", failure.message);
        assert_eq!(room(0, None, 16).unwrap_err().kind, FailureKind::InvalidRequest);
    }
}
