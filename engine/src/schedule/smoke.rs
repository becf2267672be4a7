//! The smoke prompt: what a group answers before anybody may ask it. It takes the way of a request through every
//! rank, and leaves nothing behind, neither in a cache nor in what requests are counted by.

use jiff::Zoned;
use russet_wire::event::Event;
use russet_wire::request::{GenerationRequest, Message, Sampling};
use thiserror::Error;
use tokio::time::Instant;

use super::Schedule;
use super::deal::deal;
use crate::sequence::{self, Accepted, Sequence, Telling};
use crate::tokens::TokensError;

/// All slots are free when it runs.
const SLOT: u32 = 0;
/// Some of the answer is read again, and the largest model takes seconds for it.
const TOKENS: u32 = 4;

/// Why a group cannot answer.
#[derive(Debug, Error)]
pub enum SmokeError {
    /// Between text and tokens.
    #[error(transparent)]
    Tokens(#[from] TokensError),
    /// The context is shorter than what the template makes of a word.
    #[error("{0}")]
    Context(String),
    /// A step of some rank failed or hung, or its logits allow no choice.
    #[error("{0}")]
    Step(String),
    /// A token that nobody can read.
    #[error(
        "token {index} of its answer is {token}, which the tokenizer does not have; the weights and tokenizer.json belong to different models"
    )]
    Unknown {
        /// Counted from 1.
        index: usize,
        /// The token.
        token: u32,
    },
    /// Tokens without a text.
    #[error(
        "the tokens of its answer, {0:?}, have no text; the weights and tokenizer.json belong to different models, or the weights are damaged"
    )]
    Silent(Vec<u32>),
}

fn request() -> GenerationRequest {
    GenerationRequest {
        id: "smoke".into(),
        messages: vec![Message { role: "user".into(), content: "Hello".into() }],
        max_tokens: Some(TOKENS),
        sampling: Sampling::default(),
        stop: Vec::new(),
        // A model that greets with nothing is sound, and its next tokens are to be seen all the same.
        ignore_eos: true,
        emitted: Vec::new(),
        priority: 0,
        deadline_milliseconds: None,
    }
}

impl Schedule {
    /// Has every rank answer the smoke prompt, before the first request comes.
    pub async fn smoke(&self, context_tokens: u32) -> Result<(), SmokeError> {
        let begun = Instant::now();
        let request = request();
        let prompt = self.tokens.prompt(&request.messages, &Zoned::now())?;
        let limit = sequence::room(prompt.len(), request.max_tokens, context_tokens)
            .map_err(|failure| SmokeError::Context(failure.message))?;
        let (ends, text) = (self.tokens.ends().clone(), self.tokens.stream());
        let telling = Telling::new(&request, limit, ends, text);
        let mut sequence = Sequence::new(&request, prompt, 0, telling);
        sequence.enter(SLOT, 0);
        let (tokens, text) = self.answer(&mut sequence).await?;
        self.followers.reset(SLOT);
        self.compute.reset(SLOT);
        let lasted = begun.elapsed();
        self.metrics.tried(lasted);
        tracing::info!(?tokens, text, ?lasted, "the smoke prompt is answered");
        Ok(())
    }

    /// Tokens and text of the answer.
    async fn answer(&self, sequence: &mut Sequence) -> Result<(Vec<u32>, String), SmokeError> {
        let (mut tokens, mut text) = (Vec::new(), String::new());
        loop {
            let turns = deal(&[sequence.ready(false)], 1, false, self.context_tokens);
            let steps = turns.iter().map(|turn| sequence.step(turn.tokens)).collect();
            let chosen = self.ask(steps).answered().await;
            let chosen = chosen.map_err(|failure| SmokeError::Step(failure.reason))?.concat();
            let Some(token) = chosen.first().cloned() else { continue };
            let token = token.map_err(|error| SmokeError::Step(error.to_string()))?;
            sequence.check(&chosen);
            tokens.push(token);
            if !self.tokens.knows(token) {
                return Err(SmokeError::Unknown { index: tokens.len(), token });
            }
            let Accepted { event, finished } = sequence.accept(token)?;
            if let Some(Event::Token { text: piece, .. }) = event {
                text.push_str(&piece);
            }
            match finished {
                None => {}
                Some(_) if text.is_empty() => return Err(SmokeError::Silent(tokens)),
                Some(_) => return Ok((tokens, text)),
            }
        }
    }
}
