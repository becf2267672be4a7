//! What of an answer its caller is told: tokens become text that is certain, until the answer ends. It is a function
//! of the tokens alone, so an answer that another engine began goes on in the middle of a word, a character or a stop
//! text. Pure; it knows nothing of caches and steps.

use std::sync::Arc;

use russet_wire::event::{Event, Failure, FailureKind, FinishReason};
use russet_wire::request::GenerationRequest;
use thiserror::Error;

use crate::tokens::TokensError;
use crate::tokens::stops::Stops;
use crate::tokens::stream::TextStream;

/// The telling of one answer.
pub struct Telling {
    tokens: u32,
    limit: u32,
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

/// Why an answer cannot go on after the tokens it came with.
#[derive(Debug, Error)]
pub enum TakeUpError {
    /// Between text and tokens.
    #[error(transparent)]
    Tokens(#[from] TokensError),
    /// The end is not the last of them.
    #[error(
        "{emitted} tokens of this answer are said to have been told, but it ends with token {end}; it was begun by another model or with another context"
    )]
    BeyondEnd {
        /// Tokens that came.
        emitted: usize,
        /// The one that ends the answer, counted from 1.
        end: usize,
    },
}

impl TakeUpError {
    /// What the caller gets.
    pub fn failure(&self) -> Failure {
        let kind = match self {
            Self::Tokens(TokensError::BeyondVocabulary { .. }) | Self::BeyondEnd { .. } => {
                FailureKind::InvalidRequest
            }
            Self::Tokens(_) => FailureKind::Internal,
        };
        Failure { kind, message: self.to_string() }
    }
}

impl Telling {
    /// An answer of at most `limit` tokens, nothing of which was told.
    pub fn new(request: &GenerationRequest, limit: u32, ends: Arc<[u32]>, text: TextStream) -> Self {
        Self {
            tokens: 0,
            limit,
            ends,
            ignore_eos: request.ignore_eos,
            text,
            stops: Stops::new(request.stop.iter().cloned()),
        }
    }

    /// Tokens so far.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Most tokens.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Tokens that must not be chosen.
    pub fn banned(&self) -> Arc<[u32]> {
        if self.ignore_eos { self.ends.clone() } else { Arc::new([]) }
    }

    /// Goes on after tokens that were told before; how the answer ended, if the last of them ended it.
    pub fn take_up(&mut self, emitted: &[u32]) -> Result<Option<FinishReason>, TakeUpError> {
        for (index, &token) in emitted.iter().enumerate() {
            let Accepted { event: _, finished } = self.accept(token)?;
            if finished.is_some() {
                let end = index + 1;
                return if end == emitted.len() {
                    Ok(finished)
                } else {
                    Err(TakeUpError::BeyondEnd { emitted: emitted.len(), end })
                };
            }
        }
        Ok(None)
    }

    /// Takes the next token.
    pub fn accept(&mut self, token: u32) -> Result<Accepted, TokensError> {
        if self.ends.contains(&token) && !self.ignore_eos {
            let text = self.rest()?;
            let event = (!text.is_empty()).then_some(Event::Token { id: token, text });
            return Ok(Accepted { event, finished: Some(FinishReason::Stop) });
        }
        self.tokens += 1;
        let piece = self.text.push(token)?;
        let mut pushed = self.stops.push(&piece);
        let finished = if pushed.stopped {
            Some(FinishReason::Stop)
        } else if self.tokens >= self.limit {
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
