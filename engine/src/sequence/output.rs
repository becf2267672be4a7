//! Output stream of a request: incremental detokenisation up to the end of the output, and its reasoning and calls of
//! tools told apart from its text. A function of the tokens alone, so a resumed output continues in the middle of a
//! word, a character, a stop string or a call. Pure; not here: caches and steps.

use std::sync::Arc;

use parking_lot::Mutex;
use russet_chat::grammar::{GrammarMatcher, TokenText};
use russet_chat::parser::{OutputFormat, OutputParser, Part};
use russet_wire::event::{
    Delta, FailureKind, FinishReason, GenerationEvent, GenerationFailure, Logprobs, TokenLogprob,
};
use russet_wire::request::GenerationRequest;
use thiserror::Error;

use super::thinking_budget::ThinkingBudget;
use super::tool_call_ids::ToolCallIds;
use crate::executor::{SampledToken, TopLogprobs};
use crate::token_masks::{SharedMatcher, StepMask};
use crate::tokenizer::TokenizerError;
use crate::tokenizer::detokenizer::Detokenizer;
use crate::tokenizer::stop_strings::{StopCheck, StopStrings};

/// The output stream of one request.
pub struct OutputStream {
    tokens: u32,
    limit: u32,
    /// Tokens that end the output.
    ends: Arc<[u32]>,
    /// Tokens that must not be sampled, and those that must not be before `min_tokens`.
    banned: Arc<[u32]>,
    banned_early: Arc<[u32]>,
    min_tokens: u32,
    detokenizer: Detokenizer,
    stop_strings: StopStrings,
    /// Reads the text up to a stop string.
    parser: OutputParser,
    single_tool_call: bool,
    tool_calls: ToolCallIds,
    /// What the output has to be.
    grammar: Option<SharedMatcher>,
    thinking: ThinkingBudget,
    /// For log-probabilities.
    token_texts: Option<Arc<[TokenText]>>,
    /// Whether the log-probabilities of an end token are told.
    tells_ends: bool,
}

/// Result of a sampled token.
#[derive(Debug, PartialEq)]
pub struct AcceptedToken {
    /// Event to emit, if there is text or a token to count.
    pub event: Option<GenerationEvent>,
    /// Set when the output is complete.
    pub finished: Option<FinishReason>,
}

/// Why an output cannot resume after the tokens that came with the request.
#[derive(Debug, Error)]
pub enum ResumeError {
    /// The tokenizer failed.
    #[error(transparent)]
    Tokens(#[from] TokenizerError),
    /// An end token is not the last emitted token.
    #[error(
        "{emitted} tokens of this answer are said to have been sent, but it ends with token {end}; it was begun by another model or with another context"
    )]
    BeyondEnd {
        /// Emitted tokens in the request.
        emitted: usize,
        /// Position of the end token, counted from 1.
        end: usize,
    },
}

impl ResumeError {
    /// The failure that the client gets.
    pub fn failure(&self) -> GenerationFailure {
        let kind = match self {
            Self::Tokens(TokenizerError::OutOfVocabulary { .. } | TokenizerError::Grammar(_))
            | Self::BeyondEnd { .. } => FailureKind::InvalidRequest,
            Self::Tokens(_) => FailureKind::Internal,
        };
        GenerationFailure { kind, message: self.to_string() }
    }
}

/// The bytes of a token; of a special one those of its name.
pub(super) fn token_bytes(texts: &[TokenText], id: u32) -> Vec<u8> {
    match texts.get(id as usize) {
        Some(TokenText::Bytes(bytes)) => bytes.clone(),
        Some(TokenText::Special(name)) => name.clone().into_bytes(),
        Some(TokenText::None) | None => Vec::new(),
    }
}

impl OutputStream {
    /// An output of at most `limit` tokens, with none emitted yet.
    pub fn new(
        request: &GenerationRequest,
        limit: u32,
        eos_token_ids: Arc<[u32]>,
        detokenizer: Detokenizer,
    ) -> Self {
        let stops = request.stop_token_ids.as_slice();
        let both = || -> Arc<[u32]> { [&eos_token_ids, stops].concat().into() };
        let (ends, banned): (Arc<[u32]>, Arc<[u32]>) = match (request.ignore_eos, stops.is_empty()) {
            (true, _) => (stops.into(), eos_token_ids.clone()),
            (false, true) => (eos_token_ids.clone(), Arc::new([])),
            (false, false) => (both(), Arc::new([])),
        };
        Self {
            tokens: 0,
            limit,
            ends,
            banned,
            banned_early: if request.sampling.min_tokens == 0 { Arc::new([]) } else { both() },
            min_tokens: request.sampling.min_tokens,
            stop_strings: StopStrings::new(request.stop.iter().cloned(), |stop| {
                detokenizer.holds_special_token(stop)
            }),
            detokenizer,
            parser: OutputParser::new(&OutputFormat::default(), Arc::new([]), false),
            single_tool_call: request.single_tool_call,
            tool_calls: ToolCallIds::new(&request.id),
            grammar: None,
            thinking: ThinkingBudget::default(),
            token_texts: None,
            tells_ends: request.echo,
        }
    }

