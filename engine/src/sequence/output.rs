//! What of an answer its caller is told: tokens become text that is certain, until the answer ends. It is a function
//! of the tokens alone, so an answer that another engine began goes on in the middle of a word, a character or a stop
//! text. Pure; it knows nothing of caches and steps.

use std::sync::Arc;

use russet_wire::event::{GenerationEvent, GenerationFailure, FailureKind, FinishReason};
use russet_wire::request::GenerationRequest;
use thiserror::Error;

use crate::tokenizer::TokenizerError;
use crate::tokenizer::stop_strings::StopStrings;
use crate::tokenizer::detokenizer::Detokenizer;

/// The telling of one answer.
pub struct OutputStream {
    tokens: u32,
    limit: u32,
    eos_token_ids: Arc<[u32]>,
    ignore_eos: bool,
    detokenizer: Detokenizer,
    stop_strings: StopStrings,
}

/// What a chosen token came to.
#[derive(Debug, PartialEq, Eq)]
pub struct AcceptedToken {
    /// Text to tell, if there is any or a token to count.
    pub event: Option<GenerationEvent>,
    /// Set when the answer is complete.
    pub finished: Option<FinishReason>,
}

/// Why an answer cannot go on after the tokens it came with.
#[derive(Debug, Error)]
pub enum ResumeError {
    /// Between text and tokens.
    #[error(transparent)]
    Tokens(#[from] TokenizerError),
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

impl ResumeError {
    /// What the caller gets.
    pub fn failure(&self) -> GenerationFailure {
        let kind = match self {
            Self::Tokens(TokenizerError::OutOfVocabulary { .. }) | Self::BeyondEnd { .. } => {
                FailureKind::InvalidRequest
            }
            Self::Tokens(_) => FailureKind::Internal,
        };
        GenerationFailure { kind, message: self.to_string() }
    }
}

impl OutputStream {
    /// An answer of at most `limit` tokens, nothing of which was told.
    pub fn new(request: &GenerationRequest, limit: u32, eos_token_ids: Arc<[u32]>, detokenizer: Detokenizer) -> Self {
        Self {
            tokens: 0,
            limit,
            eos_token_ids,
            ignore_eos: request.ignore_eos,
            detokenizer,
            stop_strings: StopStrings::new(request.stop.iter().cloned()),
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
        if self.ignore_eos { self.eos_token_ids.clone() } else { Arc::new([]) }
    }

    /// Goes on after tokens that were told before; how the answer ended, if the last of them ended it.
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
    pub fn accept(&mut self, token: u32) -> Result<AcceptedToken, TokenizerError> {
        if self.eos_token_ids.contains(&token) && !self.ignore_eos {
            let text = self.flush()?;
            let event = (!text.is_empty()).then_some(GenerationEvent::Token { id: token, text });
            return Ok(AcceptedToken { event, finished: Some(FinishReason::Stop) });
        }
        self.tokens += 1;
        let piece = self.detokenizer.push(token)?;
        let mut pushed = self.stop_strings.push(&piece);
        let finished = if pushed.stopped {
            Some(FinishReason::Stop)
        } else if self.tokens >= self.limit {
            // The bytes left may still complete a stop text.
            let last = self.detokenizer.flush()?;
            let rest = self.stop_strings.push(&last);
            pushed.text.push_str(&rest.text);
            if rest.stopped {
                Some(FinishReason::Stop)
            } else {
                pushed.text.push_str(&self.stop_strings.flush());
                Some(FinishReason::Length)
            }
        } else {
            None
        };
        Ok(AcceptedToken { event: Some(GenerationEvent::Token { id: token, text: pushed.text }), finished })
    }

    /// What was held back when the model ended its turn.
    fn flush(&mut self) -> Result<String, TokenizerError> {
        let last = self.detokenizer.flush()?;
        let mut pushed = self.stop_strings.push(&last);
        if !pushed.stopped {
            pushed.text.push_str(&self.stop_strings.flush());
        }
        Ok(pushed.text)
    }
}
