//! One request from its prompt to its finish, pure: which step comes next, what a chosen token
//! means, when it is over, and how it goes on after its cache was taken away. It neither waits nor sends.

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
/// Priorities lie between its negative and it. Waiting is worth levels of priority, so a level beyond every bound
/// would have the others wait without one.
pub const MOST_PRIORITY: i32 = 100;

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
    if request.priority.unsigned_abs() > MOST_PRIORITY.unsigned_abs() {
        return wrong(format!("priority is {}; use -{MOST_PRIORITY} to {MOST_PRIORITY}", request.priority));
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

/// A request that is being answered, in a slot or on its way to one.
pub struct Sequence {
    slot: u32,
    /// All of it that is known: the prompt, then what was chosen.
    tokens: Vec<u32>,
    cached: u32,
    /// Tokens of the prompt that were in the cache from the beginning.
    kept: u32,
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
    /// A sequence whose prompt and room are known, in the first slot until it [enters](Sequence::enter) another.
    /// `seed` was drawn if the request names none.
    pub fn new(
        request: &GenerationRequest,
        prompt: Vec<u32>,
        limit: u32,
        seed: u64,
        ends: Arc<[u32]>,
        text: TextStream,
    ) -> Self {
        let banned: Arc<[u32]> = if request.ignore_eos { ends.clone() } else { Arc::new([]) };
        Self {
            slot: 0,
            prompt_tokens: prompt.len() as u32,
            tokens: prompt,
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

    /// The prompt and what was chosen after it. The cache holds no more of it than [`Sequence::cached`].
    pub fn history(&self) -> &[u32] {
        &self.tokens
    }

    /// The prompt.
    pub fn prompt(&self) -> &[u32] {
        &self.tokens[..self.prompt_tokens as usize]
    }

    /// Begins in a slot that holds so many of its tokens, but not all, for the first time or anew: then the others are
    /// read again, its own behind the prompt. Tokens that were handed out to be chosen and did not come back are chosen
    /// again, and come out the same; what was said, counted and held back goes on.
    pub fn enter(&mut self, slot: u32, cached: u32) {
        (self.slot, self.cached, self.pending) = (slot, cached, 0);
        if self.generated == 0 {
            self.kept = cached;
        }
    }

    /// The slot it occupies.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// Tokens in the cache once the steps handed out are done.
    pub fn cached(&self) -> u32 {
        self.cached
    }

    /// Most tokens of its answer.
    pub fn limit(&self) -> u32 {
        self.limit
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
        match self.next().len() {
            0 if ahead && self.pending == 1 && self.generated + self.pending < self.limit => Ready::Choose,
            0 => Ready::Busy,
            1 => Ready::Choose,
            length => Ready::Read(length as u32 - 1),
        }
    }

    /// Tokens that are known and not yet in the cache.
    pub fn unread(&self) -> u32 {
        self.next().len() as u32
    }

    /// Tokens not yet in the cache, oldest first: the rest of what is read, or one chosen token.
    fn next(&self) -> &[u32] {
        self.tokens.get(self.cached as usize..).unwrap_or_default()
    }

    /// The step to run next: so many tokens at most, and without a choice, while the prompt is being read. Steps
    /// with a choice are followed by [`Sequence::accept`], in their order.
    pub fn step(&mut self, tokens: u32) -> Step {
        let next = self.next();
        let (tokens, chooses) = match self.ready(false) {
            Ready::Read(left) => (next[..left.min(tokens.max(1)) as usize].to_vec(), false),
            Ready::Choose | Ready::Busy => (next.to_vec(), true),
        };
        let offset = self.cached;
        let choice = chooses.then(|| {
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
        // Where a step that was handed out already goes on from it, it is in the cache.
        self.tokens.push(token);
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
            priority: 0,
            deadline_milliseconds: None,
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
            Sequence::new(request, vec![1, 2, 3], limit, 7, tokens.ends().clone(), tokens.stream());
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
            Sequence::new(&request(), vec![9; 5000], 10, 7, tokens.ends().clone(), tokens.stream());
        sequence.enter(3, 0);
        let steps: Vec<Step> = (0..4).map(|_| sequence.step(2048)).collect();
        let shapes: Vec<_> =
            steps.iter().map(|step| (step.offset, step.tokens.len(), step.choice.is_some())).collect();
        assert_eq!(shapes, [(0, 2048, false), (2048, 2048, false), (4096, 903, false), (4999, 1, true)]);
        let mut single = Sequence::new(&request(), vec![9], 10, 7, tokens.ends().clone(), tokens.stream());
        assert!(single.step(2048).choice.is_some());
        assert_eq!(steps[0].slot, 3);
    }

    /// Runs a sequence over answers given by their index, so many steps ahead as `ahead` allows, and takes its cache
    /// away whenever it has so many tokens of the answer as `leaves` says. Everything it told, its end and its usage.
    fn told(
        request: &GenerationRequest,
        limit: u32,
        answer: &[u32],
        ahead: bool,
        leaves: &[u32],
    ) -> (Vec<Event>, FinishReason, Usage) {
        let dir = fixture::model_dir();
        let tokens = Tokens::load(dir.path()).unwrap();
        let mut sequence =
            Sequence::new(request, vec![1; 600], limit, 7, tokens.ends().clone(), tokens.stream());
        let (mut cache, mut chosen, mut told) = (Vec::new(), Vec::new(), Vec::new());
        let mut leaves = leaves.iter().peekable();
        loop {
            while sequence.ready(ahead) != Ready::Busy {
                let step = sequence.step(256);
                assert_eq!(step.offset as usize, cache.len());
                // Where no token is told, the one that was chosen last goes in.
                let last = chosen.last().map(|index: &u32| answer[*index as usize]);
                cache.extend(if step.tokens.is_empty() { vec![last.unwrap()] } else { step.tokens });
                chosen.extend(step.choice.map(|choice| choice.index));
            }
            let index = sequence.usage().completion_tokens;
            assert_eq!(cache[..600], [1; 600]);
            assert_eq!(cache[600..600 + index as usize], answer[..index as usize]);
            if leaves.next_if(|leave| **leave == index).is_some() {
                cache.clear();
                chosen.clear();
                sequence.enter(5, 0);
                continue;
            }
            let at = chosen.len() - sequence.pending as usize;
            assert_eq!(chosen[at], index, "each token is chosen in its turn");
            let Accepted { event, finished } = sequence.accept(answer[index as usize]).unwrap();
            told.extend(event);
            if let Some(reason) = finished {
                return (told, reason, sequence.usage());
            }
        }
    }

    #[test]
    fn an_answer_whose_cache_is_taken_away_goes_on_as_if_nothing_had_been() {
        let stops = GenerationRequest { stop: vec!["lo w".into()], ..request() };
        for (story, request, limit, text) in [
            ("to its end", request(), 99, "hello world, and good bye"),
            ("to its limit, within a character", request(), 3, "hé, wörld"),
            ("to a stop text that was held back meanwhile", stops, 99, "hello world"),
        ] {
            let answer = [bytes(text), vec![END]].concat();
            let undisturbed = told(&request, limit, &answer, false, &[]);
            for ahead in [false, true] {
                for leaves in [&[0][..], &[1], &[2], &[0, 0, 1, 2, 2], &[2, 5, 6, 9]] {
                    assert_eq!(
                        told(&request, limit, &answer, ahead, leaves),
                        undisturbed,
                        "{story} {leaves:?}"
                    );
                }
            }
        }
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
            (GenerationRequest { priority: -101, ..request() }, "priority is -101; use -100 to 100"),
            (GenerationRequest { priority: i32::MIN, ..request() }, "priority is -2147483648"),
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