    /// The same, which has to be what this grammar allows.
    #[must_use]
    pub fn with_grammar(self, grammar: Option<GrammarMatcher>) -> Self {
        Self { grammar: grammar.map(|grammar| Arc::new(Mutex::new(grammar))), ..self }
    }

    /// The same, with a budget for its thinking.
    #[must_use]
    pub fn with_thinking_budget(self, thinking: ThinkingBudget) -> Self {
        Self { thinking, ..self }
    }

    /// The same, which tells log-probabilities of tokens with these texts.
    #[must_use]
    pub fn with_token_texts(self, token_texts: Option<Arc<[TokenText]>>) -> Self {
        Self { token_texts, ..self }
    }

    /// Whether what may be sampled next depends on the token before it.
    pub fn follows_tokens(&self) -> bool {
        self.grammar.is_some() || self.thinking.is_set()
    }

    /// Which tokens may be sampled next, and after each of these draft tokens.
    pub fn mask(&self, drafts: &[u32]) -> Option<StepMask> {
        if let Some(token) = self.thinking.forced(self.parser.in_reasoning()) {
            return Some(StepMask::only(token));
        }
        self.grammar.as_ref().map(|grammar| StepMask::of_grammar(grammar, drafts))
    }

    /// How many of these draft tokens may be sampled.
    pub fn allowed_drafts(&self, drafts: &[u32]) -> usize {
        // Where thinking ends depends on the text of the tokens before it.
        match &self.grammar {
            _ if self.thinking.is_set() => 0,
            Some(grammar) => grammar.lock().allowed(drafts),
            None => drafts.len(),
        }
    }

    /// The same, read by this parser.
    #[must_use]
    pub fn with_parser(self, parser: OutputParser) -> Self {
        Self { parser, ..self }
    }

    /// Output tokens so far.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Maximum output tokens.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Tokens that must not be sampled after so many of the output.
    pub fn banned(&self, index: u32) -> Arc<[u32]> {
        if index < self.min_tokens { self.banned_early.clone() } else { self.banned.clone() }
    }

    /// Tokens from here on of which all have the same ban.
    pub fn tokens_of_one_ban(&self) -> u32 {
        match self.min_tokens.checked_sub(self.tokens) {
            None | Some(0) => u32::MAX,
            Some(left) => left,
        }
    }

    /// Resumes after the emitted tokens; returns the finish reason if the last of them ended the output.
    pub fn resume(&mut self, emitted: &[u32]) -> Result<Option<FinishReason>, ResumeError> {
        for (index, &token) in emitted.iter().enumerate() {
            let AcceptedToken { event: _, finished } = self.accept(token)?;
            if finished.is_some() {
                let end = index + 1;
                return if end == emitted.len() {
                    Ok(finished)
                } else {
                    Err(ResumeError::BeyondEnd { emitted: emitted.len(), end })
                };
            }
        }
        Ok(None)
    }

    /// Takes the next token.
    pub fn accept(&mut self, sampled: impl Into<SampledToken>) -> Result<AcceptedToken, TokenizerError> {
        let SampledToken { id: token, logprobs } = sampled.into();
        if self.ends.contains(&token) {
            let held = self.flush()?;
            let mut parts = self.parser.push(&held.text);
            // It may end a call, too.
            let marker = self.detokenizer.special_token(token).filter(|text| self.parser.reads(text));
            if let Some(marker) = marker {
                parts.extend(self.parser.push(&marker));
            }
            parts.extend(self.parser.finish());
            let mut delta = self.delta(parts).0;
            if self.tells_ends {
                delta.logprobs.extend(logprobs.map(|logprobs| self.logprobs(token, logprobs)));
            }
            let event = (!delta.is_empty()).then_some(GenerationEvent::Token { id: token, delta });
            let reason = held.stopped.map_or(FinishReason::Stop, FinishReason::StopString);
            return Ok(AcceptedToken { event, finished: Some(reason) });
        }
        self.tokens += 1;
        self.thinking.count(token, self.parser.in_reasoning());
        let is_complete = match &self.grammar {
            Some(grammar) => {
                let mut grammar = grammar.lock();
                grammar.accept(token)?;
                grammar.is_complete()
            }
            None => false,
        };
        let (mut parts, stopped) = self.push(token)?;
        let mut finished = None;
        if let Some(index) = stopped {
            parts.extend(self.parser.finish());
            finished = Some(FinishReason::StopString(index));
        } else if is_complete || self.tokens >= self.limit {
            // The remaining bytes may still complete a stop string.
            let held = self.flush()?;
            parts.extend(self.parser.push(&held.text));
            parts.extend(self.parser.finish());
            finished = Some(match held.stopped {
                Some(index) => FinishReason::StopString(index),
                None if is_complete => FinishReason::Stop,
                None => FinishReason::Length,
            });
        }
        let (mut delta, ended) = self.delta(parts);
        delta.logprobs.extend(logprobs.map(|logprobs| self.logprobs(token, logprobs)));
        if ended {
            finished = Some(FinishReason::Stop);
        }
        Ok(AcceptedToken { event: Some(GenerationEvent::Token { id: token, delta }), finished })
    }

