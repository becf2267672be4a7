//! One request as a pure state machine: its next step, the effect of a sampled token, its end, and how it
//! resumes after preemption. It neither waits nor sends.

mod output;
mod prompt_report;
mod thinking_budget;
mod tool_call_ids;

use std::collections::BTreeSet;
use std::sync::Arc;

use russet_wire::event::{FailureKind, GenerationEvent, GenerationFailure, Usage};
use russet_wire::request::{GenerationRequest, Sampling};

use crate::executor::{
    DraftRequest, DraftRewind, SampleError, SampleSpec, SampledToken, SequenceStep, TokenScore,
};
use crate::logit_edits::LogitEditor;
use crate::prefix_cache::block_hash::PrefixScope;
use crate::prefix_cache::checkpoints::Checkpoints;
use crate::scheduler::batching::Readiness;
use crate::served_adapters::ServedAdapter;
use crate::speculative::{AcceptanceThreshold, MAX_DRAFT_TOKENS, Proposers, Speculator};
use crate::tokenizer::TokenizerError;
pub use output::{AcceptedToken, OutputStream, ResumeError};
pub use prompt_report::PromptReport;
pub use thinking_budget::ThinkingBudget;

/// Maximum stop strings: more than any client's API accepts.
const MAX_STOP_STRINGS: usize = 32;
/// Maximum length of a stop string in bytes: every one is searched after every token.
const MAX_STOP_BYTES: usize = 1024;
/// Maximum tokens that a request names: each is looked at for every token of the response.
const MAX_TOKEN_LIST: usize = 1024;
/// A smaller factor would make logits infinite.
const MIN_REPETITION_PENALTY: f32 = 0.01;
/// Maximum messages: a context of a million tokens holds no more, as templates frame each with ten or so.
const MAX_MESSAGES: usize = 100_000;
/// Maximum bytes of a request's id: it is logged several times.
const MAX_ID_BYTES: usize = 1024;
/// Maximum bytes of a salt of the prefix cache: more than a digest or a name of a key.
const MAX_SALT_BYTES: usize = 1024;
/// Bound of the absolute priority. Waiting time is worth priority levels, so an unbounded priority could
/// starve the others.
pub const MAX_PRIORITY: i32 = 100;

/// Checks a request as far as that needs no model.
pub fn validate(request: &GenerationRequest) -> Result<(), GenerationFailure> {
    let sampling = &request.sampling;
    let wrong = |message: String| Err(GenerationFailure { kind: FailureKind::InvalidRequest, message });
    match (&request.raw_prompt, request.messages.is_empty()) {
        (None, true) => return wrong("the request has no messages; send at least one".into()),
        (Some(_), false) => {
            return wrong("the request has messages and a raw prompt; send one of them".into());
        }
        _ => {}
    }
    if request.truncate_prompt_tokens == Some(0) {
        return wrong("truncate_prompt_tokens is 0; ask for at least 1".into());
    }
    if request.messages.len() > MAX_MESSAGES {
        return wrong(format!("{} messages; send at most {MAX_MESSAGES}", request.messages.len()));
    }
    if request.id.len() > MAX_ID_BYTES {
        return wrong(format!("an id of {} bytes; send at most {MAX_ID_BYTES}", request.id.len()));
    }
    if request.max_tokens == Some(0) && !request.tells_prompt() {
        return wrong("max_tokens is 0; ask for at least 1".into());
    }
    if !(sampling.temperature.is_finite() && sampling.temperature >= 0.0) {
        return wrong(format!("temperature is {}; use 0 or more", sampling.temperature));
    }
    if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
        return wrong(format!("top_p is {}; use more than 0 and at most 1", sampling.top_p));
    }
    for (name, value, range) in [
        ("repetition_penalty", sampling.repetition_penalty, MIN_REPETITION_PENALTY..=10.0),
        ("presence_penalty", sampling.presence_penalty, -2.0..=2.0),
        ("frequency_penalty", sampling.frequency_penalty, -2.0..=2.0),
    ] {
        if !range.contains(&value) {
            return wrong(format!("{name} is {value}; use {} to {}", range.start(), range.end()));
        }
    }
    if let Some((token, bias)) =
        sampling.logit_bias.iter().find(|(_, bias)| !(-100.0..=100.0).contains(*bias))
    {
        return wrong(format!("the logit_bias of token {token} is {bias}; use -100 to 100"));
    }
    for (name, count) in
        [("logit_bias", sampling.logit_bias.len()), ("stop_token_ids", request.stop_token_ids.len())]
    {
        if count > MAX_TOKEN_LIST {
            return wrong(format!("{name} has {count} tokens; send at most {MAX_TOKEN_LIST}"));
        }
    }
    if !(0.0..=1.0).contains(&sampling.min_p) {
        return wrong(format!("min_p is {}; use 0 to 1", sampling.min_p));
    }
    if request.priority.unsigned_abs() > MAX_PRIORITY.unsigned_abs() {
        return wrong(format!("priority is {}; use -{MAX_PRIORITY} to {MAX_PRIORITY}", request.priority));
    }
    if request.stop.len() > MAX_STOP_STRINGS {
        return wrong(format!("{} stop texts; send at most {MAX_STOP_STRINGS}", request.stop.len()));
    }
    if let Some(length) = request.stop.iter().map(String::len).find(|&length| length > MAX_STOP_BYTES) {
        return wrong(format!("a stop text of {length} bytes; send at most {MAX_STOP_BYTES}"));
    }
    if request.cache_salt.len() > MAX_SALT_BYTES {
        let length = request.cache_salt.len();
        return wrong(format!("a cache_salt of {length} bytes; send at most {MAX_SALT_BYTES}"));
    }
    Ok(())
}