    /// What a token adds, and the index of the stop string that is complete.
    fn push(&mut self, token: u32) -> Result<(Vec<Part>, Option<u32>), TokenizerError> {
        let special = self.detokenizer.special_token(token);
        let mut pushed = match &special {
            Some(special) if self.stop_strings.hold_special_tokens() => {
                self.stop_strings.push_special(special)
            }
            Some(_) => StopCheck::default(),
            // A stop is none yet.
            None if self.tokens <= self.min_tokens && self.min_tokens > 0 => {
                StopCheck { text: self.detokenizer.push(token)?, stopped: None }
            }
            None => self.stop_strings.push(&self.detokenizer.push(token)?),
        };
        let marker = special.filter(|text| pushed.stopped.is_none() && self.parser.reads(text));
        let Some(marker) = marker else {
            return Ok((self.parser.push(&pushed.text), pushed.stopped));
        };
        // What stands before a marker is no beginning of a character or stop string that goes on behind it.
        let held = self.flush()?;
        pushed.text.push_str(&held.text);
        let mut parts = self.parser.push(&pushed.text);
        if held.stopped.is_none() {
            parts.extend(self.parser.push(&marker));
        }
        Ok((parts, held.stopped))
    }

    /// The parts as one delta, and whether the output ends with them.
    fn delta(&mut self, parts: Vec<Part>) -> (Delta, bool) {
        let mut delta = Delta::default();
        for part in parts {
            match part {
                Part::Text(text) => delta.text.push_str(&text),
                Part::Reasoning(text) => delta.reasoning.push_str(&text),
                Part::ToolCall(call) => {
                    delta.tool_calls.push(self.tool_calls.named(call));
                    if self.single_tool_call {
                        return (delta, true);
                    }
                }
            }
        }
        (delta, false)
    }

    fn logprobs(&self, token: u32, logprobs: TopLogprobs) -> Logprobs {
        let TopLogprobs { sampled, top } = logprobs;
        let texts = self.token_texts.as_deref().unwrap_or_default();
        let of = |(id, logprob): (u32, f32)| TokenLogprob { id, bytes: token_bytes(texts, id), logprob };
        Logprobs { sampled: of((token, sampled)), top: top.into_iter().map(of).collect() }
    }

    /// The text held back, where nothing that goes on with it follows.
    fn flush(&mut self) -> Result<StopCheck, TokenizerError> {
        let last = self.detokenizer.flush()?;
        let mut held = self.stop_strings.push(&last);
        if held.stopped.is_none() {
            held.text.push_str(&self.stop_strings.flush());
        }
        Ok(held)
    }
}

#[cfg(test)]
mod tests {
    use russet_wire::conversation::{Tool, ToolCall};

    use super::*;
    use crate::fixture::{self, END, USER, token_of_byte};
    use crate::tokenizer::ChatTokenizer;

    const WRITTEN: &str = "<think>\nI add: 17 + 25.\n</think>\n\nSo é 🙂: <tool_call>\n{\"name\": \"add\", \"arguments\": {\"b\": 25, \"a\": \"日本\"}}\n</tool_call>\n<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";

    fn request() -> GenerationRequest {
        let tool = Tool { name: "add".into(), ..Tool::default() };
        GenerationRequest { id: "r".into(), tools: vec![tool], ..GenerationRequest::default() }
    }

    fn output(tokenizer: &ChatTokenizer, request: &GenerationRequest, limit: u32) -> OutputStream {
        let format = OutputFormat::default().tools_by_name("hermes").unwrap();
        let format = format.reasoning_by_name("think").unwrap();
        let parser = OutputParser::new(&format, request.tools.clone().into(), false);
        let (ends, detokenizer) = (tokenizer.eos_token_ids().clone(), tokenizer.detokenizer());
        OutputStream::new(request, limit, ends, detokenizer).with_parser(parser)
    }