/// Maximum output tokens: as requested, up to what the context leaves.
pub fn max_new_tokens(
    prompt_tokens: usize,
    max_tokens: Option<u32>,
    context_tokens: u32,
) -> Result<u32, GenerationFailure> {
    let left = (context_tokens as usize).saturating_sub(prompt_tokens) as u32;
    match (prompt_tokens, left) {
        (0, _) => Err(GenerationFailure {
            kind: FailureKind::InvalidRequest,
            message: "the prompt has no tokens; send text".into(),
        }),
        // Without an answer, the prompt may fill the context.
        (_, 0) if max_tokens != Some(0) || prompt_tokens > context_tokens as usize => {
            Err(GenerationFailure {
                kind: FailureKind::ContextLengthExceeded,
                // In the words of OpenAI, by which clients know it.
                message: format!(
                    "This model's maximum context length is {context_tokens} tokens. However, your messages resulted in {prompt_tokens} tokens. Shorten the conversation; the answer needs room too."
                ),
            })
        }
        _ => Ok(max_tokens.map_or(left, |asked| asked.min(left))),
    }
}

/// A request that is waiting, running or preempted.
pub struct Sequence {
    slot: u32,
    /// All known tokens: the prompt, then the sampled tokens.
    tokens: Vec<u32>,
    cached: u32,
    /// Where its prefill pauses.
    checkpoints: Checkpoints,
    /// Tokens that were cached at its first admission.
    prefix_hit_tokens: Option<u32>,
    /// Steps in flight that sample tokens.
    pending: u32,
    /// Tokens that were cached before the newest step.
    step_offset: u32,
    /// Draft tokens of the next step, or of the step in flight.
    speculator: Speculator,
    draft_rewind: DraftRewind,
    /// Tokens that have run and run again in the next step, as their step was taken back with its rejected draft
    /// tokens.
    repeated: u32,
    prompt_tokens: u32,
    cache_salt: String,
    adapter: ServedAdapter,
    sampling: Arc<Sampling>,
    seed: u64,
    top_logprobs: Option<u32>,
    editor: LogitEditor,
    output: OutputStream,
    /// What is told of the prompt.
    prompt_report: Option<PromptReport>,
}

impl Sequence {
    /// A sequence with a known prompt, in the first slot until it is [admitted](Sequence::admit) to another.
    /// `seed` is random if the request names none. Output tokens that came with a resumed request are
    /// prefilled like its prompt.
    pub fn new(request: &GenerationRequest, prompt: Vec<u32>, seed: u64, output: OutputStream) -> Self {
        let sampling = Arc::new(request.sampling.clone());
        let mut editor = LogitEditor::new(sampling.clone(), &prompt);
        request.emitted.iter().for_each(|token| editor.count(*token));
        let read = [prompt.as_slice(), &request.emitted].concat();
        Self {
            slot: 0,
            prompt_tokens: prompt.len() as u32,
            cache_salt: request.cache_salt.clone(),
            adapter: ServedAdapter::default(),
            tokens: read,
            cached: 0,
            checkpoints: Checkpoints::default(),
            prefix_hit_tokens: None,
            pending: 0,
            step_offset: 0,
            speculator: Speculator::default(),
            draft_rewind: DraftRewind::default(),
            repeated: 0,
            sampling,
            seed,
            top_logprobs: request.logprobs,
            editor,
            output,
            prompt_report: None,
        }
    }

    /// Enables speculation with these proposers; rejected draft tokens are taken back so.
    pub fn with_speculation(self, sources: Proposers, draft_rewind: DraftRewind) -> Self {
        Self { speculator: Speculator::new(sources), draft_rewind, ..self }
    }

    /// The same, of whose prompt this is told.
    #[must_use]
    pub fn with_prompt_report(self, prompt_report: Option<PromptReport>) -> Self {
        Self { prompt_report, ..self }
    }

    /// No repeated run goes on over these tokens.
    #[must_use]
    pub fn with_breakers(mut self, breakers: BTreeSet<u32>) -> Self {
        self.editor.set_breakers(breakers);
        self
    }

    /// The prompt and the tokens sampled after it. The KV cache holds only the first [`Sequence::cached`] of
    /// them.
    pub fn history(&self) -> &[u32] {
        &self.tokens
    }

    /// The prompt.
    pub fn prompt(&self) -> &[u32] {
        &self.tokens[..self.prompt_tokens as usize]
    }

    /// The same, answered by an adapter.
    pub fn with_adapter(self, adapter: ServedAdapter) -> Self {
        Self { adapter, ..self }
    }

    /// With whom it shares cached prefixes: with requests of the same adapter and salt alone.
    pub fn prefix_scope(&self) -> PrefixScope<'_> {
        PrefixScope { adapter: &self.adapter.identity, salt: &self.cache_salt }
    }

    /// Admitted, for the first time or after preemption, to a slot that holds `cached` of its tokens, but not
    /// all. The others are prefilled, its output after the prompt. Tokens whose steps were in flight are
    /// sampled again, with the same result; output text, usage and held-back text continue.
    pub fn admit(&mut self, slot: u32, cached: u32, checkpoints: Checkpoints) {
        (self.slot, self.cached, self.pending, self.checkpoints) = (slot, cached, 0, checkpoints);
        self.repeated = 0;
        self.prompt_report.iter_mut().for_each(PromptReport::admit);
        self.speculator.reset_slot();
        self.prefix_hit_tokens.get_or_insert(cached);
    }

    /// Its blocks were not loaded: all of its tokens are prefilled.
    pub fn discard_cached(&mut self) {
        if self.prefix_hit_tokens == Some(self.cached) {
            self.prefix_hit_tokens = Some(0);
        }
        self.cached = 0;
    }

    /// The slot it occupies.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// Tokens in the KV cache once the steps in flight have ended.
    pub fn cached(&self) -> u32 {
        self.cached
    }

    /// Maximum output tokens.
    pub fn limit(&self) -> u32 {
        self.output.limit()
    }

    /// Token usage so far.
    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.output.tokens(),
            cached_tokens: self.prefix_hit_tokens.unwrap_or_default().min(self.prompt_tokens),
        }
    }

    /// The first event of its response.
    pub fn started_event(&self) -> GenerationEvent {
        let Usage { prompt_tokens, completion_tokens, .. } = self.usage();
        GenerationEvent::Started { prompt_tokens, emitted_tokens: completion_tokens }
    }

    /// What is told of its prompt before anything of it is computed.
    pub fn prompt_events(&mut self) -> Vec<GenerationEvent> {
        let prompt = &self.tokens[..self.prompt_tokens as usize];
        self.prompt_report.as_mut().map_or(Vec::new(), |report| report.opening(prompt))
    }

    /// Whether log-probabilities of its prompt are still to be computed: it is prefilled from its first token on then.
    pub fn scores_prompt(&self) -> bool {
        self.prompt_report.as_ref().is_some_and(|report| report.needs_scores(self.prompt()))
    }

    /// Takes the scores of a step, in the order of the steps; returns what is told of them.
    ///
    /// # Errors
    /// A score is no number.
    pub fn accept_scores(&mut self, scores: Vec<TokenScore>) -> Result<Vec<GenerationEvent>, SampleError> {
        let prompt = &self.tokens[..self.prompt_tokens as usize];
        self.prompt_report.as_mut().map_or(Ok(Vec::new()), |report| report.scored(prompt, scores))
    }

    /// Whether it ends with its prompt, of which all is told.
    pub fn ends_with_prompt(&self) -> bool {
        self.limit() == 0 && !self.scores_prompt()
    }

    /// Work it is ready for; `ahead` allows sampling after a token that is not known yet. The last prompt
    /// token always runs as a step of its own, as in mlx-lm.
    pub fn readiness(&self, ahead: bool) -> Readiness {
        let more = self.output.tokens() + self.pending < self.output.limit();
        let ahead = ahead && !self.editor.follows_tokens() && !self.output.follows_tokens();
        let drafts = self.speculator.draft_tokens().len() as u32;
        match self.uncached_tokens() {
            0 if ahead && self.pending == 1 && drafts == 0 && more => Readiness::Decode { known: 1, drafts },
            0 => Readiness::Busy,
            // Nothing is sampled behind its prompt.
            1 if self.output.limit() == 0 => Readiness::Busy,
            known if self.decodes(known) && self.speculator.awaits_draft() => Readiness::Busy,
            known if self.decodes(known) => Readiness::Decode { known, drafts },
            length => {
                let left = length - 1;
                let next = self.checkpoints.tokens_to_next(self.cached);
                Readiness::Prefill(next.map_or(left, |tokens| left.min(tokens)))
            }
        }
    }

    /// For what its slot is to be copied before the next step; says so once.
    pub fn take_checkpoints(&mut self) -> Checkpoints {
        self.checkpoints.take(self.cached)
    }

    /// Proposes draft tokens after the next token, as far as they pay. Returns whether it has draft tokens,
    /// or may have once the token in flight is known: a step started before that would leave them out.
    pub fn propose(&mut self, least: AcceptanceThreshold) -> bool {
        // Penalties of a draft token would depend on those before it.
        if self.editor.follows_tokens() {
            return false;
        }
        let next = self.uncached_tokens();
        // The first token must not wait for draft tokens.
        if next > 0 && !self.decodes(next) || self.pending > 1 || self.output.tokens() == 0 {
            return false;
        }
        if next == 0 {
            return !self.speculator.draft_tokens().is_empty()
                || self.speculator.will_propose(&self.tokens, least);
        }
        let most = self.max_draft_tokens();
        self.speculator.propose(&self.tokens, most, least);
        self.drop_draft_tokens();
        !self.speculator.draft_tokens().is_empty() || self.speculator.awaits_draft()
    }

    /// The request to the draft model before the next step, if any.
    pub fn request_draft(&mut self, least: AcceptanceThreshold) -> Option<DraftRequest> {
        let follows = self.editor.follows_tokens();
        if follows || !self.decodes(self.uncached_tokens()) || self.pending > 0 || self.output.tokens() == 0 {
            return None;
        }
        let most = self.max_draft_tokens();
        let (offset, count) = self.speculator.request_draft(&self.tokens, most, least)?;
        let choice = self.sample_spec(self.output.tokens());
        let (slot, tokens) = (self.slot, self.tokens[offset..].to_vec());
        Some(DraftRequest { slot, offset: offset as u32, tokens, draft_tokens: count as u32, sample: choice })
    }

    /// Takes the draft model's reply.
    pub fn receive_draft(&mut self, drafted: Vec<u32>) {
        self.speculator.receive_draft(drafted);
        self.drop_draft_tokens();
    }

    /// Drops the draft tokens that may not be sampled.
    fn drop_draft_tokens(&mut self) {
        let allowed = self.output.allowed_drafts(self.speculator.draft_tokens());
        self.speculator.truncate(allowed);
    }

    /// Whether the newest draft tokens come from the draft model.
    pub fn is_from_draft_model(&self) -> bool {
        self.speculator.is_from_draft_model()
    }

    /// One token is sampled in any case, and the output ends at its limit. Tokens that run again take the place of draft
    /// tokens, or a sequence of rejections would make ever longer steps.
    fn max_draft_tokens(&self) -> usize {
        let left = self.output.limit().saturating_sub(self.output.tokens() + 1);
        let left = left.min(self.output.tokens_of_one_ban() - 1);
        left.min((MAX_DRAFT_TOKENS as u32).saturating_sub(self.repeated)) as usize
    }

    /// How the token after so many of the output is sampled.
    fn sample_spec(&self, index: u32) -> SampleSpec {
        SampleSpec {
            sampling: self.sampling.clone(),
            seed: self.seed,
            index,
            banned: self.output.banned(index),
            edits: self.editor.edits(),
            mask: None,
            top_logprobs: self.top_logprobs,
        }
    }

    /// Whether so many known tokens that are not cached are a decode step: the token sampled last, with those that run
    /// again.
    fn decodes(&self, uncached: u32) -> bool {
        uncached == 1 + self.repeated
    }

    /// Known tokens that are not in the KV cache yet.
    pub fn uncached_tokens(&self) -> u32 {
        self.uncached().len() as u32
    }

    /// Tokens not yet in the KV cache, oldest first: the rest of the prefill, or one sampled token, with those that run
    /// again.
    fn uncached(&self) -> &[u32] {
        self.tokens.get(self.cached as usize..).unwrap_or_default()
    }

    /// The next step: at most `tokens` tokens; during prefill it does not sample. A step that samples must be
    /// followed by [`Sequence::verify`] and [`Sequence::accept`], in this order.
    pub fn step(&mut self, tokens: u32) -> SequenceStep {
        let next = self.uncached();
        let (tokens, drafted, chooses) = match self.readiness(false) {
            Readiness::Prefill(left) => (next[..left.min(tokens.max(1)) as usize].to_vec(), 0, false),
            Readiness::Decode { known, drafts } => {
                let drafted = drafts.min(tokens.saturating_sub(known));
                let drafts = &self.speculator.draft_tokens()[..drafted as usize];
                ([next, drafts].concat(), drafted, true)
            }
            Readiness::Busy => (Vec::new(), 0, true),
        };
        self.speculator.truncate(drafted as usize);
        let offset = self.cached;
        (self.step_offset, self.repeated) = (offset, 0);
        let choice = chooses.then(|| {
            let index = self.output.tokens() + self.pending;
            self.pending += 1;
            let mask = self.output.mask(&tokens[tokens.len() - drafted as usize..]);
            SampleSpec { mask, ..self.sample_spec(index) }
        });
        let following = (offset as usize + 1)..=(offset as usize + tokens.len());
        let score = match &self.prompt_report {
            Some(report) if !chooses && self.scores_prompt() => report.score_spec(&self.tokens[following]),
            Some(_) | None => None,
        };
        let step = SequenceStep {
            slot: self.slot,
            offset,
            tokens,
            draft_tokens: drafted,
            adapter: self.adapter.number,
            sample: choice,
            score,
        };
        self.cached += step.length();
        step
    }

    /// Verifies draft tokens: how many sampled tokens count, the first one and one per accepted draft token.
    /// The KV cache then has to be truncated to [`Sequence::cached`], which excludes the rejected ones, and all of the
    /// step where the layers go back to its beginning alone.
    pub fn verify<Token: PartialEq<u32>, E>(&mut self, chosen: &[Result<Token, E>]) -> usize {
        self.pending = self.pending.saturating_sub(1);
        let drafted = self.speculator.draft_tokens().len();
        if drafted == 0 {
            return chosen.len();
        }
        let right = self.speculator.verify(self.tokens.len(), chosen);
        if right < drafted {
            let kept = self.cached - (drafted - right) as u32;
            (self.cached, self.repeated) = match self.draft_rewind {
                DraftRewind::ToLastAccepted => (kept, 0),
                DraftRewind::ToStepBeginning => (self.step_offset, kept - self.step_offset),
            };
        }
        right + 1
    }

    /// Takes a sampled token that counts.
    pub fn accept(&mut self, sampled: impl Into<SampledToken>) -> Result<AcceptedToken, TokenizerError> {
        let sampled = sampled.into();
        let (before, token) = (self.output.tokens(), sampled.id);
        let accepted = self.output.accept(sampled)?;
        // If a step in flight continues from it, it is in the KV cache already: the end token too, which is none of the
        // response. The next request of the conversation has it there.
        if self.output.tokens() > before {
            self.editor.count(token);
        }
        if self.output.tokens() > before || self.cached as usize > self.tokens.len() {
            self.tokens.push(token);
        }
        Ok(accepted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{self, END, USER, token_of_byte};
    use crate::tokenizer::ChatTokenizer;
    use russet_wire::conversation::Message;
    use russet_wire::event::{FinishReason, GenerationEvent};
    use russet_wire::request::Sampling;

    const LOOKUP: Proposers = Proposers { prompt_lookup: true, draft_model: false };
    const THRESHOLD: AcceptanceThreshold = AcceptanceThreshold { prompt_lookup: 0.1, draft_model: 0.3 };

    fn request() -> GenerationRequest {
        GenerationRequest {
            id: "r".into(),
            messages: vec![Message::new("user", "hi")],
            ..GenerationRequest::default()
        }
    }

    /// Result of an output.
    #[derive(Debug, PartialEq, Eq)]
    struct OutputLog {
        events: Vec<(u32, String)>,
        finished: Option<FinishReason>,
        count: u32,
    }

    impl OutputLog {
        fn text(&self) -> String {
            self.events.iter().map(|(_, text)| text.as_str()).collect()
        }
    }

    fn sequence(
        tokens: &ChatTokenizer,
        request: &GenerationRequest,
        prompt: Vec<u32>,
        limit: u32,
    ) -> Sequence {
        let mut telling =
            OutputStream::new(request, limit, tokens.eos_token_ids().clone(), tokens.detokenizer());
        assert_eq!(telling.resume(&request.emitted).unwrap(), None);
        let mut sequence = Sequence::new(request, prompt, 7, telling);
        sequence.admit(3, 0, Checkpoints::default());
        sequence
    }

    /// Feeds the sampled tokens of the whole output, also where a part of it was emitted before.
    fn answer(tokens: &ChatTokenizer, request: &GenerationRequest, limit: u32, choices: &[u32]) -> OutputLog {
        let prompt = vec![1, 2, 3];
        let mut sequence = sequence(tokens, request, prompt.clone(), limit);
        let read = [sequence.step(2048), sequence.step(2048)];
        assert_eq!(
            read.iter().flat_map(|step| step.tokens.clone()).collect::<Vec<_>>(),
            [prompt.as_slice(), &request.emitted].concat()
        );
        let mut choice = read[1].sample.clone();
        let count = sequence.usage().completion_tokens;
        let mut output = OutputLog { events: Vec::new(), finished: None, count };
        for (index, &token) in choices.iter().enumerate().skip(request.emitted.len()) {
            // The sampled token is a function of these.
            let SampleSpec { sampling, seed, index: chosen, banned, .. } = choice.unwrap();
            assert_eq!((&*sampling, seed, chosen as usize), (&request.sampling, 7, index));
            let is_early = (index as u32) < request.sampling.min_tokens;
            assert_eq!(banned.contains(&END), request.ignore_eos || is_early);
            assert_eq!(sequence.verify(&[Ok::<u32, ()>(token)]), 1);
            let AcceptedToken { event, finished } = sequence.accept(token).unwrap();
            if let Some(GenerationEvent::Token { id, delta }) = event {
                output.events.push((id, delta.text));
            }
            output.count = sequence.usage().completion_tokens;
            output.finished = finished;
            if finished.is_some() {
                break;
            }
            let step = sequence.step(1);
            assert_eq!(step.tokens, [token]);
            choice = step.sample;
        }
        output
    }

    fn bytes(text: &str) -> Vec<u32> {
        text.bytes().map(token_of_byte).collect()
    }

    /// A request, its output limit and the sampled tokens; then text, finish reason and token count of the
    /// output.
    type Case = (GenerationRequest, u32, Vec<u32>, &'static str, Option<FinishReason>, u32);

    fn answers() -> Vec<Case> {
        let with = |stop: &[&str], ignore_eos| GenerationRequest {
            stop: stop.iter().map(|stop| (*stop).to_owned()).collect(),
            ignore_eos,
            ..request()
        };
        let also = |stop_token_ids: &[u32], min_tokens, ignore_eos| GenerationRequest {
            stop_token_ids: stop_token_ids.to_vec(),
            sampling: Sampling { min_tokens, ..Sampling::default() },
            ignore_eos,
            ..request()
        };
        let sampled = Sampling { temperature: 0.7, top_p: 0.9, seed: Some(7), ..Sampling::default() };
        let ended = |text: &str| [bytes(text), vec![END]].concat();
        let (stop, length) = (Some(FinishReason::Stop), Some(FinishReason::Length));
        let string = |index| Some(FinishReason::StopString(index));
        vec![
            (with(&[], false), 99, ended("héllo"), "héllo", stop, 6),
            (with(&[], false), 99, ended("日本語 🙂!"), "日本語 🙂!", stop, 15),
            (with(&[], false), 3, ended("hello"), "hel", length, 3),
            (with(&["lo"], false), 99, ended("hello!"), "hel", string(0), 5),
            (with(&["lo!"], false), 99, ended("hello"), "hello", stop, 5),
            (with(&["lo!"], false), 5, ended("hello"), "hello", length, 5),
            (with(&["語 ", "本日"], false), 99, ended("日本語 日"), "日本", string(0), 10),
            (with(&["aab"], false), 99, ended("aaab"), "a", string(0), 4),
            // A special token as stop string, alone, after text and before it; it is counted and not emitted.
            (
                with(&["<|user|>"], false),
                99,
                [bytes("hi"), vec![USER], bytes("!")].concat(),
                "hi",
                string(0),
                3,
            ),
            (
                with(&["i<|user|>"], false),
                99,
                [bytes("hi"), vec![USER], bytes("!")].concat(),
                "h",
                string(0),
                3,
            ),
            (
                with(&["<|user|>!"], false),
                99,
                [bytes("hi"), vec![USER], bytes("!")].concat(),
                "hi",
                string(0),
                4,
            ),
            (
                with(&["<|user|>?"], false),
                99,
                [bytes("hi"), vec![USER], bytes("!"), vec![END]].concat(),
                "hi!",
                stop,
                4,
            ),
            // The end token, where it is banned as the end.
            (with(&["<|end|>"], true), 99, [bytes("hi"), vec![END], bytes("!")].concat(), "hi", string(0), 3),
            // Special tokens take no character's place.
            (with(&[], false), 99, [vec![USER; 20], ended("日!")].concat(), "日!", stop, 24),
            (
                with(&[], false),
                99,
                [bytes("日")[..2].to_vec(), vec![USER; 20], ended("日")[2..].to_vec()].concat(),
                "日",
                stop,
                23,
            ),
            (with(&[], true), 8, ended("hi"), "hi", None, 3),
            // Further end tokens, also where the model's own are banned; and not before the least number of tokens.
            (also(&[token_of_byte(b'l')], 0, false), 99, ended("hello"), "he", stop, 2),
            (also(&[token_of_byte(b'l')], 0, true), 99, ended("hello"), "he", stop, 2),
            (
                GenerationRequest { stop: vec!["e".into(), "o".into()], ..also(&[], 3, false) },
                99,
                ended("hello"),
                "hell",
                string(1),
                5,
            ),
            (with(&[], true), 3, ended("hi"), "hi", length, 3),
            // The limit cuts é in half: the half becomes a replacement character and is not dropped.
            (with(&[], false), 2, ended("hé"), "h\u{FFFD}", length, 2),
            // The output ends in the middle of a character.
            (with(&[], false), 9, [bytes("a日")[..3].to_vec(), vec![END]].concat(), "a\u{FFFD}", stop, 3),
            (GenerationRequest { sampling: sampled, ..request() }, 99, ended("what"), "what", stop, 4),
        ]
    }

    #[test]
    fn answers_end_at_eos_stop_strings_and_limits() {
        let dir = fixture::model_dir();
        let tokens = ChatTokenizer::load(dir.path()).unwrap();
        for (request, limit, choices, text, finished, count) in answers() {
            let output = answer(&tokens, &request, limit, &choices);
            assert_eq!((output.text().as_str(), output.finished, output.count), (text, finished, count));
        }
    }

    #[test]
    fn resumed_output_equals_uninterrupted_output() {
        let dir = fixture::model_dir();
        let tokens = ChatTokenizer::load(dir.path()).unwrap();
        for (request, limit, choices, ..) in answers() {
            let undisturbed = answer(&tokens, &request, limit, &choices);
            for cut in 1..=undisturbed.events.len() {
                let emitted: Vec<u32> = undisturbed.events[..cut].iter().map(|(id, _)| *id).collect();
                let request = GenerationRequest { emitted, ..request.clone() };
                let mut telling =
                    OutputStream::new(&request, limit, tokens.eos_token_ids().clone(), tokens.detokenizer());
                let rest = match telling.resume(&request.emitted).unwrap() {
                    None => answer(&tokens, &request, limit, &choices),
                    // Only its end was lost.
                    finished => OutputLog { events: Vec::new(), finished, count: telling.tokens() },
                };
                let whole = OutputLog { events: [&undisturbed.events[..cut], &rest.events].concat(), ..rest };
                assert_eq!(whole, undisturbed, "cut after {cut} of {choices:?}");
            }
        }
    }

    #[test]
    fn resume_rejects_impossible_emitted_tokens_with_the_numbers() {
        let dir = fixture::model_dir();
        let config = format!(r#"{{"eos_token_id": {END}, "vocab_size": 300}}"#);
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let tokens = ChatTokenizer::load(dir.path()).unwrap();
        let check = |emitted: &[u32], limit| {
            tokens.check_emitted(emitted).map_err(ResumeError::from).and_then(|()| {
                OutputStream::new(&request(), limit, tokens.eos_token_ids().clone(), tokens.detokenizer())
                    .resume(emitted)
            })
        };
        for (emitted, limit, expected) in [
            (vec![300], 9, "token 300 of this answer is said to have been sent, but the model has only 300"),
            (
                bytes("hello"),
                4,
                "5 tokens of this answer are said to have been sent, but it ends with token 4",
            ),
            ([vec![END], bytes("x")].concat(), 9, "but it ends with token 1"),
        ] {
            let failure = check(&emitted, limit).unwrap_err().failure();
            assert_eq!(failure.kind, FailureKind::InvalidRequest);
            assert!(failure.message.contains(expected), "{}", failure.message);
        }
        assert!(matches!(check(&bytes("hell"), 4), Ok(Some(FinishReason::Length))));
        assert!(matches!(check(&[], 4), Ok(None)));
    }

    #[test]
    fn prefill_follows_its_chunks_and_decodes_the_last_token_alone() {
        let dir = fixture::model_dir();
        let tokens = ChatTokenizer::load(dir.path()).unwrap();
        let shapes = |request: &GenerationRequest, prompt: Vec<u32>| -> Vec<_> {
            let mut sequence = sequence(&tokens, request, prompt, 10);
            let steps: Vec<SequenceStep> = (0..4).map(|_| sequence.step(2048)).collect();
            steps.iter().map(|step| (step.offset, step.tokens.len(), step.sample.is_some())).collect()
        };
        let expected = [(0, 2048, false), (2048, 2048, false), (4096, 903, false), (4999, 1, true)];
        assert_eq!(shapes(&request(), vec![9; 5000]), expected);
        // So is the part of the output that was emitted before.
        let resumed = GenerationRequest { emitted: bytes("four"), ..request() };
        assert_eq!(shapes(&resumed, vec![9; 4996]), expected);
        assert!(sequence(&tokens, &request(), vec![9], 10).step(2048).sample.is_some());
    }

    #[test]
    fn prefill_stops_once_where_a_snapshot_is_wanted() {
        let dir = fixture::model_dir();
        let tokens = ChatTokenizer::load(dir.path()).unwrap();
        for (story, cached, at, expected) in [
            ("in a piece", 0, 100, vec![(0, 64), (64, 36), (100, 64), (164, 35), (199, 1)]),
            ("at the end of a piece", 0, 128, vec![(0, 64), (64, 64), (128, 64), (192, 7), (199, 1)]),
            ("soon", 90, 100, vec![(90, 10), (100, 64), (164, 35), (199, 1)]),
            ("before the last token", 150, 199, vec![(150, 49), (199, 1)]),
        ] {
            let mut sequence = sequence(&tokens, &request(), vec![9; 200], 10);
            sequence.admit(0, cached, Checkpoints { snapshot_at: Some(at), ..Checkpoints::default() });
            let (mut steps, mut snapshots) = (Vec::new(), Vec::new());
            while sequence.readiness(false) != Readiness::Busy {
                snapshots.extend(sequence.take_checkpoints().snapshot_at);
                let step = sequence.step(64);
                steps.push((step.offset, step.tokens.len()));
            }
            assert_eq!((steps, snapshots), (expected, vec![at]), "{story}");
        }
    }

    /// Runs a sequence over sampled tokens given by index, up to `ahead` steps ahead, and preempts it at the
    /// given output lengths. Returns its output, finish reason and usage.
    fn run_preempted(
        request: &GenerationRequest,
        limit: u32,
        answer: &[u32],
        ahead: bool,
        leaves: &[u32],
    ) -> (Vec<GenerationEvent>, FinishReason, Usage) {
        let dir = fixture::model_dir();
        let tokens = ChatTokenizer::load(dir.path()).unwrap();
        let mut sequence = sequence(&tokens, request, vec![1; 600], limit);
        let (mut cache, mut chosen, mut output) = (Vec::new(), Vec::new(), Vec::new());
        let mut leaves = leaves.iter().peekable();
        loop {
            while sequence.readiness(ahead) != Readiness::Busy {
                let step = sequence.step(256);
                assert_eq!(step.offset as usize, cache.len());
                // A step without tokens continues from the token sampled last.
                let last = chosen.last().map(|index: &u32| answer[*index as usize]);
                cache.extend(if step.tokens.is_empty() { vec![last.unwrap()] } else { step.tokens });
                chosen.extend(step.sample.map(|choice| choice.index));
            }
            let index = sequence.usage().completion_tokens;
            assert_eq!(cache[..600], [1; 600]);
            assert_eq!(cache[600..600 + index as usize], answer[..index as usize]);
            if leaves.next_if(|leave| **leave == index).is_some() {
                cache.clear();
                chosen.clear();
                sequence.admit(5, 0, Checkpoints::default());
                continue;
            }
            let at = chosen.len() - sequence.pending as usize;
            assert_eq!(chosen[at], index, "each token is chosen in its turn");
            sequence.verify(&[Ok::<u32, ()>(answer[index as usize])]);
            let AcceptedToken { event, finished } = sequence.accept(answer[index as usize]).unwrap();
            output.extend(event);
            if let Some(reason) = finished {
                // The end token too, where a step ran ahead of it.
                assert_eq!(cache, sequence.history()[..cache.len()], "the history says what the slot holds");
                return (output, reason, sequence.usage());
            }
        }
    }

    /// Runs a sequence with speculation over sampled tokens given by index. Returns its output, finish reason
    /// and usage, and the number of steps.
    fn run_speculative(
        request: &GenerationRequest,
        prompt: &[u32],
        limit: u32,
        answer: &[u32],
        rewind: DraftRewind,
    ) -> (Vec<GenerationEvent>, FinishReason, Usage, usize) {
        let dir = fixture::model_dir();
        let tokens = ChatTokenizer::load(dir.path()).unwrap();
        let mut sequence =
            sequence(&tokens, request, prompt.to_vec(), limit).with_speculation(LOOKUP, rewind);
        let (mut cache, mut output, mut steps) = (Vec::<u32>::new(), Vec::new(), 0);
        loop {
            sequence.propose(THRESHOLD);
            let room = match sequence.readiness(false) {
                // Now and then the batch has no capacity for all draft tokens.
                Readiness::Decode { known, drafts } if steps % 3 == 0 => known + drafts.min(2),
                Readiness::Decode { known, drafts } => known + drafts,
                Readiness::Prefill(_) | Readiness::Busy => 256,
            };
            let step = sequence.step(room);
            assert_eq!(step.offset as usize, cache.len());
            assert_eq!(step.tokens[..step.tokens.len() - step.draft_tokens as usize], {
                let known = sequence.history();
                known[cache.len()..].iter().take(step.tokens.len()).copied().collect::<Vec<_>>()
            });
            cache.extend(&step.tokens);
            let indices: Vec<u32> = step.samples().map(|choice| choice.index).collect();
            if indices.is_empty() {
                continue;
            }
            steps += 1;
            assert!(step.tokens.len() <= 1 + MAX_DRAFT_TOKENS, "a step of {} tokens", step.tokens.len());
            let last = *indices.last().unwrap();
            assert!(last < limit, "token {last} of {limit} is drafted");
            let chosen: Vec<Result<u32, ()>> =
                indices.iter().map(|index| Ok(*answer.get(*index as usize).unwrap_or(&END))).collect();
            let count = sequence.verify(&chosen);
            let is_taken_back = count < chosen.len() && rewind == DraftRewind::ToStepBeginning;
            let kept = if is_taken_back { step.offset as usize } else { cache.len() + count - chosen.len() };
            assert_eq!(sequence.cached() as usize, kept, "{rewind:?}");
            cache.truncate(kept);
            for token in chosen.into_iter().take(count) {
                let AcceptedToken { event, finished } = sequence.accept(token.unwrap()).unwrap();
                output.extend(event);
                if let Some(reason) = finished {
                    return (output, reason, sequence.usage(), steps);
                }
            }
            assert_eq!(cache, sequence.history()[..cache.len()]);
        }
    }

    #[test]
    fn speculative_output_is_identical_in_fewer_steps() {
        let stops = GenerationRequest { stop: vec!["fox".into()], ..request() };
        let line = "the quick brown fox jumps; ";
        for (story, request, prompt, limit, text, most) in [
            ("what the prompt says already", request(), line, 99, "the quick brown fox jumps over", 14),
            ("a limit in the middle of draft tokens", request(), line, 12, "the quick brown fox jumps", 8),
            ("a stop text in the middle of draft tokens", stops, line, 99, "the quick brown fox jumps", 11),
            ("nothing that was said before", request(), "prompt", 99, "hé, wörld", 12),
            ("what it said itself", request(), "-", 99, "la la la la la la la la la la la la", 14),
            (
                "draft tokens that are mostly rejected",
                request(),
                "abcd abce abcf abcg ",
                99,
                "abch abci abcj abck",
                20,
            ),
        ] {
            let answer = [bytes(text), vec![END]].concat();
            let mut alone = Vec::new();
            let dir = fixture::model_dir();
            let tokens = ChatTokenizer::load(dir.path()).unwrap();
            let mut telling =
                OutputStream::new(&request, limit, tokens.eos_token_ids().clone(), tokens.detokenizer());
            let reason = answer.iter().find_map(|token| {
                let AcceptedToken { event, finished } = telling.accept(*token).unwrap();
                alone.extend(event);
                finished
            });
            for rewind in [DraftRewind::ToLastAccepted, DraftRewind::ToStepBeginning] {
                let (output, finished, usage, steps) =
                    run_speculative(&request, &bytes(prompt), limit, &answer, rewind);
                assert_eq!((output, Some(finished)), (alone.clone(), reason), "{story}, {rewind:?}");
                assert_eq!(usage.completion_tokens, telling.tokens(), "{story}, {rewind:?}");
                let tokens = usage.completion_tokens;
                assert!(steps <= most, "{story}, {rewind:?}: {steps} steps for {tokens} tokens");
            }
        }
    }

    #[test]
    fn steps_do_not_overlap_pending_draft_tokens() {
        let dir = fixture::model_dir();
        let tokens = ChatTokenizer::load(dir.path()).unwrap();
        let mut sequence = sequence(&tokens, &request(), bytes("abcdef abc"), 99)
            .with_speculation(LOOKUP, DraftRewind::ToLastAccepted);
        sequence.step(256);
        assert!(!sequence.propose(THRESHOLD), "the first token is chosen by itself");
        assert_eq!(sequence.step(1).draft_tokens, 0);
        assert!(!sequence.propose(THRESHOLD));
        assert_eq!(sequence.readiness(true), Readiness::Decode { known: 1, drafts: 0 });
        sequence.verify(&[Ok::<u32, ()>(token_of_byte(b'd'))]);
        sequence.accept(token_of_byte(b'd')).unwrap();
        assert!(sequence.propose(THRESHOLD));
        let step = sequence.step(3);
        assert_eq!((step.tokens, step.draft_tokens), (bytes("def"), 2));
        assert!(sequence.propose(THRESHOLD), "they are on their way");
        assert_eq!(sequence.readiness(true), Readiness::Busy);
    }

    #[test]
    fn tokens_of_a_step_that_was_taken_back_run_again_once() {
        let dir = fixture::model_dir();
        let tokens = ChatTokenizer::load(dir.path()).unwrap();
        let mut sequence = sequence(&tokens, &request(), bytes("abcdef abc"), 99)
            .with_speculation(LOOKUP, DraftRewind::ToStepBeginning);
        let choose = |sequence: &mut Sequence, chosen: &str| {
            let chosen: Vec<Result<u32, ()>> = bytes(chosen).into_iter().map(Ok).collect();
            let count = sequence.verify(&chosen);
            chosen.iter().take(count).for_each(|token| drop(sequence.accept(token.unwrap()).unwrap()));
        };
        sequence.step(256);
        sequence.step(1);
        choose(&mut sequence, "d");
        sequence.propose(THRESHOLD);
        assert_eq!(sequence.step(3).tokens, bytes("def"));
        // The second draft token is rejected.
        choose(&mut sequence, "eX.");
        assert_eq!((sequence.cached(), sequence.usage().completion_tokens), (10, 3));
        assert_eq!(sequence.readiness(true), Readiness::Decode { known: 3, drafts: 0 });
        let mut again = sequence.step(3);
        assert_eq!((again.offset, &again.tokens, again.draft_tokens), (10, &bytes("deX"), 0));
        assert_eq!(again.sample.take().map(|sample| sample.index), Some(3));
        // It ran without draft tokens, so the next step may overlap it.
        assert_eq!(sequence.readiness(true), Readiness::Decode { known: 1, drafts: 0 });
        choose(&mut sequence, "Y");
        assert_eq!(sequence.readiness(false), Readiness::Decode { known: 1, drafts: 0 });
        // In another slot all of it is a prompt.
        sequence.admit(4, 0, Checkpoints::default());
        assert_eq!(sequence.readiness(false), Readiness::Prefill(13));
    }

    #[test]
    fn preempted_output_equals_uninterrupted_output() {
        let stops = GenerationRequest { stop: vec!["lo w".into()], ..request() };
        for (story, request, limit, text) in [
            ("to its end", request(), 99, "hello world, and good bye"),
            ("to its limit, within a character", request(), 3, "hé, wörld"),
            ("to a stop text that was held back meanwhile", stops, 99, "hello world"),
        ] {
            let answer = [bytes(text), vec![END]].concat();
            let undisturbed = run_preempted(&request, limit, &answer, false, &[]);
            for ahead in [false, true] {
                for leaves in [&[0][..], &[1], &[2], &[0, 0, 1, 2, 2], &[2, 5, 6, 9]] {
                    assert_eq!(
                        run_preempted(&request, limit, &answer, ahead, leaves),
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
            (sampled(|s| s.repetition_penalty = 0.0), "repetition_penalty is 0; use 0.01 to 10"),
            (sampled(|s| s.presence_penalty = f32::NAN), "presence_penalty is NaN"),
            (sampled(|s| s.frequency_penalty = 2.5), "frequency_penalty is 2.5; use -2 to 2"),
            (sampled(|s| s.logit_bias = [(7, -101.0)].into()), "the logit_bias of token 7 is -101"),
            (
                GenerationRequest { stop_token_ids: vec![1; 1025], ..request() },
                "stop_token_ids has 1025 tokens",
            ),
            (GenerationRequest { priority: -101, ..request() }, "priority is -101; use -100 to 100"),
            (GenerationRequest { priority: i32::MIN, ..request() }, "priority is -2147483648"),
            (GenerationRequest { stop: vec!["x".into(); 33], ..request() }, "33 stop texts"),
            (GenerationRequest { stop: vec!["x".repeat(2000)], ..request() }, "2000 bytes"),
            (GenerationRequest { cache_salt: "x".repeat(1025), ..request() }, "cache_salt of 1025 bytes"),
            (GenerationRequest { id: "x".repeat(1025), ..request() }, "an id of 1025 bytes"),
            (
                GenerationRequest { messages: vec![request().messages[0].clone(); 100_001], ..request() },
                "100001 messages",
            ),
        ] {
            let failure = validate(&request).unwrap_err();
            assert_eq!(failure.kind, FailureKind::InvalidRequest);
            assert!(failure.message.contains(expected), "{}", failure.message);
        }
        assert_eq!(validate(&request()), Ok(()));
        // A prompt may be all that is asked for.
        assert_eq!(validate(&GenerationRequest { max_tokens: Some(0), echo: true, ..request() }), Ok(()));
    }

    #[test]
    fn the_context_bounds_the_answer() {
        assert_eq!(max_new_tokens(10, None, 16), Ok(6));
        assert_eq!(max_new_tokens(10, Some(4), 16), Ok(4));
        assert_eq!(max_new_tokens(10, Some(40), 16), Ok(6));
        let failure = max_new_tokens(16, Some(4), 16).unwrap_err();
        assert!(
            failure.message.contains("length is 16 tokens. However, your messages resulted in 16 tokens"),
            "{}",
            failure.message
        );
        assert_eq!(max_new_tokens(16, Some(0), 16), Ok(0));
        for (tokens, asked) in [(16, None), (17, None), (17, Some(0)), (17, Some(1))] {
            let failure = max_new_tokens(tokens, asked, 16).unwrap_err();
            assert_eq!(failure.kind, FailureKind::ContextLengthExceeded, "{tokens} {asked:?}");
        }
        assert_eq!(max_new_tokens(0, None, 16).unwrap_err().kind, FailureKind::InvalidRequest);
    }
}