    /// What the tokens from a place on add, and how the output ends.
    fn run(output: &mut OutputStream, tokens: &[u32]) -> (Delta, Option<FinishReason>) {
        let mut delta = Delta::default();
        for token in tokens {
            let AcceptedToken { event, finished } = output.accept(*token).unwrap();
            if let Some(GenerationEvent::Token { delta: next, .. }) = event {
                delta.append(next);
            }
            if finished.is_some() {
                return (delta, finished);
            }
        }
        (delta, None)
    }

    fn tokens(text: &str) -> Vec<u32> {
        text.bytes().map(token_of_byte).chain([END]).collect()
    }

    fn call(id: &str, arguments: &str) -> ToolCall {
        ToolCall { id: id.into(), name: "add".into(), arguments: arguments.into() }
    }

    #[test]
    fn reasoning_text_and_calls_are_parts_of_their_own() {
        let dir = fixture::model_dir();
        let tokenizer = ChatTokenizer::load(dir.path()).unwrap();
        let (delta, finished) = run(&mut output(&tokenizer, &request(), 999), &tokens(WRITTEN));
        let ids: Vec<String> = delta.tool_calls.iter().map(|call| call.id.clone()).collect();
        let expected = Delta {
            reasoning: "I add: 17 + 25.".into(),
            text: "So é 🙂:".into(),
            tool_calls: vec![call(&ids[0], "{\"b\": 25, \"a\": \"日本\"}"), call(&ids[1], "{}")],
            ..Delta::default()
        };
        assert_eq!((&delta, finished), (&expected, Some(FinishReason::Stop)));
        assert_ne!(ids[0], ids[1]);
        // Another engine goes on after any token, in the middle of a call too.
        let written = tokens(WRITTEN);
        for cut in 1..written.len() {
            let mut first = Delta::default();
            let (begun, _) = run(&mut output(&tokenizer, &request(), 999), &written[..cut]);
            first.append(begun);
            let mut resumed = output(&tokenizer, &request(), 999);
            assert_eq!(resumed.resume(&written[..cut]).unwrap(), None);
            first.append(run(&mut resumed, &written[cut..]).0);
            assert_eq!(first, delta, "cut after {cut}");
        }
    }

    #[test]
    fn calls_end_at_limits_stops_and_the_first_where_asked() {
        let dir = fixture::model_dir();
        let tokenizer = ChatTokenizer::load(dir.path()).unwrap();
        let mut single = request();
        single.single_tool_call = true;
        let (delta, finished) = run(&mut output(&tokenizer, &single, 999), &tokens(WRITTEN));
        assert_eq!((delta.tool_calls.len(), finished), (1, Some(FinishReason::Stop)));
        // A call that is cut off is text: no half of it is a call.
        let limit = WRITTEN.find("\"a\"").unwrap() as u32;
        let (delta, finished) = run(&mut output(&tokenizer, &request(), limit), &tokens(WRITTEN));
        assert_eq!((delta.tool_calls.len(), finished), (0, Some(FinishReason::Length)));
        assert!(delta.text.ends_with("{\"b\": 25, "), "{}", delta.text);
        let mut stopped = request();
        stopped.stop = vec!["arguments".into()];
        let (delta, finished) = run(&mut output(&tokenizer, &stopped, 999), &tokens(WRITTEN));
        assert_eq!((delta.tool_calls.len(), finished), (0, Some(FinishReason::StopString(0))));
        assert!(delta.text.ends_with("{\"name\": \"add\", \""), "{}", delta.text);
        // Without tools all of it is text, thinking aside.
        let plain = GenerationRequest { tools: Vec::new(), ..request() };
        let (delta, _) = run(&mut output(&tokenizer, &plain, 999), &tokens(WRITTEN));
        assert!(delta.tool_calls.is_empty() && delta.text.ends_with("</tool_call>"), "{delta:?}");
    }

    #[test]
    fn special_tokens_are_read_where_the_format_has_them() {
        let dir = fixture::model_dir();
        let tokenizer = ChatTokenizer::load(dir.path()).unwrap();
        let special = |token: u32, text: &str| {
            let mut written = tokens(text);
            written.splice(2..2, [token]);
            written
        };
        let (delta, _) = run(&mut output(&tokenizer, &request(), 99), &special(USER, "abcd"));
        assert_eq!(delta, Delta::text("abcd"), "one that no format has is no text");
    }
}
